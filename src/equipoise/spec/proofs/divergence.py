"""Divergences and entropies, for every length, from the one axiom ln t ≤ t − 1.

A probability p and its logarithm a are two symbols; the axiom is used for quotients of the
probabilities at hand, and of their logarithms only that those of quotients are differences. The
axiom itself is proved by sympy: t − 1 − ln t has its minimum, 0, at t = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from equipoise.spec.distributions import normalized
from equipoise.spec.divergence import kl_gap, kl_term
from equipoise.spec.formats import optional
from equipoise.spec.mixture import mixed_term
from equipoise.spec.proofs.statement import Statement, Theorem, induction
from equipoise.spec.scalars import plus
from equipoise.spec.symbols import Real, Symbols
from equipoise.spec.uncertainty import entropy_term

Term = Callable[[Symbols, Real, Real], Real]
Rule = Callable[[Symbols, Real, Real, Real], Real]


def logarithm_below_its_tangent() -> bool:
    """The axiom: the minimum of t − 1 − ln t over t > 0 is 0."""
    sympy = optional("sympy")
    t = sympy.Symbol("t", positive=True)
    gap = t - 1 - sympy.log(t)
    return bool(sympy.calculus.util.minimum(gap, t, sympy.Interval.open(0, sympy.oo)) == 0)


def divergence_above_difference(K: Symbols, term: Term = kl_term) -> Statement:
    """Σp(log p − log q) ≥ Σp − Σq. Both sums are 1 in the end."""
    a, b, kl, P, Q = _reals(K, "a b kl P Q")
    longer = [plus(kl, term(K, a, b)), plus(P, K.exp(a)), plus(Q, K.exp(b))]
    return induction(K, lambda kl, P, Q: kl >= P - Q, [kl, P, Q], longer)


def gap_is_never_negative(K: Symbols, term: Term = kl_gap) -> Statement:
    """p(log p − log q) + q − p ≥ 0: no term of the runtime's sum is negative."""
    a, b = _reals(K, "a b")
    return Statement([], term(K, a, b) >= 0)


def gap_has_the_same_sum(K: Symbols) -> Statement:
    """Σgap = Σp(log p − log q) + Σq − Σp."""
    a, b, kl, gap, P, Q = _reals(K, "a b kl gap P Q")
    longer = [
        plus(gap, kl_gap(K, a, b)),
        plus(kl, kl_term(K, a, b)),
        plus(P, K.exp(a)),
        plus(Q, K.exp(b)),
    ]

    def holds(gap: Real, kl: Real, P: Real, Q: Real) -> Real:
        return gap == kl + Q - P

    return induction(K, holds, [gap, kl, P, Q], longer)


def entropy_is_not_negative(K: Symbols, largest: int = 1) -> Statement:
    """H ≥ 0 for probabilities up to 1."""
    a, H = _reals(K, "a H")
    longer = [plus(H, entropy_term(K, a))]
    return induction(K, lambda H: H >= 0, [H], longer, [K.exp(a) <= largest])


def entropy_below_logarithm(K: Symbols, number: int = 1) -> Statement:
    """H ≤ P·ln n + k/n − P over k of n entries. In the end k = n and P = 1."""
    a, H, P, k, n = _reals(K, "a H P k n")
    log_n, one = K.log(n), K.const(1)
    K.relate(-log_n, one / n)  # the logarithm of 1/n
    longer = [plus(H, entropy_term(K, a)), plus(P, K.exp(a)), k + number]

    def holds(H: Real, P: Real, k: Real) -> Real:
        return P * log_n + k / n - P >= H

    return induction(K, holds, [H, P, k], longer, [n >= 1])


def mixture_term_below(K: Symbols, share: Fraction = Fraction(1, 2)) -> Statement:
    """JS ≤ ½(P + Q)·ln 2 with m = (p + q)/2. Both sums are 1 in the end."""
    a, b, log_m, js, P, Q = _reals(K, "a b log_m js P Q")
    p, q, m, log_2 = K.exp(a), K.exp(b), K.exp(log_m), K.log(K.const(2))
    half = K.const(Fraction(1, 2))
    K.relate(log_m + log_2, m + m)  # the logarithm of a product
    term = mixed_term(K, a, b, log_m, Fraction(1, 2))
    longer = [plus(js, term), plus(P, p), plus(Q, q)]

    def holds(js: Real, P: Real, Q: Real) -> Real:
        return js <= half * (P + Q) * log_2

    return induction(K, holds, [js, P, Q], longer, [m == K.const(share) * (p + q)])


