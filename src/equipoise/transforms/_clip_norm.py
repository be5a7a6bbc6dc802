"""Clipping by length: every gradient by itself, or all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from equipoise._errors import names_its_options
from equipoise.transforms._amounts import Amount, Amounts
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._nonfinite import NonFinite, check_policy, heed, shown
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
    no_figure,
)

Clip = Callable[[Leaves, float], dict[str, Tensor]]
"""Rescales leaves to a limit, and gives the figures of it."""


@names_its_options
def clip_by_global_norm(
    limit: Amount = 1.0, *, nonfinite: NonFinite = "propagate"
) -> GradientTransform:
    """All gradients by one factor, so that together they are no longer than the limit.

    ``g · min(1, limit/‖g‖)`` with one norm over all of them. It is compared squared and strictly,
    and there is no ε: up to and at the limit this is the identity to the last bit. Squares add up
    in float64: for half and single precision the branch is the one that exact arithmetic takes, for
    float64 itself it is so unless the norm is within a few rounding errors of the limit.

    It records ``norm``, ``norm_clipped``, and ``clipped_fraction``: 1 if this step was clipped.

    ``nonfinite`` says what NaN or inf does. ``"propagate"``: it stays where it is, and nothing is
    clipped, so that it does not spread to the other gradients. ``"raise"``: an error that names the
    tensors (waits for the device). ``"zero"``: such entries become 0, and the rest is clipped.
    ``"skip"``: the step is skipped, as by `skip_nonfinite`.

    *At the edge:* a negative limit counts as its magnitude; 0 makes every gradient 0; no gradients
    are no error. `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm, so that it is off by that
    and no identity at the limit; and it spreads a NaN to every gradient.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_global_norm(1.0)
        >>> params = [torch.zeros(1), torch.zeros(1)]
        >>> grads, _ = clip.update(
        ...     [torch.tensor([3.0]), torch.tensor([4.0])], clip.init(params), params
        ... )
        >>> grads
        [tensor([0.6000]), tensor([0.8000])]
    """
    return _by_limit("clip_by_global_norm", limit, nonfinite, clip_together)


@names_its_options
def clip_by_norm(limit: Amount, *, nonfinite: NonFinite = "propagate") -> GradientTransform:
    """Every gradient by a factor of its own, so that none is longer than the limit.

    ``g · min(1, limit/‖g‖)`` for each tensor, compared and computed as in `clip_by_global_norm`,
    with the same ``nonfinite``. Records ``norm`` and ``norm_clipped`` (over all tensors), and
    ``clipped_fraction``: the part of the tensors that were clipped.

    *At the edge:* a tensor that is not finite stays as it is, and the others are clipped. A
    negative limit counts as its magnitude.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_norm(1.0)
        >>> params = [torch.zeros(2), torch.zeros(1)]
        >>> grads, _ = clip.update(
        ...     [torch.tensor([3.0, 4.0]), torch.tensor([0.5])], clip.init(params), params
        ... )
        >>> grads
        [tensor([0.6000, 0.8000]), tensor([0.5000])]
    """
    return _by_limit("clip_by_norm", limit, nonfinite, _clip_each)


def _by_limit(name: str, limit: Amount, nonfinite: NonFinite, clip: Clip) -> GradientTransform:
    amounts = Amounts(limit=limit)
    check_policy(nonfinite)

    def init(params: Sequence[Tensor]) -> State:
        return {**amounts.init(params), RECORDED: no_figures(params)}

    def apply(leaves: Leaves, state: State) -> State:
        (bound,), state = amounts.at(state)
        heed(leaves, nonfinite)
        return {**state, RECORDED: clip(leaves, bound)}

    return in_place(f"{name}({amounts}{shown(nonfinite)})", init, apply)


def _clip_each(leaves: Leaves, limit: float) -> dict[str, Tensor]:
    """Rescale each leaf by a factor of its own, and say what was done."""
    if not len(leaves):
        return no_figures([])
    factors = leaves.norms.factors(limit)
    before = leaves.norms.together()
    leaves.scale(factors)
    fraction = (factors < 1).to(before.dtype).mean()
    return figures(before, leaves.norms.together(), fraction)


def clip_together(leaves: Leaves, limit: Tensor | float) -> dict[str, Tensor]:
    """Rescale all leaves by one factor, and say what was done."""
    if not len(leaves):
        return no_figures([])
    factor = leaves.norms.factor(limit)
    before = leaves.norms.together()
    leaves.scale(factor)
    return figures(before, before * factor, (factor < 1).to(before.dtype))


def figures(before: Tensor, after: Tensor, fraction: Tensor) -> dict[str, Tensor]:
    """What a clip records."""
    return {"norm": before, "norm_clipped": after, "clipped_fraction": fraction}


def no_figures(params: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a clip records before its first step, and where there is nothing to clip."""
    return figures(no_figure(params), no_figure(params), no_figure(params))
