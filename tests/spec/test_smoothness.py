"""Gradient penalties agree with their definition, through a function whose gradient is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import spec
from tests.spec.oracle import HALVES, assert_agrees, computed_in, flatten, name_of

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
PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A norm of x/s, times s, and back; then through the function, exactly.
STEPS = 4


def curved(x: Tensor) -> Tensor:
    """One value a sample."""
    return (x * x * torch.tensor(CURVATURE, dtype=x.dtype)).sum(-1) / 2


def samples(dtype: torch.dtype, seed: int) -> Tensor:
    """Five samples, one of them zero, and one with several largest entries in its gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    x[2], x[3] = 0.0, torch.tensor([1.0, 4.0, -2.0, 0.5, 8.0, 2.0])
    return x.to(dtype)


def slope(K: spec.Rounding) -> Any:
    """The gradient of the function at a sample, in the numbers of a context."""
    return lambda row: [_exact_product(K, a, x) for a, x in zip(CURVATURE, row, strict=True)]


def _exact_product(K: spec.Rounding, power: float, x: spec.Enclosure) -> spec.Enclosure:
    factor = K.exactly(power).exact
    return spec.Enclosure(K, factor * x.exact, factor * x.rounded)


def rounded_to(dtype: torch.dtype, steepness: Any) -> list[list[spec.Enclosure]]:
    """What moves the gradients, as it comes back into a function that runs in half precision."""
    rows = [list(row) for row in steepness]
    return [[v.once_more(name_of(dtype)) for v in r] for r in rows] if dtype in HALVES else rows


def assert_penalty_agrees(
    options: dict[str, Any],
    dtype: torch.dtype,
    penalty: Callable[..., Tensor] = eq.gradient_penalty,
) -> None:
    """Its value, and its gradient with respect to the samples.

    In half precision the function itself runs in it, exactly here; its gradients are then widened.
    """
    x = samples(dtype, 1).requires_grad_()
    value = penalty(curved, x, **options)
    value.sum().backward()
    K = spec.Rounding(computed_in(dtype), steps=STEPS)

    def check() -> None:
        at = slope(K)
        gradients = [at([K.exactly(v) for v in row]) for row in x.tolist()]
        assert_agrees(value, flatten([spec.gradient_penalty(K, gradients, **options)]))
        slopes = spec.gradient_penalty_grad(K, gradients, **options)
        assert x.grad is not None
        assert_agrees(x.grad, flatten([at(row) for row in rounded_to(dtype, slopes)]))

    spec.decided(check)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_penalty(options: dict[str, Any], dtype: torch.dtype) -> None:
    """For every norm and side."""
    assert_penalty_agrees(options, dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiled_gradient_penalties_agree(options: dict[str, Any]) -> None:
    """In one graph, where the gradient is taken inside."""
    torch.compiler.reset()
    compiled = torch.compile(eq.gradient_penalty, fullgraph=True, backend="aot_eager")
    assert_penalty_agrees(options, torch.float64, compiled)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_interpolated_gradient_penalty(options: dict[str, Any], dtype: torch.dtype) -> None:
    """At points between two batches, one ε a sample, and with respect to both batches."""
    x, reference = samples(dtype, 1).requires_grad_(), samples(dtype, 2).requires_grad_()
    given = torch.tensor([0.25, 0.3, 0.9, 0.0, 0.7], dtype=dtype).unsqueeze(-1)
    value = eq.interpolated_gradient_penalty(curved, x, reference, epsilon=given, **options)
    value.sum().backward()
    # The points are of the type of the batches, what is measured at them of that of the value.
    points = spec.Rounding(name_of(dtype), steps=STEPS)
    K = spec.Rounding(computed_in(dtype), steps=STEPS)
    chosen = {**options, "epsilon": given.flatten().tolist()}

    def check() -> None:
        at = slope(K)
        inputs = [[[points.exactly(v) for v in r] for r in t.tolist()] for t in (x, reference)]
        result = spec.interpolated_gradient_penalty(K, at, *inputs, **chosen)
        assert_agrees(value, flatten([result]))
        slopes = spec.interpolated_gradient_penalty_grad(K, at, *inputs, **chosen)
        moved = [slope(points)(row) for row in rounded_to(dtype, slopes)]
        for leaf, shares in (
            (x, chosen["epsilon"]),
            (reference, [1 - e for e in chosen["epsilon"]]),
        ):
            assert leaf.grad is not None
            to_leaf = [
                [points.const(e) * v for v in row] for row, e in zip(moved, shares, strict=True)
            ]
            assert_agrees(leaf.grad, flatten(to_leaf))

    spec.decided(check)
