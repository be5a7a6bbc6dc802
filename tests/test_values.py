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
from equipoise import transforms
from equipoise.transforms import GradientTransform

Case = dict[str, Any]
Option = float | str | bool

CASES: list[Case] = json.loads(Path(__file__).with_name("values.json").read_text("utf-8"))

PIPELINES = {"pipeline.compute", "schedule", "total_grad_norm"}
"""Functions of the table that are tested in `tests/pipeline/test_values.py`."""

CLIPS: dict[str, Callable[..., GradientTransform]] = {
    "clip_by_norm": transforms.clip_by_norm,
    "clip_by_percentile": transforms.clip_by_percentile,
    "clip_by_value": transforms.clip_by_value,
}
"""Functions of the table that take a gradient and their options in order."""

LINKS: dict[str, Callable[..., GradientTransform]] = {
    "agc": transforms.adaptive_clip,
    "centralize": transforms.centralize,
    "clip_norm": transforms.clip_by_global_norm,
    "elastic_decay": transforms.add_elastic_net_decay,
    "l1_decay": transforms.add_l1_decay,
    "l2_decay": transforms.add_l2_decay,
}
"""Links of a chain by their names in the table."""

NOISE = {"gradient_noise.variance"}
STEPS = {"opt.update"}

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("case", cases(set(CLIPS)))
def test_a_clip_gives_what_is_in_the_table(case: Case, dtype: torch.dtype) -> None:
    """A clip of one gradient gives the table's entries."""
    gradient, *options = case["args"]
    clip, grad = CLIPS[case["function"]](*options), torch.tensor(gradient, dtype=dtype)
    (got,), _ = clip.update([grad], clip.init([grad]), [grad])
    expected = torch.tensor(case["expect"], dtype=dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=case["tol"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("case", cases(STEPS))
def test_a_step_gives_the_change_in_the_table(case: Case, dtype: torch.dtype) -> None:
    """One step of SGD through a chain changes the weights by the table's entries."""
    options = case["kwargs"]
    weights, grads = (
        {name: torch.tensor(x, dtype=dtype) for name, x in options[what].items()}
        for what in ("params", "grads")
    )
    params = {name: torch.nn.Parameter(x.clone()) for name, x in weights.items()}
    optimizer = torch.optim.SGD(params.values(), lr=options["lr"])
    links = [LINKS[name](*numbers) for name, *numbers in options["chain"]]
    transforms.attach(transforms.chain(*links), optimizer)
    for name, param in params.items():
        param.grad = grads[name]
    optimizer.step()
    for name, change in case["expect"].items():
        expected = torch.tensor(change, dtype=dtype)
        got = params[name].detach() - weights[name]
        torch.testing.assert_close(got, expected, rtol=0, atol=case["tol"])


@pytest.mark.parametrize("case", cases(NOISE))
def test_the_variance_of_noise_is_that_in_the_table(case: Case) -> None:
    """At step t noise has the table's variance, which a million entries show to 1 %."""
    variance, decay, step = case["args"]
    noise = transforms.add_noise(variance, decay)
    zeros = torch.zeros(1_000_000)
    (drawn,), _ = noise.update([zeros], {"step": torch.tensor(step)}, [zeros])
    assert drawn is not None
    assert drawn.var().item() == pytest.approx(case["expect"], rel=0.01, abs=case["tol"])


def table_of(x: list[Any]) -> list[list[Any]]:
    """A list as a list of rows."""
    return x if isinstance(x[0], list) else [x]


def test_no_function_of_the_table_is_left_out() -> None:
    """What is tested is the whole table, and each function once."""
    groups = [set(FUNCTIONS), set(CLIPS), REFUSING, PIPELINES, STEPS, NOISE]
    assert set.union(*groups) == {case["function"] for case in CASES}
    assert sum(map(len, groups)) == len(set.union(*groups))
