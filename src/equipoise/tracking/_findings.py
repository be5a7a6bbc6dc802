"""What looks wrong in a series of gradient reports: one rule a fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from equipoise._recorder import NO_GRAPH

Kind = Literal["conflict", "dead", "dominated", "empty", "exploding", "weightless"]

DOMINATED = 100.0
"""A term this many times below the largest hardly moves the model."""
CONFLICT = -0.1
"""Below this cosine two terms pull against each other."""
OFTEN = 0.9
"""In this part of the steps a conflict is no accident."""
EXPLODING = 10.0
"""A norm this many times above its median has exploded."""


@dataclass(frozen=True)
class Step:
    """One step's figures on the host, by term and by pair of terms."""

    values: Mapping[str, float]
    weights: Mapping[str, float]
    norms: Mapping[str, float]
    cosines: Mapping[tuple[str, str], float]
    detached: Mapping[str, float]
    """1 for each term whose value had no graph, though an input required grad."""


@dataclass(frozen=True)
class Finding:
    """Something to look at: what, in which term, in words, and the numbers behind it."""

    kind: Kind
    term: str
    message: str
    threshold: float
    window: int
    evidence: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.term}: {self.message}"


def column(steps: Sequence[Step], figure: str, name: str) -> list[float]:
    """One term's figure over the steps that have it."""
    found: Iterator[Mapping[str, float]] = (getattr(step, figure) for step in steps)
    return [figures[name] for figures in found if name in figures]


def mean_norm(steps: Sequence[Step], name: str) -> float:
    """A term's mean norm over all steps, 0 in those in which it was left out or weighed nothing.

    A lazy term has n times its weight at every n-th step: only so is it compared with the others.
    """
    norms = column(steps, "norms", name)
    idle = sum(step.weights.get(name, 0.0) == 0 for step in steps if name not in step.norms)
    return mean([*norms, *[0.0] * idle])


def terms(steps: Sequence[Step]) -> list[str]:
    """All terms of these steps, in order."""
    return list(dict.fromkeys(name for step in steps for name in step.values))


def findings(steps: Sequence[Step]) -> list[Finding]:
    """Everything that looks wrong."""
    return [finding for rule in RULES for finding in rule(steps)]


def weightless(steps: Sequence[Step]) -> Iterator[Finding]:
    """A term whose weight is 0 throughout."""
    for name in terms(steps):
        weights = column(steps, "weights", name)
        if not any(weights):
            yield Finding(
                kind="weightless",
                term=name,
                message=f"its weight was 0 in all {len(weights)} steps",
                threshold=0.0,
                window=len(weights),
                evidence={"largest weight": 0.0},
            )


def motionless(steps: Sequence[Step]) -> Iterator[Finding]:
    """A term without any gradient: dead, or with nothing to look at."""
    for name in terms(steps):
        norms, values = column(steps, "norms", name), column(steps, "values", name)
        if not norms or any(norms) or not any(column(steps, "weights", name)):
            continue
        empty = not any(values)
        yield Finding(
            kind="empty" if empty else "dead",
            term=name,
            message=(
                f"value and gradient were 0 in all {len(norms)} steps, as with an empty mask"
                if empty
                else f"its gradient was 0 in all {len(norms)} steps"
            ),
            threshold=0.0,
            window=len(norms),
            evidence={"largest norm": 0.0, "mean value": mean(values)},
        )


def detached(steps: Sequence[Step]) -> Iterator[Finding]:
    """A term that has no gradient at all, not even 0, and that not on purpose."""
    for name in terms(steps):
        lost = column(steps, "detached", name)
        if lost and not column(steps, "norms", name):
            yield Finding(
                kind="dead",
                term=name,
                message=f"{NO_GRAPH}, in all {len(lost)} steps",
                threshold=0.0,
                window=len(lost),
                evidence={"steps without a graph": math.fsum(lost)},
            )


def dominated(steps: Sequence[Step]) -> Iterator[Finding]:
    """A term far below the largest one."""
    means = {name: mean_norm(steps, name) for name in terms(steps)}
    finite = {name: size for name, size in means.items() if math.isfinite(size)}
    top = max(finite, key=lambda name: finite[name], default="")
    for name, size in finite.items():
        if size > 0 and finite[top] > DOMINATED * size:
            yield Finding(
                kind="dominated",
                term=name,
                message=(
                    f"{finite[top] / size:.3g}× below {top} on average, and hardly moves the model"
                ),
                threshold=DOMINATED,
                window=len(steps),
                evidence={"mean norm": size, f"mean norm of {top}": finite[top]},
            )


def conflicting(steps: Sequence[Step]) -> Iterator[Finding]:
    """Two terms that pull against each other nearly always."""
    for first, second in combinations(terms(steps), 2):
        pair = [s.cosines[first, second] for s in steps if (first, second) in s.cosines]
        against = [cosine for cosine in pair if cosine < CONFLICT]
        typical = mean([cosine for cosine in pair if math.isfinite(cosine)])
        if pair and len(against) >= OFTEN * len(pair):
            yield Finding(
                kind="conflict",
                term=first,
                message=(
                    f"pulls against {second} in {len(against)} of {len(pair)} steps, mean cosine "
                    f"{typical:.2f}"
                ),
                threshold=CONFLICT,
                window=len(pair),
                evidence={"mean cosine": typical, "part of steps": len(against) / len(pair)},
            )


def exploding(steps: Sequence[Step]) -> Iterator[Finding]:
    """A term whose last norm is far above its median, or not finite."""
    for name in terms(steps):
        norms = column(steps, "norms", name)
        usual = median([norm for norm in norms if math.isfinite(norm)])
        # One that is not finite has exploded, also in the first step. Of a finite one that can be
        # said only where the others are not all 0.
        if norms and (not math.isfinite(norms[-1]) or 0 < EXPLODING * usual < norms[-1]):
            yield Finding(
                kind="exploding",
                term=name,
                message=f"its norm is {norms[-1]:.3g}, with a median of {usual:.3g}",
                threshold=EXPLODING,
                window=len(norms),
                evidence={"last norm": norms[-1], "median norm": usual},
            )


RULES: tuple[Callable[[Sequence[Step]], Iterator[Finding]], ...] = (
    exploding,
    motionless,
    detached,
    weightless,
    dominated,
    conflicting,
)


def mean(numbers: Sequence[float]) -> float:
    """The mean, 0 of nothing. The module `statistics` would take longer to import than all this."""
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def median(numbers: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle; 0 of nothing."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return mean(
        ordered[middle : middle + 1] if len(ordered) % 2 else ordered[middle - 1 : middle + 1]
    )
