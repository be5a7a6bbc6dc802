"""Lists of tensors, read and written in bulk: the one place that knows how this is done fast.

Everything else in this package speaks of lists. What a device can do better (one launch for
thousands of tensors) belongs here, behind the same few functions. Nothing here knows of sharding:
figures are those of the tensors given, in float64 where the device has it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from equipoise._context import compiling
from equipoise._numerics import CHUNK, norm_on_cpu, real_entries, vector_norm

# Small tensors are worked on together in a buffer of at most this many entries; where they are only
# looked at, of at most `CHUNK`: what that says of the cache and of threads holds here too.
BUFFER = 1 << 18
# Tensors up to this size are measured side by side with others of their shape.
TINY = 1 << 12
# Entries that float32 adds up within 1e-6, also where all are equal (measured on the CPU), if they
# lie side by side: with gaps torch adds one after the other, and loses up to 6e-6.
SHORT = 768
# A length at which float32 is precise (3e-7 where all are equal), and as fast as any.
ROW = 256
DOUBLE = (torch.float64, torch.complex128)
# How far a sum of squares from short sums in float32 may be off, in any order of adding: 1026 ·
# 2⁻²⁴, times two and rounded up. Outside this band a comparison of it is exact.
BAND = 2e-4


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
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return _squares_by_launch(tensors)
    out = torch.empty(len(tensors), dtype=torch.float64)
    for places in alike(tensors).values():
        out[places] = _squares_on_cpu([tensors[i] for i in places])
    return out


def _squares_by_launch(tensors: Sequence[Tensor]) -> Tensor:
    """One launch for each device and type; put in order without an index, which is copied there."""
    home = tensors[0].device
    norms = [torch.empty(0)] * len(tensors)
    for (device, _), places in by_kind(tensors).items():
        some = [real_entries(tensors[i]) for i in places]
        found = torch._foreach_norm(some, 2, dtype=wide(device))  # noqa: SLF001
        for i, norm in zip(places, found, strict=True):
            norms[i] = norm.to(home, wide(home))
    return torch.stack(norms).square()


def _squares_on_cpu(group: Sequence[Tensor]) -> Tensor:
    """Of tensors of one shape and type: small ones side by side, in float64."""
    if group[0].numel() > TINY:
        return torch.stack([_square_on_cpu(tensor) for tensor in group])
    found = []
    for some in side_by_side(group):
        flat = _shaped(torch.stack(some), len(some)).to(torch.float64)
        found.append(torch.linalg.vecdot(flat, flat))
    return torch.cat(found)


def _square_on_cpu(x: Tensor) -> Tensor:
    flat = real_entries(x).reshape(-1)
    if flat.dtype != torch.float64 and flat.numel() > CHUNK:
        return norm_on_cpu(flat).square()
    flat = flat.to(torch.float64)
    return torch.dot(flat, flat)


def total_square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, within 1e-6 of the exact one: see `exact_total_square`."""
    home = tensors[0].device
    # There may be thousands of tensors: what can be asked of a group is not asked of each.
    groups = alike(tensors)
    if not all(looking_is_free(device) for device, _, _ in groups):
        return squared_norms(tensors).sum()
    squares: list[Tensor] = []
    single: list[Tensor] = []
    short, entries = [torch.zeros(1)], 0
    for (_, dtype, shape), places in groups.items():
        some = [tensors[i] for i in places]
        if dtype in DOUBLE:
            squares += map(_square_on_cpu, some)
        else:
            single += some
            short += _short_norms(some)
            entries += len(some) * shape.numel()
    if single:
        length = torch.linalg.vector_norm(torch.cat(short), dtype=torch.float64)
        squares.append(exact_total_square(single) if _lossy(length, entries) else length.square())
    return torch.stack(squares).sum().to(home)


def _short_norms(group: Sequence[Tensor]) -> list[Tensor]:
    """Of tensors of one shape and type: vectors whose entries each stand for a few of theirs."""
    some = group[0]
    entries, dims = some.numel(), tuple(range(1, some.dim()))
    if entries <= TINY and not some.is_complex():
        stacks = (torch.stack(part) for part in side_by_side(group, CHUNK))
        return [x for stack in stacks for x in _in_rows(stack.reshape(len(stack), -1).float())]
    if some.dtype is torch.float32 and dims and ROW <= math.prod(some.shape[1:]) <= SHORT:
        return [torch.linalg.vector_norm(tensor.contiguous(), dim=dims) for tensor in group]
    found = []
    for tensor in group:
        if tensor.dtype is torch.float32 and not entries % ROW and tensor.is_contiguous():
            found.append(torch.linalg.vector_norm(tensor.view(-1, ROW), dim=1))
        else:
            found += _in_rows(real_entries(tensor).reshape(1, -1).float())
    return found


def _in_rows(lines: Tensor) -> list[Tensor]:
    """The lengths of the parts of all lines."""
    return [torch.linalg.vector_norm(part, dim=-1).view(-1) for part in _parts(lines)]


def _parts(lines: Tensor) -> list[Tensor]:
    """The last dimension cut to `ROW` entries at a time, and what is left of it."""
    lines = lines.contiguous()
    even = lines.shape[-1] // ROW * ROW
    parts = [torch.unflatten(lines[..., :even], -1, (-1, ROW)), lines[..., None, even:]]
    return [part for part in parts if part.numel()]


