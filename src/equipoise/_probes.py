"""Probes: identities in the forward pass that see gradients go by in the backward pass.

Every term reads its inputs through aliases of its own, tracked or not, so that gradients are added
in the same order either way: tracking changes no bit of the training. A tracked alias takes note of
what passes through it; it holds on to no gradient unless asked to, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Note = Callable[[Tensor], None]


class _Alias(torch.autograd.Function):
    """The identity, whose gradient passes through a function on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401
        ctx.back = back
        return x.view_as(x)

    @staticmethod
    def jvp(_: Any, tangent: Tensor, __: None) -> Tensor:  # noqa: ANN401
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (gradient,) = gradients
        return ctx.back(gradient), None


def probe(x: Tensor, note: Note) -> Tensor:
    """An alias of ``x`` whose gradient is shown to ``note`` in every backward pass.

    It comes as it is, in a graph of its own where that is asked for.
    """

    def noted(gradient: Tensor) -> Tensor:
        note(gradient)
        return gradient

    return _Alias.apply(x, noted)  # type: ignore[no-untyped-call, no-any-return]


def alias(x: Tensor) -> Tensor:
    """An alias of ``x`` that nobody watches, with the same place in the graph as a probe."""
    # The one lets sparse gradients through, the other is known to nested tensors.
    return x.view_as(x) if x.is_nested else x[...]


@dataclass(eq=False)
class Gate:
    """Aliases whose gradients are replaced by 0 unless the gate is open, which is known later."""

    open: Tensor | None = None

    def alias(self, x: Tensor) -> Tensor:
        """An alias behind this gate."""
        return _Alias.apply(x, self._passed)  # type: ignore[no-untyped-call, no-any-return]

    def _passed(self, gradient: Tensor) -> Tensor:
        # Selected, not multiplied: 0 · NaN would be NaN.
        return gradient if self.open is None else torch.where(self.open, gradient, 0.0)


def backward_pass() -> int:
    """The number of the backward pass that is running; torch's own checkpoints ask for it so."""
    return torch._C._current_graph_task_id()  # noqa: SLF001


def differentiable(x: object) -> bool:
    """Whether a gradient with respect to this can be taken here and now."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def real_floating(x: object) -> bool:
    """Whether this is a tensor of a type that could have a gradient."""
    return isinstance(x, Tensor) and x.is_floating_point()


def map_tensors(
    function: Callable[[Tensor], Tensor],
    x: Any,  # noqa: ANN401
    *,
    where: Callable[[object], bool] = differentiable,
) -> Any:  # noqa: ANN401
    """Apply a function to every differentiable tensor in lists, tuples, dictionaries and the like.

    Into which containers to look, and how to build their copies, torch knows: named tuples too,
    and whatever a library has registered there. What holds none of these tensors is returned as it
    is, so that data of any kind reaches a term untouched.
    """
    if isinstance(x, Tensor):
        return function(x) if where(x) else x
    leaves, form = tree_flatten(x)
    if not any(where(leaf) for leaf in leaves):
        return x
    return tree_unflatten([function(leaf) if where(leaf) else leaf for leaf in leaves], form)


def tensors_in(
    x: Any,  # noqa: ANN401
    *,
    where: Callable[[object], bool] = differentiable,
) -> list[Tensor]:
    """The tensors that `map_tensors` would apply a function to, in its order."""
    leaves = [x] if isinstance(x, Tensor) else tree_leaves(x)
    return [leaf for leaf in leaves if where(leaf)]
