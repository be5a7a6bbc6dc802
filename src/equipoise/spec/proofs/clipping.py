"""Clipping by a norm, for every length: the sum of squares is one number S ≥ 0."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from equipoise.spec.clipping import clip_factor
from equipoise.spec.proofs.sizes import cauchy_schwarz
from equipoise.spec.proofs.statement import Statement, Theorem, induction
from equipoise.spec.scalars import plus
from equipoise.spec.sums import square
from equipoise.spec.symbols import Real, Symbols

Rule = Callable[[Symbols, Real, Real], Real]


def squares_are_not_negative(K: Symbols) -> Statement:
    """S = Σx² ≥ 0."""
    S, x = K.real("S"), K.real("x")
    return induction(K, lambda S: S >= 0, [S], [plus(S, square(K, x))])


def squares_of_the_clipped(K: Symbols) -> Statement:
    """Σ(c·g)² = c²·Σg²."""
    S, T, c, x = K.real("S"), K.real("T"), K.real("c"), K.real("x")
    longer = [plus(S, square(K, x)), plus(T, square(K, x * c))]
    return induction(K, lambda S, T: c * c * S == T, [S, T], longer)


def squares_of_a_difference(K: Symbols) -> Statement:
    """Σ(c·x − d·y)² = c²·Σx² − 2cd·Σxy + d²·Σy²."""
    A, B, C, D = K.real("A"), K.real("B"), K.real("C"), K.real("D")
    c, d, x, y = K.real("c"), K.real("d"), K.real("x"), K.real("y")
    longer = [
        plus(A, square(K, x)),
        plus(B, square(K, y)),
        plus(C, x * y),
        plus(D, square(K, x * c - y * d)),
    ]

    def holds(A: Real, B: Real, C: Real, D: Real) -> Real:
        return c * c * A - 2 * c * d * C + d * d * B == D

    return induction(K, holds, [A, B, C, D], longer)


def product_below_lengths(K: Symbols) -> Statement:
    """C² ≤ a²·b² gives |C| ≤ a·b for a, b ≥ 0."""
    a, b, C = K.real("a"), K.real("b"), K.real("C")
    within = square(K, C) <= square(K, a) * square(K, b)
    return Statement([a >= 0, b >= 0, within], K.abs(C) <= a * b)


FOLDS = (squares_are_not_negative, squares_of_the_clipped)


def norm_within_limit(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """‖clip g‖² ≤ m²."""
    S, m = _given(K)
    c = rule(K, S, m)
    return Statement([S >= 0], c * c * S <= m * m)


def norm_at_limit(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """‖clip g‖² = m² where ‖g‖ > m."""
    S, m = _given(K)
    c = rule(K, S, m)
    return Statement([m * m < S], c * c * S == m * m)


def factor_between_zero_and_one(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """0 ≤ c ≤ 1."""
    S, m = _given(K)
    c = rule(K, S, m)
    return Statement([S >= 0], K.z3.And(c >= 0, c <= 1))


def nothing_changes_within(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """c = 1 where ‖g‖ ≤ m, the boundary included."""
    S, m = _given(K)
    return Statement([S >= 0, m * m >= S], rule(K, S, m) == 1)


def clipping_twice_is_once(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """The factor of what was clipped is 1."""
    S, m = _given(K)
    c = rule(K, S, m)
    return Statement([S >= 0], rule(K, c * c * S, m) == 1)


def direction_is_kept(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """Clipped entries are in the proportions of the entries, with their signs."""
    S, m = _given(K)
    x, y = K.real("x"), K.real("y")
    c = rule(K, S, m)
    parallel = (x * c) * y == (y * c) * x
    return Statement([x * x + y * y <= S], K.z3.And(parallel, (x * c) * x >= 0))


def limit_is_a_magnitude(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """A limit and its negative clip alike."""
    S, m = _given(K)
    return Statement([S >= 0], rule(K, S, m) == rule(K, S, -m))


def factor_is_homogeneous(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """t·g at the limit t·m has the factor of g at m, for t > 0."""
    S, m = _given(K)
    t = K.real("t")
    return Statement([S >= 0, t > 0], rule(K, t * t * S, t * m) == rule(K, S, m))


def limit_zero_gives_zeros(K: Symbols, rule: Rule = clip_factor) -> Statement:
    """At m = 0 every entry becomes 0: its square is at most S."""
    S, x = K.real("S"), K.real("x")
    return Statement([x * x <= S], x * rule(K, S, K.const(0)) == 0)


def distance_does_not_grow(K: Symbols, which: int = 0, rule: Rule = clip_factor) -> Statement:
    """‖clip a − clip b‖² ≤ ‖a − b‖², from A = Σa², B = Σb² and C = Σab.

    Three cases: neither is clipped, one is, both are; the roots of A and B are named. |C| ≤ a·b is
    Cauchy and Schwarz's.
    """
    a, b, C, m = K.real("a"), K.real("b"), K.real("C"), K.real("m")
    A, B = a * a, b * b
    # The root that clipping takes of A is a, since a ≥ 0.
    cut_a, cut_b = rule(K, A, m), rule(K, B, m)
    clipped = cut_a * cut_a * A - 2 * cut_a * cut_b * C + cut_b * cut_b * B
    case = [
        [m * m >= A, m * m >= B],
        [m * m < A, m * m >= B],
        [m * m < A, m * m < B],
    ][which]
    cauchy = K.abs(C) <= a * b
    return Statement([a >= 0, b >= 0, m >= 0, cauchy, *case], clipped <= A - 2 * C + B)


def missing_root(K: Symbols, S: Real, m: Real) -> Real:
    """A rule that divides by the square of the norm."""
    return K.ite(K.gt(S, m * m), lambda: K.abs(m) / S, lambda: K.const(1))


def wrong_comparison(K: Symbols, S: Real, m: Real) -> Real:
    """A rule that clips what is within."""
    return K.ite(K.gt(m * m, S), lambda: K.abs(m) / K.sqrt(S), lambda: K.const(1))


def signed_limit(K: Symbols, S: Real, m: Real) -> Real:
    """A rule that takes a negative limit as it is."""
    return K.ite(K.gt(S, m * m), lambda: m / K.sqrt(S), lambda: K.const(1))


def with_epsilon(K: Symbols, S: Real, m: Real) -> Real:
    """A rule that adds 10⁻⁶ to the norm and always multiplies, as `clip_grad_norm_` does."""
    factor = K.abs(m) / (K.sqrt(S) + K.const(Fraction(1, 10**6)))
    return K.min(factor, K.const(1))


def least_limit(K: Symbols, S: Real, m: Real) -> Real:
    """A rule whose limit never falls below 10⁻⁶."""
    return clip_factor(K, S, K.max(K.abs(m), K.const(Fraction(1, 10**6))))


def _given(K: Symbols) -> tuple[Real, Real]:
    return K.real("S"), K.real("m")


def theorems() -> list[Theorem]:
    """The theory of clipping by a norm."""
    every = "every n"
    return [
        Theorem(
            "the clipped norm never exceeds the limit",
            every,
            [*FOLDS, norm_within_limit],
            {
                "a missing root": partial(norm_within_limit, rule=missing_root),
                "a wrong comparison": partial(norm_within_limit, rule=wrong_comparison),
            },
        ),
        Theorem(
            "the clipped norm is the limit where it clips",
            every,
            [*FOLDS, norm_at_limit],
            {"a missing root": partial(norm_at_limit, rule=missing_root)},
        ),
        Theorem(
            "the factor of clipping lies between 0 and 1",
            every,
            [squares_are_not_negative, factor_between_zero_and_one],
            {"a wrong comparison": partial(factor_between_zero_and_one, rule=wrong_comparison)},
        ),
        Theorem(
            "clipping changes nothing within the limit, the boundary included",
            every,
            [squares_are_not_negative, nothing_changes_within],
            {"an epsilon": partial(nothing_changes_within, rule=with_epsilon)},
        ),
        Theorem(
            "clipping twice is clipping once",
            every,
            [*FOLDS, clipping_twice_is_once],
            {
                "a missing root": partial(clipping_twice_is_once, rule=missing_root),
                "an epsilon": partial(clipping_twice_is_once, rule=with_epsilon),
            },
        ),
        Theorem(
            "clipping keeps the direction and the signs",
            every,
            [squares_are_not_negative, direction_is_kept],
            {"a signed limit": partial(direction_is_kept, rule=signed_limit)},
        ),
        Theorem(
            "clipping is even in the limit",
            every,
            [squares_are_not_negative, limit_is_a_magnitude],
            {"a signed limit": partial(limit_is_a_magnitude, rule=signed_limit)},
        ),
        Theorem(
            "clipping is homogeneous",
            every,
            [*FOLDS, factor_is_homogeneous],
            {"an epsilon": partial(factor_is_homogeneous, rule=with_epsilon)},
        ),
        Theorem(
            "clipping at 0 gives zeros",
            every,
            [squares_are_not_negative, limit_zero_gives_zeros],
            {"a least limit": partial(limit_zero_gives_zeros, rule=least_limit)},
        ),
        Theorem(
            "clipping brings no two gradients further apart",
            every,
            [
                cauchy_schwarz,
                product_below_lengths,
                squares_of_a_difference,
                *(partial(distance_does_not_grow, which=which) for which in range(3)),
            ],
            {"a missing root": partial(distance_does_not_grow, which=1, rule=missing_root)},
        ),
    ]