def mixture_is_not_negative(K: Symbols, sign: int = 1) -> Statement:
    """JS ≥ ½(Σp − Σm) + ½(Σq − Σm) with m = (p + q)/2; that is 0 in the end."""
    a, b, log_m, js, P, Q, M = _reals(K, "a b log_m js P Q M")
    half = K.const(Fraction(1, 2))
    p, q, m = K.exp(a), K.exp(b), K.exp(log_m)
    term = sign * mixed_term(K, a, b, log_m, Fraction(1, 2))
    longer = [plus(js, term), plus(P, p), plus(Q, q), plus(M, m)]

    def holds(js: Real, P: Real, Q: Real, M: Real) -> Real:
        return js >= half * (P - M) + half * (Q - M)

    return induction(K, holds, [js, P, Q, M], longer, [m == half * (p + q)])


def softmax_is_a_quotient(K: Symbols, rule: Rule = normalized) -> Statement:
    """exp(x − m − ln s) = exp(x − m)/s, from exp(u − v)·exp(v) = exp(u)."""
    x, m, s = _reals(K, "x m s")
    log_s = K.log(s)
    e, p = K.exp(x - m), K.exp(rule(K, x, m, log_s))
    return Statement([K.exp(x - m - log_s) * s == e], p == e / s)


def shares_add_up(K: Symbols) -> Statement:
    """Σ(eᵢ/s) = Σeᵢ/s: each probability is a quotient p = e/s."""
    total, shares, s, x = _reals(K, "total shares s x")
    e = K.exp(x)
    longer = [plus(total, e), plus(shares, e / s)]
    return induction(K, lambda total, shares: shares * s == total, [total, shares], longer, [s > 0])


def whole_is_one(K: Symbols, missing: int = 0) -> Statement:
    """With s = Σe the probabilities sum to 1."""
    shares, s = _reals(K, "shares s")
    return Statement([s > 0, shares * s == s + missing], shares == 1)


def unnormalized(K: Symbols, x: Real, largest: Real, log_sum: Real) -> Real:  # noqa: ARG001
    """A rule that only takes the largest out."""
    return x - largest


def reversed_ratio(K: Symbols, log_p: Real, log_q: Real) -> Real:
    """A term with its quotient turned over."""
    return K.exp(log_p) * (log_q - log_p)


def clipped_ratio(K: Symbols, log_p: Real, log_q: Real) -> Real:
    """A term whose log ratio is held at ½."""
    return (
        K.exp(log_p) * K.min(log_p - log_q, K.const(Fraction(1, 2))) + K.exp(log_q) - K.exp(log_p)
    )


def _reals(K: Symbols, names: str) -> list[Real]:
    return [K.real(name) for name in names.split()]


def theorems() -> list[Theorem]:
    """What holds of distributions."""
    every = "every n"
    return [
        Theorem(
            "KL ≥ 0, and no term of its sum is negative",
            every,
            [divergence_above_difference, gap_is_never_negative, gap_has_the_same_sum],
            {
                "a quotient turned over": partial(divergence_above_difference, term=reversed_ratio),
                "a clipped ratio": partial(gap_is_never_negative, term=clipped_ratio),
            },
        ),
        Theorem(
            "0 ≤ H ≤ ln n",
            every,
            [entropy_is_not_negative, entropy_below_logarithm],
            {
                "probabilities up to 2": partial(entropy_is_not_negative, largest=2),
                "one entry too few": partial(entropy_below_logarithm, number=0),
            },
        ),
        Theorem(
            "0 ≤ JS ≤ ln 2 for equal shares",
            every,
            [mixture_is_not_negative, mixture_term_below],
            {
                "a mixture too thin": partial(mixture_term_below, share=Fraction(1, 8)),
                "the wrong sign": partial(mixture_is_not_negative, sign=-1),
            },
        ),
        Theorem(
            "a softmax sums to 1",
            every,
            [softmax_is_a_quotient, shares_add_up, whole_is_one],
            {
                "a sum left out": partial(softmax_is_a_quotient, rule=unnormalized),
                "an entry left out": partial(whole_is_one, missing=1),
            },
        ),
    ]
