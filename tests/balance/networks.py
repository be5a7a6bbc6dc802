"""Losses whose gradients are known, and loops over them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term
from equipoise.balance import Balancer

Loss = Callable[[Tensor], Tensor]


def along(direction: list[float]) -> Loss:
    """A linear loss, whose gradient is this everywhere."""
    return lambda x: (x * x.new_tensor(direction)).sum()


def around(center: list[float], scale: float = 1.0) -> Loss:
    """A quadratic loss with this optimum."""
    return lambda x: 0.5 * scale * (x - x.new_tensor(center)).square().sum()


def pipeline_of(losses: Mapping[str, Loss], **weights: float) -> Pipeline:
    """A term for each loss."""
    return Pipeline(**{n: Term(loss, weight=weights.get(n, 1.0)) for n, loss in losses.items()})


def evaluated(
    pipeline: Pipeline, x: list[float] | Tensor = (0.0, 0.0), *, gram: bool = True
) -> eq.Evaluation:
    """A tracked evaluation after its backward pass."""
    at = torch.as_tensor(x, dtype=torch.float64).clone().requires_grad_()
    result = pipeline(at, track="gram" if gram else "norms")
    result.total.backward()
    return result


def descended(
    balancer: Balancer,
    pipeline: Pipeline,
    x: list[float],
    *,
    steps: int = 300,
    lr: float = 0.1,
    noise: float = 0.0,
) -> tuple[Tensor, Pipeline, list[dict[str, float]]]:
    """Gradient descent with balanced weights: where it ends, the last pipeline, all weights."""
    at = torch.tensor(x, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(steps):
        shaken = at + noise * torch.randn(at.shape, generator=generator, dtype=at.dtype)
        leaf = shaken.clone().requires_grad_()
        result = pipeline(leaf, track="gram")
        result.total.backward()
        assert leaf.grad is not None
        at = at - lr * leaf.grad
        pipeline = balancer.update(result, pipeline)
        weights.append({name: float(w) for name, w in balancer.weights.items()})
    return at, pipeline, weights


def numbers(balancer: Balancer) -> dict[str, float]:
    """The weights that were set, as Python numbers."""
    return {name: weight.item() for name, weight in balancer.weights.items()}
