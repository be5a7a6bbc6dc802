"""Clipping entry by entry: to a range that is given, or that the gradients themselves say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from equipoise._errors import check_choice, names_its_options
from equipoise._numerics import real_entries
from equipoise.transforms._amounts import AT_LEAST_0, Amount, Amounts
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._lists import by_kind, wide
from equipoise.transforms._rank import Wanted, ranked
from equipoise.transforms._shards import Split
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
    no_figure,
)


@names_its_options
def clip_by_value(low: Amount, high: Amount) -> GradientTransform:
    """Every entry held within a range: ``min(high, max(low, g))``.

    *At the edge:* where ``low`` is above ``high`` every entry is ``high``, as with `torch.clamp`.
    NaN stays NaN, an infinite entry is held like any other. Of a complex gradient the real and the
    imaginary part are clipped each.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_value(-1.0, 2.0)
        >>> weight = torch.zeros(3)
        >>> clip.update([torch.tensor([-3.0, 0.5, 9.0])], clip.init([weight]), [weight])[0]
        [tensor([-1.0000,  0.5000,  2.0000])]
    """
    amounts = Amounts(low=low, high=high)

    def apply(leaves: Leaves, state: State) -> State:
        (floor, ceiling), state = amounts.at(state)
        tensors = leaves.write()
        for (_, dtype), places in by_kind(tensors).items():
            real = [real_entries(tensors[i]) for i in places]
            # A limit that the type cannot hold is one that it cannot reach.
            most = torch.finfo(dtype).max
            torch._foreach_clamp_min_(real, min(max(floor, -most), most))
            torch._foreach_clamp_max_(real, min(max(ceiling, -most), most))
        return state

    return in_place(f"clip_by_value({amounts})", amounts.init, apply)


@names_its_options
def clip_by_percentile(
    percent: Amount, *, scope: Literal["global", "tensor"] = "global"
) -> GradientTransform:
    """Every entry held within ±b, where b is a percentile of the absolute values.

    ``b = sorted(|g|)[⌊percent·(n−1)/100⌋]``, the nearest rank below, not interpolated; over all
    gradients together, or over each tensor by itself (``scope="tensor"``). Exact for every n: the
    entries are counted by the bits of their absolute value, in one to six readings, and never
    sorted or brought together.

    Records ``bound`` (with ``scope="global"``).

    *At the edge:* above 100 counts as 100, which is the identity; 0 holds every entry to the
    smallest. The index is exact where ``percent`` is a whole number. NaN counts as the largest, so
    that few of them do not move b; a b that is not finite clips nothing. Empty tensors are
    unchanged. Of a complex gradient the real and the imaginary part count each.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_percentile(50)
        >>> weight = torch.zeros(4)
        >>> clip.update([torch.tensor([1.0, -2.0, 3.0, -4.0])], clip.init([weight]), [weight])[0]
        [tensor([ 1., -2.,  2., -2.])]
    """
    check_choice("scope", scope, ("global", "tensor"))
    amounts = Amounts({"percent": AT_LEAST_0}, percent=percent)

    def init(params: Sequence[Tensor]) -> State:
        none = {RECORDED: {"bound": no_figure(params)}} if scope == "global" else {}
        return {**amounts.init(params), **none}

    def apply(leaves: Leaves, state: State) -> State:
        (part,), new = amounts.at(state)
        real = [real_entries(tensor) for tensor in leaves.read()]
        splits = [() if shard is None else shard.everywhere for shard in leaves.shards]
        sizes = [_entries(original) for original in leaves.originals]
        if scope == "tensor":
            some = [i for i, entries in enumerate(sizes) if entries]
            bounds = ranked([_wanted([real[i]], [splits[i]], sizes[i], part) for i in some])
            tensors = leaves.write()
            for i, bound in zip(some, bounds, strict=True):
                _hold([real_entries(tensors[i])], bound)
            return new
        if not sum(sizes):
            return {**new, RECORDED: {"bound": no_figure(leaves.tensors)}}
        (bound,) = ranked([_wanted(real, splits, sum(sizes), part)])
        _hold([real_entries(tensor) for tensor in leaves.write()], bound)
        return {**new, RECORDED: {"bound": bound.to(wide(bound.device))}}

    where = "" if scope == "global" else ", scope='tensor'"
    return in_place(f"clip_by_percentile({amounts}{where})", init, apply)


def _wanted(
    tensors: list[Tensor], splits: list[tuple[Split, ...]], entries: int, percent: float
) -> Wanted:
    return Wanted(tensors, splits, entries, _index(percent, entries))


def _index(percent: float, entries: int) -> int:
    """``⌊percent·(n−1)/100⌋``, in whole numbers: 29 % of 100 is 29, and not 28.999…"""
    part, of = min(percent, 100).as_integer_ratio()
    return part * (entries - 1) // (of * 100)


def _entries(original: Tensor) -> int:
    """How many real numbers a gradient has, in all its parts."""
    stored = original._values() if original.is_sparse else original  # noqa: SLF001
    return stored.numel() * (2 if original.is_complex() else 1)


def _hold(real: list[Tensor], bound: Tensor) -> None:
    finite = torch.where(bound.isfinite(), bound, torch.inf)
    for tensor in real:
        limit = finite.to(tensor)
        tensor.clamp_(-limit, limit)
