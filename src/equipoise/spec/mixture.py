"""How far two distributions are from their mixture, row by row: Jensen and Shannon's measure."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from equipoise.spec.distributions import (
    Row,
    Support,
    by_row,
    log_probabilities,
    log_probabilities_grad,
)
from equipoise.spec.divergence import (
    Direction,
    Rows,
    directed_slopes,
    kl_divergence,
    kl_term,
    pair_of_slopes,
)
from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import Mask, Reduction, reduce, reduce_grad, zero


def js_divergence(
    K: Scalars[T],
    p: Rows[T],
    q: Rows[T],
    *,
    beta: Number = Fraction(1, 2),
    base: Literal["e", 2] = "e",
    normalized: bool = False,
    from_logits: bool = False,
    reduction: Reduction = "mean",
    mask: Mask = None,
    support: Support = None,
    denominator: Number | None = None,
) -> T | list[T]:
    """``β·KL(P‖M) + (1−β)·KL(Q‖M)`` with M = βP + (1−β)Q; over β(1−β) where normalised.

    At the edge: finite for 0 < β < 1, whatever is −inf. Normalised it is KL(P‖Q) at β = 0 and
    KL(Q‖P) at β = 1, the limits.

    Examples:
        >>> from equipoise import spec
        >>> spec.js_divergence(spec.Float(), [[0.0, None]], [[None, 0.0]], base=2)
        1.0
    """
    if _at_an_end(beta):
        value = kl_divergence(
            K,
            p,
            q,
            direction="reverse" if beta else "forward",
            from_logits=from_logits,
            reduction=reduction,
            mask=mask,
            support=support,
            denominator=denominator,
        )
    else:

        def mixed(a: Row[T], b: Row[T]) -> T:
            logs = (log_probabilities(K, x, normalize=from_logits) for x in (a, b))
            return K.sum(js_term(K, x, y, beta) for x, y in zip(*logs, strict=True))

        value = reduce(K, by_row(K, mixed, (p, q), mask, support), mask, reduction, denominator)
    unit = _js_unit(K, beta, base, normalized=normalized)
    return [v / unit for v in value] if isinstance(value, list) else value / unit


def js_divergence_grad(
    K: Scalars[T],
    p: Rows[T],
    q: Rows[T],
    *,
    beta: Number = Fraction(1, 2),
    base: Literal["e", 2] = "e",
    normalized: bool = False,
    from_logits: bool = False,
    reduction: Reduction = "mean",
    mask: Mask = None,
    support: Support = None,
    denominator: Number | None = None,
) -> tuple[list[list[T]], list[list[T]]]:
    """``β·p·(log p − log m)`` and ``(1−β)·q·(log q − log m)``, in the units of the value.

    The mixture moves too, but what that adds is 0. Logits: the same through the softmax.

    At the edge: an entry that is −inf has gradient 0.

    Examples:
        >>> from equipoise import spec
        >>> spec.js_divergence_grad(spec.Float(), [[0.0, None]], [[0.0, None]])
        ([[0.0, 0.0]], [[0.0, 0.0]])
    """

    def slopes(a: Row[T], b: Row[T]) -> tuple[list[T], list[T]]:
        logs = [log_probabilities(K, x, normalize=from_logits) for x in (a, b)]
        if _at_an_end(beta):
            direction: Direction = "reverse" if beta else "forward"
            free = directed_slopes(K, logs[0], logs[1], direction, None, normalize=from_logits)
        else:
            free = _mixture_slopes(K, logs[0], logs[1], beta)
        first, second = (
            log_probabilities_grad(K, x, v, normalize=from_logits)
            for x, v in zip((a, b), free, strict=True)
        )
        return first, second

    unit = _js_unit(K, beta, base, normalized=normalized)
    moves = [m / unit for m in reduce_grad(K, len(p), mask, reduction, denominator)]
    return pair_of_slopes(K, slopes, (p, q), moves, mask=mask, support=support)


def js_term(K: Scalars[T], log_p: T | None, log_q: T | None, beta: Number) -> T:
    """`mixed_term` with ``m = βp + (1−β)q``; 0 where both are impossible."""
    log_m = _log_mixture(K, log_p, log_q, beta)
    return zero(K) if log_m is None else mixed_term(K, log_p, log_q, log_m, beta)


def mixed_term(K: Scalars[T], log_p: T | None, log_q: T | None, log_m: T, beta: Number) -> T:
    """``β·p·(log p − log m) + (1−β)·q·(log q − log m)``."""
    parts = [
        K.const(weight) * kl_term(K, a, log_m)
        for a, weight in ((log_p, beta), (log_q, 1 - Fraction(beta)))
        if a is not None
    ]
    return K.sum(parts)


def _log_mixture(K: Scalars[T], log_p: T | None, log_q: T | None, beta: Number) -> T | None:
    """``log(βp + (1−β)q)``, with the larger probability taken out of the sum."""
    present = [
        (a, K.const(weight))
        for a, weight in ((log_p, beta), (log_q, 1 - Fraction(beta)))
        if a is not None
    ]
    if not present:
        return None
    top = present[0][0]
    for a, _ in present[1:]:
        top = K.max(top, a)
    return top + K.log(K.sum(weight * K.exp(a - top) for a, weight in present))


def _mixture_slopes(K: Scalars[T], a: Row[T], b: Row[T], beta: Number) -> tuple[list[T], list[T]]:
    log_m = [_log_mixture(K, x, y, beta) for x, y in zip(a, b, strict=True)]
    first, second = (
        [
            zero(K) if x is None or m is None else K.const(weight) * kl_term(K, x, m)
            for x, m in zip(row, log_m, strict=True)
        ]
        for row, weight in ((a, beta), (b, 1 - Fraction(beta)))
    )
    return first, second


def _at_an_end(beta: Number) -> bool:
    return not Fraction(beta) * (1 - Fraction(beta))


def _js_unit(K: Scalars[T], beta: Number, base: str | int, *, normalized: bool) -> T:
    spread = Fraction(beta) * (1 - Fraction(beta)) if normalized else Fraction(1)
    unit = K.const(spread or 1)
    return unit if base == "e" else K.log(K.const(2)) * unit
