"""The k-th smallest absolute value among many tensors, exact, without sorting or joining them.

The absolute values of floating-point numbers are in the order of their bits, read as integers. So
the entry is found digit by digit: one reading counts how many entries begin with each of some
thousand digits, which tells the digit of the one that is sought; the next looks only at those that
begin so. Counts of shards are added up, so that the answer is that of the whole tensors; where one
is sought in each of many, their counts go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equipoise.transforms._lists import BUFFER, looking_is_free
from equipoise.transforms._shards import Split, add_over_splits

Pieces = Callable[[], Iterator[tuple[int, Tensor]]]
"""Integers to count, each piece with the number of the tensor it is of; may be read again."""

# Up to here one selection over all entries side by side is fastest.
FEW = 1 << 16
# Entries counted at a time: float32 counts them exactly, and copies stay small.
AT_ONCE = 1 << 22
# As many searches over several processes go on together; of each some thousand counts are held.
TOGETHER = 128
# The bits of each type, the first digit first; the sign is always 0.
DIGITS = {torch.int16: (15,), torch.int32: (11, 10, 10), torch.int64: (13, 13, 13, 12, 12)}
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@dataclass(frozen=True)
class Wanted:
    """The absolute value with this index in ascending order, among all entries of some tensors.

    The tensors are real. NaN comes after infinity.
    """

    tensors: Sequence[Tensor]
    splits: Sequence[tuple[Split, ...]]
    entries: int
    """How many there are in all, on all processes."""
    index: int


def ranked(wanted: Sequence[Wanted]) -> list[Tensor]:
    """What is wanted, each exactly."""
    found: dict[int, Tensor] = {}
    spread = [i for i, one in enumerate(wanted) if any(one.splits)]
    for start in range(0, len(spread), TOGETHER):
        some = spread[start : start + TOGETHER]
        found.update(zip(some, _searched([wanted[i] for i in some]), strict=True))
    for i, one in enumerate(wanted):
        if i not in found:
            found[i] = _selected(one) if one.entries <= FEW else _searched([one])[0]
    return [found[i] for i in range(len(wanted))]


def _selected(one: Wanted) -> Tensor:
    """By one selection over all entries side by side."""
    dtype, home = _common(one.tensors), one.tensors[0].device
    together = torch.cat([t.reshape(-1).to(home, dtype) for t in one.tensors])
    return together.abs().kthvalue(one.index + 1).values


def _searched(wanted: Sequence[Wanted]) -> list[Tensor]:
    """Digit by digit, all at the same time: one packed all-reduce a digit."""
    largest = max(tensor.numel() for one in wanted for tensor in one.tensors)
    room = min(AT_ONCE, max(BUFFER, largest)) // len(wanted)
    searches = [_Search(one, room) for one in wanted]
    while going := [search for search in searches if search.widths]:
        counts = [search.counts() for search in going]
        kinds = [kind for search in going for kind in search.kinds]
        sums = iter(add_over_splits([c for some in counts for c in some], kinds))
        for search in going:
            search.go_on(torch.stack([next(sums) for _ in search.kinds]).sum(0))
    return [search.found.to(BITS[search.dtype]).view(search.dtype) for search in searches]


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


class _Search:
    """How far one search has come: what is found of the bits, and what is still looked at."""

    def __init__(self, one: Wanted, room: int) -> None:
        self.splits = one.splits
        self.kinds = list(dict.fromkeys(one.splits))
        self.room = room
        """As many candidates may be held by themselves, once they are so few."""
        self.home = one.tensors[0].device
        self.dtype = _common(one.tensors)
        self.widths = DIGITS[BITS[self.dtype]]
        self.candidates: Pieces = partial(_bits, one.tensors, self.dtype)
        self.found = torch.zeros((), dtype=torch.int64, device=self.home)
        self.left = torch.full((), one.index, dtype=torch.int64, device=self.home)

    def counts(self) -> list[Tensor]:
        """How many entries that begin with what is found have each next digit, by their spread."""
        width, shift = self.widths[0], sum(self.widths[1:])
        zeros = torch.zeros(1 << width, dtype=torch.int64, device=self.home)
        counts = [zeros.clone() for _ in self.kinds]
        for i, bits in self.candidates():
            high = bits >> shift
            digit = torch.where(high >> width == self.found.to(bits), high & ((1 << width) - 1), -1)
            # What does not match lies outside the range and is not counted.
            here = torch.histc(digit.float(), bins=1 << width, min=0, max=1 << width)
            counts[self.kinds.index(self.splits[i])] += here.to(self.home, torch.int64)
        return counts

    def go_on(self, counts: Tensor) -> None:
        """Find the next digit, from the counts of all processes."""
        width, *rest = self.widths
        below = counts.cumsum(0)
        digit = (below <= self.left).sum()
        # To index with a tensor would wait for the device.
        self.left = self.left - torch.where(digit > 0, below.take((digit - 1).clamp(min=0)), 0)
        self.found = (self.found << width) | digit
        self.widths = tuple(rest)
        if looking_is_free(self.home) and rest and counts.take(digit).item() <= self.room:
            self._narrow(sum(rest))

    def _narrow(self, shift: int) -> None:
        """Only the entries that begin with what is found, now that they are few."""
        found = self.found
        kept = [(i, bits[bits >> shift == found.to(bits)]) for i, bits in self.candidates()]
        self.candidates = lambda: iter(kept)
