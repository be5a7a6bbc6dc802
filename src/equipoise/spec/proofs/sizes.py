"""Sums of sizes and of squares: triangle, convexity, Cauchy-Schwarz, and what lies between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from equipoise.spec.magnitude import elastic_term
from equipoise.spec.proofs.statement import Statement, Theorem, induction
from equipoise.spec.scalars import plus
from equipoise.spec.sums import magnitude, square
from equipoise.spec.symbols import Real, Symbols

Term = Callable[[Symbols, Real], Real]


def triangle_of_sizes(K: Symbols, term: Term = magnitude) -> Statement:
    """Σ|x + y| ≤ Σ|x| + Σ|y|."""
    x, y, together, X, Y = _reals(K, "x y together X Y")
    longer = [plus(together, term(K, x + y)), plus(X, term(K, x)), plus(Y, term(K, y))]
    return induction(K, lambda both, X, Y: both <= X + Y, [together, X, Y], longer)


def sizes_are_homogeneous(K: Symbols, term: Term = magnitude) -> Statement:
    """Σ|t·x| = |t|·Σ|x|."""
    x, t, X, scaled = _reals(K, "x t X scaled")
    longer = [plus(X, term(K, x)), plus(scaled, term(K, t * x))]
    return induction(K, lambda X, scaled: scaled == K.abs(t) * X, [X, scaled], longer)


def convexity(K: Symbols, term: Term = magnitude) -> Statement:
    """Σf(t·x + (1−t)·y) ≤ t·Σf(x) + (1−t)·Σf(y) for 0 ≤ t ≤ 1."""
    x, y, t, between, X, Y = _reals(K, "x y t between X Y")
    rest = K.const(1) - t
    longer = [
        plus(between, term(K, t * x + rest * y)),
        plus(X, term(K, x)),
        plus(Y, term(K, y)),
    ]

    def holds(between: Real, X: Real, Y: Real) -> Real:
        return between <= t * X + rest * Y

    return induction(K, holds, [between, X, Y], longer, [t >= 0, t <= 1])


def cauchy_schwarz(K: Symbols, term: Term = square) -> Statement:
    """(Σx·y)² ≤ Σx²·Σy², both ≥ 0."""
    x, y, C, X, Y = _reals(K, "x y C X Y")
    longer = [plus(C, x * y), plus(X, term(K, x)), plus(Y, term(K, y))]

    def holds(C: Real, X: Real, Y: Real) -> Real:
        return K.z3.And(X >= 0, Y >= 0, square(K, C) <= X * Y)

    return induction(K, holds, [C, X, Y], longer)


def square_of_a_sum(K: Symbols) -> Statement:
    """Σ(x + y)² = Σx² + 2Σx·y + Σy²."""
    x, y, C, X, Y, together = _reals(K, "x y C X Y together")
    longer = [
        plus(C, x * y),
        plus(X, square(K, x)),
        plus(Y, square(K, y)),
        plus(together, square(K, x + y)),
    ]

    def holds(C: Real, X: Real, Y: Real, together: Real) -> Real:
        return together == X + 2 * C + Y

    return induction(K, holds, [C, X, Y, together], longer)


def triangle_of_lengths(K: Symbols, sign: int = 1) -> Statement:
    """√Σ(x + y)² ≤ √Σx² + √Σy², from Cauchy-Schwarz; and not less than their difference."""
    X, Y, C = _reals(K, "X Y C")
    together = X + 2 * C + Y
    length, a, b = K.sqrt(together), K.sqrt(X), K.sqrt(Y)
    within = K.z3.And(length <= a + sign * b, length >= a - b, length >= b - a)
    return Statement([X >= 0, Y >= 0, together >= 0, C * C <= X * Y], within)


def elastic_net_between_its_ends(K: Symbols, share: int = 1) -> Statement:
    """a·|x| + (1−a)·x² lies between |x| and x², for every 0 ≤ a ≤ 1."""
    a, L, S = _reals(K, "a L S")
    mixed = a * L + (share - a) * S
    within = K.z3.And(mixed >= K.min(L, S), mixed <= K.max(L, S))
    return Statement([a >= 0, a <= 1, L >= 0, S >= 0], within)


def elastic_net_for_every_ratio(K: Symbols) -> Statement:
    """Σ(a·|x| + (1−a)·x²) = a·Σ|x| + (1−a)·Σx², with any ratio."""
    x, a, N, L, S = _reals(K, "x a N L S")
    rest = K.const(1) - a
    longer = [
        plus(N, elastic_term(K, x, a, rest)),
        plus(L, magnitude(K, x)),
        plus(S, square(K, x)),
    ]
    return induction(K, lambda N, L, S: a * L + rest * S == N, [N, L, S], longer)


def sizes_below_root_n(K: Symbols, room: int = 1) -> Statement:
    """(Σ|x|)² ≤ n·Σx²."""
    x, L, S, n = _reals(K, "x L S n")
    longer = [plus(L, magnitude(K, x)), plus(S, square(K, x)), n + room]

    def holds(L: Real, S: Real, n: Real) -> Real:
        empty = K.z3.Implies(n == 0, S == 0)
        return K.z3.And(n >= 0, L >= 0, S >= 0, n * S >= L * L, empty)

    return induction(K, holds, [L, S, n], longer)


def squares_below_sizes(K: Symbols, term: Term = magnitude) -> Statement:
    """Σx² ≤ (Σ|x|)²."""
    x, L, S = _reals(K, "x L S")
    longer = [plus(L, term(K, x)), plus(S, square(K, x))]
    return induction(K, lambda L, S: K.z3.And(L >= 0, S <= L * L), [L, S], longer)


def signed(K: Symbols, x: Real) -> Real:  # noqa: ARG001 — a term, as the others
    """A term without its absolute value."""
    return x


def negated(K: Symbols, x: Real) -> Real:
    """A term of the wrong sign."""
    return -square(K, x)


def _reals(K: Symbols, names: str) -> list[Real]:
    return [K.real(name) for name in names.split()]


def theorems() -> list[Theorem]:
    """What holds of l1, l2 and the elastic net."""
    every = "every n"
    return [
        Theorem(
            "l1 is a norm: homogeneous, and a triangle's side is no longer than the others",
            every,
            [triangle_of_sizes, sizes_are_homogeneous],
            {
                "a square for a size": partial(triangle_of_sizes, term=square),
                "a missing absolute value": partial(sizes_are_homogeneous, term=signed),
            },
        ),
        Theorem(
            "l1 is convex",
            every,
            [convexity],
            {"the wrong sign": partial(convexity, term=negated)},
        ),
        Theorem(
            "l2 is convex",
            every,
            [partial(convexity, term=square)],
            {"the wrong sign": partial(convexity, term=negated)},
        ),
        Theorem(
            "Cauchy-Schwarz",
            every,
            [cauchy_schwarz],
            {"sizes for squares": partial(cauchy_schwarz, term=magnitude)},
        ),
        Theorem(
            "the length of a sum lies between the difference and the sum of the lengths",
            every,
            [cauchy_schwarz, square_of_a_sum, triangle_of_lengths],
            {"a swapped sign": partial(triangle_of_lengths, sign=-1)},
        ),
        Theorem(
            "the elastic net lies between l1 and l2",
            every,
            [elastic_net_for_every_ratio, elastic_net_between_its_ends],
            {"shares that do not sum to 1": partial(elastic_net_between_its_ends, share=2)},
        ),
        Theorem(
            "l2 ≤ l1² ≤ n·l2",
            every,
            [squares_below_sizes, sizes_below_root_n],
            {
                "a missing absolute value": partial(squares_below_sizes, term=signed),
                "n too small by one": partial(sizes_below_root_n, room=0),
            },
        ),
    ]
