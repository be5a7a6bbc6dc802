"""What a fused path finds, and the numbers it is given: constants, weights, and what rows count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equipoise.kernels._recognise import KINDS, Plan, Rows, Sizes


@dataclass(frozen=True, eq=False)
class Fused:
    """What a fused path found, in the order of ``names``; figures in float64."""

    names: tuple[str, ...]
    total: Tensor
    penalty: Tensor
    values: Tensor
    contributions: Tensor
    gradient: Tensor
    squares: Tensor
    gram: Tensor | None


@lru_cache(maxsize=256)
def on_device(
    numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Constants as a tensor; sent once, and without waiting."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=4)
def _latest(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return on_device.__wrapped__(numbers, device)


def constants(plan: Plan, given: Sequence[float | Tensor]) -> tuple[float, ...]:
    """What is known of each term beforehand, line by line, in the order of `kernels._sums`."""
    sizes = [plan.sizes.get(name, Sizes()) for name in plan.names]
    kinds = [KINDS.index(plan.rows[n].kind) if n in plan.rows else -1 for n in plan.names]
    return (
        *(size.one for size in sizes),
        *(size.two for size in sizes),
        *(size.root for size in sizes),
        *(size.target for size in sizes),
        *map(float, kinds),
        *(float(not isinstance(w, Tensor)) for w in given),
        *(float(name == "base") for name in plan.names),
    )


def as_rows(x: Tensor, width: int) -> Tensor:
    """A matrix whose rows are contiguous: a view where that is possible."""
    flat = x.reshape(-1, width)
    return flat if flat.stride(-1) == 1 or width == 1 else flat.contiguous()


def weights(given: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """All weights as one tensor in float64; no tensor among them is read by the host."""
    numbers = tuple(0.0 if isinstance(w, Tensor) else float(w) for w in given)
    together = _latest(numbers, device)
    if not any(isinstance(w, Tensor) for w in given):
        return together
    return torch.stack(
        [
            w.detach().to(device, torch.float64) if isinstance(w, Tensor) else number
            for w, number in zip(given, together.unbind(), strict=True)
        ]
    )


def uses(plan: Plan, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """How much each kind counts in each row, or in all of them: [4, rows] or [4, 1]."""
    found = [_use(plan.of_kind(kind), rows, device) for kind in KINDS]
    numbers = tuple(use for use in found if isinstance(use, float))
    if len(numbers) == len(found):
        return on_device(numbers, device, dtype).unsqueeze(1)
    spread = [use if isinstance(use, Tensor) else on_device((use,), device) for use in found]
    most = max(use.numel() for use in spread)
    return torch.stack([use.expand(most) for use in spread]).to(dtype)


def _use(row: Rows | None, rows: int, device: torch.device) -> float | Tensor:
    if row is None:
        return 0.0
    if row.labels is not None:  # which are counted on the device
        return row.factor
    by: float | Tensor = 1.0
    if row.mean:
        by = rows
        if row.mask is not None:
            by = row.mask.sum(dtype=torch.float64)
        if row.denominator is not None:
            by = row.denominator
    if isinstance(by, Tensor):
        by = by.detach().to(device, torch.float64).reshape(1)
        factor: float | Tensor = row.factor / torch.where(by == 0, 1.0, by)
    else:
        factor = row.factor / (by or 1)
    return factor if row.mask is None else row.mask.reshape(-1).double() * factor
