"""The table of known values: every case whose function exists, and none left out in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq

Case = dict[str, Any]
Option = float | str | bool

CASES: list[Case] = json.loads(Path(__file__).with_name("values.json").read_text("utf-8"))

PIPELINES = {"pipeline.compute", "schedule", "total_grad_norm"}
"""Functions of the table that are tested in `tests/pipeline/test_values.py`."""

NOT_YET = {
    "clip_by_norm",
    "clip_by_percentile",
    "clip_by_value",
    "gradient_noise.variance",
    "opt.update",
}
"""Functions of the table that the library does not have so far."""

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "const": lambda x: (x * 0).sum() + 5,
    "double": lambda x: 2 * x,
    "neg_mean": lambda x: -x.mean(),
    "sq": lambda x: x.square(),
    "sum": lambda x: x.sum(),
    "sum_abs": lambda x: x.abs().sum(),
    "sum_cube": lambda x: x.pow(3).sum(),
    "sum_sq": lambda x: x.square().sum(),
}
"""The functions that the keyword `loss` names."""


def gradient_penalty(x: Tensor, *, loss: str, **options: Option) -> Tensor:
    """The penalty of a named loss."""
    return eq.gradient_penalty(LOSSES[loss], x, **options)


def grad_norm(x: Tensor, *, loss: str) -> Tensor:
    """The gradient norm of a named loss."""
    return eq.grad_norm(LOSSES[loss], x)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "consistency": eq.consistency,
    "elastic_net": eq.elastic_net,
    "entropy": eq.entropy,
    "grad_norm": grad_norm,
    "gradient_penalty": gradient_penalty,
    "js_divergence": eq.js_divergence,
    "kl_divergence": eq.kl_divergence,
    "l1": eq.l1,
    "l2": eq.l2,
    "orthogonality": eq.orthogonality,
    "output_magnitude": eq.output_magnitude,
}
"""Functions of the table that give a number."""

REFUSING = {"validate"}
"""Functions of the table that raise."""

DIFFERENTIATED = {"grad": 0, "grad_q": 1}
"""Which argument a part differentiates by; the part `value` is the function itself."""


def cases(functions: set[str]) -> list[Any]:
    """The cases of these functions, each a test parameter by its own name."""
    return [pytest.param(c, id=c["id"]) for c in CASES if c["function"] in functions]


def part(case: Case, dtype: torch.dtype) -> Tensor:
    """What a case asks for: the value, or the gradient by one argument."""
    inputs = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in case["args"]]
    value = FUNCTIONS[case["function"]](*inputs, **case["kwargs"])
    if case["part"] == "value":
        return value.detach()
    return torch.autograd.grad(value, inputs[DIFFERENTIATED[case["part"]]])[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("case", cases(set(FUNCTIONS)))
def test_the_value_is_the_one_in_the_table(case: Case, dtype: torch.dtype) -> None:
    """A function gives the table's number, within the accuracy the table states for it."""
    expected = torch.tensor(case["expect"], dtype=dtype)
    torch.testing.assert_close(part(case, dtype), expected, rtol=0, atol=case["tol"])


@pytest.mark.parametrize("case", cases(REFUSING))
def test_what_is_not_finite_is_refused_and_counted(case: Case) -> None:
    """`check_finite` raises, and counts NaN and infinities apart."""
    x = torch.tensor([[float(entry) for entry in row] for row in table_of(case["args"][0])])
    with pytest.raises(eq.NonFiniteError) as caught:
        eq.check_finite(x)
    found = {"nan": caught.value.nan, "inf": caught.value.inf}
    assert found == {"nan": int(x.isnan().sum()), "inf": int(x.isinf().sum())}
    assert found[case["expect"]] > 0


def table_of(x: list[Any]) -> list[list[Any]]:
    """A list as a list of rows."""
    return x if isinstance(x[0], list) else [x]


def test_no_function_of_the_table_is_left_out() -> None:
    """What is tested and what does not exist yet are together the whole table."""
    groups = [set(FUNCTIONS), REFUSING, PIPELINES, NOT_YET]
    assert set.union(*groups) == {case["function"] for case in CASES}
    assert sum(map(len, groups)) == len(set.union(*groups))
