"""The gradient report with respect to parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import (
    GradientError,
    InputError,
    InputTypeError,
    check_choice,
    check_flag,
)
from equipoise._evaluation import Evaluation, check_evaluation
from equipoise._figures import Figures, filled, unmeasured
from equipoise._gradients import Gradients, added
from equipoise._numerics import total_norm
from equipoise._recorder import BASE, Level, Place

Parameters = Iterable[Tensor] | Mapping[str, Iterable[Tensor]] | Mapping[str, Tensor]


def parameter_gradients(
    result: Evaluation,
    /,
    parameters: Parameters,
    *,
    level: Level = "norms",
    set_grad: bool = True,
    scale: float | Tensor = 1.0,
    check_against: Gradients | None = None,
) -> Gradients:
    """Differentiate every term with respect to parameters, and report as at the inputs.

    One backward pass a term. Their sum *is* the training gradient: it is added to each parameter's
    ``.grad``, so that no ``result.total.backward()`` is needed any more. The last pass, that of the
    base, frees its graph. Penalties that read weights directly are counted too. ``scale``
    multiplies the loss, as a gradient scaler does; the report does not depend on it.

    For a part of the model (``model.lm_head.parameters()``) the passes end early and cost less;
    then give ``set_grad=False``, which leaves graph and ``.grad`` alone, and call ``backward``
    yourself. A mapping from names to parameters reports each group by itself in ``by_input``.

    ``check_against=result.gradients`` says in ``deviations`` how far each term's share at the
    parameters is from its share at the inputs: whether the free report can be trusted here. With
    inner products in both reports these are the signed shares, otherwise parts of all norms.

    *At the edge:* a term without a gradient is reported with its reason; that no term reaches any
    of the parameters to be trained is an error. Terms are differentiated one after the other: with
    ``level="norms"`` two sets of gradients are held at a time, with ``"gram"`` one for each term.
    Under data parallelism the gradients are those of this process alone: use ``set_grad=False`` and
    ``backward``, which averages them.

    Examples:
        >>> import torch, equipoise as eq
        >>> weight = torch.tensor([3.0, -4.0], requires_grad=True)
        >>> pipeline = eq.Pipeline(
        ...     l1=eq.Term(eq.l1, inputs="weights"), l2=eq.Term(eq.l2, inputs="weights", weight=0.5)
        ... )
        >>> report = eq.tracking.parameter_gradients(pipeline(weights=[weight]), [weight])
        >>> report.weighted["l2"].item(), weight.grad
        (5.0, tensor([ 4., -5.]))
    """
    check_evaluation(result)
    check_choice("level", level, ("norms", "gram"))
    check_flag("set_grad", set_grad)
    if check_against is not None and not isinstance(check_against, Gradients):
        raise InputTypeError(
            f"`check_against` must be a gradient report, got {type(check_against).__name__}. "
            "Use `result.gradients`."
        )
    places = _places(parameters)
    if set_grad:
        _check_leaves(places)
    if result.tracked and set_grad:
        _ = result.gradients  # `metrics` will ask for it, and the graph it needs is about to go
    passes = _Passes(places, level, scale)
    errors = _differentiated(result, passes, keep_graph=not set_grad)
    if set_grad:
        passes.accumulate()
    report = Gradients(
        names=tuple(result.results),
        inputs=tuple(dict.fromkeys(group for group, _ in places)),
        weights=tuple(
            term.weight.detach() if isinstance(term.weight, Tensor) else term.weight
            for term in result.results.values()
        ),
        errors=errors,
        squares=unmeasured(result.total.device),
    )
    report = filled(report, passes.figures(), level)
    return report if check_against is None else _compared(report, check_against)


def _differentiated(result: Evaluation, passes: _Passes, *, keep_graph: bool) -> dict[str, str]:
    """Make a pass for each term that has a graph; why the others have no gradient."""
    terms = result.results
    errors = {name: reason for name in terms if (reason := _reason(name, result)) is not None}
    order = [name for name in terms if name not in errors]
    order.sort(key=lambda name: name == BASE)  # the model's graph is needed until then
    if not order:
        raise GradientError(
            "parameter gradients need a term with a graph, got none. "
            "Use a result computed with gradients enabled, before its backward pass."
        )
    for name in order:
        last = name == order[-1]
        passes.add(name, terms[name].contribution, keep_graph=keep_graph or not last)
        if name not in passes.reached:
            errors[name] = "its value does not depend on these parameters"
    if not keep_graph and not passes.reached:
        raise GradientError(
            "parameter gradients train what the terms depend on, got parameters that none of them "
            "reaches (those of FSDP2 cannot be differentiated one term at a time). "
            "Use the model's own parameters; or set_grad=False, and `result.total.backward()`."
        )
    return errors


def _places(parameters: Parameters) -> dict[Place, Tensor]:
    named = parameters if isinstance(parameters, Mapping) else {"parameters": parameters}
    groups = {name: _listed(name, group) for name, group in named.items()}
    places = {
        (name, i): tensor
        for name, group in groups.items()
        for i, tensor in enumerate(group)
        if tensor.requires_grad
    }
    names: dict[int, str] = {}
    for (name, _), tensor in places.items():
        if id(tensor) in names:
            raise InputError(
                f"`parameters` must hold each tensor once, got one of shape {tuple(tensor.shape)} "
                f"in {names[id(tensor)]!r} and again in {name!r}. Its gradient would count twice. "
                "Use groups that do not overlap, or one call for each with set_grad=False."
            )
        names[id(tensor)] = name
    if not places:
        raise InputError(
            "`parameters` must hold tensors that require grad, got none. Use "
            "`list(model.parameters())`: a generator can be read only once."
        )
    return places


def _listed(name: str, group: object) -> list[Tensor]:
    """The tensors of one group; a single tensor is a group of its own."""
    if isinstance(group, Tensor):
        return [group]
    tensors: list[Any] = list(group) if isinstance(group, Iterable) else [group]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputTypeError(
                f"`{name}` must hold tensors, got {type(tensor).__name__}. Use "
                "`model.parameters()`, or `dict(model.named_parameters())` for a row each."
            )
    return tensors


def _check_leaves(places: dict[Place, Tensor]) -> None:
    for (name, i), tensor in places.items():
        if not tensor.is_leaf:
            raise InputError(
                f"`{name}[{i}]` must be a leaf to have a `.grad`, got what an operation computed. "
                "Use the parameters of the model; or set_grad=False, to look only."
            )


def _reason(name: str, result: Evaluation) -> str | None:
    """Why a term has no gradient at any parameter, if that can be told before trying."""
    term = result.results[name]
    if not term.contribution.requires_grad:
        return "its value has no graph"
    if not isinstance(term.weight, Tensor) and term.weight == 0:
        return "its weight is 0, so that no gradient flows"
    return None


class _Passes:
    """One backward pass a term; the sum, and of each pass only what the level needs."""

    def __init__(self, places: dict[Place, Tensor], level: Level, scale: float | Tensor) -> None:
        self.places = places
        self.level = level
        self.scale = scale
        self.sums: dict[Place, Tensor] = {}
        self.kept: dict[Place, dict[str, Tensor]] = {}
        self.reached: set[str] = set()

    def add(self, name: str, contribution: Tensor, *, keep_graph: bool) -> None:
        try:
            gradients = torch.autograd.grad(
                contribution,
                list(self.places.values()),
                self._scale_as(contribution) * torch.ones_like(contribution),
                retain_graph=keep_graph,
                allow_unused=True,
            )
        except RuntimeError as error:
            if "second time" in str(error):
                raise GradientError(
                    "the graph is gone after a backward pass, and with it the way to the "
                    "parameters. Use `parameter_gradients` in place of `backward()`, or before it "
                    "with set_grad=False."
                ) from error
            error.add_note(f"in the term {name!r}")
            raise
        for place, gradient in zip(self.places, gradients, strict=True):
            if gradient is None:
                continue
            self.reached.add(name)
            before = self.sums.get(place)
            self.sums[place] = gradient if before is None else added(before, gradient)
            kept = gradient if self.level == "gram" else total_norm([gradient])
            self.kept.setdefault(place, {})[name] = kept

    def _scale_as(self, x: Tensor) -> float | Tensor:
        return self.scale.detach().to(x) if isinstance(self.scale, Tensor) else self.scale

    def accumulate(self) -> None:
        """Add the sums to the parameters' gradients, as a backward pass does."""
        for place, gradient in self.sums.items():
            parameter = self.places[place]
            # Not the gradient itself: it may be that of a second parameter, or of a view.
            addend = gradient.clone()
            before = parameter.grad
            parameter.grad = addend if before is None else added(before, addend)

    def figures(self) -> dict[Place, Figures]:
        return {place: self._without_scale(self._measured(place)) for place in self.kept}

    def _measured(self, place: Place) -> Figures:
        kept = self.kept[place]
        if self.level == "gram":
            return Figures.of(kept, "gram")
        return Figures.of_norms(kept, [*kept.values(), total_norm([self.sums[place]])])

    def _without_scale(self, found: Figures) -> Figures:
        scale = self._scale_as(found.squares)
        gram = None if found.gram is None else found.gram / (scale * scale)
        return Figures(found.names, found.squares / (scale * scale), gram)


def _compared(report: Gradients, other: Gradients) -> Gradients:
    signed = report.grams is not None and other.grams is not None
    ours, theirs = (r.shares if signed else _parts(r) for r in (report, other))
    return replace(
        report,
        deviations={name: (ours[name] - theirs[name]).abs() for name in ours if name in theirs},
    )


def _parts(report: Gradients) -> dict[str, Tensor]:
    """Each term's norm as a part of the sum of all norms."""
    norms = {n: norm for n, norm in report.weighted.items() if norm is not None}
    if not norms:
        return {}
    together = torch.stack([*norms.values()]).sum()
    return {name: norm / together for name, norm in norms.items()}
