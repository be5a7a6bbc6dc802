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

LOG_ZERO = -1e30


def log_probabilities(
    x: Tensor, *, normalize: bool, temperature: float = 1.0, keep: Tensor | None = None
) -> Tensor:
    """Log-probabilities over the last dimension, with `LOG_ZERO` for −inf.

    ``keep`` says which entries exist: the others are left out of the normalisation, get probability
    0 and gradient 0, and may hold anything. A row in which nothing is possible has only zeros.
    """
    x = x / temperature if temperature != 1.0 else x
    dead = x == -torch.inf if keep is None else (x == -torch.inf) | ~keep
    x = x.masked_fill(dead, LOG_ZERO)
    return x.log_softmax(-1).masked_fill(dead, LOG_ZERO) if normalize else x


def divergence(
    log_p: Tensor, log_q: Tensor, *, normalized: bool, floor: float | None = None
) -> Tensor:
    """Row by row Σ p·(log p − log q): 0 where p = 0, inf where only q = 0 (gradient 0 there).

    Two normalised distributions get p·d + q − p with d = log p − log q: the same sum, since
    Σq = Σp, but no term is negative and none cancels where p ≈ q. ``floor`` holds log q up in d.
    """
    p, q = log_p.exp(), log_q.exp()
    held = log_q if floor is None else log_q.clamp(min=floor)
    d = log_p - held
    terms = _gap(p, d, q, exact=log_q == held) if normalized else p * d
    possible = log_p > LOG_ZERO
    rows = terms.masked_fill((held <= LOG_ZERO) & possible, torch.inf).sum(-1)
    if normalized and floor is not None:
        # A row of q in which nothing is possible sums to 0: there q − p does not cancel.
        rows = rows + (log_q <= LOG_ZERO).all(-1).to(rows.dtype)
    # In a row where nothing is possible p sums to 0 and not to 1: there is nothing to compare.
    return torch.where(possible.any(-1) | rows.isnan(), rows, 0.0) if normalized else rows


def symmetric_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Row by row Σ ½(p − q)(log p − log q) = (KL(P‖Q) + KL(Q‖P))/2; no term is negative.

    0 where p = q = 0, inf (gradient 0) where just one of them is 0.
    """
    terms = 0.5 * (log_p.exp() - log_q.exp()) * (log_p - log_q)
    zero_p, zero_q = log_p <= LOG_ZERO, log_q <= LOG_ZERO
    infinite = (zero_p & (log_q > LOG_ZERO)) | (zero_q & (log_p > LOG_ZERO))
    return terms.masked_fill(infinite, torch.inf).sum(-1)


def mixture_divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Row by row Σ β·p·log(p/m) + (1−β)·q·log(q/m) with m = βp + (1−β)q; finite everywhere.

    β(m − p) + (1−β)(m − q) = 0, so the never-negative form may be used for each part, also for
    distributions that do not sum to 1.
    """
    log_m = log_mixture(log_p, log_q, beta)
    p, q, m = log_p.exp(), log_q.exp(), log_m.exp()
    terms = beta * _gap(p, log_p - log_m, m) + (1 - beta) * _gap(q, log_q - log_m, m)
    return terms.sum(-1)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log(βp + (1−β)q) for 0 < β < 1.

    As `torch.logaddexp`, whose derivatives are NaN where a probability is 0. The larger part is
    chosen by comparison, so that both derivatives exist where the parts are equal.
    """
    a, b = log_p + math.log(beta), log_q + math.log1p(-beta)
    larger = a >= b
    top, low = torch.where(larger, a, b), torch.where(larger, b, a)
    return top + F.softplus(low - top)


def entropy_of(log_p: Tensor) -> Tensor:
    """Row by row −Σ p·log p, with 0 where p = 0."""
    return (-log_p.exp() * log_p).sum(-1)


def _gap(p: Tensor, d: Tensor, q: Tensor, exact: Tensor | bool = True) -> Tensor:
    """p·d + q − p, computed as p·(d + expm1(−d)) where d is small and exactly log p − log q.

    That form is never negative and does not cancel at d ≈ 0; the other does not overflow.
    """
    near = d.clamp(-1, 1)
    return torch.where((d.abs() < 1) & exact, p * (near + torch.expm1(-near)), p * d + (q - p))
