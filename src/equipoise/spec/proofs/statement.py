"""Statements about all real numbers, and how they are proved, tried for emptiness, and refuted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from equipoise.spec.symbols import Real, Symbols

Verdict = Literal["proved", "refuted", "unknown"]
MILLISECONDS = 20_000


@dataclass(frozen=True)
class Statement:
    """What follows from what."""

    hypotheses: Sequence[Real]
    conclusion: Real
    base: Statement | None = None
    """Where this is the step of an induction: what it starts from."""


Lemma = Callable[[Symbols], Statement]


def induction(
    K: Symbols,
    holds: Callable[..., Real],
    sums: Sequence[Real],
    longer: Sequence[Real],
    given: Sequence[Real] = (),
) -> Statement:
    """``holds`` of sums of nothing, and of sums with one term more if it holds of those before."""
    nothing = [K.const(0) for _ in sums]
    base = Statement(given, holds(*nothing))
    return Statement([*given, holds(*sums)], holds(*longer), base)


@dataclass(frozen=True)
class Theorem:
    """A claim, the lemmas it consists of, and faulty versions of them that must be refuted."""

    claim: str
    lengths: str
    lemmas: Sequence[Lemma]
    mutants: Mapping[str, Lemma] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """What is wrong with the proof, nothing if it stands."""
        found = []
        for lemma in self.lemmas:
            name = name_of(lemma)
            if not satisfiable(lemma):
                found.append(f"{name}: no numbers satisfy the hypotheses")
            if (verdict := judge(lemma)) != "proved":
                found.append(f"{name}: {verdict}")
        for name, mutant in self.mutants.items():
            if (verdict := judge(mutant)) != "refuted":
                found.append(f"mutant with {name}: {verdict}")
        return found


def judge(lemma: Lemma) -> Verdict:
    """Whether the conclusion holds for all numbers that satisfy the hypotheses, the base too."""
    K, statement = _stated(lemma)
    parts = [statement] if statement.base is None else [statement.base, statement]
    answers = {_solve(K, [*p.hypotheses, *K.facts, K.z3.Not(p.conclusion)]) for p in parts}
    if "sat" in answers:
        return "refuted"
    return "proved" if answers == {"unsat"} else "unknown"


def satisfiable(lemma: Lemma) -> bool:
    """Whether any numbers satisfy the hypotheses: a proof from nothing proves nothing."""
    K, statement = _stated(lemma)
    return _solve(K, [*statement.hypotheses, *K.facts]) == "sat"


def name_of(lemma: Lemma) -> str:
    """The function that states it."""
    inner = getattr(lemma, "func", lemma)
    return str(inner.__name__).replace("_", " ")


def _stated(lemma: Lemma) -> tuple[Symbols, Statement]:
    K = Symbols()
    return K, lemma(K)


def _solve(K: Symbols, assertions: Sequence[Real]) -> str:
    solver = K.z3.Solver()
    solver.set("timeout", MILLISECONDS)
    solver.add(*assertions)
    return str(solver.check())
