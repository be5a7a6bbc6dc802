"""Training in small: parameters, gradients that a step number says, an optimizer, a transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from equipoise import transforms
from equipoise.transforms import GradientTransform
from tests.transforms.members import gradients, parameters

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Run:
    """An optimizer with a transform on it, and the gradients of the table at every step."""

    def __init__(
        self,
        transform: GradientTransform,
        make: Callable[..., Optimizer] = SGD,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.dtype = dtype
        self.params = [nn.Parameter(p) for p in parameters(dtype)]
        self.optimizer = make(self.params, **{"lr": 0.1, **options})
        self.handle = transforms.attach(transform, self.optimizer)

    def step(self, number: int) -> None:
        """One step with the gradients of this number."""
        for param, grad in zip(self.params, gradients(number, self.dtype), strict=True):
            param.grad = grad
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [param.detach().clone() for param in self.params]
