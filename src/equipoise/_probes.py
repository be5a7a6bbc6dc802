"""Probes: identities in the forward pass that see gradients go by in the backward pass.

Every term reads its inputs through aliases of its own, tracked or not, so that gradients are added
in the same order either way: tracking changes no bit of the training. A tracked alias takes note of
what passes through it; it holds on to no gradient unless asked to, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Note = Callable[[Tensor], None]


class _Probe(torch.autograd.Function):
    """The identity; its backward shows the gradient to ``note`` and passes it on untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Note) -> Tensor:  # noqa: ANN401
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (gradient,) = gradients
        ctx.note(gradient.detach())
        return gradient, None


def probe(x: Tensor, note: Note) -> Tensor:
    """An alias of ``x`` whose gradient is shown to ``note`` in every backward pass."""
    return _Probe.apply(x, note)  # type: ignore[no-untyped-call, no-any-return]


def alias(x: Tensor) -> Tensor:
    """An alias of ``x`` that nobody watches, with the same place in the graph as a probe."""
    return x.view_as(x)


def differentiable(x: object) -> bool:
    """Whether a gradient with respect to this can be taken here and now."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def map_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:  # noqa: ANN401
    """Apply a function to every differentiable tensor in nested lists, tuples and mappings."""
    if differentiable(x):
        return function(x)
    if isinstance(x, dict):
        return {key: map_tensors(function, value) for key, value in x.items()}
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(map_tensors(function, value) for value in x)
    return x


def tensors_in(x: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors that `map_tensors` would apply a function to, in its order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, x)
    return found
