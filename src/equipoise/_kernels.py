"""Which of a pipeline's terms the fused kernels are asked about, and what they answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise._ahead import Ahead, handed_over
from equipoise._probes import tensors_in
from equipoise._recorder import BASE, Figures, Level, Place
from equipoise.kernels._launch import Fused, evaluate
from equipoise.kernels._recognise import Plan, Request, plan
from equipoise.kernels._scale import scaled

if TYPE_CHECKING:
    from equipoise._run import Call

PLAIN = (Tensor, torch.nn.Parameter)
SMALL = 1 << 16
"""Below so many entries a launch takes longer than the plain definition of a term."""


def ask(calls: Mapping[str, Call], inputs: Mapping[str, Any], level: Level | None) -> Ahead | None:
    """The terms that the kernels evaluated together, on the tensor that most of them read."""
    best: Plan | None = None
    place: Place = ("", 0)
    for key, x in inputs.items():
        if not isinstance(x, Tensor) or not x.requires_grad or type(x) not in PLAIN:
            continue
        if x.device.type == "cuda" and x.numel() < SMALL:
            continue
        found = plan(_requests(calls, inputs, key), x)
        if found is not None and (best is None or len(found.names) > len(best.names)):
            best, place = found, (key, 0)
    if best is None:
        handed_over("no term that the kernels know reads a large tensor that requires grad")
        return None
    reason = _refusal(best, place, calls, level)
    if reason is not None:
        handed_over(reason)
        return None
    weights = {name: calls[name].weight for name in best.names}
    return _ahead(evaluate(best, weights, measure=level), place, calls, level)


def _requests(calls: Mapping[str, Call], inputs: Mapping[str, Any], key: str) -> list[Request]:
    """The terms that read this input and no other that moves."""
    return [
        Request(name, call.term.penalty, call.options, tuple(inputs[k] for k in call.keys))
        for name, call in calls.items()
        if key in call.keys
        and call.term.differentiable
        and call.term.nan_policy == "propagate"
        and not any(tensors_in(inputs[k]) for k in call.keys if k != key)
        and _takes_weight(call.weight, inputs[key])
    ]


def _takes_weight(weight: object, x: Tensor) -> bool:
    """Whether this weight changes neither the type of the total nor needs a gradient."""
    if not isinstance(weight, Tensor):
        return True
    small = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return small and not weight.requires_grad and weight.device in (x.device, torch.device("cpu"))


def _refusal(
    found: Plan, place: Place, calls: Mapping[str, Call], level: Level | None
) -> str | None:
    """Why terms that could be fused are not."""
    beside = [n for n, c in calls.items() if n not in found.names and place[0] in c.keys]
    if level == "gram" and any(calls[name].term.differentiable for name in beside):
        return f"inner products need all gradients, and those of {beside} are not in the kernels"
    if forward_ad.unpack_dual(found.x).tangent is not None:  # type: ignore[no-untyped-call]
        return "an input has a forward derivative"
    return None


def _ahead(fused: Fused, place: Place, calls: Mapping[str, Call], level: Level | None) -> Ahead:
    values = dict(zip(fused.names, fused.values.unbind(), strict=True))
    contributions = dict(zip(fused.names, fused.contributions.unbind(), strict=True))
    others = [x for name, x in contributions.items() if name != BASE]
    names = [name for name in calls if name in values]
    figures = Figures(fused.names, fused.squares, fused.gram)
    return Ahead(
        total=fused.total,
        penalty=fused.penalty if others else None,
        values={name: values[name] for name in names},
        contributions={name: contributions[name] for name in names},
        gradients={place: fused.gradient},
        figures={} if level is None else {place: figures},
        scale=scaled if fused.gradient.is_cuda else _multiplied,
    )


def _multiplied(gradient: Tensor, by: Tensor) -> Tensor:
    return gradient.mul_(by.to(gradient.dtype))
