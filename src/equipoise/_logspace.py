"""Log-probabilities: distributions whose zeros are −inf, without the NaN that −inf breeds.

The trick is one floor. `LOG_ZERO` stands for −inf: its exponential is exactly 0 in every
precision, yet differences and products with it stay finite, so 0·(LOG_ZERO − x) is 0 where
0·(−inf − x) is NaN, in value and in every derivative. What is infinite by mathematics is put back
as inf where it belongs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise._context import compiling

LOG_ZERO = -1e30
INFINITE = 1e29
"""A difference of log-probabilities above this has a `LOG_ZERO` on one side alone."""


def log_probabilities(
    x: Tensor, *, normalize: bool, temperature: float = 1.0, keep: Tensor | None = None
) -> Tensor:
    """Log-probabilities over the last dimension, with `LOG_ZERO` for −inf.

    ``keep`` says which entries exist: the others are left out of the normalisation, get probability
    0 and gradient 0, and may hold anything. A row in which nothing is possible has only zeros.
    """
    x = x / temperature if temperature != 1.0 else x
    # Not `masked_fill`, which takes ten times as long on the CPU: clamping has no gradient there
    # either, and lets NaN through.
    x = (x if keep is None else x.masked_fill(~keep, -torch.inf)).clamp(min=LOG_ZERO)
    if not normalize or not x.shape[-1]:
        return x
    # What is impossible stays so, but in a row of nothing else: there all would be equally likely.
    nothing = (x.detach().amax(-1, keepdim=True) <= LOG_ZERO).to(x.dtype)
    return x.log_softmax(-1) + LOG_ZERO * nothing


def divergence(
    log_p: Tensor, log_q: Tensor, *, normalized: bool, floor: float | None = None
) -> Tensor:
    """Row by row Σ p·(log p − log q): 0 where p = 0, inf where only q = 0 (gradient 0 there).

    Two normalised distributions get p·d + q − p with d = log p − log q: the same sum, since
    Σq = Σp, but no term is negative and none cancels where p ≈ q. ``floor`` holds log q up in d.
    """
    p, q = log_p.exp(), log_q.exp()
    held = log_q if floor is None else log_q.clamp(min=floor)
    d, infinite = _finite(log_p - held, one_sided=True)
    exact = True if floor is None else log_q == held
    rows = (gap(p, d, q, exact=exact) if normalized else p * d).sum(-1) + infinite
    if not normalized:
        return rows
    if floor is not None:
        # A row of q in which nothing is possible sums to 0: there q − p does not cancel.
        rows = rows + (log_q <= LOG_ZERO).all(-1).to(rows.dtype)
    # In a row where nothing is possible p sums to 0 and not to 1: there is nothing to compare.
    return rows.masked_fill((p.detach().sum(-1) == 0) & ~rows.isnan(), 0.0)


def symmetric_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Row by row Σ ½(p − q)(log p − log q) = (KL(P‖Q) + KL(Q‖P))/2; no term is negative.

    0 where p = q = 0, inf (gradient 0) where just one of them is 0.
    """
    d, infinite = _finite(log_p - log_q, one_sided=False)
    return (0.5 * (log_p.exp() - log_q.exp()) * d).sum(-1) + infinite


def _finite(d: Tensor, *, one_sided: bool) -> tuple[Tensor, Tensor]:
    """The difference with 0, and no gradient, where it is infinite; and inf for rows with such."""
    far = (d if one_sided else d.abs()) > INFINITE
    # A factor of 0 or 1: `torch.where` takes ten times as long on the CPU.
    out = far.to(d.dtype)
    rows = out.sum(-1)
    return d - out * d, torch.zeros_like(rows).masked_fill(rows > 0, torch.inf)


def mixture_divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Row by row Σ β·p·log(p/m) + (1−β)·q·log(q/m) with m = βp + (1−β)q; finite everywhere.

    β(m − p) + (1−β)(m − q) = 0, so the never-negative form may be used for each part, also for
    distributions that do not sum to 1.
    """
    log_m = log_mixture(log_p, log_q, beta)
    p, q, m = log_p.exp(), log_q.exp(), log_m.exp()
    terms = beta * gap(p, log_p - log_m, m) + (1 - beta) * gap(q, log_q - log_m, m)
    return terms.sum(-1)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log(βp + (1−β)q) for 0 < β < 1.

    As `torch.logaddexp`, whose derivatives are NaN where a probability is 0. The larger part is
    chosen by comparison, so that both derivatives exist where the parts are equal.
    """
    a, b = log_p + math.log(beta), log_q + math.log1p(-beta)
    larger = (a >= b).to(a.dtype)
    # Exactly one or the other, and ten times as fast on the CPU as `torch.where`.
    top, low = torch.lerp(b, a, larger), torch.lerp(a, b, larger)
    return top + F.softplus(low - top)


def entropy_of(log_p: Tensor) -> Tensor:
    """Row by row −Σ p·log p, with 0 where p = 0."""
    return (-log_p.exp() * log_p).sum(-1)


def gap(p: Tensor, d: Tensor, q: Tensor, exact: Tensor | bool = True) -> Tensor:
    """p·d + q − p, computed as p·(d + expm1(−d)) where d is small and exactly log p − log q.

    That form is never negative and does not cancel at d ≈ 0; the other does not overflow. Which of
    them counts is a factor of 0 or 1: both are finite, and `torch.where` takes ten times as long on
    the CPU.
    """
    far = ((d.abs() >= 1) | ~exact if isinstance(exact, Tensor) else d.abs() >= 1).to(d.dtype)
    near = d - far * d
    return p * _excess(near) + far * (p * d + (q - p))


def _excess(d: Tensor) -> Tensor:
    """d + expm1(−d) for −1 ≤ d ≤ 1."""
    if not compiling():
        return d + torch.expm1(-d)
    # The compiler makes exp(−d) − 1 of it on the CPU, which cancels; this is free in what it fuses:
    # d²·(1/2! − d/3! + d²/4! − …), until the next term is lost beside 1/2!.
    last = 19 if d.dtype == torch.float64 else 12
    series = torch.full_like(d, 1 / math.factorial(last))
    for k in range(last - 1, 1, -1):
        series = 1 / math.factorial(k) - d * series
    return d * d * series
