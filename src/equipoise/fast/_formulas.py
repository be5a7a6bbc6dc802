"""A pipeline whose terms all have formulas, ready for the compiler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from equipoise._recorder import Level, Place
from equipoise.fast._ahead import Ahead, Scale
from equipoise.fast._fusable import as_ahead, best_plan, refusal
from equipoise.kernels._formulas import evaluate, form_of, formulas
from equipoise.kernels._recognise import FLOATS, Plan

if TYPE_CHECKING:
    from equipoise._run import Call

DEVICES = {"cpu", "cuda"}
"""Those whose sums are taken in float64."""


@dataclass(frozen=True, eq=False)
class Formulas:
    """All terms of a pipeline as one plan, on the one tensor that moves."""

    plan: Plan
    place: Place
    calls: Mapping[str, Call]
    level: Level | None

    @classmethod
    def of(
        cls,
        calls: Mapping[str, Call],
        inputs: Mapping[str, Any],
        moving: Sequence[Place],
        level: Level | None,
    ) -> Formulas | None:
        """Nothing where a term has no formula, or where terms of sizes are all there is."""
        best = best_plan(calls, inputs, floats=(*FLOATS, torch.float64))
        if best is None:
            return None
        plan, place = best
        whole = len(plan.names) == len(calls) and list(moving) == [place] and bool(plan.rows)
        if not whole or plan.x.device.type not in DEVICES:
            return None
        return None if refusal(plan, place, calls, level) else cls(plan, place, calls, level)

    @property
    def key(self) -> Hashable:
        """What tells its compiled function from others."""
        return form_of(self.plan, self.level)

    def function(self) -> Callable[..., Any]:
        """What is to be compiled."""
        return formulas(form_of(self.plan, self.level))

    def evaluated(self, by: Callable[..., Any], scale: Scale) -> Ahead:
        """All terms, by their compiled function."""
        weights = {name: self.calls[name].weight for name in self.plan.names}
        fused = evaluate(self.plan, weights, by=by)
        return as_ahead(fused, self.place, self.calls, self.level, scale)
