"""How large: ``l1``, ``l2``, ``elastic_net`` over one list of entries, and ``output_magnitude``.

Several tensors are the list of all their entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import (
    Mask,
    Reduction,
    clamp,
    length,
    magnitude,
    over,
    reduce,
    reduce_grad,
    signed,
    square,
    weigh,
    where,
    zero,
)

Center = Literal["mean"] | Number | list[Number] | None
ClipMode = Literal["cap", "huber"]


def l1(
    K: Scalars[T],
    x: Sequence[T],
    *,
    reduction: Reduction = "sum",
    mask: Mask = None,
    scale: Number = 1,
) -> T | list[T]:
    """``scale · Σ|xᵢ|``.

    At the edge: empty gives 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.l1(spec.Float(), [1.0, -2.0, 3.0])
        6.0
    """
    return _scaled(K, reduce(K, [magnitude(K, v) for v in x], mask, reduction), scale)


def l1_grad(
    K: Scalars[T],
    x: Sequence[T],
    *,
    reduction: Reduction = "sum",
    mask: Mask = None,
    scale: Number = 1,
) -> list[T]:
    """``scale · sign xᵢ``.

    At the edge: 0 at 0, the middle of the subgradients.

    Examples:
        >>> from equipoise import spec
        >>> spec.l1_grad(spec.Float(), [1.0, -2.0, 0.0])
        [1.0, -1.0, 0.0]
    """
    moves = _moves(K, x, mask, reduction, scale)
    return [signed(K, v, m) for v, m in zip(x, moves, strict=True)]


def l2(
    K: Scalars[T],
    x: Sequence[T],
    *,
    reduction: Reduction = "sum",
    center: Center = None,
    clip: Number | None = None,
    clip_mode: ClipMode = "cap",
    mask: Mask = None,
    scale: Number = 1,
) -> T | list[T]:
    """``scale · Σ φ(xᵢ − c)`` with φ(y) = y²; c is 0, a number, one for each entry, or the mean.

    ``clip=k``, cap: φ(y) = min(max(y, −k), k)². Huber: y² within ±k and k·(2|y| − k) outside.

    At the edge: empty gives 0, and the mean of nothing is 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.l2(spec.Float(), [1.0, 2.0, 3.0], center="mean")
        2.0
    """
    term = _square_term(K, clip, clip_mode)
    values = [term(y) for y in _centered(K, x, center, mask)]
    return _scaled(K, reduce(K, values, mask, reduction), scale)


def l2_grad(
    K: Scalars[T],
    x: Sequence[T],
    *,
    reduction: Reduction = "sum",
    center: Center = None,
    clip: Number | None = None,
    clip_mode: ClipMode = "cap",
    mask: Mask = None,
    scale: Number = 1,
) -> list[T]:
    """``hᵢ = scale · φ′(xᵢ − c)``; with the mean as centre ``hᵢ − (wᵢ/Σw)·Σh``.

    φ′(y) = 2y; outside ±k it is 0 where the penalty is capped, and ±2k for Huber.

    At the edge: at ±k itself φ′ is 2y in both modes.

    Examples:
        >>> from equipoise import spec
        >>> spec.l2_grad(spec.Float(), [1.0, -2.0], clip=1, clip_mode="huber")
        [2.0, -2.0]
    """
    slope = _square_slope(K, clip, clip_mode)
    moves = _moves(K, x, mask, reduction, scale)
    ys = _centered(K, x, center, mask)
    steps = [slope(y) * m for y, m in zip(ys, moves, strict=True)]
    if center != "mean":
        return steps
    together = K.sum(steps)
    shares = reduce_grad(K, len(x), mask, "mean")
    return [h - share * together for h, share in zip(steps, shares, strict=True)]


def elastic_net(
    K: Scalars[T],
    x: Sequence[T],
    *,
    l1_ratio: Number = Fraction(1, 2),
    reduction: Reduction = "sum",
    mask: Mask = None,
    scale: Number = 1,
) -> T | list[T]:
    """``scale · Σ(a·|xᵢ| + (1−a)·xᵢ²)``.

    At the edge: a = 1 is `l1`, a = 0 is `l2`; empty gives 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.elastic_net(spec.Float(), [1.0, -2.0], l1_ratio=0.25)
        4.5
    """
    a, b = K.const(l1_ratio), K.const(1 - Fraction(l1_ratio))
    values = [elastic_term(K, v, a, b) for v in x]
    return _scaled(K, reduce(K, values, mask, reduction), scale)


def elastic_net_grad(
    K: Scalars[T],
    x: Sequence[T],
    *,
    l1_ratio: Number = Fraction(1, 2),
    reduction: Reduction = "sum",
    mask: Mask = None,
    scale: Number = 1,
) -> list[T]:
    """``scale · (a·sign xᵢ + 2(1−a)·xᵢ)``.

    At the edge: 0 at 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.elastic_net_grad(spec.Float(), [1.0, -2.0], l1_ratio=0.5)
        [1.5, -2.5]
    """
    a, b = K.const(l1_ratio), K.const(2 * (1 - Fraction(l1_ratio)))
    moves = _moves(K, x, mask, reduction, scale)
    return [(signed(K, v, a) + b * v) * m for v, m in zip(x, moves, strict=True)]


def output_magnitude(
    K: Scalars[T],
    x: Sequence[Sequence[T]],
    *,
    target: Number = 1,
    norm: Literal["rms", "l2"] = "rms",
    reduction: Reduction = "mean",
) -> T | list[T]:
    """``(‖x‖ − target)²`` for each list of entries x; ‖x‖ is the root of their mean square, or sum.

    At the edge: an empty list counts as zeros, with value target²; no list gives 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.output_magnitude(spec.Float(), [[3.0, 4.0]], norm="l2")
        16.0
    """
    values = [square(K, _norm(K, row, norm) - K.const(target)) for row in x]
    return reduce(K, values, None, reduction)


def output_magnitude_grad(
    K: Scalars[T],
    x: Sequence[Sequence[T]],
    *,
    target: Number = 1,
    norm: Literal["rms", "l2"] = "rms",
    reduction: Reduction = "mean",
) -> list[list[T]]:
    """``2(‖x‖ − target)·x/‖x‖``; with the mean square ``2(‖x‖ − target)·x/(n‖x‖)``.

    At the edge: 0 at the zero vector.

    Examples:
        >>> from equipoise import spec
        >>> spec.output_magnitude_grad(spec.Float(), [[3.0, 4.0]], norm="l2")
        [[4.8..., 6.4...]]
    """
    moves = reduce_grad(K, len(x), None, reduction)
    return [_magnitude_slope(K, row, target, norm, m) for row, m in zip(x, moves, strict=True)]


def _scaled(K: Scalars[T], value: T | list[T], scale: Number) -> T | list[T]:
    factor = K.const(scale)
    return [factor * v for v in value] if isinstance(value, list) else factor * value


def _moves(
    K: Scalars[T], x: Sequence[T], mask: Mask, reduction: Reduction, scale: Number
) -> list[T]:
    return [K.const(scale) * m for m in reduce_grad(K, len(x), mask, reduction)]


def _centered(K: Scalars[T], x: Sequence[T], center: Center, mask: Mask) -> list[T]:
    if center is None:
        return list(x)
    if isinstance(center, str):
        weights = [True] * len(x) if mask is None else mask
        kept = K.sum(weigh(K, v, w) for v, w in zip(x, weights, strict=True) if w)
        middle = over(K, kept, weights, "mean")
        return [v - middle for v in x]
    if isinstance(center, list):
        return [v - K.const(c) for v, c in zip(x, center, strict=True)]
    return [v - K.const(center) for v in x]


def _square_term(K: Scalars[T], clip: Number | None, mode: ClipMode) -> Callable[[T], T]:
    if clip is None:
        return lambda y: square(K, y)
    k = K.const(clip)
    if mode == "cap":
        return lambda y: square(K, clamp(K, y, -k, k))
    return lambda y: huber(K, y, k)


def huber(K: Scalars[T], y: T, k: T) -> T:
    """y² within ±k, k·(2|y| − k) outside."""
    size = K.abs(y)
    line = k * (size + size - k)
    return K.ite(K.gt(size, k), lambda: line, lambda: square(K, y))


def _square_slope(K: Scalars[T], clip: Number | None, mode: ClipMode) -> Callable[[T], T]:
    if clip is None:
        return lambda y: y + y
    k = K.const(clip)
    if mode == "cap":
        return lambda y: K.ite(K.gt(K.abs(y), k), lambda: zero(K), lambda: y + y)
    return lambda y: clamp(K, y + y, -(k + k), k + k)


def elastic_term(K: Scalars[T], x: T, a: T, b: T) -> T:
    """``a·|x| + b·x²``."""
    return a * magnitude(K, x) + b * square(K, x)


def _norm(K: Scalars[T], row: Sequence[T], norm: str) -> T:
    size = length(K, row)
    return size / K.sqrt(K.const(len(row))) if norm == "rms" and row else size


def _magnitude_slope(
    K: Scalars[T], row: Sequence[T], target: Number, norm: str, move: T
) -> list[T]:
    size = length(K, row)
    outer = (_norm(K, row, norm) - K.const(target)) * (move + move)
    inner = outer / K.sqrt(K.const(len(row))) if norm == "rms" and row else outer
    return where(K, K.gt(size, zero(K)), lambda: [inner * v / size for v in row], len(row))
