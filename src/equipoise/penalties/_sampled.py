"""Divergence estimated from the log-probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._errors import InputError, check_choice, check_same_shape, names_its_options
from equipoise._numerics import pieces, reduce
from equipoise._types import Reduction, Tensors


@names_its_options
def sampled_kl(
    logp: Tensors,
    logq: Tensors,
    /,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    gradient: Literal["same", "k2"] = "same",
    reduction: Reduction = "mean",
    mask: Tensors | None = None,
    denominator: float | Tensor | None = None,
) -> Float[Tensor, "..."]:
    """Estimate KL(P‖Q) from tokens sampled from P: their log-probabilities under P and under Q.

    With ``log r = logq − logp``: ``k1 = −log r`` is unbiased and can be negative; ``k2 =
    (log r)²/2`` has little variance and a bias; ``k3 = r − 1 − log r ≥ 0`` is unbiased with little
    variance (Schulman 2020, "Approximating KL divergence"). The gradient of k3 is *not* that of
    KL(P‖Q): ``gradient="k2"`` keeps the value of the estimator and takes the gradient of k2, which
    is unbiased when P is what learns.

    Both arguments are one tensor, or lists of tensors (one a sequence, of any lengths).

    *At the edge:* a token with ``logp = −inf`` cannot have been sampled and contributes 0 with
    gradient 0; ``logq = −inf`` alone gives ``inf``, with ``gradient="k2"`` of slope 0. No token
    gives 0. NaN propagates, except under the mask.

    Examples:
        >>> import torch, equipoise as eq
        >>> logp, logq = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5])
        >>> (
        ...     eq.sampled_kl(logp, logq, estimator="k1"),
        ...     eq.sampled_kl(logp, logq, estimator="k2"),
        ... )
        (tensor(0.), tensor(0.1250))
    """
    check_choice("estimator", estimator, ("k1", "k2", "k3"))
    check_choice("gradient", gradient, ("same", "k2"))
    # The mask is read twice: a generator would be empty the second time.
    mask = list(mask) if isinstance(mask, Iterator) else mask
    sampled, masks = pieces("logp", logp, mask)
    scored, _ = pieces("logq", logq, mask)
    if len(sampled) != len(scored):
        raise InputError(
            f"`logp` and `logq` must hold as many tensors, got {len(sampled)} and {len(scored)}. "
            "Use one tensor a sequence in both."
        )
    values = []
    for p, q in zip(sampled, scored, strict=True):
        check_same_shape("logp", p, "logq", q)
        log_ratio = torch.where(p == -torch.inf, 0.0, q) - torch.where(p == -torch.inf, 0.0, p)
        values.append(_estimate(log_ratio, estimator, gradient))
    return reduce(values, masks, reduction=reduction, denominator=denominator)


def _estimate(log_ratio: Tensor, estimator: str, gradient: str) -> Tensor:
    if gradient == "k2":
        value = _estimate(log_ratio.detach(), estimator, "same")
        # Infinite ratios are left out before the square: 0 times its slope would be NaN.
        second = 0.5 * torch.where(log_ratio.isinf(), 0.0, log_ratio).square()
        # second − second is 0 with the gradient of second.
        return value + (second - second.detach())
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio
