"""Evaluating terms, once: aliases in, values out, added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from equipoise._context import compiling, inside_transform, whole
from equipoise._errors import InputError, InputTypeError, OptionError
from equipoise._evaluation import Evaluation, Number, TermResult
from equipoise._finite import check_finite
from equipoise._inputs import keys_of
from equipoise._probes import Gate, alias, map_tensors, real_floating, tensors_in
from equipoise._recorder import BASE, NO_GRAPH, Level, Place, Reading, Recorder
from equipoise._term import Term, in_term, weight_at
from equipoise.fast._ahead import Joined
from equipoise.fast._take import take

if TYPE_CHECKING:
    from equipoise.fast._compiler import Compiler

Metrics = Mapping[str, Number]
Edges = Mapping[Place, GradientEdge]


@dataclass(frozen=True)
class Call:
    """One term, with the weight and the options it has this time."""

    name: str
    term: Term
    weight: Number
    options: Mapping[str, Any]

    @property
    def keys(self) -> tuple[str, ...]:
        """The inputs it reads."""
        return keys_of(self.term)

    def value(self, arguments: list[Any]) -> tuple[Tensor, Metrics]:
        """The penalty's value, checked, and its metrics."""
        if self.term.differentiable:
            returned = self.term.penalty(*arguments, **self.options)
        else:
            with torch.no_grad():
                returned = self.term.penalty(*arguments, **self.options)
        parts = returned if isinstance(returned, tuple) and returned else (returned,)
        value, metrics = (*parts, {})[:2]
        if len(parts) > 2 or not isinstance(value, Tensor) or not isinstance(metrics, Mapping):
            raise InputTypeError(
                f"the term {self.name!r} must return a scalar tensor, or that and a mapping of "
                f"metrics, got {', '.join(type(part).__name__ for part in parts)}. Use a function "
                "that returns the loss alone, as a tensor."
            )
        return self._scalar("", value), {key: self._metric(key, m) for key, m in metrics.items()}

    def _metric(self, key: object, metric: object) -> Number:
        if isinstance(metric, Tensor):
            return self._scalar(f" as metric {key!r}", metric)
        if not isinstance(metric, int | float):
            raise InputTypeError(
                f"the term {self.name!r} must return numbers as metrics, got "
                f"{type(metric).__name__} as {key!r}. Use `float(...)`, or leave it out."
            )
        return metric

    def _scalar(self, what: str, x: Tensor) -> Tensor:
        if x.is_complex():
            raise InputTypeError(
                f"the term {self.name!r} must return a real number{what}, got {x.dtype}. "
                "Use `.abs()` or `.real`."
            )
        if x.numel() != 1:
            raise InputError(
                f"the term {self.name!r} must return a scalar{what}, got shape {tuple(x.shape)}. "
                "Use reduction='mean', or `.sum()`."
            )
        return whole(x).reshape(())

    def result(self, value: Tensor, metrics: Metrics) -> TermResult:
        """The value with its weight."""
        counted = value
        if self.term.nan_policy == "skip":
            # Before it is weighed: a weight that learns would get NaN from it.
            counted = torch.where(value.isfinite(), value, 0.0)
        contribution = counted if self.name == BASE else self.weight * counted
        if not isinstance(self.weight, Tensor) and self.weight == 0:
            # 0 · value would be NaN where the value is infinite. It stays in the graph, for data
            # parallelism waits for every parameter's gradient.
            contribution = value.reshape(1)[:0].sum()
        return TermResult(self.name, value, self.weight, contribution, metrics)

    def reading(self, value: Tensor, edges: Edges, *, some_input: bool) -> Reading:
        """The value with the reason why it has no gradient, if it has none."""
        error = None
        if not self.term.differentiable:
            error = "it is marked differentiable=False"
        elif not some_input:
            error = "none of its inputs requires grad"
        elif not value.requires_grad:
            error = NO_GRAPH
        return Reading(self.weight, value, edges, error)


def run(
    terms: Mapping[str, Term],
    inputs: Mapping[str, Any],
    *,
    base: Tensor | None,
    step: int | None,
    level: Level | None,
    overrides: Mapping[str, Mapping[str, Any]],
    compiler: Compiler | None = None,
) -> Evaluation:
    """Evaluate the terms on the inputs and add them up."""
    recorder = Recorder(level, in_graph=compiling() or inside_transform())
    read = {key for term in terms.values() for key in keys_of(term)}
    seen = {key: x for key, x in inputs.items() if key in read or base is not None}
    if recorder.in_graph:
        # The argument of a compiled `torch.func.grad` claims to require no grad; an alias does not.
        seen = {key: map_tensors(alias, x, where=real_floating) for key, x in seen.items()}
    else:
        seen = {key: recorder.enter(key, x) for key, x in seen.items()}
    calls = {name: _call(name, term, step, overrides) for name, term in terms.items()}
    joined = take(calls, seen, recorder, base=base, compiler=compiler)
    results = {} if joined is None else dict(joined.results)
    for name, call in calls.items():
        if name in results:
            continue
        with in_term(name):
            evaluate = _in_graph if recorder.in_graph else _probed
            results[name] = evaluate(recorder, call, seen)
    if recorder.in_graph:
        recorder.measure()
    return _added_up({name: results[name] for name in calls}, inputs, base, recorder, joined)


