"""Real numbers as symbols, for statements about all of them (z3).

A root is a symbol whose square is given; an exponential and a logarithm are symbols that know one
axiom, ln t ≤ t − 1. Whatever is asked of a symbol is written down in ``facts``, and belongs to the
hypotheses of what is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from equipoise.spec.formats import optional
from equipoise.spec.scalars import (
    Decision,
    Number,
    eigenvalues_up_to_two,
    left_fold,
)

Real = Any
"""A z3 expression."""


class Symbols:
    """Real numbers in z3."""

    def __init__(self) -> None:
        self.z3 = optional("z3")
        self.facts: list[Real] = []
        self._logs: list[tuple[Real, Real]] = [(self.const(0), self.const(1))]

    def real(self, name: str) -> Real:
        """Any real number."""
        return self.z3.Real(name)

    def reals(self, name: str, count: int) -> list[Real]:
        """So many of them."""
        return [self.z3.Real(f"{name}{i}") for i in range(count)]

    def const(self, number: Number, /) -> Real:
        exact = Fraction(number)
        return self.z3.RealVal(exact.numerator) / self.z3.RealVal(exact.denominator)

    def gt(self, a: Real, b: Real, /) -> Real:
        return a > b

    def ite(
        self, condition: Decision, then: Callable[[], Real], otherwise: Callable[[], Real]
    ) -> Real:
        return self.z3.If(condition, then(), otherwise())

    def abs(self, x: Real, /) -> Real:
        return self.z3.If(x >= 0, x, -x)

    def min(self, a: Real, b: Real, /) -> Real:
        return self.z3.If(a > b, b, a)

    def max(self, a: Real, b: Real, /) -> Real:
        return self.z3.If(a > b, a, b)

    def sqrt(self, x: Real, /) -> Real:
        root = self._fresh("root")
        self.facts += [self.z3.Implies(x >= 0, self.z3.And(root >= 0, root * root == x))]
        return root

    def exp(self, x: Real, /) -> Real:
        for log, known in self._logs:
            if log.eq(x):
                return known
        power = self._fresh("exp")
        self.relate(x, power)
        return power

    def log(self, x: Real, /) -> Real:
        for known, power in self._logs:
            if power.eq(x):
                return known
        logarithm = self._fresh("log")
        self.relate(logarithm, x)
        return logarithm

    def sum(self, xs: Iterable[Real], /) -> Real:
        return left_fold(self.const(0), xs)

    def sort(self, xs: Sequence[Real], /) -> list[Real]:
        """By a network of minima and maxima."""
        ordered = list(xs)
        for end in range(len(ordered) - 1, 0, -1):
            for i in range(end):
                low, high = ordered[i], ordered[i + 1]
                ordered[i], ordered[i + 1] = self.min(low, high), self.max(low, high)
        return ordered

    def eigenvalues(self, matrix: Sequence[Sequence[Real]], /) -> list[Real]:
        """By the closed form, for matrices up to 2×2."""
        return eigenvalues_up_to_two(self, matrix)

    def relate(self, logarithm: Real, power: Real) -> None:
        """``ln power = logarithm``, hence ln t ≤ t − 1 for t a quotient of any two powers known."""
        self.facts.append(power > 0)
        for log, known in self._logs:
            self.facts += [
                known * (logarithm - log) <= power - known,
                power * (log - logarithm) <= known - power,
            ]
        self._logs.append((logarithm, power))

    def _fresh(self, name: str) -> Real:
        return self.z3.FreshReal(name)
