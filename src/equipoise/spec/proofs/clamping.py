"""Clamping, entry by entry, and what that means for whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from equipoise.spec.proofs.statement import Statement, Theorem, induction
from equipoise.spec.scalars import plus
from equipoise.spec.sums import clamp, magnitude, square
from equipoise.spec.symbols import Real, Symbols

Rule = Callable[[Symbols, Real, Real, Real], Real]


def stays_in_range(K: Symbols, rule: Rule = clamp) -> Statement:
    """low ≤ clamp x ≤ high where low ≤ high."""
    x, low, high = _given(K)
    held = rule(K, x, low, high)
    return Statement([low <= high], K.z3.And(low <= held, held <= high))


def crossed_bounds_give_the_upper(K: Symbols, rule: Rule = clamp) -> Statement:
    """clamp x = high where low > high."""
    x, low, high = _given(K)
    return Statement([low > high], rule(K, x, low, high) == high)


def nothing_changes_inside(K: Symbols, rule: Rule = clamp) -> Statement:
    """clamp x = x where low ≤ x ≤ high."""
    x, low, high = _given(K)
    return Statement([low <= x, x <= high], rule(K, x, low, high) == x)


def twice_is_once(K: Symbols, rule: Rule = clamp) -> Statement:
    """Clamping what is clamped changes nothing, whatever the bounds."""
    x, low, high = _given(K)
    held = rule(K, x, low, high)
    return Statement([], rule(K, held, low, high) == held)


def order_is_kept(K: Symbols, rule: Rule = clamp) -> Statement:
    """Where x ≤ y, clamp x ≤ clamp y."""
    x, low, high = _given(K)
    y = K.real("y")
    return Statement([x <= y], rule(K, x, low, high) <= rule(K, y, low, high))


def sizes_apart(K: Symbols, rule: Rule = clamp) -> Statement:
    """Σ|clamp x − clamp y| ≤ Σ|x − y|."""
    return _apart(K, rule, magnitude)


def squares_apart(K: Symbols, rule: Rule = clamp) -> Statement:
    """Σ(clamp x − clamp y)² ≤ Σ(x − y)²."""
    return _apart(K, rule, square)


def _apart(K: Symbols, rule: Rule, term: Callable[[Symbols, Real], Real]) -> Statement:
    x, low, high = _given(K)
    y, before, after = K.real("y"), K.real("before"), K.real("after")
    apart = term(K, rule(K, x, low, high) - rule(K, y, low, high))
    longer = [plus(before, term(K, x - y)), plus(after, apart)]
    return induction(K, lambda before, after: after <= before, [before, after], longer)


def one_sided(K: Symbols, x: Real, low: Real, high: Real) -> Real:  # noqa: ARG001 — the fault
    """A rule that forgets the upper bound."""
    return K.max(low, x)


def swapped(K: Symbols, x: Real, low: Real, high: Real) -> Real:
    """A rule with its bounds exchanged."""
    return clamp(K, x, high, low)


def mirrored(K: Symbols, x: Real, low: Real, high: Real) -> Real:
    """A rule that turns the order round."""
    return -clamp(K, x, low, high)


def doubled(K: Symbols, x: Real, low: Real, high: Real) -> Real:
    """A rule that stretches what it holds."""
    held = clamp(K, x, low, high)
    return held + held


def _given(K: Symbols) -> tuple[Real, Real, Real]:
    return K.real("x"), K.real("low"), K.real("high")


def theorems() -> list[Theorem]:
    """What clamping does to numbers and to distances."""
    every = "every n"
    return [
        Theorem(
            "a clamped value lies in its range",
            every,
            [stays_in_range, crossed_bounds_give_the_upper, nothing_changes_inside],
            {
                "a bound left out": partial(stays_in_range, rule=one_sided),
                "swapped bounds": partial(nothing_changes_inside, rule=swapped),
            },
        ),
        Theorem(
            "clamping twice is clamping once",
            every,
            [twice_is_once],
            {"a stretch": partial(twice_is_once, rule=doubled)},
        ),
        Theorem(
            "clamping keeps the order",
            every,
            [order_is_kept],
            {"a mirror": partial(order_is_kept, rule=mirrored)},
        ),
        Theorem(
            "clamping brings no two vectors further apart, in the sum of sizes",
            every,
            [sizes_apart],
            {"a stretch": partial(sizes_apart, rule=doubled)},
        ),
        Theorem(
            "clamping brings no two vectors further apart, in length",
            every,
            [squares_apart],
            {"a stretch": partial(squares_apart, rule=doubled)},
        ),
    ]
