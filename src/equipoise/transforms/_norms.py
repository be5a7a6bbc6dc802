"""Lengths of gradients, each measured once: of every leaf, and of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise.transforms._lists import (
    BAND,
    exact_total_square,
    largest,
    looking_is_free,
    squared_norms,
    total_square,
    wide,
)
from equipoise.transforms._shards import Shard, Split, add_over_splits

DOUBLE = (torch.float64, torch.complex128)
# Where squares of float64 neither overflow nor vanish; for shorter types float64 has room.
SAFE = (1e-280, 1e300)


class Norms:
    """Squared lengths in units of `unit`, a power of two that keeps squares of float64 in range.

    What is measured is read at that moment, so that what was known and scaled since, and what is
    measured now, are of the same tensors.
    """

    def __init__(
        self, read: Callable[[], list[Tensor]], splits: Sequence[tuple[Split, ...]]
    ) -> None:
        self.read = read
        self.splits = splits
        self.unit: Tensor | None = None
        self.known_each: Tensor | None = None
        self.known_total: Tensor | None = None

    @staticmethod
    def of(read: Callable[[], list[Tensor]], shards: Sequence[Shard | None]) -> Norms:
        """Nothing known so far, but the units."""
        norms = Norms(read, [() if shard is None else shard.everywhere for shard in shards])
        if any(tensor.dtype in DOUBLE for tensor in read()):
            norms.unit = norms._unit()
        return norms

    @property
    def free(self) -> bool:
        """Whether figures may be looked at."""
        return not self.splits or looking_is_free(self.read()[0].device)

    def _unit(self) -> Tensor | None:
        tensors = self.read()
        if self.free and not any(self.splits):
            self.known_total = total_square(tensors)
            if SAFE[0] < self.known_total.item() < SAFE[1]:
                return None
            self.known_total = None
        peaks = add_over_splits([largest([t]) for t in tensors], self.splits, largest=True)
        peak = torch.stack([p.to(peaks[0].device) for p in peaks]).amax()
        usable = peak.isfinite() & (peak > 0)
        return torch.ldexp(torch.ones_like(peak), torch.frexp(torch.where(usable, peak, 1.0))[1])

    def _measured(self) -> list[Tensor]:
        tensors = self.read()
        if self.unit is None:
            return tensors
        return [tensor / self.unit.to(tensor.device) for tensor in tensors]

    def squares(self) -> Tensor:
        """Of every leaf, of the whole parameter where it is sharded."""
        if self.known_each is None:
            if not self.splits:
                return torch.zeros(0, dtype=torch.float64)
            each = squared_norms(self._measured())
            if any(self.splits):
                each = torch.stack(add_over_splits([*each.unbind()], self.splits))
            self.known_each = each
        return self.known_each

    def total(self) -> Tensor:
        """Of all leaves together, to 1e-6; see `exceed`."""
        if self.known_total is None:
            if not self.splits:
                return torch.zeros((), dtype=torch.float64)
            if self.known_each is not None or not self.free:
                self.known_total = self.squares().sum()
            else:
                self.known_total = self._added(total_square)
        return self.known_total

    def _added(self, measure: object) -> Tensor:
        """The total by groups of equal spread, each added up over its own splits."""
        groups: dict[tuple[tuple[int, int], ...], tuple[tuple[Split, ...], list[Tensor]]] = {}
        for tensor, splits in zip(self._measured(), self.splits, strict=True):
            key = tuple((id(mesh), dim) for mesh, dim in splits)
            groups.setdefault(key, (splits, []))[1].append(tensor)
        totals = [measure(tensors) for _, tensors in groups.values()]  # type: ignore[operator]
        return torch.stack(add_over_splits(totals, [s for s, _ in groups.values()])).sum()

    def together(self) -> Tensor:
        """The length of all leaves together."""
        return self._root(self.total())

    def each(self) -> Tensor:
        """The length of every leaf."""
        return self._root(self.squares())

    def _root(self, squares: Tensor) -> Tensor:
        return squares.sqrt() if self.unit is None else squares.sqrt() * self.unit

    def factor(self, limit: Tensor | float) -> Tensor:
        """``min(1, limit/‖g‖)`` for all leaves together, the branch taken on exact squares.

        1 also where the length is not finite: what is wrong in one leaf does not spread.
        """
        m = self._in_units(limit)
        square = self.total()
        if self.free and _near(square, m).item():
            square = self.known_total = self._added(exact_total_square)
        return _factor(square, m)

    def factors(self, limit: Tensor | float) -> Tensor:
        """The same for each leaf by itself."""
        m = self._in_units(limit)
        squares = self.squares()
        if self.free:
            near = _near(squares, m).nonzero().flatten().tolist()
            measured = self._measured() if near else []
            for i in near:
                exact = exact_total_square([measured[i]])
                squares[i] = add_over_splits([exact], [self.splits[i]])[0]
        return _factor(squares, m)

    def _in_units(self, limit: Tensor | float) -> Tensor:
        device = self.read()[0].device if self.splits else torch.device("cpu")
        m = torch.as_tensor(limit, dtype=wide(device), device=device).abs()
        return m if self.unit is None else m / self.unit

    def scaled(self, by: Tensor) -> Norms:
        """The lengths after every leaf was multiplied by a number, or each by its own."""
        new, square = self._like(self.read, self.splits), by.square()
        new.known_each = None if self.known_each is None else self.known_each * square
        if not by.dim() and self.known_total is not None:
            new.known_total = self.known_total * square
        return new

    def among(self, chosen: Sequence[int], read: Callable[[], list[Tensor]]) -> Norms:
        """The lengths of some leaves, as far as they are known."""
        new = self._like(read, [self.splits[i] for i in chosen])
        new.known_each = None if self.known_each is None else self.known_each[list(chosen)]
        return new

    def _like(self, read: Callable[[], list[Tensor]], splits: Sequence[tuple[Split, ...]]) -> Norms:
        new = Norms(read, splits)
        new.unit = self.unit
        return new


def _near(squares: Tensor, m: Tensor) -> Tensor:
    """Whether a measured square might lie on the wrong side of the limit."""
    return ((squares - m.square()).abs() <= BAND * m.square()) & m.isfinite()


def _factor(squares: Tensor, m: Tensor) -> Tensor:
    longer = (squares > m.square()) & squares.isfinite()
    return torch.where(longer, m / torch.where(longer, squares, 1.0).sqrt(), 1.0)
