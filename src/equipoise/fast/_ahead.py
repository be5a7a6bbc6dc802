"""Terms whose gradients were computed together with their values, put into the graph.

A fast path (the compiler, a fused kernel) gives values and the summed gradient in one pass; the
backward pass then only scales it. Whatever else is asked of the graph, the plain definition is
evaluated again and answers: a second derivative, the gradient of one part alone, a second backward
pass through a graph that was kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from equipoise._context import compiling
from equipoise._evaluation import TermResult
from equipoise._figures import Figures
from equipoise._probes import alias, map_tensors, tensors_in
from equipoise._recorder import BASE, Number, Place, Reading, Recorder

if TYPE_CHECKING:
    from equipoise._run import Call

log = logging.getLogger("equipoise")

Scale = Callable[[Tensor, Tensor], Tensor]
"""Multiplies a gradient that nobody else holds by a 0-d tensor, in place where it can."""


def multiplied(gradient: Tensor, by: Tensor) -> Tensor:
    """The gradient times a 0-d tensor, in place.

    A 0-d tensor would be rounded to the gradient's type before it multiplies; one with dimensions
    is not.
    """
    return gradient.mul_(by.reshape((1,) * gradient.dim()))


@dataclass(frozen=True, eq=False)
class Ahead:
    """What a fast path found: of each term it took, and of all of them together.

    ``total`` is the weighted sum, ``penalty`` the same without the base (None without any term but
    the base). ``gradients`` has the gradient of ``total`` at each place that moves.
    """

    total: Tensor
    penalty: Tensor | None
    values: Mapping[str, Tensor]
    contributions: Mapping[str, Tensor]
    gradients: Mapping[Place, Tensor]
    metrics: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    errors: Mapping[str, str | None] = field(default_factory=dict)
    figures: Mapping[Place, Figures] = field(default_factory=dict)
    scale: Scale = multiplied


@dataclass(frozen=True, eq=False)
class Joined:
    """The same in the graph: the terms' results, and the sums for total and penalty."""

    results: Mapping[str, TermResult]
    total: Tensor
    penalty: Tensor | None


@dataclass(frozen=True, eq=False)
class Gap:
    """Where a tensor was taken out of nested data, and which."""

    number: int


def is_gap(x: object) -> bool:
    """Whether a tensor belongs here."""
    return isinstance(x, Gap)


def is_tensor(x: object) -> bool:
    """Whether this is a tensor of any kind."""
    return isinstance(x, Tensor)


