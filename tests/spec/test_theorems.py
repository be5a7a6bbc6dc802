"""The theorems stand, their mutants fall, and the code that is proved is the code that is run."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from equipoise import spec
from equipoise.spec import rechecks
from equipoise.spec.claims import Claim, proved
from equipoise.spec.divergence import kl_gap, kl_term
from equipoise.spec.magnitude import elastic_term
from equipoise.spec.percentile import rank
from equipoise.spec.proofs import (
    clamping,
    clipping,
    divergence,
    percentiles,
    sizes,
    summation,
    tracking,
)
from equipoise.spec.proofs.statement import Statement, Theorem, induction, judge
from equipoise.spec.scalars import plus
from equipoise.spec.sums import magnitude, square
from equipoise.spec.symbols import Symbols
from equipoise.spec.tracking import gram_form, signed_shares, total_gradient
from equipoise.spec.uncertainty import entropy_term

AREAS = (clipping, clamping, percentiles, sizes, divergence, tracking, summation)
THEOREMS = [theorem for area in AREAS for theorem in area.theorems()]


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda theorem: theorem.claim)
def test_the_theorem_stands_and_its_mutants_fall(theorem: Theorem) -> None:
    """Every lemma is proved from hypotheses that can be satisfied; every mutant is refuted."""
    assert theorem.faults() == []
    assert theorem.mutants


def test_the_axiom_is_proved() -> None:
    """The logarithm lies below its tangent at 1; the one thing that is assumed of it."""
    assert rechecks.axiom() == []


def test_every_theorem_is_claimed() -> None:
    """The table of claims has each theorem, and the axiom before them."""
    claimed: list[Claim] = proved()
    assert [claim.statement for claim in claimed[1:]] == [theorem.claim for theorem in THEOREMS]


def test_faulty_proofs_are_seen() -> None:
    """No hypothesis can be, the statement is false, or its base, or a mutant is true: all told."""

    def empty(K: Symbols) -> Statement:
        return Statement([K.real("x") > K.real("x")], K.real("x") > 0)

    def false(K: Symbols) -> Statement:
        return Statement([], K.real("x") > 0)

    def baseless(K: Symbols) -> Statement:
        S, x = K.real("S"), K.real("x")
        return induction(K, lambda S: S >= 1, [S], [S + x * x])

    def stepless(K: Symbols) -> Statement:
        S, x = K.real("S"), K.real("x")
        return induction(K, lambda S: S >= 0, [S], [S + x])

    def true(K: Symbols) -> Statement:
        return Statement([], K.real("x") * K.real("x") >= 0)

    assert Theorem("", "", [empty]).faults() == ["empty: no numbers satisfy the hypotheses"]
    assert Theorem("", "", [false]).faults() == ["false: refuted"]
    assert Theorem("", "", [baseless]).faults() == ["baseless: refuted"]
    assert Theorem("", "", [stepless]).faults() == ["stepless: refuted"]
    assert Theorem("", "", [true], {"nothing": true}).faults() == ["mutant with nothing: proved"]
    assert Theorem("", "", [true], {"a sign": false}).faults() == []


@pytest.mark.parametrize("n", percentiles.LENGTHS)
def test_the_percentages_of_the_proofs_have_every_rank(n: int) -> None:
    """So that what is proved for these four is proved for all percentages."""
    ranks = {rank(n, pct) for pct in percentiles.PERCENTS}
    assert ranks == {rank(n, Fraction(pct, 8)) for pct in range(801)} == set(range(n))


Fold = tuple[Callable[[Symbols, list[Any]], Any], Callable[[Symbols, Any], Any]]
FOLDS: dict[str, Fold] = {
    "l1": (spec.l1, magnitude),
    "l2": (spec.l2, square),
    "elastic_net": (
        spec.elastic_net,
        lambda K, x: elastic_term(K, x, K.const(1) / 2, K.const(1) / 2),
    ),
    "entropy": (lambda K, xs: spec.entropy(K, [xs]), entropy_term),
    "kl": (
        lambda K, xs: spec.kl_divergence(K, [xs], [[x + 1 for x in xs]]),
        lambda K, x: kl_term(K, x, x + 1),
    ),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_sum_is_the_fold_of_its_terms(name: str) -> None:
    """Of none it is 0, and one entry more adds its term: what the inductions speak of."""
    total, term = FOLDS[name]

    def grows(K: Symbols, n: int) -> Statement:
        xs = K.reals("x", n + 1)
        return Statement([], total(K, xs) == plus(total(K, xs[:-1]), term(K, xs[-1])))

    assert judge(lambda K: Statement([], total(K, []) == 0)) == "proved"
    for n in range(4):
        assert judge(partial(grows, n=n)) == "proved"


def test_the_runtime_form_of_a_divergence_has_the_proved_terms() -> None:
    """Between normalised rows the definition's sum is that of the gaps."""

    def same(K: Symbols) -> Statement:
        a, b = K.reals("a", 2), K.reals("b", 2)
        gaps = K.sum(kl_gap(K, x, y) for x, y in zip(a, b, strict=True))
        terms = [kl_term(K, x, y) for x, y in zip(a, b, strict=True)]
        whole = K.sum([*terms, *(K.exp(y) for y in b), *(-K.exp(x) for x in a)])
        return Statement([], gaps == whole)

    assert judge(same) == "proved"


def test_clipping_uses_the_factor_that_is_proved() -> None:
    """Each entry times the factor of the sum of squares."""

    def same(K: Symbols) -> Statement:
        g, m = K.reals("g", 3), K.const(2)
        S = g[0] * g[0] + g[1] * g[1] + g[2] * g[2]
        out = spec.clip_by_global_norm(K, g, 2)
        # Both roots are of S and not negative, so they are one.
        K.facts.append(m * m < S)
        return Statement(
            [], K.z3.And(*(y * y * S == x * x * m * m for x, y in zip(g, out, strict=True)))
        )

    assert judge(same) == "proved"


def test_tracking_of_lists_is_what_is_proved() -> None:
    """For two terms and two entries: shares sum to 1 and the norm is the Gram matrix's form."""

    def shares(K: Symbols) -> Statement:
        w, g = K.reals("w", 2), [K.reals("g", 2), K.reals("h", 2)]
        total = total_gradient(K, w, g)
        some = total[0] * total[0] + total[1] * total[1] > 0
        return Statement([some], K.sum(signed_shares(K, w, g)) == 1)

    def form(K: Symbols) -> Statement:
        w, g = K.reals("w", 2), [K.reals("g", 2), K.reals("h", 2)]
        gram = [[K.sum(x * y for x, y in zip(a, b, strict=True)) for b in g] for a in g]
        total = total_gradient(K, w, g)
        return Statement([], gram_form(K, w, gram) == K.sum(x * x for x in total))

    assert judge(shares) == "proved"
    assert judge(form) == "proved"
