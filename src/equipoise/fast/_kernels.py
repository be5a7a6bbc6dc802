"""The fused kernels asked about a pipeline's terms, and what they answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise._recorder import Level
from equipoise.fast._ahead import Ahead, handed_over, multiplied
from equipoise.fast._fusable import as_ahead, best_plan, refusal
from equipoise.kernels._launch import evaluate
from equipoise.kernels._scale import scaled

if TYPE_CHECKING:
    from equipoise._run import Call

SMALL = 1 << 16
"""Below so many entries a launch on a GPU takes longer than the plain definition of a term."""


def ask(calls: Mapping[str, Call], inputs: Mapping[str, Any], level: Level | None) -> Ahead | None:
    """The terms that the kernels evaluated together, on the tensor that most of them read."""
    gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs.values())
    best = best_plan(calls, inputs, at_least=SMALL if gpu else 0)
    if best is None:
        handed_over("no term that the kernels know reads a large tensor that requires grad")
        return None
    reason = refusal(*best, calls, level)
    if reason is not None:
        handed_over(reason)
        return None
    plan, place = best
    weights = {name: calls[name].weight for name in plan.names}
    fused = evaluate(plan, weights, measure=level)
    return as_ahead(fused, place, calls, level, scaled if fused.gradient.is_cuda else multiplied)
