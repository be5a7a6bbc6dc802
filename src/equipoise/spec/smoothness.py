"""How steep a function is, as a function of its gradients: one list of entries for each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import (
    Reduction,
    flat,
    length,
    magnitude,
    reduce,
    reduce_grad,
    signed,
    square,
    sum_of_squares,
    where,
    zero,
)

Norm = Literal["l2", "l1", "linf"]
Rows = Sequence[Sequence[T]]
Per = Literal["sample", "batch"]
Sided = Literal["two", "one"]
Slope = Callable[[Sequence[T]], Sequence[T]]
"""From a sample to the gradient of the function there."""


@dataclass(frozen=True)
class Measure:
    """What is penalised of a gradient."""

    target: Number
    sided: Sided
    norm: Norm
    squared: bool


def gradient_penalty(
    K: Scalars[T],
    gradients: Rows[T],
    *,
    target: Number = 1,
    per: Per = "sample",
    sided: Sided = "two",
    norm: Norm = "l2",
    squared: bool = False,
    reduction: Reduction = "mean",
) -> T | list[T]:
    """``(‖g‖ − target)²`` for each gradient; one-sided ``max(‖g‖ − target, 0)²``; squared ``‖g‖²``.

    The norm is the root of the squares, the sum of the sizes, or the largest size; for the whole
    batch one norm over everything.

    At the edge: the norm of nothing is 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.gradient_penalty(spec.Float(), [[3.0, 4.0], [0.0, 1.0]])
        8.0
    """
    return _penalty(K, gradients, per, Measure(target, sided, norm, squared), reduction)


def gradient_penalty_grad(
    K: Scalars[T],
    gradients: Rows[T],
    *,
    target: Number = 1,
    per: Per = "sample",
    sided: Sided = "two",
    norm: Norm = "l2",
    squared: bool = False,
    reduction: Reduction = "mean",
) -> list[list[T]]:
    """With respect to the gradients: ``2(‖g‖ − target)·∂‖g‖``; squared ``2‖g‖·∂‖g‖``.

    ``∂‖g‖`` is g/‖g‖, sign g, or the sign of the largest entry, shared among equals.

    At the edge: 0 where g = 0; one-sided 0 up to the target.

    Examples:
        >>> from equipoise import spec
        >>> spec.gradient_penalty_grad(spec.Float(), [[3.0, 0.0], [0.0, 0.0]], reduction="sum")
        [[4.0, 0.0], [0.0, 0.0]]
    """
    return _penalty_grad(K, gradients, per, Measure(target, sided, norm, squared), reduction)


def interpolated_gradient_penalty(
    K: Scalars[T],
    slope: Slope[T],
    x: Rows[T],
    reference: Rows[T],
    *,
    epsilon: Sequence[Number],
    target: Number = 1,
    per: Per = "sample",
    sided: Sided = "two",
    norm: Norm = "l2",
    squared: bool = False,
    reduction: Reduction = "mean",
) -> T | list[T]:
    """`gradient_penalty` of the gradients at ``εᵢ·xᵢ + (1−εᵢ)·referenceᵢ``, one ε a sample.

    At the edge: as `gradient_penalty`.

    Examples:
        >>> from equipoise import spec
        >>> spec.interpolated_gradient_penalty(
        ...     spec.Float(), lambda x: x, [[0.0, 0.0]], [[6.0, 8.0]], epsilon=[0.5]
        ... )
        16.0
    """
    gradients = [slope(row) for row in between(K, x, reference, epsilon)]
    return _penalty(K, gradients, per, Measure(target, sided, norm, squared), reduction)


def interpolated_gradient_penalty_grad(
    K: Scalars[T],
    slope: Slope[T],
    x: Rows[T],
    reference: Rows[T],
    *,
    epsilon: Sequence[Number],
    target: Number = 1,
    per: Per = "sample",
    sided: Sided = "two",
    norm: Norm = "l2",
    squared: bool = False,
    reduction: Reduction = "mean",
) -> list[list[T]]:
    """With respect to the gradients at the points between: that of `gradient_penalty`.

    At the edge: as `gradient_penalty`.

    Examples:
        >>> from equipoise import spec
        >>> spec.interpolated_gradient_penalty_grad(
        ...     spec.Float(), lambda x: x, [[0.0]], [[6.0]], epsilon=[0.5]
        ... )
        [[4.0]]
    """
    gradients = [slope(row) for row in between(K, x, reference, epsilon)]
    return _penalty_grad(K, gradients, per, Measure(target, sided, norm, squared), reduction)


def between(
    K: Scalars[T], x: Rows[T], reference: Rows[T], epsilon: Sequence[Number]
) -> list[list[T]]:
    """``ε·x + (1−ε)·reference``, as ``reference + ε·(x − reference)``."""
    return [
        [r + K.const(e) * (v - r) for v, r in zip(row, other, strict=True)]
        for row, other, e in zip(x, reference, epsilon, strict=True)
    ]


def norm_of(K: Scalars[T], g: Sequence[T], norm: Norm) -> T:
    """The length, the sum of sizes, or the largest size."""
    if norm == "l2":
        return length(K, g)
    sizes = [magnitude(K, v) for v in g]
    if norm == "l1":
        return K.sum(sizes)
    largest = zero(K)
    for size in sizes:
        largest = K.max(largest, size)
    return largest


def norm_grad(K: Scalars[T], g: Sequence[T], norm: Norm) -> list[T]:
    """The derivative of the norm; 0 at the zero vector."""
    one = K.const(1)
    if norm == "l1":
        return [signed(K, v, one) for v in g]
    size = norm_of(K, g, norm)
    if norm == "l2":
        return where(K, K.gt(size, zero(K)), lambda: [v / size for v in g], len(g))
    # An entry is largest where the largest is not above it.
    largest = [K.ite(K.gt(size, K.abs(v)), lambda: zero(K), lambda: one) for v in g]
    share = K.sum(largest)
    return [signed(K, v, part / share) for v, part in zip(g, largest, strict=True)]


def _penalty(
    K: Scalars[T], gradients: Rows[T], per: Per, measure: Measure, reduction: Reduction
) -> T | list[T]:
    values = [_term(K, g, measure) for g in _units(gradients, per)]
    return reduce(K, values, None, reduction)


def _penalty_grad(
    K: Scalars[T], gradients: Rows[T], per: Per, measure: Measure, reduction: Reduction
) -> list[list[T]]:
    units = _units(gradients, per)
    moves = reduce_grad(K, len(units), None, reduction)
    slopes = [_slope(K, g, move, measure) for g, move in zip(units, moves, strict=True)]
    if per == "sample":
        return slopes
    entries = iter(flat(slopes))
    return [[next(entries) for _ in g] for g in gradients]


def _units(gradients: Rows[T], per: Per) -> list[list[T]]:
    return [list(g) for g in gradients] if per == "sample" else [flat(gradients)]


def _term(K: Scalars[T], g: Sequence[T], measure: Measure) -> T:
    if measure.squared and measure.norm == "l2":
        return sum_of_squares(K, g)
    return square(K, _excess(K, norm_of(K, g, measure.norm), measure))


def _excess(K: Scalars[T], size: T, measure: Measure) -> T:
    if measure.squared:
        return size
    above = size - K.const(measure.target)
    return K.max(above, zero(K)) if measure.sided == "one" else above


def _slope(K: Scalars[T], g: Sequence[T], move: T, measure: Measure) -> list[T]:
    if measure.squared and measure.norm == "l2":
        return [(v + v) * move for v in g]
    size = norm_of(K, g, measure.norm)
    excess = _excess(K, size, measure)
    outer = (excess + excess) * move
    nonzero = K.gt(size, zero(K))
    return where(K, nonzero, lambda: [outer * v for v in norm_grad(K, g, measure.norm)], len(g))
