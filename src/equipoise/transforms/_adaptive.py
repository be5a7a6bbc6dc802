"""Adaptive clipping: a gradient may be no longer than a part of what it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from equipoise._errors import check_choice
from equipoise.transforms._amounts import Amount, Amounts
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._lists import looking_is_free, rescale_rows, row_norms
from equipoise.transforms._nonfinite import NonFinite, check_policy, heed
from equipoise.transforms._shards import Shard, Split, add_over_splits
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
    no_figure,
)


def adaptive_clip(
    factor: Amount = 0.01,
    eps: float = 1e-3,
    *,
    per: Literal["unit", "tensor"] = "unit",
    nonfinite: NonFinite = "propagate",
) -> GradientTransform:
    """Adaptive gradient clipping (AGC; Brock et al. 2021), which does not depend on any scale.

    ``g · min(1, factor · max(‖w‖, eps) / ‖g‖)`` for every unit by itself: each row of a weight (all
    dimensions but the first), or a whole tensor of fewer than two dimensions. ``per="tensor"``
    takes every tensor as one unit.

    Records ``clipped_fraction``: the part of the units that were clipped.

    *At the edge:* ``eps`` lets zero weights move. A unit that is not finite stays as it is and does
    not touch the others; ``nonfinite`` is that of `clip_by_global_norm`. Sparse gradients are
    refused.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.adaptive_clip(0.1)
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> grads, _ = clip.update([torch.ones(2, 2)], clip.init([weight]), [weight])
        >>> grads[0].norm(dim=1)
        tensor([5.0000e-01, 1.0000e-04])
    """
    amounts = Amounts(factor=factor, eps=eps)
    check_choice("per", per, ("unit", "tensor"))
    check_policy(nonfinite)
    whole = per == "tensor"

    def init(params: Sequence[Tensor]) -> State:
        return {**amounts.init(params), RECORDED: {"clipped_fraction": no_figure(params)}}

    def apply(leaves: Leaves, state: State) -> State:
        (part, least), state = amounts.at(state)
        if not len(leaves):
            return {**state, RECORDED: {"clipped_fraction": no_figure([])}}
        heed(leaves, nonfinite)
        tensors, params = leaves.read(), leaves.params("adaptive_clip")
        splits = [
            _of_unit(t, shard, whole) for t, shard in zip(tensors, leaves.shards, strict=True)
        ]
        lengths = _of_whole_units(
            [*row_norms(tensors, whole=whole), *row_norms(params, whole=whole)], splits * 2
        )
        gradients, weights = lengths[: len(tensors)], lengths[len(tensors) :]
        sizes = [len(g) for g in gradients]
        home = leaves.device
        g = torch.cat([row.to(home) for row in gradients])
        limit = part * torch.cat([row.to(home) for row in weights]).clamp(min=least)
        longer = (g > limit) & g.isfinite()
        factors = torch.where(longer, limit / torch.where(longer, g, 1.0), 1.0)
        _rescale(leaves, factors, sizes)
        fraction = longer.to(g.dtype).mean() if len(g) else no_figure(tensors)
        return {**state, RECORDED: {"clipped_fraction": fraction}}

    options = "" if per == "unit" else f", per={per!r}"
    options += "" if nonfinite == "propagate" else f", nonfinite={nonfinite!r}"
    return in_place(f"adaptive_clip({amounts}{options})", init, apply)


def _of_unit(local: Tensor, shard: Shard | None, whole: bool) -> tuple[Split, ...]:
    """The splits that cut a unit to pieces."""
    if shard is None:
        return ()
    if whole or local.dim() < 2:
        return shard.everywhere
    return shard.across(range(1, local.dim()))


def _of_whole_units(lengths: list[Tensor], splits: Sequence[tuple[Split, ...]]) -> list[Tensor]:
    if not any(splits):
        return lengths
    cut = [i for i, of_unit in enumerate(splits) if of_unit]
    squares = add_over_splits([lengths[i].square() for i in cut], [splits[i] for i in cut])
    for i, square in zip(cut, squares, strict=True):
        lengths[i] = square.sqrt()
    return lengths


def _rescale(leaves: Leaves, factors: Tensor, sizes: Sequence[int]) -> None:
    """Multiply the rows; where looking is free, only of tensors in which something changes."""
    rows = torch.split(factors, list(sizes))
    chosen: Sequence[int] = range(len(sizes))
    if looking_is_free(factors.device):
        ends = torch.tensor(sizes).cumsum(0)
        changed = (factors != 1).nonzero().flatten()
        chosen = sorted(set(torch.bucketize(changed, ends, right=True).tolist()))
    if chosen:
        tensors = leaves.write()
        rescale_rows([tensors[i] for i in chosen], [rows[i] for i in chosen])
