"""Clipping at a percentile: of the entries' own sizes, or of the norms that came before.

The nearest rank from below: entry ⌊pct·(n−1)/100⌋ of the sorted sizes, counted from 0 in exact
integers. Nothing is interpolated, so that the bound is always one of the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from equipoise.spec.clipping import clip_factor, norm_pullback
from equipoise.spec.scalars import Number, Rational, Scalars, T
from equipoise.spec.sums import clamp, magnitude, sum_of_squares, zero


def rank(count: int, pct: Number) -> int:
    """``⌊pct·(n−1)/100⌋``; above 100 counts as 100."""
    share = Rational().min(Fraction(pct), Fraction(100))
    return int(share * (count - 1) / 100)


def percentile(K: Scalars[T], xs: Sequence[T], pct: Number) -> T:
    """The entry of that rank."""
    return K.sort(xs)[rank(len(xs), pct)]


def clip_by_percentile(K: Scalars[T], g: Sequence[T], pct: Number) -> list[T]:
    """``clamp(gᵢ, −b, b)`` with b the percentile of the sizes |g|.

    At the edge: empty stays empty; 0 clips at the smallest size, 100 changes nothing.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_percentile(spec.Float(), [-4.0, 1.0, 2.0], 50)
        [-2.0, 1.0, 2.0]
    """
    if not g:
        return []
    b = percentile(K, [magnitude(K, v) for v in g], pct)
    return [clamp(K, v, -b, b) for v in g]


def clip_by_percentile_grad(
    K: Scalars[T], g: Sequence[T], upstream: Sequence[T], pct: Number
) -> list[T]:
    """``vᵢ`` up to the bound, 0 above it; the bound is held fixed.

    At the edge: at the bound ``vᵢ``.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_percentile_grad(spec.Float(), [-4.0, 1.0, 2.0], [1.0, 1.0, 1.0], 50)
        [0.0, 1.0, 1.0]
    """
    if not g:
        return []
    sizes = [magnitude(K, v) for v in g]
    b = percentile(K, sizes, pct)
    return [
        K.ite(K.gt(size, b), lambda: zero(K), lambda v=v: v)  # type: ignore[misc]
        for size, v in zip(sizes, upstream, strict=True)
    ]


def clip_by_norm_history(
    K: Scalars[T], g: Sequence[T], norms: Sequence[T], pct: Number = 10
) -> list[T]:
    """``g·min(1, b/‖g‖)`` with b the percentile of the last norms, that of g among them.

    At the edge: unchanged without a norm.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_norm_history(spec.Float(), [6.0, 8.0], [5.0, 10.0], 10)
        [3.0, 4.0]
    """
    if not norms:
        return list(g)
    factor = clip_factor(K, sum_of_squares(K, g), percentile(K, norms, pct))
    return [v * factor for v in g]


def clip_by_norm_history_grad(
    K: Scalars[T], g: Sequence[T], upstream: Sequence[T], norms: Sequence[T], pct: Number = 10
) -> list[T]:
    """``(b/‖g‖)·(v − (v·u)u)`` above the limit b, else ``v``; the norms are held fixed.

    At the edge: at the limit ``v``.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_norm_history_grad(spec.Float(), [0.0, 2.0], [1.0, 1.0], [1.0, 2.0])
        [0.5, 0.0]
    """
    if not norms:
        return list(upstream)
    return norm_pullback(K, g, upstream, percentile(K, norms, pct))


def clip_by_zscore(
    K: Scalars[T], g: Sequence[T], norms: Sequence[T], threshold: Number = 3
) -> list[T]:
    """``g·min(1, b/‖g‖)`` with ``b = mean + threshold·deviation`` of the last norms after clipping.

    The deviation is the root of the mean square distance from the mean.

    At the edge: unchanged without a norm; equal norms have deviation 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_zscore(spec.Float(), [9.0], [1.0, 3.0], 2)
        [4.0]
    """
    if not norms:
        return list(g)
    factor = clip_factor(K, sum_of_squares(K, g), _outlying(K, norms, threshold))
    return [v * factor for v in g]


def clip_by_zscore_grad(
    K: Scalars[T], g: Sequence[T], upstream: Sequence[T], norms: Sequence[T], threshold: Number = 3
) -> list[T]:
    """``(b/‖g‖)·(v − (v·u)u)`` above the limit b, else ``v``; the norms are held fixed.

    At the edge: at the limit ``v``.

    Examples:
        >>> from equipoise import spec
        >>> spec.clip_by_zscore_grad(spec.Float(), [0.0, 8.0], [1.0, 1.0], [1.0, 3.0], 2)
        [0.5, 0.0]
    """
    if not norms:
        return list(upstream)
    return norm_pullback(K, g, upstream, _outlying(K, norms, threshold))


def _outlying(K: Scalars[T], norms: Sequence[T], threshold: Number) -> T:
    count = K.const(len(norms))
    mean = K.sum(norms) / count
    deviation = K.sqrt(sum_of_squares(K, [norm - mean for norm in norms]) / count)
    return mean + K.const(threshold) * deviation
