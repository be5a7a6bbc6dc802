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
    here = {name: t for name, t in tensors.items() if t.device.type == "cpu"}
    away = {name: t for name, t in tensors.items() if t.device.type != "cpu"}
    fetched = {**_read(here), **_read(away)}
    return {n: fetched[n] if n in fetched else float(f) for n, f in figures.items()}


def _read(tensors: Mapping[K, Tensor]) -> dict[K, float]:
    """All at once, from the device of the first."""
    if not tensors:
        return {}
    there = next(iter(tensors.values())).device
    wide = torch.float32 if there.type == "mps" else torch.float64
    numbers = torch.stack([t.to(there, wide) for t in tensors.values()]).tolist()
    return dict(zip(tensors, numbers, strict=True))
