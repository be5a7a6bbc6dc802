"""Lists of tensors, read and written in bulk: the one place that knows how this is done fast.

Everything else in this package speaks of lists. What a device can do better (one launch for
thousands of tensors) belongs here, behind the same few functions. Nothing here knows of sharding:
figures are those of the tensors given, in float64 where the device has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from equipoise._context import compiling
from equipoise._numerics import CHUNK, norm_on_cpu, real_entries, vector_norm

# Small tensors are looked at together in a buffer of at most this many entries.
BUFFER = 1 << 18
# Tensors up to this size are measured side by side with others of their shape; for larger ones the
# copy costs more than it saves (measured).
TINY = 1 << 12
# How far a sum of squares in short rows of float32 may be off, at worst: (128 + 2) · 2⁻²⁴, rounded
# up, twice. Outside this band a comparison of it is exact.
BAND = 2e-5


def wide(device: torch.device) -> torch.dtype:
    """The most precise type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def looking_is_free(device: torch.device) -> bool:
    """Whether the value of a tensor may be read: on the CPU there is nothing to wait for."""
    return device.type == "cpu" and not compiling()


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, in a vector on the device of the first."""
    home = tensors[0].device
    if compiling():
        squares = [real_entries(t).to(wide(t.device)).square().sum() for t in tensors]
        return torch.stack([s.to(home, wide(home)) for s in squares])
    out = [torch.empty(0)] * len(tensors)
    for device, places in by_device(tensors).items():
        group = [tensors[i] for i in places]
        if device.type == "cpu":
            found = [_square_on_cpu(tensor) for tensor in group]
        else:
            norms = torch._foreach_norm([real_entries(t) for t in group], 2, dtype=wide(device))  # noqa: SLF001
            found = [*torch.stack(list(norms)).square().unbind()]
        for i, square in zip(places, found, strict=True):
            out[i] = square
    return torch.stack([square.to(home, wide(home)) for square in out])


def _square_on_cpu(x: Tensor) -> Tensor:
    flat = real_entries(x).reshape(-1)
    if flat.dtype != torch.float64 and flat.numel() > CHUNK:
        return norm_on_cpu(flat).square()
    flat = flat.to(torch.float64)
    return torch.dot(flat, flat)


def total_square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, within 1e-6 of the exact one: see `exact_total_square`."""
    home = tensors[0].device
    if not all(looking_is_free(t.device) for t in tensors):
        return squared_norms(tensors).sum()
    parts = [_square_on_cpu(flat) for flat in _gathered(tensors)]
    return torch.stack(parts).sum().to(home)


