"""Divergences and entropies, for every length, from the one axiom ln t ≤ t − 1.

A probability p and its logarithm a are two symbols; the axiom is used for quotients of the
probabilities at hand. It is itself proved by sympy: t − 1 − ln t has its minimum, 0, at t = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from equipoise.spec.divergence import kl_gap, kl_term
from equipoise.spec.formats import optional
from equipoise.spec.mixture import mixed_term
from equipoise.spec.proofs.statement import Statement, Theorem
from equipoise.spec.scalars import plus
from equipoise.spec.symbols import Real, Symbols
from equipoise.spec.uncertainty import entropy_term

Term = Callable[[Symbols, Real, Real], Real]


def logarithm_below_its_tangent() -> bool:
    """The axiom: the minimum of t − 1 − ln t over t > 0 is 0."""
    sympy = optional("sympy")
    t = sympy.Symbol("t", positive=True)
    gap = t - 1 - sympy.log(t)
    return bool(sympy.calculus.util.minimum(gap, t, sympy.Interval.open(0, sympy.oo)) == 0)


def divergence_above_difference(K: Symbols, term: Term = kl_term) -> Statement:
    """Step of Σp(log p − log q) ≥ Σp − Σq; the base is 0 ≥ 0. Both sums are 1 in the end."""
    a, b, kl, P, Q = _reals(K, "a b kl P Q")
    step = plus(kl, term(K, a, b)) >= plus(P, K.exp(a)) - plus(Q, K.exp(b))
    return Statement([kl >= P - Q], step)


def gap_is_never_negative(K: Symbols, term: Term = kl_gap) -> Statement:
    """p(log p − log q) + q − p ≥ 0: no term of the runtime's sum is negative."""
    a, b = _reals(K, "a b")
    return Statement([], term(K, a, b) >= 0)


def gap_has_the_same_sum(K: Symbols) -> Statement:
    """Step of Σgap = Σp(log p − log q) + Σq − Σp; the base is 0 = 0."""
    a, b, kl, gap, P, Q = _reals(K, "a b kl gap P Q")
    step = plus(kl, kl_term(K, a, b)) + plus(Q, K.exp(b)) - plus(P, K.exp(a))
    return Statement([gap == kl + Q - P], plus(gap, kl_gap(K, a, b)) == step)


def entropy_is_not_negative(K: Symbols, largest: int = 1) -> Statement:
    """Step of H ≥ 0 for probabilities up to 1; the base is 0 ≥ 0."""
    a, H = _reals(K, "a H")
    p = K.exp(a)
    return Statement([H >= 0, p <= largest], plus(H, entropy_term(K, a)) >= 0)


def entropy_below_logarithm(K: Symbols, number: int = 1) -> Statement:
    """Step of H ≤ P·ln n + k/n − P over k of n entries; the base is 0 ≤ 0. Then k = n, P = 1."""
    a, H, P, k, n = _reals(K, "a H P k n")
    log_n, one = K.log(n), K.const(1)
    K.relate(-log_n, one / n)  # the logarithm of 1/n
    p = K.exp(a)
    step = plus(P, p) * log_n + (k + number) / n - plus(P, p)
    before = P * log_n + k / n - P
    return Statement([n >= 1, before >= H], plus(H, entropy_term(K, a)) <= step)


def mixture_term_below(K: Symbols, share: Fraction = Fraction(1, 2)) -> Statement:
    """Step of JS ≤ ½(P + Q)·ln 2 with m = (p + q)/2; the base is 0 ≤ 0. Both sums are 1."""
    a, b, log_m, js, P, Q = _reals(K, "a b log_m js P Q")
    p, q, m, log_2 = K.exp(a), K.exp(b), K.exp(log_m), K.log(K.const(2))
    half = K.const(Fraction(1, 2))
    K.relate(log_m + log_2, m + m)  # the logarithm of a product
    step = half * (plus(P, p) + plus(Q, q)) * log_2
    hypotheses = [m == K.const(share) * (p + q), js <= half * (P + Q) * log_2]
    return Statement(hypotheses, plus(js, mixed_term(K, a, b, log_m, Fraction(1, 2))) <= step)


def mixture_is_not_negative(K: Symbols, sign: int = 1) -> Statement:
    """Step of JS ≥ 0 as β(Σp − Σm) + (1−β)(Σq − Σm), which is 0; the base is 0 ≥ 0."""
    a, b, log_m, js, P, Q, M = _reals(K, "a b log_m js P Q M")
    half = K.const(Fraction(1, 2))
    p, q, m = K.exp(a), K.exp(b), K.exp(log_m)
    before = half * (P - M) + half * (Q - M)
    after = half * (plus(P, p) - plus(M, m)) + half * (plus(Q, q) - plus(M, m))
    step = plus(js, sign * mixed_term(K, a, b, log_m, Fraction(1, 2))) >= after
    return Statement([m == half * (p + q), js >= before], step)


def shares_add_up(K: Symbols) -> Statement:
    """Step of Σ(eᵢ/s) = Σeᵢ/s, where each probability is p = e/s; the base is 0 = 0/s."""
    total, shares, s, x = _reals(K, "total shares s x")
    e = K.exp(x)
    return Statement([s > 0, shares * s == total], plus(shares, e / s) * s == plus(total, e))


def whole_is_one(K: Symbols, missing: int = 0) -> Statement:
    """With s = Σe the probabilities sum to 1."""
    shares, s = _reals(K, "shares s")
    return Statement([s > 0, shares * s == s + missing], shares == 1)


def softmax_is_a_quotient(K: Symbols) -> Statement:
    """exp(x − m − ln s) = exp(x − m)/s, from exp(u − v)·exp(v) = exp(u)."""
    x, s = _reals(K, "x s")
    log_s = K.log(s)
    p, e = K.exp(x - log_s), K.exp(x)
    return Statement([s > 0, p * s == e], p == e / s)


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
            {"an entry left out": partial(whole_is_one, missing=1)},
        ),
    ]
