"""How far apart two outputs for the same thing are."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._errors import check_choice, check_dim, check_same_shape, names_its_options
from equipoise._logspace import log_probabilities, symmetric_divergence
from equipoise._numerics import check_mask, full_precision, reduce, select, unit
from equipoise._types import Reduction

Metric = Literal["mse", "l1", "cosine", "kl"]


@names_its_options
def consistency(
    a: Float[Tensor, "*shape"],
    b: Float[Tensor, "*shape"],
    /,
    *,
    metric: Metric = "mse",
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
    stop_gradient: Literal["first", "second"] | None = None,
    dim: int = -1,
) -> Float[Tensor, "..."]:
    """Distance between paired outputs, for instance of two views of one example.

    ``"mse"`` and ``"l1"`` compare entry by entry: ``(a − b)²`` and ``|a − b|``. ``"cosine"`` is
    ``1 − cos(a, b)`` and ``"kl"`` is ``(KL(a‖b) + KL(b‖a))/2`` of log-probabilities, both along
    ``dim``, one value a row. ``mask`` fits the entries, or for the last two the rows.
    ``stop_gradient`` lets nothing flow into one side.

    *At the edge:* shapes must be equal, nothing broadcasts. A zero vector has cosine term 1 with
    gradient 0. Identical inputs have gradient 0 in every metric. No entry gives 0. NaN propagates,
    except under the mask.

    Examples:
        >>> import torch, equipoise as eq
        >>> a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
        >>> eq.consistency(a, b), eq.consistency(a, b, metric="cosine")
        (tensor(2.5000), tensor(1.))
    """
    check_choice("metric", metric, ("mse", "l1", "cosine", "kl"))
    check_choice("stop_gradient", stop_gradient, (None, "first", "second"))
    check_same_shape("a", a, "b", b)
    check_dim("dim", dim, a.dim())
    a = full_precision(a.detach() if stop_gradient == "first" else a)
    b = full_precision(b.detach() if stop_gradient == "second" else b)
    if metric in ("mse", "l1"):
        values = _by_entry(a, b, metric, mask)
    else:
        values = _by_row(_rows(a, dim), _rows(b, dim), metric, mask)
    return reduce([values], [mask], reduction=reduction)


def _by_entry(a: Tensor, b: Tensor, metric: Metric, mask: Tensor | None) -> Tensor:
    if mask is not None:
        check_mask("mask", mask, a.shape)
    difference = select(a - b, mask)
    return difference.square() if metric == "mse" else difference.abs()


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, -1) if x.dim() else x.reshape(1)


def _by_row(a: Tensor, b: Tensor, metric: Metric, mask: Tensor | None) -> Tensor:
    keep = None
    if mask is not None:
        check_mask("mask", mask, a.shape[:-1])
        keep = (mask != 0).unsqueeze(-1)
    if metric == "cosine":
        return _cosine_distance(select(a, keep), select(b, keep))
    log_a, log_b = (log_probabilities(x, normalize=False, keep=keep) for x in (a, b))
    return symmetric_divergence(log_a, log_b)


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 − cos as ½‖a/‖a‖ − b/‖b‖‖²: exactly 0, with gradient 0, where the directions agree."""
    unit_a, some_a = unit(a, -1)
    unit_b, some_b = unit(b, -1)
    half = 0.5 * (unit_a - unit_b).square().sum(-1)
    return torch.where((some_a & some_b).squeeze(-1), half, 1.0)
