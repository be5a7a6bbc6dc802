"""How far apart two outputs for the same thing are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from equipoise.spec.distributions import Row
from equipoise.spec.divergence import kl_divergence, kl_divergence_grad
from equipoise.spec.scalars import Scalars, T
from equipoise.spec.sums import (
    Mask,
    Reduction,
    dot,
    magnitude,
    reduce,
    reduce_grad,
    signed,
    square,
    sum_of_squares,
    unit_vector,
    unit_vector_grad,
    where,
    zero,
)

Metric = Literal["mse", "l1", "cosine", "kl"]
Side = Literal["first", "second"] | None


def consistency(
    K: Scalars[T],
    a: Sequence[Row[T]],
    b: Sequence[Row[T]],
    *,
    metric: Metric = "mse",
    reduction: Reduction = "mean",
    mask: Mask = None,
    stop_gradient: Side = None,  # noqa: ARG001 — the value does not depend on it
) -> T | list[T]:
    """Entry by entry ``(a − b)²`` (mse) or ``|a − b|`` (l1), or a value for each row.

    Row by row: ``1 − cos(a, b)`` (cosine), ``(KL(a‖b) + KL(b‖a))/2`` of log-probabilities (kl). The
    mask is over the entries in order, or over the rows.

    At the edge: a zero vector has cosine term 1; one-sided −inf in kl: `InfiniteError`.

    Examples:
        >>> from equipoise import spec
        >>> spec.consistency(spec.Float(), [[3.0, 0.0]], [[0.0, 2.0]], metric="cosine")
        1.0
    """
    if metric == "kl":
        return kl_divergence(K, a, b, direction="symmetric", reduction=reduction, mask=mask)
    if metric == "cosine":
        values = [_cosine_distance(K, x, y) for x, y in _pairs(a, b)]
    else:
        term = square if metric == "mse" else magnitude
        values = [term(K, x - y) for x, y in _entries(a, b)]
    return reduce(K, values, mask, reduction)


def consistency_grad(
    K: Scalars[T],
    a: Sequence[Row[T]],
    b: Sequence[Row[T]],
    *,
    metric: Metric = "mse",
    reduction: Reduction = "mean",
    mask: Mask = None,
    stop_gradient: Side = None,
) -> tuple[list[list[T]], list[list[T]]]:
    """With respect to a: ``2(a − b)``, ``sign(a − b)``, ``(u − v − (1 − u·v)u)/‖a‖``, or KL's.

    u and v are the unit vectors of a and b. With respect to b: the same with the roles changed.

    At the edge: 0 where a = b, where a vector is zero, and on the side that is stopped.

    Examples:
        >>> from equipoise import spec
        >>> spec.consistency_grad(spec.Float(), [[3.0]], [[1.0]], stop_gradient="second")
        ([[4.0]], [[0.0]])
    """
    if metric == "kl":
        to_a, to_b = kl_divergence_grad(
            K, a, b, direction="symmetric", reduction=reduction, mask=mask
        )
    elif metric == "cosine":
        to_a, to_b = _by_row_grad(K, a, b, reduce_grad(K, len(a), mask, reduction))
    else:
        moves = reduce_grad(K, len([x for row in a for x in row]), mask, reduction)
        to_a, to_b = _by_entry_grad(K, a, b, metric, moves)
    if stop_gradient == "first":
        to_a = [[zero(K)] * len(row) for row in a]
    if stop_gradient == "second":
        to_b = [[zero(K)] * len(row) for row in b]
    return to_a, to_b


def _pairs(a: Sequence[Row[T]], b: Sequence[Row[T]]) -> list[tuple[list[T], list[T]]]:
    return [
        ([v for v in x if v is not None], [v for v in y if v is not None])
        for x, y in zip(a, b, strict=True)
    ]


def _entries(a: Sequence[Row[T]], b: Sequence[Row[T]]) -> list[tuple[T, T]]:
    return [pair for x, y in _pairs(a, b) for pair in zip(x, y, strict=True)]


def _both_nonzero(K: Scalars[T], x: Sequence[T], y: Sequence[T]) -> object:
    # Sums of squares: a product of two would leave the numbers of a format sooner.
    nothing = zero(K)
    smaller = K.min(sum_of_squares(K, x), sum_of_squares(K, y))
    return K.gt(smaller, nothing)


def _cosine_distance(K: Scalars[T], x: Sequence[T], y: Sequence[T]) -> T:
    one = K.const(1)
    return K.ite(
        _both_nonzero(K, x, y),
        lambda: one - dot(K, unit_vector(K, x), unit_vector(K, y)),
        lambda: one,
    )


def _by_row_grad(
    K: Scalars[T], a: Sequence[Row[T]], b: Sequence[Row[T]], moves: Sequence[T]
) -> tuple[list[list[T]], list[list[T]]]:
    pairs = _pairs(a, b)
    return (
        [_toward(K, x, y, move) for (x, y), move in zip(pairs, moves, strict=True)],
        [_toward(K, y, x, move) for (x, y), move in zip(pairs, moves, strict=True)],
    )


def _toward(K: Scalars[T], x: Sequence[T], y: Sequence[T], move: T) -> list[T]:
    def slopes() -> list[T]:
        apart = [u - v for u, v in zip(unit_vector(K, x), unit_vector(K, y), strict=True)]
        return [move * slope for slope in unit_vector_grad(K, x, apart)]

    return where(K, _both_nonzero(K, x, y), slopes, len(x))


def _by_entry_grad(
    K: Scalars[T], a: Sequence[Row[T]], b: Sequence[Row[T]], metric: str, moves: Sequence[T]
) -> tuple[list[list[T]], list[list[T]]]:
    slopes = []
    for (x, y), move in zip(_entries(a, b), moves, strict=True):
        apart = x - y
        slopes.append((apart + apart) * move if metric == "mse" else signed(K, apart, move))
    to_a, start = [], 0
    for row in a:
        to_a.append(slopes[start : start + len(row)])
        start += len(row)
    return to_a, [[-v for v in row] for row in to_a]
