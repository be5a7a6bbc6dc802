"""What the order of a sum can do to it, in floating-point arithmetic.

Whatever tree of additions is taken over n numbers, the result is within (n−1)·u·Σ|xᵢ| of their sum
(Jeannerod and Rump 2013). By induction over the tree: two sums of n₁ and n₂ numbers, with errors
within their bounds, are added with an error δ that is at most u times the result, and at most
either of the two (rounding to nearest never moves further than to a number that is there).
"""

from __future__ import annotations

from functools import partial

from equipoise.spec.balls import summation_bound
from equipoise.spec.proofs.statement import Statement, Theorem
from equipoise.spec.symbols import Real, Symbols


def one_number_is_exact(K: Symbols) -> Statement:
    """The base: the bound of one number alone is 0."""
    u, A = K.real("u"), K.real("A")
    return Statement([], summation_bound(K.const(1), u, A) == 0)


def errors_add(K: Symbols, left: int = 1) -> Statement:
    """The errors of two sums and δ are all the error there is."""
    x, y, s, t, delta = (K.real(name) for name in ("x", "y", "s", "t", "delta"))
    parts = K.abs(s - x) + left * K.abs(t - y) + K.abs(delta)
    return Statement([], K.abs(s + t + delta - (x + y)) <= parts)


def bounds_add(K: Symbols, lost: int = 0) -> Statement:
    """The bounds of both sums and of δ are the bound of the whole."""
    u, n, m, A, B = _sizes(K)
    parts = summation_bound(n, u, A) + summation_bound(m, u, B) + u * (m * A + n * B)
    return Statement(_ranges(u, n, m, A, B), parts <= summation_bound(n + m - lost, u, A + B))


def a_computed_sum_is_no_larger(K: Symbols) -> Statement:
    """|s₁| ≤ A₁ + (n₁−1)·u·A₁."""
    u, n, m, A, B = _sizes(K)
    x, s = K.real("x"), K.real("s")
    within = [K.abs(x) <= A, K.abs(s - x) <= summation_bound(n, u, A)]
    return Statement([*_ranges(u, n, m, A, B), *within], K.abs(s) <= A + summation_bound(n, u, A))


def delta_if_one_is_small(K: Symbols) -> Statement:
    """Where A₁ ≤ u·A₂ (or the other way round) |δ| ≤ |s₁| ≤ u·(n₂A₁ + n₁A₂)."""
    u, n, m, A, B = _sizes(K)
    case = [u * B >= A]
    return Statement(
        [*_ranges(u, n, m, A, B), *case], A + summation_bound(n, u, A) <= u * (m * A + n * B)
    )


def delta_if_none_is_small(K: Symbols, comparable: bool = True) -> Statement:
    """Otherwise |δ| ≤ u·(|s₁| + |s₂|) ≤ u·(n₂A₁ + n₁A₂), since u·A₁ ≤ A₂ and u·A₂ ≤ A₁."""
    u, n, m, A, B = _sizes(K)
    case = [u * A <= B, u * B <= A] if comparable else []
    most = u * (A + summation_bound(n, u, A) + B + summation_bound(m, u, B))
    # Each product is taken by itself: (n−1)·(u·A) ≤ (n−1)·B.
    products = [
        K.z3.Implies(u * A <= B, (n - 1) * (u * A) <= (n - 1) * B),
        K.z3.Implies(u * B <= A, (m - 1) * (u * B) <= (m - 1) * A),
    ]
    return Statement([*_ranges(u, n, m, A, B), *case, *products], most <= u * (m * A + n * B))


def a_product_keeps_an_inequality(K: Symbols) -> Statement:
    """a ≤ b gives k·a ≤ k·b for k ≥ 0."""
    k, a, b = K.real("k"), K.real("a"), K.real("b")
    return Statement([k >= 0, a <= b], k * a <= k * b)


def _sizes(K: Symbols) -> list[Real]:
    """The unit; how many numbers each part has, and the sum of their sizes."""
    return [K.real(name) for name in ("u", "n", "m", "A", "B")]


def _ranges(u: Real, n: Real, m: Real, A: Real, B: Real) -> list[Real]:
    return [u > 0, u < 1, n >= 1, m >= 1, A >= 0, B >= 0]


def theorems() -> list[Theorem]:
    """The bound that every agreement test rests on."""
    return [
        Theorem(
            "a sum of n floats, in any order, is within (n−1)·u·Σ|xᵢ| of the exact one",
            "every n, every tree",
            [
                one_number_is_exact,
                a_computed_sum_is_no_larger,
                a_product_keeps_an_inequality,
                delta_if_one_is_small,
                delta_if_none_is_small,
                errors_add,
                bounds_add,
            ],
            {
                "a bound for one number less": partial(bounds_add, lost=1),
                "an error left out": partial(errors_add, left=0),
                "sizes that are not comparable": partial(delta_if_none_is_small, comparable=False),
            },
        ),
    ]
