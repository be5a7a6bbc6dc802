"""Clipping by a limit: of each entry, of a norm, and of each row next to its weights.

A derivative is a pullback: from what moves the clipped gradient to what moves the gradient, Jᵀ·v.
Several tensors are the list of all their entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import clamp, dot, length, sum_of_squares, zero


def clip_factor(K: Scalars[T], squares: T, limit: T) -> T:
    """What a vector with this sum of squares is multiplied by: ``|limit|/‖g‖`` above it, else 1.

    Compared squared and strictly, so that at the limit itself nothing changes, and a root is taken
    only when clipping.
    """
    bound = K.abs(limit)
    return K.ite(K.gt(squares, bound * bound), lambda: bound / K.sqrt(squares), lambda: K.const(1))


def clip_by_value(K: Scalars[T], g: Sequence[T], low: Number, high: Number) -> list[T]:
    """``min(high, max(low, gᵢ))``.

    At the edge: where low > high, high.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_value(spec.Float(), [-3.0, 0.5, 3.0], -1, 2)
        [-1.0, 0.5, 2.0]
    """
    floor, ceiling = K.const(low), K.const(high)
    return [clamp(K, v, floor, ceiling) for v in g]


def clip_by_value_grad(
    K: Scalars[T], g: Sequence[T], upstream: Sequence[T], low: Number, high: Number
) -> list[T]:
    """``vᵢ`` within the bounds, 0 outside.

    At the edge: on a bound ``vᵢ``.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_value_grad(spec.Float(), [-3.0, 0.5], [1.0, 1.0], -1, 2)
        [0.0, 1.0]
    """
    floor, ceiling = K.const(low), K.const(high)
    return [_inside(K, x, v, floor, ceiling) for x, v in zip(g, upstream, strict=True)]


def clip_by_norm(K: Scalars[T], g: Sequence[T], limit: Number = 1) -> list[T]:
    """``g·min(1, |limit|/‖g‖)``, with the norm of one tensor.

    At the edge: unchanged up to and at the limit; limit 0 gives zeros; empty stays empty.

    Examples:
        >>> from equipoise import spec
        >>> (
        ...     spec.clip_by_norm(spec.Float(), [3.0, 4.0], 5),
        ...     spec.clip_by_norm(spec.Float(), [3.0, 4.0], 0),
        ... )
        ([3.0, 4.0], [0.0, 0.0])
    """
    factor = clip_factor(K, sum_of_squares(K, g), K.const(limit))
    return [v * factor for v in g]


def clip_by_norm_grad(
    K: Scalars[T], g: Sequence[T], upstream: Sequence[T], limit: Number = 1
) -> list[T]:
    """Above the limit ``(|limit|/‖g‖)·(v − (v·u)u)`` with u = g/‖g‖, else ``v``.

    At the edge: at the limit ``v``.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_norm_grad(spec.Float(), [0.0, 2.0], [1.0, 1.0], 1)
        [0.5, 0.0]
    """
    return norm_pullback(K, g, upstream, K.const(limit))


def clip_by_global_norm(K: Scalars[T], g: Sequence[T], limit: Number = 1) -> list[T]:
    """``g·min(1, |limit|/‖g‖)``, with one norm over the entries of all tensors.

    At the edge: as `clip_by_norm`; a negative limit is its magnitude.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_global_norm(spec.Float(), [6.0, 8.0], 5)
        [3.0, 4.0]
    """
    return clip_by_norm(K, g, limit)


def clip_by_global_norm_grad(
    K: Scalars[T], g: Sequence[T], upstream: Sequence[T], limit: Number = 1
) -> list[T]:
    """As that of `clip_by_norm`, over the entries of all tensors.

    At the edge: as `clip_by_norm`.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_global_norm_grad(spec.Float(), [0.0, 0.5], [1.0, 1.0], 1)
        [1.0, 1.0]
    """
    return clip_by_norm_grad(K, g, upstream, limit)


def adaptive_clip(
    K: Scalars[T],
    g: Sequence[Sequence[T]],
    weights: Sequence[Sequence[T]],
    *,
    factor: Number = 0.01,
    eps: Number = 1e-3,
) -> list[list[T]]:
    """Each unit by its own limit: ``g·min(1, factor·max(‖w‖, eps)/‖g‖)``.

    A unit is a row: all entries of one output; or a whole tensor.

    At the edge: a zero gradient stays zero; weights of 0 leave a limit of factor·eps.

    Examples:
        >>> from equipoise import spec
        >>> spec.adaptive_clip(spec.Float(), [[3.0, 4.0]], [[2.0, 0.0]], factor=0.5)
        [[0.6..., 0.8]]
    """
    factors = [unit_factor(K, row, w, factor, eps) for row, w in zip(g, weights, strict=True)]
    return [[v * c for v in row] for row, c in zip(g, factors, strict=True)]


def adaptive_clip_grad(
    K: Scalars[T],
    g: Sequence[Sequence[T]],
    weights: Sequence[Sequence[T]],
    upstream: Sequence[Sequence[T]],
    *,
    factor: Number = 0.01,
    eps: Number = 1e-3,
) -> list[list[T]]:
    """Each unit as that of `clip_by_norm`, its limit held fixed.

    At the edge: at the limit ``v``.

    Examples:
        >>> from equipoise import spec
        >>> spec.adaptive_clip_grad(spec.Float(), [[3.0]], [[0.0]], [[1.0]], factor=1, eps=1)
        [[0.0]]
    """
    return [
        norm_pullback(K, row, v, unit_limit(K, w, factor, eps))
        for row, w, v in zip(g, weights, upstream, strict=True)
    ]


def unit_limit(K: Scalars[T], weights: Sequence[T], factor: Number, eps: Number) -> T:
    """``factor·max(‖w‖, eps)``."""
    return K.const(factor) * K.max(length(K, weights), K.const(eps))


def unit_factor(
    K: Scalars[T], row: Sequence[T], weights: Sequence[T], factor: Number, eps: Number
) -> T:
    """What a unit is multiplied by."""
    return clip_factor(K, sum_of_squares(K, row), unit_limit(K, weights, factor, eps))


def norm_pullback(K: Scalars[T], g: Sequence[T], upstream: Sequence[T], limit: T) -> list[T]:
    """The derivative of clipping one vector at a limit that is held fixed."""
    squares, bound = sum_of_squares(K, g), K.abs(limit)
    clipped = K.gt(squares, bound * bound)
    share = K.ite(clipped, lambda: dot(K, upstream, g) / squares, lambda: zero(K))
    factor = clip_factor(K, squares, limit)
    return [factor * (v - share * x) for v, x in zip(upstream, g, strict=True)]


def _inside(K: Scalars[T], x: T, v: T, low: T, high: T) -> T:
    below_high = K.ite(K.gt(x, high), lambda: zero(K), lambda: v)
    return K.ite(K.gt(low, x), lambda: zero(K), lambda: below_high)
