"""Lengths of gradients, each measured once: of every leaf, and of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from equipoise.transforms._lists import (
    BAND,
    DOUBLE,
    batches,
    exact_total_square,
    largest,
    looking_is_free,
    squared_norms,
    total_square,
    wide,
)
from equipoise.transforms._shards import Shard, Split, add_over_splits

# Where squares of float64 neither overflow nor vanish; for shorter types float64 has room.
SAFE = (1e-280, 1e300)


class Norms:
    """Squared lengths, in units that keep squares of float64 in range: powers of two.

    Each leaf has a unit of its own, for one may be tiny beside another, or not finite; all together
    are measured in the largest. What is measured is read at that moment, so that what was known and
    scaled since, and what is measured now, are of the same tensors.
    """

    def __init__(
        self,
        read: Callable[[], list[Tensor]],
        splits: Sequence[tuple[Split, ...]],
        device: torch.device,
    ) -> None:
        self.read = read
        self.splits = splits
        self.device = device
        """That of the first leaf; asked for here, for to read makes a rescaling happen."""
        self.double = False
        self.units: Tensor | None = None
        self.known_each: Tensor | None = None
        self.known_total: Tensor | None = None

    @staticmethod
    def of(
        read: Callable[[], list[Tensor]], shards: Sequence[Shard | None], device: torch.device
    ) -> Norms:
        """Nothing known so far, but the units."""
        splits = [() if shard is None else shard.everywhere for shard in shards]
        norms = Norms(read, splits, device)
        norms.double = not {tensor.dtype for tensor in read()}.isdisjoint(DOUBLE)
        if norms.double and not norms._safe():
            norms._take_units()
        return norms

    @property
    def free(self) -> bool:
        """Whether figures may be looked at."""
        return not self.splits or looking_is_free(self.device)

    def _safe(self) -> bool:
        """Whether the total shows that no unit is needed for it."""
        if not self.free or any(self.splits):
            return False
        total = total_square(self.read())
        if not SAFE[0] < total.item() < SAFE[1]:
            return False
        self.known_total = total
        return True

    def _take_units(self) -> None:
        largests = [largest([tensor]) for tensor in self.read()]
        # A NaN would be lost among processes.
        ordered = [torch.where(peak.isnan(), torch.inf, peak) for peak in largests]
        peaks = add_over_splits(ordered, self.splits, largest=True)
        peak = torch.stack([p.to(peaks[0].device) for p in peaks])
        usable = peak.isfinite() & (peak > 0)
        exponents = torch.frexp(torch.where(usable, peak, 1.0))[1] - 1
        self.units = torch.ldexp(torch.ones_like(peak), exponents)
        self.known_total = None

    @property
    def unit(self) -> Tensor | None:
        """That of all together."""
        return None if self.units is None else self.units.amax()

    def squares(self) -> Tensor:
        """Of every leaf, of the whole parameter where it is sharded."""
        if self.known_each is None:
            if not self.splits:
                return torch.zeros(0, dtype=torch.float64)
            each = self._squares()
            if self.double and self.units is None and (each < SAFE[0]).any().item():
                self._take_units()
                each = self._squares()
            self.known_each = each
        return self.known_each

    def _squares(self) -> Tensor:
        tensors = self.read()
        if self.units is None:
            each = squared_norms(tensors)
        else:  # each in its own unit, in copies that are never many at a time
            units = self.units.unbind()
            found = [
                squared_norms([tensors[i] / units[i].to(tensors[i].device) for i in batch])
                for batch in batches(tensors)
            ]
            each = torch.cat([squares.to(self.device) for squares in found])
        if any(self.splits):
            each = torch.stack(add_over_splits([*each.unbind()], self.splits))
        return each

    def total(self) -> Tensor:
        """Of all leaves together, to 1e-6; see `exceed`."""
        if self.known_total is None:
            if not self.splits:
                return torch.zeros((), dtype=torch.float64)
            if self.units is not None:
                parts = self.units / self.units.amax()
                self.known_total = (self.squares() * parts.square()).sum()
            elif self.known_each is not None or not self.free or any(self.splits):
                # The next link may need each of them; so one reduction over processes is enough.
                self.known_total = self.squares().sum()
            else:
                self.known_total = self._added(total_square)
        return self.known_total

    def _added(self, measure: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """The total by groups of equal spread, each added up over its own splits."""
        if not any(self.splits):
            return measure(self.read())
        groups: dict[tuple[tuple[int, int], ...], tuple[tuple[Split, ...], list[Tensor]]] = {}
        for tensor, splits in zip(self.read(), self.splits, strict=True):
            key = tuple((id(mesh), dim) for mesh, dim in splits)
            groups.setdefault(key, (splits, []))[1].append(tensor)
        totals = [measure(tensors) for _, tensors in groups.values()]
        return torch.stack(add_over_splits(totals, [s for s, _ in groups.values()])).sum()

    def together(self) -> Tensor:
        """The length of all leaves together."""
        return self.total().sqrt() if self.unit is None else self.total().sqrt() * self.unit

    def factor(self, limit: Tensor | float) -> Tensor:
        """``min(1, limit/‖g‖)`` for all leaves together, the branch taken on exact squares.

        Those of float64 are rounded themselves: there the last bits may decide. 1 also where
        the length is not finite: what is wrong in one leaf does not spread. A limit that was
        measured itself, a tensor, is compared with what is measured.
        """
        square = self.total()
        if isinstance(limit, Tensor):
            length = self.together()
            longer = (length > limit) & length.isfinite()
            return torch.where(longer, limit / torch.where(longer, length, 1.0), 1.0)
        m = self._over(limit, self.unit)
        if self.free and _near(square, m).item():
            square = self.known_total = self._added(partial(exact_total_square, unit=self.unit))
        return _factor(square, m)

    def factors(self, limit: float) -> Tensor:
        """The same for each leaf by itself."""
        squares = self.squares()
        m = self._over(limit, self.units)
        if self.free:
            near = _near(squares, m).nonzero().flatten().tolist()
            units = [None] * len(squares) if self.units is None else self.units.unbind()
            for i in near:
                exact = exact_total_square([self.read()[i]], units[i])
                squares[i] = add_over_splits([exact], [self.splits[i]])[0]
        return _factor(squares, m)

    def _over(self, limit: float, unit: Tensor | None) -> Tensor:
        # Filled in there: to copy it would wait for the device.
        m = torch.full((), abs(limit), dtype=wide(self.device), device=self.device)
        return m if unit is None else m / unit

    def scaled(self, by: Tensor) -> Norms:
        """The lengths after every leaf was multiplied by a number, or each by its own."""
        new = self._like(self.read, self.splits, self.device)
        if self.double:
            # The square of a small one would vanish: units take its power of two.
            by, power = torch.frexp(by)
            units = by.new_ones(len(self.splits)) if self.units is None else self.units
            new.units = torch.ldexp(units, power)
        square = by.square()
        new.known_each = None if self.known_each is None else self.known_each * square
        if not by.dim() and self.known_total is not None:
            new.known_total = self.known_total * square
        return new

    def among(
        self, chosen: Sequence[int], read: Callable[[], list[Tensor]], device: torch.device
    ) -> Norms:
        """The lengths of some leaves, as far as they are known."""
        new = self._like(read, [self.splits[i] for i in chosen], device)
        if self.known_each is not None:
            each = self.known_each.unbind()
            new.known_each = torch.stack([each[i] for i in chosen])
        if self.units is not None:
            units = self.units.unbind()
            new.units = torch.stack([units[i] for i in chosen])
        return new

    def _like(
        self,
        read: Callable[[], list[Tensor]],
        splits: Sequence[tuple[Split, ...]],
        device: torch.device,
    ) -> Norms:
        new = Norms(read, splits, device)
        new.double = self.double
        return new


def _near(squares: Tensor, m: Tensor) -> Tensor:
    """Whether a measured square might lie on the wrong side of the limit."""
    return ((squares - m.square()).abs() <= BAND * m.square()) & m.isfinite()


def _factor(squares: Tensor, m: Tensor) -> Tensor:
    longer = (squares > m.square()) & squares.isfinite()
    return torch.where(longer, m / torch.where(longer, squares, 1.0).sqrt(), 1.0)
