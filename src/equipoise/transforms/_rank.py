"""The k-th smallest absolute value among many tensors, exact, without sorting or joining them.

The absolute values of floating-point numbers are in the order of their bits, read as integers. So
the entry is found digit by digit: one reading counts how many entries begin with each of some
thousand digits, which tells the digit of the one that is sought; the next looks only at those that
begin so. Counts of shards are added up, so that the answer is that of the whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equipoise.transforms._lists import looking_is_free
from equipoise.transforms._shards import Split, add_over_splits

Pieces = Callable[[], Iterator[tuple[int, Tensor]]]
"""Integers to count, each piece with the number of the tensor it is of; may be read again."""

# Up to here one selection over all entries side by side is fastest.
FEW = 1 << 16
# Entries counted at a time: float32 counts them exactly, and copies stay small.
AT_ONCE = 1 << 22
# The bits of each type, the first digit first; the sign is always 0.
DIGITS = {torch.int16: (15,), torch.int32: (11, 10, 10), torch.int64: (13, 13, 13, 12, 12)}
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def ranked(
    tensors: Sequence[Tensor],
    splits: Sequence[tuple[Split, ...]],
    entries: int,
    index: int,
) -> Tensor:
    """The absolute value with this index in ascending order, among so many entries in all.

    The tensors are real. NaN comes after infinity.
    """
    dtype = _common(tensors)
    home = tensors[0].device
    if entries <= FEW and not any(splits):
        together = torch.cat([t.reshape(-1).to(home, dtype) for t in tensors])
        return together.abs().kthvalue(index + 1).values
    search = _Search(splits, home)
    found = torch.zeros((), dtype=torch.int64, device=home)
    left = torch.full((), index, dtype=torch.int64, device=home)
    candidates: Pieces = partial(_bits, tensors, dtype)
    shift = sum(DIGITS[BITS[dtype]])
    for width in DIGITS[BITS[dtype]]:
        shift -= width
        counts = search.counted(candidates(), found, shift, width)
        below = counts.cumsum(0)
        digit = (below <= left).sum()
        # To index with a tensor would wait for the device.
        before = torch.where(digit > 0, below.take((digit - 1).clamp(min=0)), 0)
        matching = counts.take(digit)
        left, found = left - before, (found << width) | digit
        if looking_is_free(home) and shift and matching.item() <= AT_ONCE:
            candidates = _narrowed(candidates, found, shift)
    return found.to(BITS[dtype]).view(dtype)


def _common(tensors: Sequence[Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _bits(tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Pieces of each tensor as integers in the order of their absolute values."""
    for i, tensor in enumerate(tensors):
        for piece in torch.split(tensor.reshape(-1), AT_ONCE):
            yield i, piece.to(dtype).abs().view(BITS[dtype])


@dataclass(frozen=True)
class _Search:
    """Counting the digits of entries, over all processes."""

    splits: Sequence[tuple[Split, ...]]
    home: torch.device

    def counted(
        self, candidates: Iterator[tuple[int, Tensor]], found: Tensor, shift: int, width: int
    ) -> Tensor:
        """How many entries that begin with what is found have each next digit."""
        kinds = list(dict.fromkeys(self.splits))
        zeros = torch.zeros(1 << width, dtype=torch.int64, device=self.home)
        counts = [zeros.clone() for _ in kinds]
        for i, bits in candidates:
            high = bits >> shift
            digit = torch.where(high >> width == found.to(bits), high & ((1 << width) - 1), -1)
            # What does not match lies outside the range and is not counted.
            here = torch.histc(digit.float(), bins=1 << width, min=0, max=1 << width)
            counts[kinds.index(self.splits[i])] += here.to(self.home, torch.int64)
        return torch.stack(add_over_splits(counts, kinds)).sum(0)


def _narrowed(candidates: Pieces, found: Tensor, shift: int) -> Pieces:
    """Only the entries that begin with what is found, now that they are few."""
    kept = [(i, bits[bits >> shift == found.to(bits)]) for i, bits in candidates()]
    return lambda: iter(kept)
