"""Rows of log-probabilities, and the way from logits to them and back.

A log-probability or a logit is a scalar, or None for −inf. Support deletes entries, a mask rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from equipoise.spec.scalars import Number, Scalars, T
from equipoise.spec.sums import Mask, zero

Row = Sequence[T | None]
"""Logarithms of probabilities; None is that of 0."""

Support = Sequence[Sequence[Number]] | None


def log_softmax(K: Scalars[T], row: Row[T]) -> list[T | None]:
    """``xᵢ − m − ln Σ exp(xⱼ − m)``, the same for every m; here m is the largest."""
    finite = [x for x in row if x is not None]
    if not finite:
        return list(row)
    largest = finite[0]
    for x in finite[1:]:
        largest = K.max(largest, x)
    log_sum = K.log(K.sum(K.exp(x - largest) for x in finite))
    return [None if x is None else normalized(K, x, largest, log_sum) for x in row]


def normalized(K: Scalars[T], x: T, largest: T, log_sum: T) -> T:  # noqa: ARG001 — as all rules
    """The logarithm of ``exp(x − m)/Σ exp(xᵢ − m)``, from that of the sum."""
    return x - largest - log_sum


def log_softmax_grad(K: Scalars[T], row: Row[T], upstream: Sequence[T]) -> list[T]:
    """``vᵢ − pᵢ·Σv`` with p the softmax; 0 where x is −inf, whatever comes from above."""
    p = [None if a is None else K.exp(a) for a in log_softmax(K, row)]
    total = K.sum(v for v, pi in zip(upstream, p, strict=True) if pi is not None)
    return [zero(K) if pi is None else v - pi * total for v, pi in zip(upstream, p, strict=True)]


def log_probabilities(
    K: Scalars[T], row: Row[T], *, normalize: bool, temperature: Number = 1
) -> list[T | None]:
    """The logarithms as they are, or those of the softmax of ``x/T``."""
    if not normalize:
        return list(row)
    heat = K.const(temperature)
    return log_softmax(K, [None if x is None else x / heat for x in row])


def log_probabilities_grad(
    K: Scalars[T], row: Row[T], upstream: Sequence[T], *, normalize: bool, temperature: Number = 1
) -> list[T]:
    """What comes from above, or that through the softmax of ``x/T``."""
    if not normalize:
        return [zero(K) if x is None else v for x, v in zip(row, upstream, strict=True)]
    heat = K.const(temperature)
    cooled: Row[T] = [None if x is None else x / heat for x in row]
    return [v / heat for v in log_softmax_grad(K, cooled, upstream)]


def normalizes(*, from_logits: bool, temperature: Number) -> bool:
    """Whether rows are normalised: logits are, and so is whatever has a temperature."""
    return True if temperature - 1 else from_logits


def supported(row: Row[T], support: Sequence[Number] | None) -> list[T | None]:
    """The row without the entries that do not exist: as impossible ones, they count for nothing."""
    if support is None:
        return list(row)
    return [x if kept else None for x, kept in zip(row, support, strict=True)]


def by_row(
    K: Scalars[T],
    value: Callable[..., T],
    rows: Sequence[Sequence[Row[T]]],
    mask: Mask,
    support: Support,
) -> list[T]:
    """One value for each row that counts, from the same row of each input; 0 for the others."""
    count = len(rows[0])
    kept = [True] * count if mask is None else mask
    entries = [None] * count if support is None else support
    return [
        value(*(supported(inputs[r], entries[r]) for inputs in rows)) if kept[r] else zero(K)
        for r in range(count)
    ]
