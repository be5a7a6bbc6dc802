"""How uncertain one distribution is."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._errors import check_choice, check_flag, check_number, names_its_options
from equipoise._logspace import entropy_of
from equipoise._numerics import reduce
from equipoise._types import Reduction
from equipoise.penalties._rows import Given, Kept, row_values


@names_its_options
def entropy(
    p: Float[Tensor, "*rows vocabulary"],
    /,
    *,
    mode: Literal["penalty", "bonus"] = "penalty",
    normalize: bool = False,
    temperature: float = 1.0,
    from_logits: bool = False,
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
    support: Bool[Tensor, "..."] | None = None,
    denominator: float | Tensor | None = None,
    chunk: int | None = None,
    check: bool = False,
) -> Float[Tensor, "..."]:
    """Shannon entropy: ``H = −Σ p·log p ≥ 0`` over the last dimension, in nats.

    ``mode="penalty"`` returns +H: added to a loss it makes the model more certain. ``"bonus"``
    returns −H: added to a loss it keeps the model exploring. ``normalize`` divides by the logarithm
    of the number of entries that exist (``support``), so that 1 is the most; with one entry it is
    0. ``temperature`` divides the logits (and renormalises log-probabilities). The other options
    are those of `kl_divergence`.

    *At the edge:* −inf contributes 0 with gradient 0. No row gives 0. NaN propagates, except under
    ``mask`` and ``support``; a temperature that is not positive is refused.

    Examples:
        >>> import torch, equipoise as eq
        >>> p = torch.tensor([0.5, 0.5, 0.0]).log()
        >>> eq.entropy(p), eq.entropy(p, mode="bonus")
        (tensor(0.6931), tensor(-0.6931))
        >>> eq.entropy(p, normalize=True, support=torch.tensor([True, True, False]))
        tensor(1.)
    """
    check_choice("mode", mode, ("penalty", "bonus"))
    check_flag("normalize", normalize)
    check_number("temperature", temperature, above=0.0)
    sign = 1.0 if mode == "penalty" else -1.0

    def row_value(keep: Tensor | None, log_p: Tensor) -> Tensor:
        row = sign * entropy_of(log_p)
        return row * _inverse_log_size(log_p, keep) if normalize else row

    given = Given(from_logits, temperature, check)
    values = row_values(row_value, {"p": p}, given, Kept(mask, support), chunk)
    return reduce([values], [mask], reduction=reduction, denominator=denominator)


def _inverse_log_size(log_p: Tensor, keep: Tensor | None) -> Tensor | float:
    """One over the logarithm of how many entries exist, and 0 where that is one or none."""
    if keep is None:
        return 1 / math.log(log_p.shape[-1]) if log_p.shape[-1] > 1 else 0.0
    size = keep.expand(log_p.shape).sum(-1)
    return torch.where(size > 1, 1 / size.clamp(min=2).to(log_p.dtype).log(), 0.0)
