"""Divergence estimated from the log-probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from equipoise.spec.distributions import Row
from equipoise.spec.scalars import InfiniteError, Number, Scalars, T
from equipoise.spec.sums import Mask, Reduction, reduce, reduce_grad, square, zero

Estimator = Literal["k1", "k2", "k3"]


def sampled_kl(
    K: Scalars[T],
    logp: Row[T],
    logq: Row[T],
    *,
    estimator: Estimator = "k3",
    gradient: Literal["same", "k2"] = "same",  # noqa: ARG001 — the value does not depend on it
    reduction: Reduction = "mean",
    mask: Mask = None,
    denominator: Number | None = None,
) -> T | list[T]:
    """With ``log r = logq − logp``: k1 = ``−log r``, k2 = ``(log r)²/2``, k3 = ``r − 1 − log r``.

    At the edge: a token with p = 0 contributes 0; q = 0 alone is refused as `InfiniteError`.

    Examples:
        >>> from equipoise import spec
        >>> spec.sampled_kl(spec.Float(), [-1.0, -2.0], [-1.5, -1.5], estimator="k2")
        0.125
    """
    values = [
        zero(K) if weightless else estimate(K, ratio, estimator)
        for ratio, weightless in _log_ratios(K, logp, logq, mask)
    ]
    return reduce(K, values, mask, reduction, denominator)


def sampled_kl_grad(
    K: Scalars[T],
    logp: Row[T],
    logq: Row[T],
    *,
    estimator: Estimator = "k3",
    gradient: Literal["same", "k2"] = "same",
    reduction: Reduction = "mean",
    mask: Mask = None,
    denominator: Number | None = None,
) -> tuple[list[T], list[T]]:
    """With respect to logq: k1 −1, k2 ``log r``, k3 ``r − 1``; to logp: the opposite.

    ``gradient="k2"`` is that of k2, whatever the value is.

    At the edge: 0 where the token cannot have been sampled.

    Examples:
        >>> from equipoise import spec
        >>> spec.sampled_kl_grad(spec.Float(), [-1.0], [-1.5], gradient="k2")
        ([0.5], [-0.5])
    """
    chosen: Estimator = estimator if gradient == "same" else "k2"
    slopes = [
        zero(K) if weightless else estimate_grad(K, ratio, chosen)
        for ratio, weightless in _log_ratios(K, logp, logq, mask)
    ]
    moves = reduce_grad(K, len(slopes), mask, reduction, denominator)
    to_q = [slope * move for slope, move in zip(slopes, moves, strict=True)]
    return [-slope for slope in to_q], to_q


def estimate(K: Scalars[T], log_ratio: T, estimator: Estimator) -> T:
    """One token's estimate."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return K.const(Fraction(1, 2)) * square(K, log_ratio)
    return K.exp(log_ratio) - K.const(1) - log_ratio


def estimate_grad(K: Scalars[T], log_ratio: T, estimator: Estimator) -> T:
    """Its derivative with respect to the logarithm of the ratio."""
    if estimator == "k1":
        return K.const(-1)
    if estimator == "k2":
        return log_ratio
    return K.exp(log_ratio) - K.const(1)


def _log_ratios(K: Scalars[T], logp: Row[T], logq: Row[T], mask: Mask) -> Sequence[tuple[T, bool]]:
    """log q − log p of each token, and whether it counts for nothing."""
    weights = [True] * len(logp) if mask is None else mask
    ratios = []
    for p, q, weight in zip(logp, logq, weights, strict=True):
        if p is None or not weight:
            ratios.append((zero(K), True))
        elif q is None:
            raise InfiniteError("The estimate is infinite: a token was sampled whose q is 0.")
        else:
            ratios.append((q - p, False))
    return ratios
