"""Adaptive clipping: a gradient may be no longer than a part of what it changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equipoise._errors import check_choice, names_its_options
from equipoise.transforms._amounts import AT_LEAST_0, Amount, Amounts
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._lists import (
    alike,
    looking_is_free,
    rescale_rows,
    row_norms,
)
from equipoise.transforms._nonfinite import NonFinite, check_policy, heed, shown
from equipoise.transforms._shards import Shard, Split, add_over_splits
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
    no_figure,
)


@names_its_options
def adaptive_clip(
    factor: Amount = 0.01,
    eps: Amount = 1e-3,
    *,
    per: Literal["unit", "tensor"] = "unit",
    nonfinite: NonFinite = "propagate",
) -> GradientTransform:
    """Adaptive gradient clipping (AGC; Brock et al. 2021), which does not depend on any scale.

    ``g · min(1, factor · max(‖w‖, eps) / ‖g‖)`` for every unit by itself: each row of a weight (all
    dimensions but the first), or a whole tensor of fewer than two dimensions. ``per="tensor"``
    takes every tensor as one unit.

    Records ``clipped_fraction``: the part of the units that were clipped, on all processes.

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
    amounts = Amounts({"factor": AT_LEAST_0, "eps": AT_LEAST_0}, factor=factor, eps=eps)
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
        all_factors, longer = _measured(groups, part, least, whole=whole)
        for group, factors in zip(groups, all_factors, strict=True):
            _rescale(leaves, group, factors)
        units = sum(_units(leaves, group, whole=whole) for group in groups)
        return {**state, RECORDED: {"clipped_fraction": longer / max(1, units)}}

    options = "" if per == "unit" else f", per={per!r}"
    return in_place(f"adaptive_clip({amounts}{options}{shown(nonfinite)})", init, apply)


@dataclass(frozen=True)
class _Group:
    """Leaves of one shape, type and spread, which are worked on together."""

    places: list[int]
    tensors: list[Tensor]
    params: list[Tensor]
    cuts: tuple[Split, ...]
    """The splits that cut a unit to pieces."""
    deals: tuple[Split, ...]
    """The splits that deal whole units out."""


def _groups(leaves: Leaves, *, whole: bool) -> list[_Group]:
    tensors, params = leaves.read(), leaves.params("adaptive_clip")
    out = []
    for same in alike(tensors).values():
        if leaves.plain:
            some = [tensors[i] for i in same]
            out.append(_Group(same, some, [params[i] for i in same], (), ()))
            continue
        spreads: dict[tuple[tuple[int, int, bool], ...], list[int]] = {}
        for i in same:
            cuts, deals = _splits(tensors[i], leaves.shards[i], whole=whole)
            key = [(id(mesh), dim, True) for mesh, dim in cuts]
            key += [(id(mesh), dim, False) for mesh, dim in deals]
            spreads.setdefault(tuple(key), []).append(i)
        for places in spreads.values():
            cuts, deals = _splits(tensors[places[0]], leaves.shards[places[0]], whole=whole)
            some = [tensors[i] for i in places]
            out.append(_Group(places, some, [params[i] for i in places], cuts, deals))
    return out


def _splits(
    local: Tensor, shard: Shard | None, *, whole: bool
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """Those that cut a unit of this leaf, and those that deal units out."""
    if shard is None:
        return (), ()
    if whole or local.dim() < 2:
        return shard.everywhere, ()
    return shard.across(range(1, local.dim())), shard.across([0])


def _units(leaves: Leaves, group: _Group, *, whole: bool) -> int:
    """How many units the whole of a group's leaves have."""
    if whole or group.tensors[0].dim() < 2:
        return len(group.places)
    shards = [leaves.shards[i] for i in group.places]
    rows = len(group.tensors[0])
    return sum(rows if shard is None else shard.whole[0] for shard in shards)


def _measured(
    groups: Sequence[_Group], part: float, least: float, *, whole: bool
) -> tuple[list[Tensor], Tensor]:
    """What to multiply each unit with, a line for each tensor of a group; how many get shorter.

    All that other processes have to say comes in one reduction, but for a count of units that are
    both cut and dealt out, which is of lengths that are known only then.
    """
    lengths = [
        torch.stack([row_norms(some, whole=whole) for some in (group.tensors, group.params)], 1)
        for group in groups
    ]
    here = [_factors(both, part, least) for both in lengths]
    said = _summed(
        (group, both.square() if group.cuts else _count(factors), group.cuts or group.deals)
        for group, both, factors in zip(groups, lengths, here, strict=True)
    )
    all_factors = [
        _factors(total.sqrt(), part, least) if group.cuts else factors
        for group, total, factors in zip(groups, said, here, strict=True)
    ]
    counts = _summed(
        (group, _count(factors), group.deals) if group.cuts else (group, total, ())
        for group, total, factors in zip(groups, said, all_factors, strict=True)
    )
    return all_factors, torch.stack([count.sum().to(counts[0].device) for count in counts]).sum()


def _summed(parts: Iterable[tuple[_Group, Tensor, tuple[Split, ...]]]) -> list[Tensor]:
    """A line for each tensor of each group, added up over the group's splits.

    The order is that of the gradients, which all processes share. Groups they need not share:
    shapes of uneven shards differ from one to the next.
    """
    listed = list(parts)
    lines = {
        place: (line, splits)
        for group, lines, splits in listed
        if splits
        for place, line in zip(group.places, lines.unbind(), strict=True)
    }
    places = sorted(lines)
    sums = add_over_splits([lines[i][0] for i in places], [lines[i][1] for i in places])
    total = dict(zip(places, sums, strict=True))
    return [
        torch.stack([total[i] for i in group.places]) if splits else lines
        for group, lines, splits in listed
    ]


def _factors(lengths: Tensor, part: float, least: float) -> Tensor:
    g, w = lengths.unbind(1)
    limit = part * w.clamp(min=least)
    longer = (g > limit) & g.isfinite()
    return torch.where(longer, limit / torch.where(longer, g, 1.0), 1.0)


def _count(factors: Tensor) -> Tensor:
    """How many units of each tensor get shorter."""
    return (factors < 1).sum(1).to(factors.dtype)


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