def _gathered(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Vectors that together hold all entries: small tensors share one, large ones are one."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    held: dict[torch.dtype, int] = {}
    for tensor in tensors:
        flat = real_entries(tensor).reshape(-1)
        if flat.numel() > BUFFER // 8:
            yield flat
            continue
        dtype = flat.dtype
        waiting.setdefault(dtype, []).append(flat)
        held[dtype] = held.get(dtype, 0) + flat.numel()
        if held[dtype] > BUFFER:
            yield torch.cat(waiting.pop(dtype))
            held[dtype] = 0
    for flats in waiting.values():
        yield torch.cat(flats)


def exact_total_square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares on the CPU, to the last bits: every product in float64."""
    parts = []
    for tensor in tensors:
        for chunk in torch.split(real_entries(tensor).reshape(-1), CHUNK):
            part = chunk.to(torch.float64)
            parts.append(torch.dot(part, part).item())
    return torch.tensor(math.fsum(parts), dtype=torch.float64)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value among all tensors; 0 where there are none."""
    home = tensors[0].device
    peaks = [real_entries(t).abs().amax().to(home, wide(home)) for t in tensors if t.numel()]
    return torch.stack(peaks).amax() if peaks else torch.zeros((), device=home, dtype=wide(home))


def row_norms(tensors: Sequence[Tensor], *, whole: bool) -> list[Tensor]:
    """The length of every row (all dimensions but the first), or of every tensor, as vectors.

    A tensor with fewer than two dimensions is one row.
    """
    rows = [_rows(tensor, whole=whole) for tensor in tensors]
    out = [torch.empty(0)] * len(rows)
    for (device, shape, dtype), places in _by_shape(rows).items():
        together = max(1, BUFFER // max(1, shape.numel()))
        if device.type != "cpu" or shape.numel() > TINY or compiling():
            together = 1
        for start in range(0, len(places), together):
            some = places[start : start + together]
            stack = torch.stack([rows[i] for i in some]) if len(some) > 1 else rows[some[0]][None]
            for i, lengths in zip(some, _lengths(stack, dtype), strict=True):
                out[i] = lengths
    return out


def _rows(x: Tensor, *, whole: bool) -> Tensor:
    rows = 1 if whole or x.dim() < 2 else x.shape[0]
    if not x.numel():
        return real_entries(x).reshape(rows, 0)
    return real_entries(x).reshape(rows, -1)


def _by_shape(
    tensors: Sequence[Tensor],
) -> dict[tuple[torch.device, torch.Size, torch.dtype], list[int]]:
    groups: dict[tuple[torch.device, torch.Size, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.shape, tensor.dtype), []).append(i)
    return groups


def _lengths(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Along the last dimension, to 1e-6 whatever its length."""
    if dtype == torch.float64:
        return vector_norm(rows, -1)
    if looking_is_free(rows.device):
        lengths = _in_short_rows(rows)
        if not _lossy(lengths, rows.shape[-1]):
            return lengths
    exact: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=wide(rows.device))
    return exact


def _in_short_rows(rows: Tensor) -> Tensor:
    """Lengths from float32 sums of 128 squares at a time: without a copy in float64."""
    even = rows.shape[-1] // 128 * 128
    parts = [torch.unflatten(rows[..., :even], -1, (-1, 128))] if even else []
    parts.append(rows[..., None, even:])
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts]
    together: Tensor = torch.linalg.vector_norm(torch.cat(norms, -1), dim=-1, dtype=torch.float64)
    return together


def _lossy(lengths: Tensor, entries: int) -> bool:
    """Whether squares in float32 may have overflowed, or rounded badly below 1.2e-38."""
    small = (lengths < 4e-16 * entries**0.5) & (lengths > 0)
    return bool((small | ~lengths.isfinite()).any().item())


def rescale_rows(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply every row of each tensor by a number of its own, in place."""
    shaped = [
        f.to(t.device, _for_product(t.dtype)).reshape(-1, *[1] * (t.dim() - 1)) if t.dim() else f[0]
        for t, f in zip(tensors, factors, strict=True)
    ]
    if tensors:
        torch._foreach_mul_(list(tensors), shaped)


def batches(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Groups of tensors whose copies take no more room than one of the largest."""
    room = max([BUFFER, *(tensor.numel() for tensor in tensors)])
    batch: list[int] = []
    held = 0
    for i, tensor in enumerate(tensors):
        if batch and held + tensor.numel() > room:
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += tensor.numel()
    if batch:
        yield batch


def rescale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by one number, in place."""
    if looking_is_free(factor.device):
        value = factor.item()
        if value == 1.0:
            return
        for places in by_kind(tensors).values():
            torch._foreach_mul_([tensors[i] for i in places], value)
        return
    for (device, dtype), places in by_kind(tensors).items():
        there = factor.to(device, _for_product(dtype))
        torch._foreach_mul_([tensors[i] for i in places], there)


def rescale_each(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by a number of its own, in place."""
    if looking_is_free(factors.device):
        values = factors.tolist()
        changed = [(t, v) for t, v in zip(tensors, values, strict=True) if v != 1.0]
        if changed:
            torch._foreach_mul_([t for t, _ in changed], [v for _, v in changed])
        return
    for (device, dtype), places in by_kind(tensors).items():
        numbers = [*factors.to(device, _for_product(dtype)).unbind()]
        torch._foreach_mul_([tensors[i] for i in places], [numbers[i] for i in places])


def _for_product(dtype: torch.dtype) -> torch.dtype:
    """The type in which a number is multiplied with entries of a type."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Where the tensors of each device stand in the list."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return groups


def by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Where the tensors of each device and type stand: one launch serves such a group."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return groups
