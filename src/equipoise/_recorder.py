"""What one evaluation takes note of, and how a gradient report is made of it.

Three ways lead to a report. *Observed*: probes saw the gradients in the backward pass that training
ran anyway. *In the graph*: inside a compiled function or a functional transform, where there can be
no probe, each term's gradient was taken along with its value. *On demand*: neither has happened
yet, and the terms are differentiated one by one, down to the pipeline's inputs and no further.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from equipoise._edges import pulled, pulled_directly, reached
from equipoise._errors import GradientError, in_short
from equipoise._figures import Figures, filled, unmeasured
from equipoise._gradients import Gradients, added
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
NO_GRAPH = "its value has no graph: something in it is detached or not differentiable"


@dataclass(frozen=True, eq=False)
class Reading:
    """One term as it was evaluated: what is needed to differentiate it later."""

    weight: Number
    value: Tensor
    edges: Mapping[Place, GradientEdge]
    error: str | None


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
    # The same of the last backward pass.
    unmeasured: dict[str, str] = field(default_factory=dict)
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
            return probe(tensor, lambda gradient: told(Recorder._all_passed, gradient, place))

        return map_tensors(entered, x)

    def read(self, term: str, name: str, x: Any, edges: dict[Place, GradientEdge]) -> Any:  # noqa: ANN401
        """An input as one term sees it; its probe sees this term's gradient."""
        numbers, told = count(), self._weakly(term)

        def seen(tensor: Tensor) -> Tensor:
            place = (name, next(numbers))
            if self.level is None:
                tensor = alias(tensor)
            else:
                tensor = probe(tensor, lambda g: told(Recorder._passed, g, term, place))
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
            except Exception as error:  # noqa: BLE001 -- a report never stops the training
                self.errors[BASE] = in_short(error)

    def _edges(self) -> dict[Place, GradientEdge]:
        """Where a base that is a tensor reads: a tensor under two names is read at the first."""
        first: dict[Hashable, tuple[Place, GradientEdge]] = {}
        for place, edge in self.entries.items():
            if edge is not None:
                first.setdefault((edge.node, edge.output_nr), (place, edge))
        return dict(first.values())

    def measure(self) -> None:
        """Turn the gradients taken in the graph into figures."""
        if self.level is not None:
            self.figures = {p: Figures.of(g, self.level) for p, g in self.at_hand.items()}
            self.at_hand = {}

    # In the backward pass

    def _weakly(self, term: str | None = None) -> Callable[..., None]:
        """Tells this recorder something, if it is still there.

        The graph must not hold what holds the graph: nothing would ever free it. What cannot be
        measured is an error of the term, or of all of them, and never one of the training.
        """
        there = weakref.ref(self)

        def told(what: Callable[..., None], gradient: Tensor, *of: Any) -> None:  # noqa: ANN401
            recorder = there()
            if recorder is None:
                return
            try:
                what(recorder, gradient.detach(), *of)
            except Exception as error:  # noqa: BLE001
                names = recorder.readings if term is None else [term]
                recorder.unmeasured.update(dict.fromkeys(names, in_short(error)))

        return told

    def _begun(self, gradient: Tensor, base: bool) -> None:
        if self.number != backward_pass():
            self.number, self.upstream = backward_pass(), {}
            self.figures, self.unmeasured = {}, {}
        self.upstream[base] = gradient

    def _passed(self, gradient: Tensor, term: str, place: Place) -> None:
        kept = gradient if self.level == "gram" else total_norm([gradient])
        self.passing.setdefault(place, {})[term] = kept

    def _all_passed(self, gradient: Tensor, place: Place) -> None:
        passed: dict[str, Any] = self.passing.pop(place, {})
        if self.number != backward_pass() or not passed:
            return  # a part was differentiated by itself, or a gradient was
        # The parameters of a model may lie on several devices, and the total on one of them.
        scales = [self._scale(term).to(gradient.device) for term in passed]
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
            return self._gradients(self.known, {}, self.level or "norms")
        if self.figures or self.upstream or self.in_graph:
            self.figures = {**self.known, **self.figures}
            alone = {place: g for place, g in self.given.items() if place not in self.figures}
            level = self.level or "norms"
            self.figures.update({p: Figures.of({BASE: g}, level) for p, g in alone.items()})
            return self._gradients(self.figures, self._cut_short(), level)
        if self.demanded is None:
            self.demanded = self._demand()
        return self.demanded

    def _cut_short(self) -> dict[str, str]:
        """The terms that were seen at some inputs only, as with `backward(inputs=...)`."""
        errors = {}
        for name, reading in self.readings.items():
            seen = {place for place, at in self.figures.items() if name in at.names}
            if not seen or seen >= reading.edges.keys():
                continue
            left_out = [p for p in reached(reading.value, reading.edges) if p not in seen]
            if left_out:
                names = ", ".join(dict.fromkeys(repr(key) for key, _ in left_out))
                errors[name] = f"the backward pass ended before it came to the input {names}"
        return errors

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
            except Exception as error:
                gone = "second time" in str(error)
                if gone and self.level is None:
                    raise GradientError(
                        "the graph is gone after the backward pass, and no gradient was observed "
                        "in it, got track=False. Use `track='norms'`, or ask before `backward()`."
                    ) from error
                errors[name] = PASSED_BY if gone else in_short(error)
                continue
            for place, gradient in found.items():
                vectors.setdefault(place, {})[name] = weight * gradient
        level = self.level or "gram"
        figures = {place: Figures.of(found, level) for place, found in vectors.items()}
        return self._gradients(figures, errors, level)

    def _gradients(
        self, figures: Mapping[Place, Figures], errors: Mapping[str, str], level: Level
    ) -> Gradients:
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
        failed = {**errors, **self.errors, **self.unmeasured}
        report = Gradients(
            names=tuple(weights),
            inputs=tuple(dict.fromkeys(name for name, _ in self.entries)),
            weights=tuple(w.detach() if isinstance(w, Tensor) else w for w in weights.values()),
            errors={**reasons, **failed},
            squares=unmeasured(self._device()),
        )
        report = filled(report, figures, level)
        if failed:  # then their sum is not known either
            squares = report.squares
            unknown = torch.full_like(squares[:, -1:], math.nan)
            report = replace(report, squares=torch.cat([squares[:, :-1], unknown], 1))
        return report

    def _device(self) -> torch.device:
        values = (reading.value for reading in self.readings.values())
        some = next(values, self.base)
        return torch.device("cpu") if some is None else some.device
