"""What one evaluation takes note of, and how a gradient report is made of it.

Three ways lead to a report. *Observed*: probes saw the gradients in the backward pass that training
ran anyway. *In the graph*: inside a compiled function or a functional transform, where there can be
no probe, each term's gradient was taken along with its value. *On demand*: neither has happened
yet, and the terms are differentiated one by one, down to the pipeline's inputs and no further.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from equipoise._edges import pulled, pulled_directly
from equipoise._errors import GradientError
from equipoise._gradients import Gradients, added, gram_matrix
from equipoise._numerics import total_norm
from equipoise._probes import alias, backward_pass, map_tensors, probe

Level = Literal["norms", "gram"]
Place = tuple[str, int]
"""Where a gradient is taken: at an input, and at which of its tensors."""

Number = float | Tensor
BASE = "base"
PASSED_BY = (
    "the graph is gone, and its backward pass began neither at the total nor at the penalty or base"
)


@dataclass(frozen=True, eq=False)
class Reading:
    """One term as it was evaluated: what is needed to differentiate it later."""

    weight: Number
    value: Tensor
    edges: Mapping[Place, GradientEdge]
    error: str | None


@dataclass(frozen=True, eq=False)
class Figures:
    """What is kept of the weighted gradients at one place: squared norms, or inner products."""

    names: tuple[str, ...]
    squares: Tensor  # one a term, and last that of the sum
    gram: Tensor | None

    @staticmethod
    def of(
        gradients: Mapping[str, Tensor], level: Level, scales: Sequence[Tensor] | None = None
    ) -> Figures:
        """Measure gradients that are all at hand, each without the factor it was scaled with."""
        vectors = [gradient.detach() for gradient in gradients.values()]
        if level == "gram":
            gram = gram_matrix(vectors)
            if scales is not None:
                by = torch.stack(list(scales)).to(gram.dtype)
                gram = gram / (by.unsqueeze(0) * by.unsqueeze(1))
            return Figures(tuple(gradients), torch.cat([gram.diagonal(), gram.sum()[None]]), gram)
        together = vectors[0]
        for vector in vectors[1:]:
            together = added(together, vector)
        return Figures.of_norms(gradients, [total_norm([v]) for v in (*vectors, together)])

    @staticmethod
    def of_norms(names: Mapping[str, object], norms: Sequence[Tensor]) -> Figures:
        """Norms of the terms' gradients, and last that of their sum."""
        wide = torch.float32 if norms[0].device.type == "mps" else torch.float64
        return Figures(tuple(names), torch.stack(list(norms)).to(wide).square(), None)