def exact_total_square(tensors: Sequence[Tensor], unit: Tensor | None = None) -> Tensor:
    """The sum of all squares on the CPU: every product in float64, exact for shorter types.

    In a unit, a power of two, it is that of the entries divided by it.
    """
    parts = []
    for tensor in tensors:
        for chunk in torch.split(real_entries(tensor).reshape(-1), CHUNK):
            part = chunk.to(torch.float64)
            part = part if unit is None else part / unit.to(part.device)
            parts.append(torch.dot(part, part).item())
    return torch.tensor(math.fsum(parts), dtype=torch.float64)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value among all tensors; 0 where there are none."""
    home = tensors[0].device
    peaks = [real_entries(t).abs().amax().to(home, wide(home)) for t in tensors if t.numel()]
    return torch.stack(peaks).amax() if peaks else torch.zeros((), device=home, dtype=wide(home))


def row_norms(tensors: Sequence[Tensor], *, whole: bool) -> Tensor:
    """The length of every row of tensors of one shape and type: a matrix, a line for each tensor.

    A row is all dimensions but the first; a tensor with fewer than two, or ``whole``, is one row.
    """
    some = tensors[0]
    rows = 1 if whole or some.dim() < 2 else some.shape[0]
    entries = some.numel() // max(1, rows)
    if looking_is_free(some.device) and entries <= SHORT and some.dtype not in DOUBLE:
        lengths = _short_lengths(tensors, rows)
        if not _lossy(lengths, entries):
            return lengths
    return torch.stack([_lengths(_shaped(t, rows)) for t in tensors])


def _shaped(x: Tensor, *sizes: int) -> Tensor:
    """The real entries in this many lines, also where there are none."""
    real = real_entries(x)
    return real.reshape(*sizes, real.numel() // max(1, math.prod(sizes)))


def _short_lengths(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Of rows so short that float32 adds them up well enough."""
    if tensors[0].numel() <= TINY:  # copying larger ones costs more than it saves (measured)
        stacks = (torch.stack(some) for some in side_by_side(tensors, CHUNK))
        flat = (_shaped(stack, len(stack), rows) for stack in stacks)
        found = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in flat]
        return torch.cat(found).to(torch.float64)
    dims = tuple(range(1, tensors[0].dim())) if rows > 1 else None
    lengths = [
        torch.linalg.vector_norm(tensor.contiguous(), dim=dims, dtype=_real_single(tensor))
        for tensor in tensors
    ]
    return torch.stack(lengths).reshape(len(tensors), rows).to(torch.float64)


def _real_single(x: Tensor) -> torch.dtype:
    return torch.complex64 if x.is_complex() else torch.float32


def _lengths(rows: Tensor) -> Tensor:
    """Along the last dimension, to 1e-6 whatever its length."""
    if rows.dtype == torch.float64:
        return vector_norm(rows, -1)
    if looking_is_free(rows.device) and rows.numel():
        norms = [
            torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in _parts(rows)
        ]
        lengths: Tensor = torch.linalg.vector_norm(
            torch.cat(norms, -1), dim=-1, dtype=torch.float64
        )
        if not _lossy(lengths, rows.shape[-1]):
            return lengths
    exact: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=wide(rows.device))
    return exact


def _lossy(lengths: Tensor, entries: int) -> bool:
    """Whether squares in float32 may have overflowed, or vanished below 1.2e-38."""
    if not lengths.numel():
        return False
    least, most = (bound.item() for bound in lengths.aminmax())
    return not (4e-16 * entries**0.5 < least and most < math.inf)


def rescale_rows(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply every row by a number of its own, in place; a line of factors for each tensor."""
    some = tensors[0]
    shape = (-1, *[1] * (some.dim() - 1)) if some.dim() else ()
    numbers = factors.to(some.device, _for_product(some.dtype)).reshape(len(tensors), *shape)
    torch._foreach_mul_(list(tensors), list(numbers.unbind()))


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
    if looking_is_free(factor.device) and factor.item() == 1.0:
        return
    for (device, dtype), places in by_kind(tensors).items():
        # As a tensor: a Python number would first be rounded to half precision.
        there = factor.to(device, _for_product(dtype))
        torch._foreach_mul_([tensors[i] for i in places], there)


def rescale_each(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by a number of its own, in place."""
    if looking_is_free(factors.device):
        changed = (factors != 1.0).nonzero().flatten().tolist()
        tensors, factors = [tensors[i] for i in changed], factors[changed]
    for (device, dtype), places in by_kind(tensors).items():
        numbers = [*factors.to(device, _for_product(dtype)).unbind()]
        torch._foreach_mul_([tensors[i] for i in places], [numbers[i] for i in places])


def _for_product(dtype: torch.dtype) -> torch.dtype:
    """The type in which a number is multiplied with entries of a type."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


Kind = tuple[torch.device, torch.dtype, torch.Size]


def alike(tensors: Sequence[Tensor]) -> dict[Kind, list[int]]:
    """Where the tensors of each device, type and shape stand in the list."""
    groups: dict[Kind, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype, tensor.shape].append(i)
    return groups


def side_by_side(group: Sequence[Tensor], room: int = BUFFER) -> Iterator[list[Tensor]]:
    """Tensors of one shape, as many at a time as a buffer holds."""
    together = max(1, room // max(1, group[0].numel()))
    for start in range(0, len(group), together):
        yield list(group[start : start + together])


def by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Where the tensors of each device and type stand: one launch serves such a group."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return groups
