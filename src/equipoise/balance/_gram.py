"""Weights from the inner products of the gradients, by whatever rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from equipoise._errors import InputError, InputTypeError, OptionError
from equipoise._gradients import Gradients
from equipoise._pipeline import Pipeline
from equipoise._recorder import BASE
from equipoise.balance._balancer import (
    LIMITS,
    Balancer,
    Limits,
    check_decay,
    good,
    of_first_process,
    used_weight,
)

Weighting = Callable[[Tensor], Tensor]
"""From a Gram matrix, a row and a column a term, to a weight for each."""


def from_gram(
    fn: Weighting,
    /,
    *,
    terms: Sequence[str] | None = None,
    decay: float = 0.0,
    limits: Limits = LIMITS,
    warmup: int = 0,
) -> GramBalancer:
    """A balancer from any function of the gradients' inner products.

    ``fn`` is given the matrix ``⟨g_i, g_j⟩`` of the gradients without their weights, in the order
    of ``terms`` (by default of the report), and returns a weight for each: for instance a weighting
    of TorchJD, ``from_gram(torchjd.aggregation.UPGradWeighting())``. The report must have been
    taken with ``track="gram"``. ``decay`` averages the matrix over reports.

    Where ``base`` is one of the terms, all weights are divided by its own, which is 1: call the
    task loss something else to have the weights as they are.

    *At the edge:* as `Balancer`. A weight of 0 becomes ``limits[0]``; where it is the base that
    gets 0 or less there is nothing to divide by, and nothing changes. Where a report does not hold
    ``fn`` is given an identity matrix, and what it returns is not used.

    Examples:
        >>> import torch, equipoise as eq
        >>> balancer = eq.balance.from_gram(lambda gram: gram.diagonal().rsqrt())
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1), l2=eq.Term(eq.l2, weight=7.0))
        >>> result = pipeline(torch.tensor([3.0, 4.0], requires_grad=True), track="gram")
        >>> result.total.backward()
        >>> balancer.update(result, pipeline)["l2"].weight  # 1 over the norm, which is 10
        tensor(0.1000)
    """
    return GramBalancer(fn, terms, decay=decay, limits=limits, warmup=warmup)


class GramBalancer(Balancer):
    """What `from_gram` makes.

    *At the edge:* as `from_gram`.

    Examples:
        >>> import equipoise as eq
        >>> eq.balance.from_gram(lambda gram: gram.diagonal().rsqrt(), terms=["task", "kl"])
        GramBalancer(<lambda>, terms=['task', 'kl'])
    """

    def __init__(
        self,
        fn: Weighting,
        terms: Sequence[str] | None,
        *,
        decay: float,
        limits: Limits,
        warmup: int,
    ) -> None:
        if not callable(fn):
            raise InputTypeError(
                f"`fn` must be a function of a Gram matrix, got {type(fn).__name__}. "
                "Use `torchjd.aggregation.UPGradWeighting()`, say."
            )
        if isinstance(terms, str):
            raise OptionError(f"`terms` must be a list of names, got {terms!r}. Use [{terms!r}].")
        check_decay(decay)
        super().__init__(terms or (), limits=limits, warmup=warmup)
        self._fn = fn
        self._decay = decay

    def __repr__(self) -> str:
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        return f"GramBalancer({name}, terms={list(self._names) or None})"

    def _wanted(
        self, report: Gradients, _values: Mapping[str, Tensor] | None, _pipeline: Pipeline
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        wanted = self._names or report.names
        names = self._measurable(report, wanted)
        if not names or (self._names and len(names) < len(wanted)):
            return {}
        among = [report.names.index(name) for name in names]
        used = torch.stack([used_weight(report, name) for name in names])
        gram = _among(report.gram, among) / (used.unsqueeze(0) * used.unsqueeze(1))
        holds = good(gram.diagonal()) & gram.isfinite().all()
        mean = self._averaged(f"gram of {', '.join(names)}", gram, holds, self._decay)
        safe = torch.where(holds, mean, torch.eye(len(names), dtype=gram.dtype, device=gram.device))
        # A rule may draw random numbers, as PCGrad's does, and each process draws others.
        weights = of_first_process(self._checked(self._fn(safe), names).to(gram))
        unit = weights[names.index(BASE)] if BASE in names else torch.ones_like(weights[0])
        holds = holds & weights.isfinite().all() & (unit > 0)
        parts = zip(names, (weights / unit).nan_to_num().unbind(), strict=True)
        return {name: (weight, holds) for name, weight in parts if name != BASE}

    def _checked(self, weights: object, names: Sequence[str]) -> Tensor:
        if not isinstance(weights, Tensor) or weights.shape != (len(names),):
            got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise InputError(
                f"`fn` must return one weight for each of {', '.join(names)}, got {got}. "
                f"Use a function whose result has the shape ({len(names)},)."
            )
        return weights.detach()


def _among(gram: Tensor, chosen: Sequence[int]) -> Tensor:
    # Indexing with a list would wait for the device, to which the list has to be sent.
    rows = torch.stack([gram[i] for i in chosen])
    return torch.stack([rows[:, i] for i in chosen], 1)