def emptied(data: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401
    """Nested data with gaps instead of tensors, which are added to the list, each of them once."""
    numbers = {id(x): i for i, x in enumerate(tensors)}

    def taken(x: Tensor) -> Any:  # noqa: ANN401
        if id(x) not in numbers:
            numbers[id(x)] = len(tensors)
            tensors.append(x)
        return Gap(numbers[id(x)])

    return map_tensors(taken, data, where=is_tensor)


def refilled(data: Any, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
    """`emptied`, undone with other tensors."""
    return map_tensors(lambda gap: tensors[gap.number], data, where=is_gap)  # type: ignore[attr-defined]


def handed_over(reason: str) -> None:
    """Say that the plain definition does the work, and why."""
    if not compiling():  # which cannot be left in the middle for a word
        log.debug("handing over to the plain definition: %s", reason)


class _Known(torch.autograd.Function):
    """Outputs whose gradient is known when only the first of them is differentiated."""

    @staticmethod
    def forward(ctx: Any, ahead: Ahead, again: Any, numbers: list[int], *tensors: Tensor) -> Any:  # noqa: ANN401
        ctx.save_for_backward(*tensors)
        ctx.known = (numbers, list(ahead.gradients.values()), ahead.scale)
        ctx.again = again
        ctx.set_materialize_grads(False)
        outputs = [x.detach() for x in _outputs(ahead)]
        ctx.mark_non_differentiable(*_fixed(ahead, outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, *others: Tensor | None) -> Any:  # noqa: ANN401
        tensors = ctx.saved_tensors  # raises where the graph is gone
        slopes: list[Tensor | None] = [None] * len(tensors)
        reason = _beyond(ctx.known, others)
        if reason is not None:
            handed_over(reason)
            slopes = _differentiated_again(ctx.again, tensors, (first, *others))
        elif first is not None:
            numbers, gradients, scale = ctx.known
            ctx.known = None  # given away: it may be scaled in place, or become somebody's `.grad`
            for number in numbers:
                slopes[number] = scale(gradients.pop(0), first)
        return None, None, None, *slopes


def _outputs(ahead: Ahead) -> list[Tensor]:
    penalty = [] if ahead.penalty is None else [ahead.penalty]
    measured = [m for of in ahead.metrics.values() for m in of.values() if isinstance(m, Tensor)]
    parts = [*ahead.values.values(), *ahead.contributions.values()]
    return [ahead.total, *penalty, *parts, *measured]


def _fixed(ahead: Ahead, outputs: list[Tensor]) -> list[Tensor]:
    """The outputs that have no gradient."""
    sums = 1 + (ahead.penalty is not None)
    names = [*ahead.values, *ahead.contributions]
    parts = zip(outputs[sums:], names, strict=False)
    fixed = [x for x, name in parts if ahead.errors.get(name)]
    if ahead.penalty is not None and all(ahead.errors.get(n) for n in ahead.values if n != BASE):
        fixed.append(outputs[1])
    return [*fixed, *(x for x in outputs[sums + len(names) :] if not x.is_floating_point())]


def _beyond(known: object, others: Sequence[Tensor | None]) -> str | None:
    """Why the known gradient does not answer, if it does not."""
    if torch.is_grad_enabled():
        return "the gradient shall be differentiated again"
    if any(gradient is not None for gradient in others):
        return "a part of the total is differentiated by itself"
    return "the gradient was given away in an earlier backward pass" if known is None else None


def _differentiated_again(
    again: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of the plain definition, in a graph of their own if that is asked for."""
    create_graph = torch.is_grad_enabled()
    moving = [i for i, x in enumerate(tensors) if x.requires_grad]
    with torch.enable_grad():
        # Aliases: what one tensor does on its way through another is none of this function's.
        inside = [alias(x) if x.requires_grad else x for x in tensors]
        outputs = again(inside)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        slopes: list[Tensor | None] = [None] * len(tensors)
        if pairs:
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                [inside[i] for i in moving],
                [gradient for _, gradient in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
            for i, slope in zip(moving, found, strict=True):
                slopes[i] = slope
    return slopes


def read(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Every input as the terms of a fast path see it: through aliases of their own."""
    return {key: map_tensors(alias, x) for key, x in inputs.items()}


def join(
    ahead: Ahead, calls: Mapping[str, Call], inputs: Mapping[str, Any], recorder: Recorder
) -> Joined:
    """Put what a fast path found into the graph, and into the notes of the evaluation.

    ``inputs`` are those that `read` gave.
    """
    tensors: list[Tensor] = []
    moving = {(key, i): x for key in inputs for i, x in enumerate(tensors_in(inputs[key]))}
    numbers = []
    for place in ahead.gradients:
        emptied(moving[place], tensors)
        numbers.append(next(i for i, x in enumerate(tensors) if x is moving[place]))
    data = emptied([dict(inputs), _options(calls)], tensors)
    weights = emptied([{n: c.weight for n, c in calls.items() if is_tensor(c.weight)}], tensors)

    def again(other: Sequence[Tensor]) -> list[Tensor]:
        return _plainly(calls, *refilled(data, other), *refilled(weights, other))

    outputs = iter(_Known.apply(ahead, again, numbers, *tensors))  # type: ignore[no-untyped-call]
    total = next(outputs)
    penalty = None if ahead.penalty is None else next(outputs)
    values = {name: next(outputs) for name in ahead.values}
    contributions = {name: next(outputs) for name in ahead.contributions}
    results = {}
    ends = {place: get_gradient_edge(x) for place, x in moving.items()}
    for name, call in calls.items():
        metrics = {
            key: next(outputs) if isinstance(m, Tensor) else m
            for key, m in ahead.metrics.get(name, {}).items()
        }
        results[name] = TermResult(name, values[name], call.weight, contributions[name], metrics)
        edges = {place: end for place, end in ends.items() if place[0] in call.keys}
        error = ahead.errors.get(name)
        recorder.readings[name] = Reading(call.weight, values[name], edges, error)
    recorder.known.update(ahead.figures)
    recorder.taken.update(calls)
    return Joined(results, total, penalty)


def _options(calls: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
    """Those options that may hold tensors."""
    simple = (bool, int, float, str, type(None))
    return {
        name: dict(call.options)
        for name, call in calls.items()
        if not all(isinstance(value, simple) for value in call.options.values())
    }


def _plainly(
    calls: Mapping[str, Call],
    inputs: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Number],
) -> list[Tensor]:
    """The plain definition's outputs, in the order of `_outputs`."""
    results = {}
    for name, call in calls.items():
        same = replace(
            call, options=options.get(name, call.options), weight=weights.get(name, call.weight)
        )
        results[name] = same.result(*same.value([inputs[key] for key in call.keys]))
    return sums_and_parts(results)


def sums_and_parts(results: Mapping[str, TermResult]) -> list[Tensor]:
    """Total, penalty if there is any, values, contributions and the metrics that are tensors."""
    penalty = None
    for name, result in results.items():
        if name != BASE:
            penalty = result.contribution if penalty is None else penalty + result.contribution
    if penalty is None:
        sums = [results[BASE].contribution]
    else:
        base = results.get(BASE)
        sums = [penalty if base is None else base.contribution + penalty, penalty]
    return [
        *sums,
        *(result.value for result in results.values()),
        *(result.contribution for result in results.values()),
        *(
            m
            for result in results.values()
            for m in result.metrics.values()
            if isinstance(m, Tensor)
        ),
    ]
