"""How far apart two distributions are, row by row: Kullback and Leibler's measure.

A derivative is first taken with respect to the log-probabilities, entry by entry, and then, where
the rows are normalised here, carried through the softmax to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
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
from equipoise.spec.scalars import InfiniteError, Number, Scalars, T
from equipoise.spec.sums import Mask, Reduction, reduce, reduce_grad, zero

Direction = Literal["forward", "reverse", "symmetric"]
Rows = Sequence[Row[T]]


def kl_term(K: Scalars[T], log_p: T, log_q: T) -> T:
    """``p·(log p − log q)``: the term of a divergence between any two distributions."""
    return K.exp(log_p) * (log_p - log_q)


def kl_gap(K: Scalars[T], log_p: T, log_q: T) -> T:
    """``p·(log p − log q) + (q − p) ≥ 0``: the term where both rows are known to sum to 1."""
    return kl_term(K, log_p, log_q) + (K.exp(log_q) - K.exp(log_p))


def kl_divergence(
    K: Scalars[T],
    p: Rows[T],
    q: Rows[T],
    *,
    direction: Direction = "forward",
    from_logits: bool = False,
    temperature: Number = 1,
    temperature_squared: bool = False,
    floor: Number | None = None,
    reduction: Reduction = "mean",
    mask: Mask = None,
    support: Support = None,
    denominator: Number | None = None,
) -> T | list[T]:
    """``KL(P‖Q) = Σ p·(log p − log q)`` a row; reverse KL(Q‖P); symmetric the mean of both.

    ``floor`` holds the second logarithm up: ``log p − max(log q, floor)``. A temperature divides
    the logits; squared, it multiplies the value.

    At the edge: p = 0 contributes 0. p > 0 with q = 0 and no floor: `InfiniteError`. A row in
    which nothing is possible under P gives 0.

    Examples:
        >>> from math import log
        >>> from equipoise import spec
        >>> p, q = [log(0.5), log(0.5), None], [log(0.25), log(0.5), log(0.25)]
        >>> round(spec.kl_divergence(spec.Float(), [p], [q]), 12)
        0.34657359028
    """
    normalize = normalizes(from_logits=from_logits, temperature=temperature)

    def value(a: Row[T], b: Row[T]) -> T:
        a, b = (
            log_probabilities(K, x, normalize=normalize, temperature=temperature) for x in (a, b)
        )
        if direction == "symmetric":
            forward = _divergence(K, a, b, floor, normalize=normalize)
            half = K.const(Fraction(1, 2))
            return half * (forward + _divergence(K, b, a, floor, normalize=normalize))
        a, b = (b, a) if direction == "reverse" else (a, b)
        return _divergence(K, a, b, floor, normalize=normalize)

    values = by_row(K, value, (p, q), mask, support)
    factor = _temperature_factor(K, temperature, squared=temperature_squared)
    reduced = reduce(K, values, mask, reduction, denominator)
    return [factor * v for v in reduced] if isinstance(reduced, list) else factor * reduced


def kl_divergence_grad(
    K: Scalars[T],
    p: Rows[T],
    q: Rows[T],
    *,
    direction: Direction = "forward",
    from_logits: bool = False,
    temperature: Number = 1,
    temperature_squared: bool = False,
    floor: Number | None = None,
    reduction: Reduction = "mean",
    mask: Mask = None,
    support: Support = None,
    denominator: Number | None = None,
) -> tuple[list[list[T]], list[list[T]]]:
    """With respect to log p: ``p·(d + 1)``, to log q: ``−p``; d = log p − log q.

    Between logits ``p·(d − KL)`` and ``q − p``, over the temperature. Where the floor holds log q
    up, that entry does not move.

    At the edge: an entry that is −inf has gradient 0, and so has one that makes the value infinite.

    Examples:
        >>> from math import log
        >>> from equipoise import spec
        >>> spec.kl_divergence_grad(spec.Float(), [[log(0.5), None]], [[log(0.5), None]])
        ([[0.5, 0.0]], [[-0.5, 0.0]])
    """
    normalize = normalizes(from_logits=from_logits, temperature=temperature)

    def slopes(a: Row[T], b: Row[T]) -> tuple[list[T], list[T]]:
        logs = [
            log_probabilities(K, x, normalize=normalize, temperature=temperature) for x in (a, b)
        ]
        free = directed_slopes(K, logs[0], logs[1], direction, floor, normalize=normalize)
        first, second = (
            log_probabilities_grad(K, x, v, normalize=normalize, temperature=temperature)
            for x, v in zip((a, b), free, strict=True)
        )
        return first, second

    factor = _temperature_factor(K, temperature, squared=temperature_squared)
    moves = [factor * m for m in reduce_grad(K, len(p), mask, reduction, denominator)]
    return pair_of_slopes(K, slopes, (p, q), moves, mask=mask, support=support)


def pair_of_slopes(
    K: Scalars[T],
    slopes: Callable[[Row[T], Row[T]], tuple[list[T], list[T]]],
    rows: tuple[Rows[T], Rows[T]],
    moves: Sequence[T],
    *,
    mask: Mask,
    support: Support,
) -> tuple[list[list[T]], list[list[T]]]:
    """The derivatives of each row, times how fast the result moves with it; 0 under the mask."""
    first: list[list[T]] = []
    second: list[list[T]] = []
    for r, (a, b, move) in enumerate(zip(*rows, moves, strict=True)):
        if mask is not None and not mask[r]:
            first.append([zero(K)] * len(a))
            second.append([zero(K)] * len(b))
            continue
        kept = None if support is None else support[r]
        to_a, to_b = slopes(supported(a, kept), supported(b, kept))
        first.append([move * v for v in to_a])
        second.append([move * v for v in to_b])
    return first, second


def _divergence(K: Scalars[T], a: Row[T], b: Row[T], floor: Number | None, *, normalize: bool) -> T:
    if not any(x is not None for x in a):
        return zero(K)
    held = _held(K, b, floor)
    if any(x is not None and y is None for x, y in zip(a, held, strict=True)):
        raise InfiniteError("The divergence is infinite: p > 0 where q = 0. Use `floor`.")
    present = zip(a, held, strict=True)
    terms = [kl_term(K, x, y) for x, y in present if x is not None and y is not None]
    if normalize and any(y is not None for y in b):
        # Both rows sum to 1, so that q − p adds up to 0. It is how the sum is computed.
        terms += [K.exp(y) for y in b if y is not None]
        terms += [-K.exp(x) for x in a if x is not None]
    return K.sum(terms)


def _held(K: Scalars[T], b: Row[T], floor: Number | None) -> list[T | None]:
    if floor is None:
        return list(b)
    low = K.const(floor)
    return [low if y is None else K.max(y, low) for y in b]


def directed_slopes(
    K: Scalars[T],
    a: Row[T],
    b: Row[T],
    direction: Direction,
    floor: Number | None,
    *,
    normalize: bool,
) -> tuple[list[T], list[T]]:
    """With respect to each logarithm, for a direction."""
    forward = _slopes(K, a, b, floor, normalize=normalize)
    if direction == "forward":
        return forward
    to_b, to_a = _slopes(K, b, a, floor, normalize=normalize)
    if direction == "reverse":
        return to_a, to_b
    half = K.const(Fraction(1, 2))
    return (
        [half * (x + y) for x, y in zip(forward[0], to_a, strict=True)],
        [half * (x + y) for x, y in zip(forward[1], to_b, strict=True)],
    )


def _slopes(
    K: Scalars[T], a: Row[T], b: Row[T], floor: Number | None, *, normalize: bool
) -> tuple[list[T], list[T]]:
    """With respect to each logarithm, term by term: ``p·(d + 1)`` and ``−p``.

    Between normalised rows the terms hold q − p too, and so the slopes are ``p·d`` and ``q − p``.
    """
    to_a, to_b = [], []
    for x, y, h in zip(a, b, _held(K, b, floor), strict=True):
        own = zero(K) if y is None or not normalize else K.exp(y)
        if x is None or h is None:
            to_a.append(zero(K))
            to_b.append(own)
            continue
        p = K.exp(x)
        to_a.append(p * (x - h) if normalize else p * (x - h) + p)
        to_b.append(own if y is None else own + _unless_below(K, y, floor, -p))
    return to_a, to_b


def _unless_below(K: Scalars[T], y: T, floor: Number | None, slope: T) -> T:
    if floor is None:
        return slope
    return K.ite(K.gt(K.const(floor), y), lambda: zero(K), lambda: slope)


def _temperature_factor(K: Scalars[T], temperature: Number, *, squared: bool) -> T:
    return K.const(Fraction(temperature) ** 2 if squared else 1)
