"""The table of known values: pipelines, total gradient norms and schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.test_values import LOSSES, Case, cases

PENALTIES: dict[str, Callable[..., Tensor]] = {"l1": eq.l1, "l2": eq.l2}


def leaf(case: Case, dtype: torch.dtype) -> Tensor:
    """The one tensor of a case."""
    return torch.tensor(case["args"][0], dtype=dtype, requires_grad=True)


dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])


@dtypes
@pytest.mark.parametrize("case", cases({"pipeline.compute"}))
def test_a_pipeline_adds_up_as_in_the_table(case: Case, dtype: torch.dtype) -> None:
    """Every figure the table states is the metric of that name; `@total` is the total itself."""
    entries = case["kwargs"]["entries"]
    result = Pipeline(**{name: Term(PENALTIES[name], **given) for name, given in entries})(
        leaf(case, dtype)
    )
    found = {**result.metrics(), "@total": result.total.item()}
    for name, figure in case["expect"].items():
        assert found[name] == pytest.approx(figure, rel=0, abs=case["tol"])


@pytest.mark.parametrize("track", ["norms", "gram"])
@dtypes
@pytest.mark.parametrize("case", cases({"total_grad_norm"}))
def test_the_total_norm_is_the_one_in_the_table(case: Case, dtype: torch.dtype, track: Any) -> None:
    """Observed in the backward pass and on demand, with the base in each of its forms."""
    given = case["kwargs"]
    base = LOSSES[given["base"]]
    terms = {
        f"t{i}": Term(LOSSES[name], weight=weight)
        for i, (name, weight) in enumerate(given["terms"])
    }
    for form in ("term", "callable", "tensor"):
        x = leaf(case, dtype)
        # What the base tensor is computed from has to be an input to be seen.
        spare = {"spare": Term(LOSSES["sum"], enabled=False)}
        pipeline = Pipeline(**terms, **spare)
        if form == "term":
            result = pipeline.with_term("base", Term(base))(x, track=track)
        else:
            result = pipeline(x, base=base if form == "callable" else base(x), track=track)
        on_demand = result.gradients.total_norm
        result.total.backward()
        for norm in (on_demand, result.gradients.total_norm):
            assert norm.item() == pytest.approx(case["expect"], rel=0, abs=case["tol"])


def linear(values: list[float], step: int, steps: int) -> float:
    """From the first value to the second in so many steps."""
    return schedules.linear(*values, steps=steps)(step)


def warmup(values: list[Any], step: int, _: int) -> float:
    """Up to the first value in as many steps as the second says."""
    return schedules.warmup(*values)(step)


def decay(values: list[float], step: int, _: int) -> float:
    """The first value times the second at every step."""
    return schedules.decay(*values)(step)


SCHEDULES: dict[str, Callable[[list[Any], int, int], float]] = {
    "linear": linear,
    "warmup": warmup,
    "decay": decay,
}


@pytest.mark.parametrize("case", cases({"schedule"}))
def test_a_schedule_has_the_value_in_the_table(case: Case) -> None:
    """A schedule has the table's number at the table's step."""
    kind, values, step, steps = case["args"]
    found = SCHEDULES[kind](values, step, steps)
    assert found == pytest.approx(case["expect"], rel=0, abs=case["tol"])
