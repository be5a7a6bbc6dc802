"""Gradient penalties agree with their definition, through a function whose gradient is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import spec
from tests.spec.oracle import HALVES, assert_agrees, computed_in, flatten

# Σ aⱼxⱼ²/2 has the gradient aⱼxⱼ, which is exact where a holds powers of two.
CURVATURE = [2.0, 0.5, -1.0, 4.0, 0.25, 1.0]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"target": 0.3, "sided": "one"},
    {"per": "batch"},
    {"norm": "l1"},
    {"norm": "linf"},
    {"squared": True},
    {"squared": True, "norm": "l1", "per": "batch"},
    {"reduction": "none"},
    {"reduction": "sum", "norm": "linf", "target": 2.7},
]
# A norm of x/s, times s, and back; then through the function, exactly.
STEPS = 4


def curved(x: Tensor) -> Tensor:
    """One value a sample."""
    return (x * x * torch.tensor(CURVATURE, dtype=x.dtype)).sum(-1) / 2


def samples(dtype: torch.dtype, seed: int) -> Tensor:
    """Five samples, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return x.index_fill(0, torch.tensor(2), 0.0).to(dtype)


def slope(K: spec.Rounding) -> Any:
    """The gradient of the function at a sample."""
    return lambda row: [_exact_product(K, a, x) for a, x in zip(CURVATURE, row, strict=True)]


def _exact_product(K: spec.Rounding, power: float, x: spec.Enclosure) -> spec.Enclosure:
    factor = K.exactly(power).exact
    return spec.Enclosure(K, factor * x.exact, factor * x.rounded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_penalty(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Its value, and its gradient with respect to the samples, for every norm and side."""
    x = samples(dtype, 1).requires_grad_()
    value = eq.gradient_penalty(curved, x, **options)
    value.sum().backward()
    K = spec.Rounding(computed_in(dtype), steps=STEPS)

    def check() -> None:
        at = slope(K)
        gradients = [at([K.exactly(v) for v in row]) for row in x.tolist()]
        assert_agrees(value, flatten([spec.gradient_penalty(K, gradients, **options)]))
        slopes = spec.gradient_penalty_grad(K, gradients, **options)
        assert x.grad is not None
        assert_agrees(x.grad, flatten([at(row) for row in slopes]), dtype)

    spec.decided(check)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_half_precision_gradients_are_measured_in_float32(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The function runs in half precision, exactly here, and its gradients are then widened."""
    x = samples(dtype, 1)
    value = eq.gradient_penalty(curved, x, **options)
    K = spec.Rounding("float32", steps=STEPS)

    def check() -> None:
        gradients = [slope(K)([K.exactly(v) for v in row]) for row in x.tolist()]
        assert_agrees(value, flatten([spec.gradient_penalty(K, gradients, **options)]))

    spec.decided(check)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_interpolated_gradient_penalty(options: dict[str, Any], dtype: torch.dtype) -> None:
    """At points between two batches, one ε a sample, and with respect to both batches."""
    x, reference = samples(dtype, 1).requires_grad_(), samples(dtype, 2).requires_grad_()
    epsilon = [0.25, 0.3, 0.9, 0.0, 0.7]
    given = torch.tensor(epsilon, dtype=dtype).unsqueeze(-1)
    value = eq.interpolated_gradient_penalty(curved, x, reference, epsilon=given, **options)
    value.sum().backward()
    K = spec.Rounding(computed_in(dtype), steps=STEPS)

    def check() -> None:
        at, inputs = (
            slope(K),
            [[[K.exactly(v) for v in r] for r in t.tolist()] for t in (x, reference)],
        )
        chosen = {**options, "epsilon": given.flatten().tolist()}
        result = spec.interpolated_gradient_penalty(K, at, *inputs, **chosen)
        assert_agrees(value, flatten([result]))
        slopes = spec.interpolated_gradient_penalty_grad(K, at, *inputs, **chosen)
        to_points = [at(row) for row in slopes]
        for leaf, shares in (
            (x, chosen["epsilon"]),
            (reference, [1 - e for e in chosen["epsilon"]]),
        ):
            assert leaf.grad is not None
            share = [[K.const(e) * v for v in r] for r, e in zip(to_points, shares, strict=True)]
            assert_agrees(leaf.grad, flatten(share), dtype)

    spec.decided(check)
