"""Which of a pipeline's terms can be fused on one tensor, and what was found as an `Ahead`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise._figures import Figures
from equipoise._probes import tensors_in
from equipoise._recorder import BASE, Level, Place
from equipoise.fast._ahead import Ahead, Scale
from equipoise.kernels._fused import Fused
from equipoise.kernels._recognise import FLOATS, Plan, Request, plan

if TYPE_CHECKING:
    from equipoise._run import Call

PLAIN = (Tensor, torch.nn.Parameter)


def best_plan(
    calls: Mapping[str, Call],
    inputs: Mapping[str, Any],
    *,
    floats: Sequence[torch.dtype] = FLOATS,
    at_least: int = 0,
) -> tuple[Plan, Place] | None:
    """The terms on the tensor that most of them read, if it has so many entries at least."""
    best: tuple[Plan, Place] | None = None
    for key, x in inputs.items():
        if not isinstance(x, Tensor) or not x.requires_grad or type(x) not in PLAIN:
            continue
        if x.numel() < at_least:
            continue
        found = plan(_requests(calls, inputs, key), x, floats)
        if found is not None and (best is None or len(found.names) > len(best[0].names)):
            best = found, (key, 0)
    return best


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
    small = weight.dtype in (torch.float32, torch.bfloat16, torch.float16, x.dtype)
    return small and not weight.requires_grad and weight.device in (x.device, torch.device("cpu"))


def refusal(
    found: Plan, place: Place, calls: Mapping[str, Call], level: Level | None
) -> str | None:
    """Why terms that could be fused are not."""
    beside = [n for n, c in calls.items() if n not in found.names and place[0] in c.keys]
    if level == "gram" and any(calls[name].term.differentiable for name in beside):
        return f"inner products need all gradients, and those of {beside} are not in the kernels"
    if forward_ad.unpack_dual(found.x).tangent is not None:  # type: ignore[no-untyped-call]
        return "an input has a forward derivative"
    return None


def as_ahead(
    fused: Fused, place: Place, calls: Mapping[str, Call], level: Level | None, scale: Scale
) -> Ahead:
    """What was found, by name."""
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
        scale=scale,
    )
