"""What the kernels must find: the plain definitions in float64, term by term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise import Term
from equipoise.kernels import _formulas, _launch
from equipoise.kernels._fused import Fused
from equipoise.kernels._recognise import Plan, Request, plan

Inputs = Mapping[str, Tensor]


def _by_formulas(found: Plan, weights: Any, *, measure: str | None) -> Fused:
    """As they stand, before the compiler makes one function of them."""
    by = _formulas.formulas(_formulas.form_of(found, measure))
    return _formulas.evaluate(found, weights, by=by)


WAYS = {"kernels": _launch.evaluate, "formulas": _by_formulas}
"""The fused paths; every test here runs over both."""
evaluate = WAYS["kernels"]


@dataclass(frozen=True, eq=False)
class Exact:
    """Values and weighted gradients by name."""

    values: dict[str, Tensor]
    slopes: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        return torch.stack([*self.slopes.values()]).sum(0)


def exactly(terms: Mapping[str, Term], inputs: Inputs) -> Exact:
    """By the plain definitions, in float64."""
    wide = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    values, slopes = {}, {}
    for name, term in terms.items():
        leaf = wide["x"].detach().clone().requires_grad_()
        arguments = [leaf if key == "x" else wide[key] for key in term.inputs or ()]
        value = term.penalty(*arguments, **term.options)
        (slope,) = torch.autograd.grad(value, leaf)
        values[name], slopes[name] = value.detach(), term.weight * slope
    return Exact(values, slopes)


def requests(terms: Mapping[str, Term], inputs: Inputs) -> list[Request]:
    """The terms as the kernels are asked about them."""
    return [
        Request(name, t.penalty, t.options, tuple(inputs[key] for key in t.inputs or ()))
        for name, t in terms.items()
    ]


def fused(terms: Mapping[str, Term], inputs: Inputs, measure: str | None = "gram") -> Fused:
    """By the path under test, which takes all of the terms."""
    found = plan(requests(terms, inputs), inputs["x"])
    assert found is not None
    assert set(found.names) == set(terms)
    weights: dict[str, Any] = {name: term.weight for name, term in terms.items()}
    return evaluate(found, weights, measure=measure)


def relative(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; the difference itself where nothing is expected."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    length = torch.linalg.vector_norm(expected.double())
    return (difference / torch.where(length == 0, 1.0, length)).item()


def assert_exact(
    terms: Mapping[str, Term], inputs: Inputs, *, gradient: float = 1e-6, figures: float = 1e-5
) -> None:
    """Values, summed gradient, norms and inner products are those of the plain definitions."""
    found, true = fused(terms, inputs), exactly(terms, inputs)
    assert relative(found.gradient, true.total) <= gradient
    values = torch.stack([true.values[name] for name in found.names])
    torch.testing.assert_close(found.values.double(), values, rtol=figures, atol=1e-6)
    rows = torch.stack([true.slopes[name].flatten() for name in found.names])
    gram, lengths = rows @ rows.T, torch.linalg.vector_norm(rows, dim=1)
    torch.testing.assert_close(found.squares[:-1].sqrt(), lengths, rtol=figures, atol=1e-9)
    total = torch.linalg.vector_norm(true.total)
    torch.testing.assert_close(found.squares[-1].sqrt(), total, rtol=figures, atol=1e-9)
    assert found.gram is not None
    scale = lengths.outer(lengths).clamp(min=1e-18)
    torch.testing.assert_close(found.gram / scale, gram / scale, rtol=0, atol=10 * figures)
