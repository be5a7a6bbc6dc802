"""Small pieces of the definitions: terms, signs, masks and reductions, and their derivatives.

A mask is a list of numbers, one for each value: 0 or False deletes the value, any other number
weighs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from typing import Literal

from equipoise.spec.scalars import Decision, Number, Scalars, T

Reduction = Literal["sum", "mean", "none"]
Mask = Sequence[Number] | None


def zero(K: Scalars[T]) -> T:
    """Nothing."""
    return K.const(0)


def square(K: Scalars[T], x: T) -> T:  # noqa: ARG001 — every term has the same form
    """The term of a sum of squares."""
    return x * x


def magnitude(K: Scalars[T], x: T) -> T:
    """The term of a sum of absolute values."""
    return K.abs(x)


def signed(K: Scalars[T], x: T, y: T) -> T:
    """``y`` with the sign of x: ``y``, 0 or ``−y``."""
    nothing = zero(K)
    not_positive = K.ite(K.gt(nothing, x), lambda: -y, lambda: nothing)
    return K.ite(K.gt(x, nothing), lambda: y, lambda: not_positive)


def where(
    K: Scalars[T], condition: Decision, compute: Callable[[], Sequence[T]], count: int
) -> list[T]:
    """The list that is computed where the condition holds, else as many zeros."""
    once = cache(compute)

    def entry(i: int) -> T:
        return K.ite(condition, lambda: once()[i], lambda: zero(K))

    return [entry(i) for i in range(count)]


def clamp(K: Scalars[T], x: T, low: T, high: T) -> T:
    """``min(high, max(low, x))``: where low > high, high."""
    return K.min(high, K.max(low, x))


def sum_of_squares(K: Scalars[T], xs: Iterable[T]) -> T:
    """``Σ xᵢ²``."""
    return K.sum(square(K, x) for x in xs)


def dot(K: Scalars[T], xs: Iterable[T], ys: Iterable[T]) -> T:
    """``Σ xᵢ·yᵢ``."""
    return K.sum(x * y for x, y in zip(xs, ys, strict=True))


def length(K: Scalars[T], xs: Sequence[T]) -> T:
    """``√Σ xᵢ²``, without a root for the zero vector."""
    squares = sum_of_squares(K, xs)
    return K.ite(K.gt(squares, zero(K)), lambda: K.sqrt(squares), lambda: zero(K))


def unit_vector(K: Scalars[T], xs: Sequence[T]) -> list[T]:
    """``x/‖x‖`` of what is not zero."""
    size = length(K, xs)
    return [x / size for x in xs]


def unit_vector_grad(K: Scalars[T], xs: Sequence[T], upstream: Sequence[T]) -> list[T]:
    """``(v − (v·u)u)/‖x‖`` with u = x/‖x‖."""
    size, unit = length(K, xs), unit_vector(K, xs)
    along = dot(K, upstream, unit)
    return [(v - along * u) / size for v, u in zip(upstream, unit, strict=True)]


def flat(rows: Iterable[Iterable[T]]) -> list[T]:
    """The entries, row after row."""
    return [x for row in rows for x in row]


def weigh(K: Scalars[T], value: T, weight: Number) -> T:
    """The value times its weight, and 0 where that is none."""
    if not weight:
        return zero(K)
    return value if weight is True else K.const(weight) * value


def reduce(
    K: Scalars[T],
    values: Sequence[T],
    mask: Mask,
    reduction: Reduction,
    denominator: Number | None = None,
) -> T | list[T]:
    """``Σ wᵢ·vᵢ``, that over ``Σ wᵢ`` (0 for nothing) or over a denominator, or each ``wᵢ·vᵢ``."""
    weights = _weights(mask, len(values))
    weighted = [weigh(K, v, w) for v, w in zip(values, weights, strict=True)]
    if reduction == "none":
        return weighted
    total = K.sum(v for v, w in zip(weighted, weights, strict=True) if w)
    return over(K, total, weights, reduction, denominator)


def reduce_grad(
    K: Scalars[T],
    count: int,
    mask: Mask,
    reduction: Reduction,
    denominator: Number | None = None,
) -> list[T]:
    """How fast the result moves with each value: its weight, over the divisor of a mean.

    Without a reduction: how fast each result moves with its own value.
    """
    weights = _weights(mask, count)
    one, by = K.const(1), divisor(K, weights, reduction, denominator)
    shares = [weigh(K, one, w) for w in weights]
    return shares if by is None else [share / by for share in shares]


def over(
    K: Scalars[T],
    total: T,
    weights: Sequence[Number],
    reduction: Reduction,
    denominator: Number | None = None,
) -> T:
    """A total over the sum of its weights where the reduction is a mean."""
    by = divisor(K, weights, reduction, denominator)
    return total if by is None else total / by


def divisor(
    K: Scalars[T],
    weights: Sequence[Number],
    reduction: Reduction,
    denominator: Number | None = None,
) -> T | None:
    """What a mean divides by: a denominator or the sum of the weights; None for nothing."""
    kept = [weight for weight in weights if weight]
    if reduction != "mean" or (denominator is None and not kept):
        return None
    if denominator is not None:
        return K.const(denominator)
    if all(weight is True for weight in kept):
        return K.const(len(kept))
    return K.sum(K.const(Fraction(weight)) for weight in kept)


def _weights(mask: Mask, count: int) -> Sequence[Number]:
    return [True] * count if mask is None else mask