def _call(
    name: str, term: Term, step: int | None, overrides: Mapping[str, Mapping[str, Any]]
) -> Call:
    options = {**term.options, **overrides.get(name, {})}
    with in_term(name):
        weight = weight_at(name, term, step)
    if isinstance(weight, Tensor):
        weight = weight.clone()  # an optimizer may change it before it is reported
    return Call(name, term, weight, options)


def _probed(recorder: Recorder, call: Call, inputs: Mapping[str, Any]) -> TermResult:
    """The usual way: the term reads aliases of its own, and backward shows its gradient."""
    edges: dict[Place, GradientEdge] = {}
    policy, gate = call.term.nan_policy, Gate()
    # One alias an input, however many arguments it is: its gradient is seen whole.
    keys = dict.fromkeys(call.keys)
    own = {key: recorder.read(call.name, key, inputs[key], edges) for key in keys}
    arguments = [own[key] for key in call.keys]
    if policy == "skip":
        arguments = [map_tensors(gate.alias, argument) for argument in arguments]
    value, metrics = call.value(arguments)
    if policy == "skip":
        gate.open = value.detach().isfinite()
    elif policy == "raise":
        check_finite(value, name=call.name)
    recorder.readings[call.name] = call.reading(value, edges, some_input=bool(edges))
    return call.result(value, metrics)


def _in_graph(recorder: Recorder, call: Call, inputs: Mapping[str, Any]) -> TermResult:
    """Inside a compiled function or a transform: the gradient is taken along with the value."""
    if call.term.nan_policy != "propagate":
        raise OptionError(
            f"`nan_policy` of {call.name!r} must be 'propagate' inside a compiled function "
            f"or a functional transform, got {call.term.nan_policy!r}. Use "
            "`pipeline.with_nan_policy('propagate')` there."
        )
    keys = list(dict.fromkeys(call.keys))
    places: list[Place] = []
    tensors: list[Tensor] = []
    for key in keys:
        found = tensors_in(inputs[key])
        tensors += found
        places += [(key, number) for number in range(len(found))]
    recorder.entries.update(dict.fromkeys(places))
    if recorder.level is None or not tensors or not call.term.differentiable:
        value, metrics = call.value([inputs[key] for key in call.keys])
        recorder.readings[call.name] = call.reading(value, {}, some_input=len(tensors) > 0)
        return call.result(value, metrics)
    plain: dict[str, Number] = {}
    errors: list[str | None] = []

    def value_of(*moved: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        remaining = iter(moved)
        own = {key: map_tensors(lambda _: next(remaining), inputs[key]) for key in keys}
        value, metrics = call.value([own[key] for key in call.keys])
        plain.update({k: m for k, m in metrics.items() if not isinstance(m, Tensor)})
        # Only in here it can be seen whether the value has a graph.
        errors.append(call.reading(value, {}, some_input=True).error)
        if not value.is_floating_point():  # as it will be once it is weighted
            value = value.to(torch.get_default_dtype())
        return value, {k: m for k, m in metrics.items() if isinstance(m, Tensor)}

    value, pull, measured = torch.func.vjp(value_of, *tensors, has_aux=True)  # type: ignore[misc]
    for place, gradient in zip(places, pull(torch.ones_like(value)), strict=True):
        recorder.at_hand.setdefault(place, {})[call.name] = call.weight * gradient.detach()
    recorder.readings[call.name] = Reading(call.weight, value, {}, errors[0])
    return call.result(value, {**plain, **measured})


def _added_up(
    results: dict[str, TermResult],
    inputs: Mapping[str, Any],
    base: Tensor | None,
    recorder: Recorder,
    joined: Joined | None,
) -> Evaluation:
    base_result = results.pop(BASE, None)
    if base is not None:
        base = whole(base).reshape(())
        recorder.take_base(base)
        base_result = TermResult(BASE, base, 1.0, base, {})
    ahead = joined.results if joined is not None else {}
    rest = None
    for name, result in results.items():
        if name not in ahead:
            rest = result.contribution if rest is None else rest + result.contribution
    rest = None if rest is None else recorder.watch(rest, base=False)
    shown = None if base_result is None else base_result.contribution
    if shown is not None and BASE not in ahead:
        shown = recorder.watch(shown, base=True)
    penalty = _sum(None if joined is None else joined.penalty, rest)
    if penalty is None:
        penalty = _zero(inputs, recorder)
    own = None if BASE in ahead else shown
    total = _sum(None if joined is None else joined.total, own, rest)
    return Evaluation(
        total=penalty if total is None else total,
        penalty=penalty,
        base=shown,
        terms=results,
        tracked=recorder.level is not None,
        _base=base_result,
        _recorder=recorder,
    )


def _sum(*parts: Tensor | None) -> Tensor | None:
    """The sum of those there are."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None


def _zero(inputs: Mapping[str, Any], recorder: Recorder) -> Tensor:
    """Nothing to add up: a zero where the inputs are, on which `backward` does nothing."""
    moving, floats = tensors_in(dict(inputs)), tensors_in(dict(inputs), where=real_floating)
    if moving and recorder.in_graph:
        return moving[0].flatten()[:0].sum()
    zero = floats[0].new_zeros(()) if floats else torch.zeros(())
    return zero.requires_grad_() if moving else zero
