"""Weights that keep terms at a part, or a multiple, of another term's gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from torch import Tensor

from equipoise._errors import OptionError, check_number
from equipoise._gradients import Gradients
from equipoise._pipeline import Pipeline
from equipoise._recorder import BASE
from equipoise.balance._balancer import LIMITS, Balancer, Limits, check_decay, good


class _AgainstBase(Balancer):
    """Weights from the ratio of each term's gradient norm to the base's."""

    def __init__(
        self,
        ratios: Mapping[str, float],
        *,
        base: str,
        decay: float,
        eps: float,
        limits: Limits,
        warmup: int,
    ) -> None:
        super().__init__(tuple(ratios), limits=limits, warmup=warmup, base=base)
        self._ratios = dict(ratios)
        self._base = base
        self._decay = decay
        self._eps = eps

    def _wanted(
        self, report: Gradients, _values: Mapping[str, Tensor] | None, _pipeline: Pipeline
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        there = self._measurable(report, [self._base, *self._ratios])
        if self._base not in there:
            return {}
        base = cast("Tensor", report[self._base].grad_norm_weighted)
        norms = {n: cast("Tensor", report[n].grad_norm) for n in there if n != self._base}
        holds = good(base, *norms.values())
        against = self._averaged(self._base, base, holds, self._decay)
        wanted = {}
        for name, norm in norms.items():
            mean = self._averaged(name, norm, holds, self._decay)
            wanted[name] = (self._ratios[name] * against / (mean + self._eps), holds)
        return wanted


class GradientRatio(_AgainstBase):
    """Weights at which a term's gradient is a multiple of the base's.

    ``w = ratio · ‖g_base‖ / (‖g‖ + eps)``, where both norms are exponential averages, with their
    weights and without. The adaptive weight of VQGAN (Esser et al. 2021) is
    ``GradientRatio({"gan": 0.8}, eps=1e-4)`` on the report of the decoder's last layer:
    ``tracking.parameter_gradients(result, [decoder.last.weight], set_grad=False)``.

    *At the edge:* as `Balancer`. ``decay=0`` remembers nothing. For the first ``warmup`` reports
    the pipeline's own weights stay, and averages begin. Without ``base`` among the pipeline's terms
    any other term may be the measure; it keeps its own weight.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1), l2=eq.Term(eq.l2))
        >>> balancer = eq.balance.GradientRatio({"l1": 0.5}, base="l2")
        >>> result = pipeline(torch.tensor([3.0, 4.0], requires_grad=True), track=True)
        >>> result.total.backward()
        >>> balancer.update(result, pipeline)["l1"].weight  # 0.5 · 10 / √2
        tensor(3.5355)
    """

    def __init__(
        self,
        ratios: Mapping[str, float],
        *,
        base: str = "base",
        decay: float = 0.0,
        eps: float = 0.0,
        limits: Limits = LIMITS,
        warmup: int = 0,
    ) -> None:
        _check_targets("ratios", ratios, base, decay, below=math.inf)
        check_number("eps", eps, low=0.0)
        super().__init__(ratios, base=base, decay=decay, eps=eps, limits=limits, warmup=warmup)

    def __repr__(self) -> str:
        return f"GradientRatio({self._ratios}, base={self._base!r})"


class GradientShare(_AgainstBase):
    """Weights at which each named term holds its share of the gradient, and the base the rest.

    Shares are of the sum of norms: ``‖w_k g_k‖ = s_k · (‖g_base‖ + Σ_j ‖w_j g_j‖)`` over the named
    terms j, with exponential averages of the norms (as Défossez et al. 2022 do for EnCodec). Terms
    that are not named keep their weights and do not count.

    *At the edge:* as `Balancer`; shares must leave something to the base. Norms are those of the
    report: at the inputs, or, with `tracking.parameter_gradients`, at the parameters. Where
    gradients oppose each other a share is still one of lengths, not of the step.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, weight=0.1))
        >>> balancer = eq.balance.GradientShare({"l1": 0.2})
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> for _ in range(2):
        ...     result = pipeline(x, base=lambda x: 8 * x.sum(), track=True)
        ...     result.total.backward()
        ...     pipeline = balancer.update(result, pipeline)
        >>> pipeline["l1"].weight  # 2 of 8 + 2
        tensor(2.)
    """

    def __init__(
        self,
        shares: Mapping[str, float],
        *,
        base: str = "base",
        decay: float = 0.9,
        limits: Limits = LIMITS,
        warmup: int = 0,
    ) -> None:
        _check_targets("shares", shares, base, decay, below=1.0)
        rest = 1.0 - math.fsum(shares.values())
        ratios = {name: share / rest for name, share in shares.items()}
        super().__init__(ratios, base=base, decay=decay, eps=0.0, limits=limits, warmup=warmup)
        self._shares = dict(shares)

    def __repr__(self) -> str:
        return f"GradientShare({self._shares}, base={self._base!r})"


def _check_targets(
    option: str, targets: object, base: object, decay: object, *, below: float
) -> None:
    """Refuse targets that are no mapping from terms to numbers above 0, or too much together."""
    if not isinstance(targets, Mapping) or not targets:
        raise OptionError(
            f"`{option}` must be a mapping from terms to numbers, got {targets!r}. "
            "Use {'kl': 0.1}, say."
        )
    for name, target in targets.items():
        check_number(f"{option}[{name!r}]", target, above=0.0)
        if name in (BASE, base):
            raise OptionError(
                f"`{option}` must be of other terms than the one they are measured against, got "
                f"{name!r}. Use `base=` to measure against another."
            )
    if math.fsum(targets.values()) >= below:
        raise OptionError(
            f"`{option}` must leave something to the base, got {dict(targets)}, which add up to "
            f"{math.fsum(targets.values()):g}. Use shares whose sum is below 1."
        )
    check_decay(decay)
