"""From the device to Python numbers, all at once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from equipoise._context import whole

K = TypeVar("K", bound=Hashable)


def on_host(figures: Mapping[K, float | Tensor]) -> dict[K, float]:
    """Python numbers, fetched from the device all at once."""
    tensors = {name: whole(f.detach()) for name, f in figures.items() if isinstance(f, Tensor)}
    devices = {t.device for t in tensors.values() if t.device.type != "cpu"}
    there = next(iter(devices), torch.device("cpu"))
    wide = torch.float32 if there.type == "mps" else torch.float64
    numbers: list[float] = []
    if tensors:
        numbers = torch.stack([t.to(there, wide) for t in tensors.values()]).tolist()
    fetched = dict(zip(tensors, numbers, strict=True))
    return {n: fetched[n] if n in fetched else float(f) for n, f in figures.items()}
