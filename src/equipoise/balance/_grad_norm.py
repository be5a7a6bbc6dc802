"""Weights that let all terms train at one rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from equipoise._errors import GradientError, InputError, OptionError, check_number
from equipoise._gradients import Gradients
from equipoise._pipeline import Pipeline
from equipoise._recorder import BASE
from equipoise.balance._balancer import (
    LIMITS,
    Balancer,
    Limits,
    good,
    over_processes,
    own_weight,
)


class GradNorm(Balancer):
    """Weights at which terms that have fallen behind get the longer gradients (Chen et al. 2018).

    With ``G_k = ‖w_k g_k‖``, the loss ratios ``L̃_k = L_k / L_k at the first report`` and
    ``r_k = L̃_k / mean L̃``, each update is one step of descent on ``Σ_k |G_k − Ḡ·r_k^alpha| / Ḡ``
    in ``log w``, the targets held still; then the weights are scaled to the sum they began with.
    In the logarithm weights stay positive, and ``lr`` means the same whatever the size of the
    gradients: ``w_k ← w_k · exp(−lr · sign(G_k − Ḡ·r_k^alpha) · G_k/Ḡ)``.

    Where ``base`` is one of the terms, all weights are divided by its own, which is 1.

    *At the edge:* as `Balancer`. All terms must be in the report, and their values positive; a
    report where one is not changes nothing. Weights settle to within a factor of ``exp(±lr)``.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1), l2=eq.Term(eq.l2))
        >>> balancer = eq.balance.GradNorm(["l1", "l2"], alpha=0.0, lr=0.01)
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> for _ in range(200):
        ...     result = pipeline(x, track=True)
        ...     result.total.backward()
        ...     pipeline = balancer.update(result, pipeline)
        >>> norms = result.gradients.weighted
        >>> round(float(norms["l1"] / norms["l2"]), 1)
        1.0
    """

    def __init__(
        self,
        terms: Sequence[str],
        *,
        alpha: float = 1.5,
        lr: float = 0.025,
        limits: Limits = LIMITS,
        warmup: int = 0,
    ) -> None:
        if isinstance(terms, str) or len(set(terms)) < 2 or len(set(terms)) < len(terms):
            raise OptionError(
                f"`terms` must be two or more names, each once, got {terms!r}. "
                "Use ['base', 'kl'], say."
            )
        check_number("alpha", alpha, low=0.0)
        check_number("lr", lr, above=0.0)
        super().__init__(terms, limits=limits, warmup=warmup)
        self._alpha = alpha
        self._lr = lr

    def __repr__(self) -> str:
        return f"GradNorm({list(self._names)}, alpha={self._alpha:g}, lr={self._lr:g})"

    def _wanted(
        self, report: Gradients, values: Mapping[str, Tensor] | None, pipeline: Pipeline
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        names = self._names
        if len(self._measurable(report, names)) < len(names):
            return {}
        losses = over_processes(self._losses(report, values))
        sizes = torch.stack([own_weight(report, name, pipeline).abs() for name in names])
        norms = sizes * torch.stack([cast("Tensor", report[n].grad_norm) for n in names])
        holds = good(norms, losses)
        # The figures of a report that does not hold go no further than the choice at the end.
        before = self._memory.get("weights", sizes).to(sizes)
        total = self._memory.get("sum", before.sum()).to(sizes)
        first = self._memory.get("losses", torch.full_like(losses, torch.nan)).to(losses)
        first = torch.where(first.isnan() & holds, losses, first)
        pace = losses / first
        mean = norms.mean()
        off = (norms - mean * (pace / pace.mean()) ** self._alpha).sign()
        after = before * torch.exp(-self._lr * off * norms / mean)
        after = self._limited(after * total / after.sum())
        after = torch.where(holds, after, before)
        if self._reports > self._warmup:
            self._memory.update(weights=after, sum=total)
        self._memory["losses"] = first
        parts = zip(names, (after / self._unit(after)).unbind(), strict=True)
        return {name: (weight, holds) for name, weight in parts if name != BASE}

    def _limited(self, weights: Tensor) -> Tensor:
        # What is remembered, too: from beyond the limits it would be as far back as it was there.
        unit = self._unit(weights)
        limited = (weights / unit).clamp(*self._limits) * unit
        both = zip(self._names, weights, limited, strict=True)
        return torch.stack([free if name == BASE else held for name, free, held in both])

    def _unit(self, weights: Tensor) -> Tensor:
        """The base's own weight, which counts as 1."""
        there = BASE in self._names
        return weights[self._names.index(BASE)] if there else torch.ones_like(weights[0])

    def _losses(self, report: Gradients, values: Mapping[str, Tensor] | None) -> Tensor:
        if values is None:
            raise GradientError(
                "GradNorm looks at the terms' values too, got a gradient report alone. "
                "Use `update(result, pipeline)`, or `values=`."
            )
        missing = [name for name in self._names if name not in values]
        if missing:
            raise InputError(
                f"`values` must hold all of {', '.join(self._names)}, got none of "
                f"{', '.join(missing)}. Use `{{n: t.value for n, t in result.results.items()}}`."
            )
        return torch.stack([values[n].detach().to(report.squares) for n in self._names])
