"""How far apart two distributions are: Kullback-Leibler and Jensen-Shannon.

Inputs are log-probabilities over the last dimension, or logits with ``from_logits=True``.
"""

from __future__ import annotations

import math
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._errors import (
    OptionError,
    check_choice,
    check_flag,
    check_number,
    check_same_shape,
    names_its_options,
)
from equipoise._logspace import divergence, mixture_divergence, symmetric_divergence
from equipoise._numerics import reduce
from equipoise._types import Reduction
from equipoise.penalties._rows import Given, Kept, row_values

Direction = Literal["forward", "reverse", "symmetric"]


@names_its_options
def kl_divergence(
    p: Float[Tensor, "*rows vocabulary"],
    q: Float[Tensor, "*rows vocabulary"],
    /,
    *,
    direction: Direction = "forward",
    from_logits: bool = False,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    floor: float | None = None,
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
    support: Bool[Tensor, "..."] | None = None,
    denominator: float | Tensor | None = None,
    chunk: int | None = None,
    check: bool = False,
) -> Float[Tensor, "..."]:
    """Kullback-Leibler divergence: ``KL(P‖Q) = Σ p·(log p − log q)`` over the last dimension.

    ``direction="reverse"`` is KL(Q‖P), ``"symmetric"`` the mean of both. By role: with a teacher as
    P this is distillation, and Q learns to cover every mode; with the policy that learns as P it
    is mode-seeking. Gradients flow to both sides: detach what should not learn.

    ``temperature`` divides both sides' logits (and renormalises log-probabilities);
    ``temperature_squared`` multiplies by T², which keeps the size of the gradient. ``mask`` has the
    leading shape (which rows count), ``support`` the full shape (which entries exist).
    ``denominator`` replaces the mean's own count, for instance by a global number of tokens.
    ``chunk`` takes that many rows at a time and computes them again in the backward pass, for large
    vocabularies. ``check`` refuses log-probabilities that do not sum to 1 (waits for the device).

    *At the edge:* both −inf contributes 0 with gradient 0. Where p > 0 and q = 0 the divergence is
    ``inf``, unless ``floor``, a log-probability, holds the distribution in the denominator up; that
    entry has gradient 0. Where it normalises itself it is never negative, and does not cancel for
    p ≈ q. No row gives 0. NaN and inf propagate, except under ``mask`` and ``support``.

    Examples:
        >>> import torch, equipoise as eq
        >>> p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).log()
        >>> q = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]).log()
        >>> eq.kl_divergence(p, q)
        tensor(0.1064)
        >>> eq.kl_divergence(q, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]).log())
        tensor(inf)
    """
    check_choice("direction", direction, ("forward", "reverse", "symmetric"))
    check_number("temperature", temperature, above=0.0)
    check_flag("temperature_squared", temperature_squared)
    if floor is not None:
        check_number("floor", floor, high=0.0)
    check_same_shape("p", p, "q", q)
    given = Given(from_logits, temperature, check)

    def row_value(_keep: Tensor | None, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _directed(log_p, log_q, direction, normalized=given.normalized, floor=floor)

    values = row_values(row_value, {"p": p, "q": q}, given, Kept(mask, support), chunk)
    value = reduce([values], [mask], reduction=reduction, denominator=denominator)
    return value * temperature**2 if temperature_squared else value


def _directed(
    log_p: Tensor, log_q: Tensor, direction: Direction, *, normalized: bool, floor: float | None
) -> Tensor:
    if direction == "symmetric":
        if floor is None:
            return symmetric_divergence(log_p, log_q)
        forward = divergence(log_p, log_q, normalized=normalized, floor=floor)
        return 0.5 * (forward + divergence(log_q, log_p, normalized=normalized, floor=floor))
    if direction == "reverse":
        log_p, log_q = log_q, log_p
    return divergence(log_p, log_q, normalized=normalized, floor=floor)


@names_its_options
def js_divergence(
    p: Float[Tensor, "*rows vocabulary"],
    q: Float[Tensor, "*rows vocabulary"],
    /,
    *,
    beta: float = 0.5,
    base: Literal["e", 2] = "e",
    normalized: bool = False,
    from_logits: bool = False,
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
    support: Bool[Tensor, "..."] | None = None,
    denominator: float | Tensor | None = None,
    chunk: int | None = None,
    check: bool = False,
) -> Float[Tensor, "..."]:
    """Jensen-Shannon divergence: ``β·KL(P‖M) + (1−β)·KL(Q‖M)`` with ``M = βP + (1−β)Q``.

    Symmetric and at most ln 2 at β = ½ (at most 1 with ``base=2``). ``normalized=True`` divides by
    β(1−β): then it tends to KL(P‖Q) as β → 0 and to KL(Q‖P) as β → 1, and those ends are allowed.
    The other options are those of `kl_divergence`.

    *At the edge:* finite and never negative for 0 < β < 1, whatever is −inf; both −inf contributes
    0 with gradient 0. No row gives 0. NaN propagates, except under ``mask`` and ``support``.

    Examples:
        >>> import torch, equipoise as eq
        >>> p = torch.tensor([1.0, 0.0, 0.0]).log()
        >>> q = torch.tensor([0.0, 1.0, 0.0]).log()
        >>> eq.js_divergence(p, q), eq.js_divergence(p, q, base=2)
        (tensor(0.6931), tensor(1.))
    """
    check_choice("base", base, ("e", 2))
    check_number("beta", beta, low=0.0, high=1.0)
    check_flag("normalized", normalized)
    if beta in (0.0, 1.0) and not normalized:
        raise OptionError(
            f"`beta` must lie between 0 and 1, where the divergence is not always 0, got {beta!r}. "
            "Use `normalized=True` for the Kullback-Leibler divergence at the ends."
        )
    check_same_shape("p", p, "q", q)
    given = Given(from_logits, 1.0, check)

    def row_value(_keep: Tensor | None, log_p: Tensor, log_q: Tensor) -> Tensor:
        if beta in (0.0, 1.0):
            ends = (log_p, log_q) if beta == 0.0 else (log_q, log_p)
            return divergence(*ends, normalized=from_logits)
        return mixture_divergence(log_p, log_q, beta)

    values = row_values(row_value, {"p": p, "q": q}, given, Kept(mask, support), chunk)
    value = reduce([values], [mask], reduction=reduction, denominator=denominator)
    unit = math.log(2) if base == 2 else 1.0
    return value / (unit * (beta * (1 - beta) if normalized and 0 < beta < 1 else 1.0))