@dataclass(eq=False)
class Recorder:
    """The notes of one evaluation."""

    level: Level | None
    # Inside a compiled function or a functional transform, where there can be no probe.
    in_graph: bool = False
    readings: dict[str, Reading] = field(default_factory=dict)
    entries: dict[Place, GradientEdge | None] = field(default_factory=dict)
    figures: dict[Place, Figures] = field(default_factory=dict)
    # A base that came as a tensor passes no probe: the tensor, and its gradients if tracked.
    base: Tensor | None = None
    given: dict[Place, Tensor] = field(default_factory=dict)
    # What the user scaled base and terms with, for instance a gradient scaler; and in which
    # backward pass. Passes that do not come from the total say nothing of it.
    upstream: dict[bool, Tensor] = field(default_factory=dict)
    number: int = -1
    # Gradients taken in the graph, until they are measured.
    at_hand: dict[Place, dict[str, Tensor]] = field(default_factory=dict)
    # Norms, or gradients for a Gram matrix, until all terms have passed their place.
    passing: dict[Place, dict[str, Tensor]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    demanded: Gradients | None = None
    # The terms that a fast path took, and what it found along with their values.
    taken: set[str] = field(default_factory=set)
    known: dict[Place, Figures] = field(default_factory=dict)

    # In the forward pass

    def enter(self, name: str, x: Any) -> Any:  # noqa: ANN401
        """An input as all terms see it; its probe sees the sum of their gradients."""
        numbers, told = count(), self._weakly()

        def entered(tensor: Tensor) -> Tensor:
            place = (name, next(numbers))
            self.entries[place] = get_gradient_edge(tensor)
            if self.level is None:
                return alias(tensor)
            return probe(tensor, lambda gradient: told(Recorder._all_passed, place, gradient))

        return map_tensors(entered, x)

    def read(self, term: str, name: str, x: Any, edges: dict[Place, GradientEdge]) -> Any:  # noqa: ANN401
        """An input as one term sees it; its probe sees this term's gradient."""
        numbers, told = count(), self._weakly()

        def seen(tensor: Tensor) -> Tensor:
            place = (name, next(numbers))
            if self.level is None:
                tensor = alias(tensor)
            else:
                tensor = probe(tensor, lambda g: told(Recorder._passed, term, place, g))
            edges[place] = get_gradient_edge(tensor)
            return tensor

        return map_tensors(seen, x)

    def watch(self, x: Tensor, *, base: bool) -> Tensor:
        """The base, or the sum of the terms; its probe sees what the user scales it with."""
        if self.level is None or self.in_graph or not x.requires_grad:
            return alias(x)
        told = self._weakly()
        return probe(x, lambda gradient: told(Recorder._begun, gradient, base))

    def take_base(self, base: Tensor) -> None:
        """A base that came as a tensor: if tracked, one partial backward down to the inputs."""
        self.base = base
        if self.in_graph:
            self.errors[BASE] = (
                "a base that is already a tensor cannot be differentiated inside a compiled "
                "function or a functional transform; give it as a callable"
            )
        elif self.level is not None and base.requires_grad:
            try:
                self.given = pulled_directly(base, self._edges())
            except RuntimeError as error:
                self.errors[BASE] = str(error).splitlines()[0]

    def _edges(self) -> dict[Place, GradientEdge]:
        return {place: edge for place, edge in self.entries.items() if edge is not None}

    def measure(self) -> None:
        """Turn the gradients taken in the graph into figures."""
        if self.level is not None:
            self.figures = {p: Figures.of(g, self.level) for p, g in self.at_hand.items()}
            self.at_hand = {}

    # In the backward pass

    def _weakly(self) -> Callable[..., None]:
        """Tells this recorder something, if it is still there.

        The graph must not hold what holds the graph: nothing would ever free it.
        """
        there = weakref.ref(self)

        def told(what: Callable[..., None], *of: Any) -> None:  # noqa: ANN401
            recorder = there()
            if recorder is not None:
                what(recorder, *of)

        return told

    def _begun(self, gradient: Tensor, base: bool) -> None:
        if self.number != backward_pass():
            self.number, self.upstream = backward_pass(), {}
        self.upstream[base] = gradient

    def _passed(self, term: str, place: Place, gradient: Tensor) -> None:
        kept = gradient if self.level == "gram" else total_norm([gradient])
        self.passing.setdefault(place, {})[term] = kept

    def _all_passed(self, place: Place, gradient: Tensor) -> None:
        passed: dict[str, Any] = self.passing.pop(place, {})
        if self.number != backward_pass() or not passed:
            return  # a part was differentiated by itself, or a gradient was
        scales = [self._scale(term) for term in passed]
        base = self.given.get(place)
        if base is not None:
            scales.append(torch.ones_like(scales[0]))
        if self.level == "gram":
            vectors = passed if base is None else {**passed, BASE: base}
            self.figures[place] = Figures.of(vectors, "gram", scales)
            return
        norms = [norm / scale.abs() for norm, scale in zip(passed.values(), scales, strict=False)]
        known = self.known.get(place)
        if known is not None:
            passed = {**passed, **dict.fromkeys(known.names)}
            norms += known.squares[: len(known.names)].sqrt().unbind()
        if base is None:
            norms.append(total_norm([gradient]) / scales[0].abs())
        else:
            passed = {**passed, BASE: base}
            norms += [total_norm([base]), total_norm([added(gradient / scales[0], base)])]
        self.figures[place] = Figures.of_norms(passed, norms)

    def _scale(self, term: str) -> Tensor:
        some = next(iter(self.upstream.values()))
        return self.upstream.get(term == BASE, some)

    # Afterwards

    def report(self) -> Gradients:
        """What was observed; or, if no backward pass has run, what it would have shown."""
        if not self.readings and self.base is None:
            raise GradientError(
                "there is no gradient to report, got an evaluation without any term. "
                "Use `enable`, or a base."
            )
        if not any(self.entries):
            raise GradientError(
                "gradients are taken at inputs that require grad, got none (or `torch.no_grad`). "
                "Use `.requires_grad_()` on what the model computes, or `track=False`."
            )
        if self.in_graph and self.level is None:
            raise GradientError(
                "a compiled function or a functional transform takes gradients along with the "
                "values, got track=False. Use `track='norms'`."
            )
        moving = {name for name, reading in self.readings.items() if reading.error is None}
        if self.known and self.taken >= moving:
            return self._gradients(self.known, {})
        if self.figures or self.upstream or self.in_graph:
            self.figures = {**self.known, **self.figures}
            alone = {place: g for place, g in self.given.items() if place not in self.figures}
            level = self.level or "norms"
            self.figures.update({p: Figures.of({BASE: g}, level) for p, g in alone.items()})
            return self._gradients(self.figures, {})
        if self.demanded is None:
            self.demanded = self._demand()
        return self.demanded

    def _demand(self) -> Gradients:
        vectors: dict[Place, dict[str, Tensor]] = {}
        errors: dict[str, str] = {}
        terms: dict[str, tuple[Tensor, Mapping[Place, GradientEdge], Number]] = {
            name: (r.value, r.edges, r.weight) for name, r in self.readings.items() if not r.error
        }
        if self.base is not None and self.base.requires_grad:
            terms[BASE] = (self.base, self._edges(), 1.0)
        for name, (value, edges, weight) in terms.items():
            try:
                found = (pulled_directly if name == BASE else pulled)(value, edges)
            except RuntimeError as error:
                gone = "second time" in str(error)
                if gone and self.level is None:
                    raise GradientError(
                        "the graph is gone after the backward pass, and no gradient was observed "
                        "in it, got track=False. Use `track='norms'`, or ask before `backward()`."
                    ) from error
                errors[name] = PASSED_BY if gone else str(error).splitlines()[0]
                continue
            for place, gradient in found.items():
                vectors.setdefault(place, {})[name] = weight * gradient
        level = self.level or "gram"
        return self._gradients({p: Figures.of(v, level) for p, v in vectors.items()}, errors)

    def _gradients(self, figures: Mapping[Place, Figures], errors: Mapping[str, str]) -> Gradients:
        weights = {name: reading.weight for name, reading in self.readings.items()}
        reasons: dict[str, str] = {}
        for name, reading in self.readings.items():
            if reading.error is not None:
                reasons[name] = reading.error
        if self.base is not None:
            weights = {BASE: 1.0, **weights}
        measured = {name for at in figures.values() for name in at.names}
        for name, weight in weights.items():
            if name not in measured:
                reasons.setdefault(
                    name,
                    "its value does not depend on an input that requires grad, "
                    "or the backward pass left it out",
                )
            if isinstance(weight, int | float) and weight == 0:
                reasons[name] = "its weight is 0, so that no gradient flows"
        report = Gradients(
            names=tuple(weights),
            inputs=tuple(dict.fromkeys(name for name, _ in self.entries)),
            weights=tuple(weights.values()),
            errors={**reasons, **errors, **self.errors},
            squares=torch.zeros(0),
        )
        report = filled(report, figures)
        if errors or self.errors:  # then their sum is not known either
            squares = report.squares
            unknown = torch.full_like(squares[:, -1:], math.nan)
            report = replace(report, squares=torch.cat([squares[:, :-1], unknown], 1))
        return report


def filled(report: Gradients, figures: Mapping[Place, Figures]) -> Gradients:
    """The report with the figures of all places, added up by input."""
    if not figures:
        nothing = torch.zeros(len(report.inputs), len(report.names) + 1, dtype=torch.float64)
        return replace(report, squares=nothing)
    some = next(iter(figures.values())).squares
    size = len(report.names)
    squares = [[some.new_zeros(()) for _ in range(size + 1)] for _ in report.inputs]
    grams = [[[some.new_zeros(())] * size for _ in range(size)] for _ in report.inputs]
    for (name, _), at in figures.items():
        row = report.inputs.index(name)
        columns = [report.names.index(term) for term in at.names]
        for column, square in zip((*columns, size), at.squares.to(some.device), strict=True):
            squares[row][column] = squares[row][column] + square
        if at.gram is not None:
            for i, line in zip(columns, at.gram.to(some.device), strict=True):
                for j, product in zip(columns, line, strict=True):
                    grams[row][i][j] = grams[row][i][j] + product
    report = replace(report, squares=torch.stack([torch.stack(line) for line in squares]))
    if any(at.gram is None for at in figures.values()):
        return report
    return replace(
        report, grams=torch.stack([torch.stack([torch.stack(r) for r in m]) for m in grams])
    )
