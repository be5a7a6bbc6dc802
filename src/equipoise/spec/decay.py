"""What a transform adds to a gradient, or takes from it: decay, noise, the mean; or all of it.

A derivative is a pullback to the gradient, and for decay one to the weights too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import signed, zero

COMBINATORS = ("attach", "chain", "identity", "masked", "partition", "recorded", "snapshot")
"""Transforms that compute nothing of their own: what they do is what their parts do."""


def add_l2_decay(K: Scalars[T], g: Sequence[T], w: Sequence[T], *, rate: Number = 0.01) -> list[T]:
    """``g + rate·w``.

    At the edge: rate 0 changes nothing.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_l2_decay(spec.Float(), [1.0], [2.0], rate=0.5)
        [2.0]
    """
    amount = K.const(rate)
    return [v + amount * x for v, x in zip(g, w, strict=True)]


def add_l2_decay_grad(
    K: Scalars[T], upstream: Sequence[T], *, rate: Number = 0.01
) -> tuple[list[T], list[T]]:
    """``v`` to the gradient, ``rate·v`` to the weights.

    At the edge: none, the rule is linear.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_l2_decay_grad(spec.Float(), [1.0], rate=0.5)
        ([1.0], [0.5])
    """
    return list(upstream), [K.const(rate) * v for v in upstream]


def add_l1_decay(K: Scalars[T], g: Sequence[T], w: Sequence[T], *, rate: Number = 0.001) -> list[T]:
    """``g + rate·sign w``.

    At the edge: a weight of 0 adds nothing.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_l1_decay(spec.Float(), [1.0, 1.0], [-2.0, 0.0], rate=0.5)
        [0.5, 1.0]
    """
    amount = K.const(rate)
    return [v + signed(K, x, amount) for v, x in zip(g, w, strict=True)]


def add_l1_decay_grad(
    K: Scalars[T],
    upstream: Sequence[T],
    *,
    rate: Number = 0.001,  # noqa: ARG001 — a sign is flat
) -> tuple[list[T], list[T]]:
    """``v`` to the gradient, 0 to the weights.

    At the edge: at a weight of 0, where the sign jumps, 0 too.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_l1_decay_grad(spec.Float(), [1.0])
        ([1.0], [0.0])
    """
    return list(upstream), [zero(K) for _ in upstream]


def add_elastic_net_decay(
    K: Scalars[T],
    g: Sequence[T],
    w: Sequence[T],
    *,
    rate: Number = 0.01,
    l1_ratio: Number = Fraction(1, 2),
) -> list[T]:
    """``g + rate·(a·sign w + (1−a)·w)``.

    At the edge: a = 1 is `add_l1_decay`, a = 0 is `add_l2_decay`.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_elastic_net_decay(spec.Float(), [0.0], [3.0], rate=1)
        [2.0]
    """
    a, b, amount = K.const(l1_ratio), K.const(1 - Fraction(l1_ratio)), K.const(rate)
    return [v + amount * (signed(K, x, a) + b * x) for v, x in zip(g, w, strict=True)]


def add_elastic_net_decay_grad(
    K: Scalars[T],
    upstream: Sequence[T],
    *,
    rate: Number = 0.01,
    l1_ratio: Number = Fraction(1, 2),
) -> tuple[list[T], list[T]]:
    """``v`` to the gradient, ``rate·(1−a)·v`` to the weights.

    At the edge: as `add_l1_decay`.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_elastic_net_decay_grad(spec.Float(), [1.0], rate=1)
        ([1.0], [0.5])
    """
    b = K.const(1 - Fraction(l1_ratio))
    return list(upstream), [K.const(rate) * (b * v) for v in upstream]


def decoupled(K: Scalars[T], w: Sequence[T], decay: Sequence[T], learning_rate: Number) -> list[T]:
    """``w − η·decay``: decay that acts on the weights at the learning rate η, not the gradient."""
    step = K.const(learning_rate)
    return [x - step * d for x, d in zip(w, decay, strict=True)]


def noise_variance(K: Scalars[T], step: int, *, variance: Number = 0.01, decay: Number = 0.55) -> T:
    """``variance/(1+t)^decay`` at step t, from 0."""
    return K.const(variance) * K.exp(-(K.const(decay) * K.log(K.const(1 + step))))


def add_noise(
    K: Scalars[T],
    g: Sequence[T],
    normal: Sequence[T],
    *,
    step: int,
    variance: Number = 0.01,
    decay: Number = 0.55,
) -> list[T]:
    """``g + √(variance/(1+t)^decay)·z``, with z the standard normal numbers that were drawn.

    At the edge: variance 0 changes nothing.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_noise(spec.Float(), [1.0], [2.0], step=0, variance=0.25)
        [2.0]
    """
    spread = K.sqrt(noise_variance(K, step, variance=variance, decay=decay))
    return [v + spread * z for v, z in zip(g, normal, strict=True)]


def add_noise_grad(K: Scalars[T], upstream: Sequence[T]) -> list[T]:  # noqa: ARG001 — v itself
    """``v``: noise does not depend on the gradient.

    At the edge: none.

    Examples:
        >>> from equipoise import spec
        >>> spec.add_noise_grad(spec.Float(), [3.0])
        [3.0]
    """
    return list(upstream)


def centralize(K: Scalars[T], g: Sequence[Sequence[T]]) -> list[list[T]]:
    """Each row minus its mean; a row is all entries of one output.

    At the edge: a row of one entry becomes 0, an empty one stays empty.

    Examples:
        >>> from equipoise import spec
        >>> spec.centralize(spec.Float(), [[1.0, 3.0]])
        [[-1.0, 1.0]]
    """
    return [_less_mean(K, row) for row in g]


def centralize_grad(K: Scalars[T], upstream: Sequence[Sequence[T]]) -> list[list[T]]:
    """The same map: taking the mean out is a projection.

    At the edge: none, the rule is linear.

    Examples:
        >>> from equipoise import spec
        >>> spec.centralize_grad(spec.Float(), [[1.0, 3.0]])
        [[-1.0, 1.0]]
    """
    return centralize(K, upstream)


def skip_nonfinite(K: Scalars[T], g: Sequence[T | None]) -> list[T] | None:  # noqa: ARG001
    """The gradient, or None for a step that is skipped: where an entry is None, which no number is.

    At the edge: an empty gradient is finite.

    Examples:
        >>> from equipoise import spec
        >>> spec.skip_nonfinite(spec.Float(), [1.0]), spec.skip_nonfinite(spec.Float(), [1.0, None])
        ([1.0], None)
    """
    finite = [v for v in g if v is not None]
    return None if len(g) - len(finite) else finite


def skip_nonfinite_grad(K: Scalars[T], g: Sequence[T | None], upstream: Sequence[T]) -> list[T]:
    """``v``, and 0 for a step that is skipped.

    At the edge: as `skip_nonfinite`.

    Examples:
        >>> from equipoise import spec
        >>> spec.skip_nonfinite_grad(spec.Float(), [None], [1.0])
        [0.0]
    """
    skipped = any(v is None for v in g)
    return [zero(K) if skipped else v for v in upstream]


def _less_mean(K: Scalars[T], row: Sequence[T]) -> list[T]:
    if not row:
        return []
    middle = K.sum(row) / K.const(len(row))
    return [v - middle for v in row]
