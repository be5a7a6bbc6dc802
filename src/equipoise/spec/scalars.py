"""What a formula needs of its numbers, and the two kinds of number that Python itself has.

A definition takes a context ``K`` first, and asks it for everything but ``+ − × ÷``. Nothing is
totalised: what a scalar cannot do is an error that says so, never a value made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cmp_to_key, reduce
from typing import Protocol, Self, TypeVar

Number = int | float | Fraction
"""A number in a formula or an option. A float is what it holds: 0.1 is not 1/10."""

Decision = object
"""What a comparison gives: a bool, or a formula where scalars are symbols."""


class Scalar(Protocol):
    """What can be added, subtracted, multiplied, divided and negated."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, other: Self, /) -> Self: ...
    def __truediv__(self, other: Self, /) -> Self: ...
    def __neg__(self) -> Self: ...


T = TypeVar("T", bound=Scalar)


class Scalars(Protocol[T]):
    """The context of a formula: constants, the one comparison, roots, sums and order."""

    def const(self, number: Number, /) -> T:
        """The scalar of a number."""
        ...

    def gt(self, a: T, b: T, /) -> Decision:
        """Whether ``a > b``; the only way for a formula to compare."""
        ...

    def ite(self, condition: Decision, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """``then()`` where the condition holds, else ``otherwise()``."""
        ...

    def abs(self, x: T, /) -> T:
        """``|x|``."""
        ...

    def min(self, a: T, b: T, /) -> T:
        """The smaller of two."""
        ...

    def max(self, a: T, b: T, /) -> T:
        """The larger of two."""
        ...

    def sqrt(self, x: T, /) -> T:
        """The root of what is not negative."""
        ...

    def exp(self, x: T, /) -> T:
        """``eˣ``."""
        ...

    def log(self, x: T, /) -> T:
        """The natural logarithm of what is positive."""
        ...

    def sum(self, xs: Iterable[T], /) -> T:
        """The sum from the left, 0 for nothing."""
        ...

    def sort(self, xs: Sequence[T], /) -> list[T]:
        """From the smallest to the largest."""
        ...

    def eigenvalues(self, matrix: Sequence[Sequence[T]], /) -> list[T]:
        """The eigenvalues of a symmetric matrix."""
        ...


class UnsupportedError(TypeError):
    """A scalar was asked for what it cannot do."""


class UndecidedError(ArithmeticError):
    """Two balls overlap: neither is known to be the larger one. More precision decides."""


class InfiniteError(ArithmeticError):
    """The value is infinite, by mathematics."""


def plus(a: T, b: T) -> T:
    """The step of every sum."""
    return a + b


def left_fold(zero: T, xs: Iterable[T]) -> T:
    """``((0 + x₁) + x₂) + …``."""
    return reduce(plus, xs, zero)


class Float:
    """Python's floats: the reference that runs everywhere."""

    def const(self, number: Number, /) -> float:
        return float(number)

    def gt(self, a: float, b: float, /) -> bool:
        return a > b

    def ite(
        self, condition: Decision, then: Callable[[], float], otherwise: Callable[[], float]
    ) -> float:
        return then() if condition else otherwise()

    def abs(self, x: float, /) -> float:
        return abs(x)

    def min(self, a: float, b: float, /) -> float:
        return min(a, b)

    def max(self, a: float, b: float, /) -> float:
        return max(a, b)

    def sqrt(self, x: float, /) -> float:
        return math.sqrt(x)

    def exp(self, x: float, /) -> float:
        return math.exp(x)

    def log(self, x: float, /) -> float:
        return math.log(x)

    def sum(self, xs: Iterable[float], /) -> float:
        return left_fold(0.0, xs)

    def sort(self, xs: Sequence[float], /) -> list[float]:
        return sorted(xs)

    def eigenvalues(self, matrix: Sequence[Sequence[float]], /) -> list[float]:
        """By the closed form, for matrices up to 2×2."""
        return eigenvalues_up_to_two(self, matrix)


class Rational:
    """Fractions, exactly. A root of what is no square, an exponential or a logarithm is refused."""

    def const(self, number: Number, /) -> Fraction:
        return Fraction(number)

    def gt(self, a: Fraction, b: Fraction, /) -> bool:
        return a > b

    def ite(
        self, condition: Decision, then: Callable[[], Fraction], otherwise: Callable[[], Fraction]
    ) -> Fraction:
        return then() if condition else otherwise()

    def abs(self, x: Fraction, /) -> Fraction:
        return abs(x)

    def min(self, a: Fraction, b: Fraction, /) -> Fraction:
        return min(a, b)

    def max(self, a: Fraction, b: Fraction, /) -> Fraction:
        return max(a, b)

    def sqrt(self, x: Fraction, /) -> Fraction:
        root = Fraction(math.isqrt(abs(x.numerator)), math.isqrt(x.denominator))
        if root * root != x:
            raise UnsupportedError(f"{x} must be a square to have a rational root. Use `Ball()`.")
        return root

    def exp(self, x: Fraction, /) -> Fraction:
        """1 for 0, the only fraction whose exponential is one."""
        if x:
            raise UnsupportedError(f"exp({x}) must be rational, and is not. Use `Ball()`.")
        return Fraction(1)

    def log(self, x: Fraction, /) -> Fraction:
        """0 for 1, the only fraction whose logarithm is one."""
        if x != 1:
            raise UnsupportedError(f"log({x}) must be rational, and is not. Use `Ball()`.")
        return Fraction(0)

    def sum(self, xs: Iterable[Fraction], /) -> Fraction:
        return left_fold(Fraction(0), xs)

    def sort(self, xs: Sequence[Fraction], /) -> list[Fraction]:
        return sorted(xs)

    def eigenvalues(self, matrix: Sequence[Sequence[Fraction]], /) -> list[Fraction]:
        """By the closed form, for matrices up to 2×2 whose eigenvalues are rational."""
        return eigenvalues_up_to_two(self, matrix)


def sort_by(K: Scalars[T], xs: Sequence[T]) -> list[T]:
    """In order of ``K.gt``, which may refuse to decide."""

    def order(a: T, b: T) -> int:
        if K.gt(a, b):
            return 1
        return -1 if K.gt(b, a) else 0

    return sorted(xs, key=cmp_to_key(order))


def eigenvalues_up_to_two(K: Scalars[T], matrix: Sequence[Sequence[T]]) -> list[T]:
    """The eigenvalues of [[a, b], [b, c]]: ``(a+c)/2 ∓ √(((a−c)/2)² + b²)``; or of less."""
    if len(matrix) > 2:
        raise UnsupportedError(
            f"The eigenvalues of a {len(matrix)}×{len(matrix)} matrix have no closed form. "
            "Use `Ball()`."
        )
    if len(matrix) < 2:
        return [row[0] for row in matrix]
    (a, b), (_, c) = matrix
    half = K.const(Fraction(1, 2))
    middle, half_gap = half * (a + c), half * (a - c)
    radius = K.sqrt(half_gap * half_gap + b * b)
    return [middle - radius, middle + radius]
