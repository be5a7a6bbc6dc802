"""Adaptive clipping: a gradient may be no longer than a part of what it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equipoise._errors import check_choice
from equipoise.transforms._amounts import Amount, Amounts
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._lists import (
    alike,
    looking_is_free,
    rescale_rows,
    row_norms,
)
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
    amounts = Amounts(0.0, factor=factor, eps=eps)
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
        groups = _groups(leaves, whole=whole)
        longer, units = no_figure(leaves.tensors), 0
        for group, factors in zip(groups, _factors(groups, part, least, whole=whole), strict=True):
            _rescale(leaves, group, factors)
            longer = longer + (factors < 1).sum().to(longer)
            units += factors.numel()
        return {**state, RECORDED: {"clipped_fraction": longer / max(1, units)}}

    options = "" if per == "unit" else f", per={per!r}"
    options += "" if nonfinite == "propagate" else f", nonfinite={nonfinite!r}"
    return in_place(f"adaptive_clip({amounts}{options})", init, apply)


@dataclass(frozen=True)
class _Group:
    """Leaves of one shape, type and spread, which are worked on together."""

    places: list[int]
    tensors: list[Tensor]
    params: list[Tensor]
    splits: tuple[Split, ...]
    """Those that cut a unit to pieces."""


def _groups(leaves: Leaves, *, whole: bool) -> list[_Group]:
    tensors, params = leaves.read(), leaves.params("adaptive_clip")
    out = []
    for same in alike(tensors).values():
        spreads: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for i in same:
            splits = _of_unit(tensors[i], leaves.shards[i], whole=whole)
            spreads.setdefault(tuple((id(mesh), dim) for mesh, dim in splits), []).append(i)
        for places in spreads.values():
            splits = _of_unit(tensors[places[0]], leaves.shards[places[0]], whole=whole)
            some = [tensors[i] for i in places]
            out.append(_Group(places, some, [params[i] for i in places], splits))
    return out


def _of_unit(local: Tensor, shard: Shard | None, *, whole: bool) -> tuple[Split, ...]:
    if shard is None:
        return ()
    if whole or local.dim() < 2:
        return shard.everywhere
    return shard.across(range(1, local.dim()))


def _factors(
    groups: Sequence[_Group], part: float, least: float, *, whole: bool
) -> Iterator[Tensor]:
    """What to multiply each unit with: for every group a matrix, a line for each tensor."""
    lengths = [row_norms(group.tensors, whole=whole) for group in groups]
    lengths += [row_norms(group.params, whole=whole) for group in groups]
    cut = [i for i, group in enumerate([*groups, *groups]) if group.splits]
    squares = add_over_splits(
        [lengths[i].square() for i in cut], [groups[i % len(groups)].splits for i in cut]
    )
    for i, square in zip(cut, squares, strict=True):
        lengths[i] = square.sqrt()
    for g, w in zip(lengths[: len(groups)], lengths[len(groups) :], strict=True):
        limit = part * w.clamp(min=least)
        longer = (g > limit) & g.isfinite()
        yield torch.where(longer, limit / torch.where(longer, g, 1.0), 1.0)


def _rescale(leaves: Leaves, group: _Group, factors: Tensor) -> None:
    """Multiply the rows; where looking is free, only of tensors in which something changes."""
    if not factors.numel():
        return
    chosen: Sequence[int] = range(len(group.places))
    if looking_is_free(factors.device):
        chosen = (factors != 1).any(1).nonzero().flatten().tolist()
    if chosen:
        tensors = leaves.write()
        some = factors if len(chosen) == len(factors) else factors[list(chosen)]
        rescale_rows([tensors[group.places[i]] for i in chosen], some)
