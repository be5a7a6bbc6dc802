"""Numbers that carry a derivative: a formula run over them differentiates itself, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flint import arb

from equipoise.spec.balls import Ball
from equipoise.spec.scalars import Decision, Number, eigenvalues_up_to_two, left_fold, sort_by

BALL = Ball()


@dataclass(frozen=True)
class Dual:
    """A real number, and how fast it moves."""

    value: arb
    slope: arb

    def __add__(self, other: Dual) -> Dual:
        return Dual(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: Dual) -> Dual:
        return Dual(self.value - other.value, self.slope - other.slope)

    def __mul__(self, other: Dual) -> Dual:
        slope = self.slope * other.value + self.value * other.slope
        return Dual(self.value * other.value, slope)

    def __truediv__(self, other: Dual) -> Dual:
        quotient = self.value / other.value
        return Dual(quotient, (self.slope - quotient * other.slope) / other.value)

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)


class Duals:
    """The context of dual numbers over balls. |x| has slope 0 at 0."""

    def const(self, number: Number, /) -> Dual:
        return Dual(BALL.const(number), arb(0))

    def gt(self, a: Dual, b: Dual, /) -> bool:
        return BALL.gt(a.value, b.value)

    def ite(
        self, condition: Decision, then: Callable[[], Dual], otherwise: Callable[[], Dual]
    ) -> Dual:
        return then() if condition else otherwise()

    def abs(self, x: Dual, /) -> Dual:
        sign = (x.value > 0) - (x.value < 0)
        return Dual(abs(x.value), sign * x.slope)

    def min(self, a: Dual, b: Dual, /) -> Dual:
        return b if self.gt(a, b) else a

    def max(self, a: Dual, b: Dual, /) -> Dual:
        return a if self.gt(a, b) else b

    def sqrt(self, x: Dual, /) -> Dual:
        root = x.value.sqrt()
        return Dual(root, x.slope / (2 * root))

    def exp(self, x: Dual, /) -> Dual:
        power = x.value.exp()
        return Dual(power, power * x.slope)

    def log(self, x: Dual, /) -> Dual:
        return Dual(x.value.log(), x.slope / x.value)

    def sum(self, xs: Iterable[Dual], /) -> Dual:
        return left_fold(self.const(0), xs)

    def sort(self, xs: Sequence[Dual], /) -> list[Dual]:
        return sort_by(self, xs)

    def eigenvalues(self, matrix: Sequence[Sequence[Dual]], /) -> list[Dual]:
        return eigenvalues_up_to_two(self, matrix)
