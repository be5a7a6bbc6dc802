"""Ball arithmetic: real numbers with rigorous error bounds, and all that a float could have given.

Both need python-flint, and both work at the precision of ``flint.ctx``; `decided` raises it until
every comparison is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from equipoise.spec.formats import FORMATS, Format, optional
from equipoise.spec.scalars import (
    Decision,
    Number,
    UndecidedError,
    UnsupportedError,
    left_fold,
    sort_by,
)

if TYPE_CHECKING:
    from flint import arb

Result = TypeVar("Result")
HIGHEST = 8192


def decided(compute: Callable[[], Result], *, bits: int = 128) -> Result:
    """What a computation over balls gives, at the first precision that decides it.

    At the edge: equal irrational numbers are never decided; beyond 8192 bits that is an error.

    Examples:
        >>> from equipoise import spec
        >>> K = spec.Ball()
        >>> spec.decided(lambda: K.gt(K.sqrt(K.const(2)), K.const(1.4142135)))
        True
    """
    flint = optional("flint")
    while True:
        with flint.ctx.workprec(bits):
            try:
                return compute()
            except UndecidedError:
                if bits >= HIGHEST:
                    raise
        bits *= 2


def summation_bound(count: Any, unit: Any, size: Any) -> Any:  # noqa: ANN401 — balls or symbols
    """How far a sum of so many floats, of these sizes together, may be from exact, in any order."""
    return (count - 1) * unit * size


class Ball:
    """Real numbers as arb balls, which contain the true value whatever happens."""

    def __init__(self) -> None:
        self._flint = optional("flint")

    def const(self, number: Number, /) -> arb:
        exact = Fraction(number)
        return self._ball(self._flint.fmpq(exact.numerator, exact.denominator))

    def gt(self, a: arb, b: arb, /) -> bool:
        # An undecided comparison of balls is False both ways, so both are asked.
        if a > b:
            return True
        if a <= b:
            return False
        raise UndecidedError(
            f"{a.str(9)} and {b.str(9)} overlap. Use `decided`, which raises the precision."
        )

    def ite(
        self, condition: Decision, then: Callable[[], arb], otherwise: Callable[[], arb]
    ) -> arb:
        return then() if condition else otherwise()

    def abs(self, x: arb, /) -> arb:
        return abs(x)

    def min(self, a: arb, b: arb, /) -> arb:
        return a.min(b)

    def max(self, a: arb, b: arb, /) -> arb:
        return a.max(b)

    def sqrt(self, x: arb, /) -> arb:
        if x < 0:
            raise UnsupportedError(f"The root of {x.str(9)} is not real. Use what is not negative.")
        # A ball around 0 is that of a number whose root is real.
        return x.nonnegative_part().sqrt()

    def exp(self, x: arb, /) -> arb:
        return x.exp()

    def log(self, x: arb, /) -> arb:
        if x <= 0:
            raise UnsupportedError(
                f"The logarithm of {x.str(9)} is not real. Use what is positive."
            )
        return x.log()

    def sum(self, xs: Iterable[arb], /) -> arb:
        return left_fold(self._ball(0), xs)

    def sort(self, xs: Sequence[arb], /) -> list[arb]:
        return sort_by(self, xs)

    def eigenvalues(self, matrix: Sequence[Sequence[arb]], /) -> list[arb]:
        """Certified enclosures, by flint; equal eigenvalues share one ball."""
        if not matrix:
            return []
        square = self._flint.acb_mat([list(row) for row in matrix])
        return [value.real for value in square.eig(multiple=True)]

    def _ball(self, x: object) -> arb:
        ball: arb = self._flint.arb(x)
        return ball


class Enclosure:
    """A number as it is, and a ball that holds all its admissible float results."""

    __slots__ = ("context", "exact", "rounded")

    def __init__(self, context: Rounding, exact: arb, rounded: arb) -> None:
        self.context, self.exact, self.rounded = context, exact, rounded

    def __add__(self, other: Enclosure) -> Enclosure:
        return self.context.after(self.exact + other.exact, self.rounded + other.rounded)

    def __sub__(self, other: Enclosure) -> Enclosure:
        return self.context.after(self.exact - other.exact, self.rounded - other.rounded)

    def __mul__(self, other: Enclosure) -> Enclosure:
        rounded = self.rounded * other.rounded
        return self.context.after(self.exact * other.exact, rounded, small=True)

    def __truediv__(self, other: Enclosure) -> Enclosure:
        rounded = self.rounded / other.rounded
        return self.context.after(self.exact / other.exact, rounded, small=True)

    def __neg__(self) -> Enclosure:
        return Enclosure(self.context, -self.exact, -self.rounded)

    def contains(self, x: float) -> bool:
        """Whether a float is one of the admissible results; never where there is no bound."""
        return self.rounded.is_finite() and self.rounded.contains(self.context.exactly(x).exact)

    def once_more(self, name: str) -> Enclosure:
        """Rounded once to another format."""
        final = Rounding(name)
        return Enclosure(
            final, self.exact, final.after(self.exact, self.rounded, small=True).rounded
        )


class Rounding:
    """Every result that floating-point arithmetic of one format may give, as a ball.

    An operation may be wrong by the relative amount u = 2^−digits, and near 0 by half the smallest
    number; roots, exponentials and logarithms by four u (2 ulp, the bound of the vector libraries;
    on the CPU at most 1.7 u was found, over all float32 numbers). A sum of n terms, in any order,
    may be wrong by (n−1)·u·Σ|xᵢ| (Jeannerod and Rump 2013). Overflow and flush-to-zero are outside.

    ``steps``: how many roundings the float program may spend where the formula has one, on numbers
    no larger. Comparisons are those of the exact numbers: a formula that jumps is to be asked away
    from its jump.
    """

    elementary = 4

    def __init__(self, name: str, *, steps: int = 1) -> None:
        self.format: Format = FORMATS[name]
        self.steps = steps
        self._flint = optional("flint")
        self._ball = Ball()
        self._unit = self._power(-self.format.digits)
        self._near_one = {k: self._together(k * self._unit) for k in (1, self.elementary)}
        self._near_zero = self._flint.arb(0, steps * self._power(self.format.lowest - 1))
        self._normal = self._power(self.format.lowest + self.format.digits)

    def after(self, exact: arb, rounded: arb, *, units: int = 1, small: bool = False) -> Enclosure:
        """The result of one operation; ``small`` if it can fall below the format's numbers."""
        if small and not abs(rounded) > self._normal and not rounded.is_zero():
            rounded = rounded + self._near_zero
        return Enclosure(self, exact, rounded * self._near_one[units])

    def exactly(self, number: float) -> Enclosure:
        """A number of the input, which the program has as it is."""
        ball = self._flint.arb(number)
        return Enclosure(self, ball, ball)

    def const(self, number: Number, /) -> Enclosure:
        ball = self._ball.const(number)
        if self.format.holds(number):
            return Enclosure(self, ball, ball)
        return self.after(ball, ball, small=True)

    def gt(self, a: Enclosure, b: Enclosure, /) -> bool:
        return self._ball.gt(a.exact, b.exact)

    def ite(
        self, condition: Decision, then: Callable[[], Enclosure], otherwise: Callable[[], Enclosure]
    ) -> Enclosure:
        return then() if condition else otherwise()

    def abs(self, x: Enclosure, /) -> Enclosure:
        return Enclosure(self, abs(x.exact), abs(x.rounded))

    def min(self, a: Enclosure, b: Enclosure, /) -> Enclosure:
        return Enclosure(self, a.exact.min(b.exact), a.rounded.min(b.rounded))

    def max(self, a: Enclosure, b: Enclosure, /) -> Enclosure:
        return Enclosure(self, a.exact.max(b.exact), a.rounded.max(b.rounded))

    def sqrt(self, x: Enclosure, /) -> Enclosure:
        rounded = x.rounded.nonnegative_part().sqrt()
        return self.after(self._ball.sqrt(x.exact), rounded, units=self.elementary)

    def exp(self, x: Enclosure, /) -> Enclosure:
        rounded = x.rounded.exp()
        return self.after(x.exact.exp(), rounded, units=self.elementary, small=True)

    def log(self, x: Enclosure, /) -> Enclosure:
        return self.after(self._ball.log(x.exact), x.rounded.log(), units=self.elementary)

    def sum(self, xs: Iterable[Enclosure], /) -> Enclosure:
        terms = list(xs)
        exact = self._ball.sum(x.exact for x in terms)
        rounded = self._ball.sum(x.rounded for x in terms)
        if len(terms) > 1:
            size = self._ball.sum(x.rounded.abs_upper() for x in terms)
            rounded += self._flint.arb(0, summation_bound(len(terms), self._unit, size).upper())
        return Enclosure(self, exact, rounded)

    def sort(self, xs: Sequence[Enclosure], /) -> list[Enclosure]:
        return sort_by(self, xs)

    def eigenvalues(self, matrix: Sequence[Sequence[Enclosure]], /) -> list[Enclosure]:
        """Those of a solver that is backward stable, up to 10·n·2u·‖G‖ (LAPACK's p(n) = 10n).

        An enclosure of the entries moves an eigenvalue by no more than the norm of its radii.
        """
        ball = self._ball
        exact = ball.eigenvalues([[entry.exact for entry in row] for row in matrix])
        entries = [entry for row in matrix for entry in row]
        size = ball.sqrt(ball.sum(e.exact.abs_upper() * e.exact.abs_upper() for e in entries))
        moved = [abs(e.rounded - e.exact).abs_upper() for e in entries]
        spread = ball.sqrt(ball.sum(m * m for m in moved))
        radius = (spread + 20 * len(matrix) * self.steps * self._unit * size).upper()
        return [Enclosure(self, value, value + self._flint.arb(0, radius)) for value in exact]

    def _together(self, error: arb) -> arb:
        """Factors 1 + δ with |δ| up to the error, one for each step: ``1 ± ((1 + error)ⁿ − 1)``."""
        factor: arb = self._flint.arb(1, (self.steps * error.log1p()).expm1().upper())
        return factor

    def _power(self, exponent: int) -> arb:
        power: arb = self._flint.arb(2) ** exponent
        return power
