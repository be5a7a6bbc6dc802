"""Clipping by what lengths the gradients had before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise._errors import OptionError, check_count, names_its_options
from equipoise.transforms._amounts import AT_LEAST_0, Amount, Amounts
from equipoise.transforms._clip_norm import clip_together, no_figures
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._nonfinite import NonFinite, check_policy, heed, shown
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
    no_figure,
)

Limit = Callable[[Tensor, Tensor, float], Tensor]
"""The limit, from the last norms in ascending order with NaN behind, their number, and a number."""


@names_its_options
def clip_by_norm_history(
    percent: Amount = 10, window: int = 1000, *, nonfinite: NonFinite = "propagate"
) -> GradientTransform:
    """Clip the global norm to a percentile of the last norms (AutoClip; Seetharaman et al. 2020).

    The limit is ``sorted(norms)[⌊percent·(n−1)/100⌋]`` over the norms of the last ``window`` steps,
    this one included. It adapts to the scale of any loss, and needs no tuning.

    Records what `clip_by_global_norm` does, and ``limit``.

    *At the edge:* the first step is its own limit. A norm that is not finite never enters the
    window, and nothing is clipped then. The window is part of the state. ``nonfinite`` is that of
    `clip_by_global_norm`.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_norm_history(0, window=2)
        >>> params = [torch.zeros(1)]
        >>> state = clip.init(params)
        >>> for size in (1.0, 5.0, 9.0):
        ...     grads, state = clip.update([torch.tensor([size])], state, params)
        ...     print(grads[0].item())
        1.0
        1.0
        5.0
    """
    amounts = Amounts({"percent": (0.0, 100.0)}, percent=percent)
    check_count("window", window)

    def limit(norms: Tensor, number: Tensor, percent: float) -> Tensor:
        index = _rank(percent, number - 1, norms.dtype).clamp(min=0)
        return norms.take(index)  # to index with it would wait for the device

    return _by_history("clip_by_norm_history", amounts, window, nonfinite, limit, with_current=True)


def _rank(percent: float, last: Tensor, wide: torch.dtype) -> Tensor:
    """``⌊percent·last/100⌋`` of what the numbers are: 2.4 is less than 24/10."""
    if isinstance(percent, int):
        return torch.div(percent * last, 100, rounding_mode="floor")
    last = last.to(wide)
    rank = (percent * last / 100).floor()
    # That product may have been rounded up to a whole one; of two parts it is exact.
    head = math.floor(percent * 2**20) / 2**20
    missing = 100 * rank - head * last > (percent - head) * last
    return rank.to(torch.int64) - missing.to(torch.int64)


@names_its_options
def clip_by_zscore(
    threshold: Amount = 3.0,
    window: int = 100,
    *,
    warmup: int = 10,
    nonfinite: NonFinite = "propagate",
) -> GradientTransform:
    """Clip the global norm where it stands out: to ``mean + threshold · deviation`` of the last.

    Mean and standard deviation are those of the last ``window`` norms as they were after clipping,
    this one excluded, so that a spike neither hides itself nor widens the limit for the next.

    Records what `clip_by_global_norm` does, and ``limit``.

    *At the edge:* for the first ``warmup`` steps nothing is clipped. Equal norms have deviation 0:
    then the limit is their mean. A norm that is not finite never enters the window, and nothing is
    clipped then.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_zscore(2.0, warmup=2)
        >>> params = [torch.zeros(1)]
        >>> state = clip.init(params)
        >>> for size in (1.0, 3.0, 9.0):
        ...     grads, state = clip.update([torch.tensor([size])], state, params)
        ...     print(round(grads[0].item(), 4))
        1.0
        3.0
        4.0
    """
    amounts = Amounts({"threshold": AT_LEAST_0}, threshold=threshold)
    check_count("window", window)
    check_count("warmup", warmup)
    if warmup > window:
        raise OptionError(
            f"`warmup` must be at most the window of {window} norms, got {warmup}. "
            "Use a longer window."
        )

    def limit(norms: Tensor, number: Tensor, threshold: float) -> Tensor:
        there = torch.arange(len(norms), device=norms.device) < number
        n = number.clamp(min=1)
        mean = torch.where(there, norms, 0.0).sum() / n
        deviation = (torch.where(there, norms - mean, 0.0).square().sum() / n).sqrt()
        ready = number >= warmup
        return torch.where(ready, mean + threshold * deviation, torch.inf)

    options = "" if warmup == 10 else f", warmup={warmup}"
    return _by_history(
        "clip_by_zscore", amounts, window, nonfinite, limit, with_current=False, options=options
    )


def _by_history(
    name: str,
    amounts: Amounts,
    window: int,
    nonfinite: NonFinite,
    limit: Limit,
    *,
    with_current: bool,
    options: str = "",
) -> GradientTransform:
    check_policy(nonfinite)

    def init(params: Sequence[Tensor]) -> State:
        zero = no_figure(params)
        return {
            **amounts.init(params),
            "norms": zero.new_full((window,), torch.nan),
            "seen": zero.new_zeros((), dtype=torch.int64),
            RECORDED: {**no_figures(params), "limit": zero},
        }

    def apply(leaves: Leaves, state: State) -> State:
        (amount,), counted = amounts.at(state)
        if not len(leaves):
            return {**state, **counted}
        heed(leaves, nonfinite)
        norm = leaves.norms.together()
        norms, seen = state["norms"].to(norm), state["seen"].to(norm.device)
        if with_current:
            norms, seen = _entered(norms, seen, norm)
        bound = limit(norms.sort().values, seen.clamp(max=window), amount)
        figures = clip_together(leaves, bound)
        if not with_current:
            norms, seen = _entered(norms, seen, figures["norm_clipped"])
        return {**counted, "norms": norms, "seen": seen, RECORDED: {**figures, "limit": bound}}

    text = f"{name}({amounts}, {window}{options}{shown(nonfinite)})"
    return in_place(text, init, apply)


def _entered(norms: Tensor, seen: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The window with one more norm in the place of the oldest, unless it is not finite."""
    finite = norm.isfinite()
    here = torch.arange(len(norms), device=norms.device) == seen % len(norms)
    return torch.where(here & finite, norm, norms), seen + finite
