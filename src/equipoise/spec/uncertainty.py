"""How uncertain one distribution is, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from equipoise.spec.distributions import (
    Row,
    Support,
    by_row,
    log_probabilities,
    log_probabilities_grad,
    normalizes,
    supported,
)
from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import Mask, Reduction, reduce, reduce_grad, zero

Mode = Literal["penalty", "bonus"]


def entropy_term(K: Scalars[T], log_p: T) -> T:
    """``−p·log p``."""
    return -(K.exp(log_p) * log_p)


def entropy_slope(K: Scalars[T], log_p: T) -> T:
    """``−p·log p − p``, a sum of two: they cancel at log p = −1."""
    return entropy_term(K, log_p) - K.exp(log_p)


def entropy(
    K: Scalars[T],
    p: Sequence[Row[T]],
    *,
    mode: Mode = "penalty",
    normalize: bool = False,
    temperature: Number = 1,
    from_logits: bool = False,
    reduction: Reduction = "mean",
    mask: Mask = None,
    support: Support = None,
    denominator: Number | None = None,
) -> T | list[T]:
    """``H = −Σ p·log p`` a row, as a bonus −H; over the logarithm of the number of entries.

    At the edge: p = 0 contributes 0. Normalised, a row of one entry gives 0.

    Examples:
        >>> from math import log
        >>> from equipoise import spec
        >>> spec.entropy(spec.Float(), [[log(0.5), log(0.5)]], mode="bonus", normalize=True)
        -1.0
    """
    inside = normalizes(from_logits=from_logits, temperature=temperature)

    def value(row: Row[T]) -> T:
        logs = log_probabilities(K, row, normalize=inside, temperature=temperature)
        return K.sum(entropy_term(K, a) for a in logs if a is not None)

    values = by_row(K, value, (p,), mask, support)
    sizes = _factors(K, p, mode, support, normalize=normalize)
    return reduce(
        K, [s * v for s, v in zip(sizes, values, strict=True)], mask, reduction, denominator
    )


def entropy_grad(
    K: Scalars[T],
    p: Sequence[Row[T]],
    *,
    mode: Mode = "penalty",
    normalize: bool = False,
    temperature: Number = 1,
    from_logits: bool = False,
    reduction: Reduction = "mean",
    mask: Mask = None,
    support: Support = None,
    denominator: Number | None = None,
) -> list[list[T]]:
    """With respect to log p: ``−p·(log p + 1)``; to logits: ``−p·(log p + H)``, over T.

    At the edge: 0 where p = 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.entropy_grad(spec.Float(), [[0.0, None]])
        [[-1.0, 0.0]]
    """
    inside = normalizes(from_logits=from_logits, temperature=temperature)
    moves = reduce_grad(K, len(p), mask, reduction, denominator)
    sizes = _factors(K, p, mode, support, normalize=normalize)
    gradients = []
    for r, (row, move, size) in enumerate(zip(p, moves, sizes, strict=True)):
        if mask is not None and not mask[r]:
            gradients.append([zero(K)] * len(row))
            continue
        kept = supported(row, None if support is None else support[r])
        logs = log_probabilities(K, kept, normalize=inside, temperature=temperature)
        free = [zero(K) if a is None else entropy_slope(K, a) for a in logs]
        through = log_probabilities_grad(K, kept, free, normalize=inside, temperature=temperature)
        gradients.append([size * move * v for v in through])
    return gradients


def _factors(
    K: Scalars[T], p: Sequence[Row[T]], mode: Mode, support: Support, *, normalize: bool
) -> list[T]:
    """The sign of the mode, over the logarithm of how many entries exist where that is asked."""
    sign = K.const(1) if mode == "penalty" else K.const(-1)
    if not normalize:
        return [sign] * len(p)
    existing = [[True] * len(row) for row in p] if support is None else support
    sizes = [len([entry for entry in row if entry]) for row in existing]
    return [sign / K.log(K.const(n)) if len(range(n)) > 1 else zero(K) for n in sizes]
