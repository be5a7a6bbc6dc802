"""How large: l1, l2, elastic net, and the distance of a norm from its target."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from equipoise._errors import (
    OptionError,
    check_choice,
    check_dims,
    check_fits,
    check_number,
    check_tensor,
    names_its_options,
)
from equipoise._numerics import (
    filled_as,
    full_precision,
    pieces,
    reduce,
    select,
    vector_norm,
)
from equipoise._types import Dims, Reduction, Tensors


@names_its_options
def l1(
    x: Tensors,
    /,
    *,
    reduction: Reduction = "sum",
    mask: Tensors | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "..."]:
    """Sum of absolute values: ``scale · Σ|xᵢ|``. Makes entries exactly zero.

    ``x`` is one tensor or an iterable of them, which count as one long vector.

    *At the edge:* the gradient at 0 is 0. Empty gives 0. NaN and inf propagate, except under the
    mask, where they change neither value nor gradient. Half precision is computed and returned in
    float32.

    Examples:
        >>> import torch, equipoise as eq
        >>> eq.l1(torch.tensor([1.0, -2.0, 3.0]))
        tensor(6.)
        >>> eq.l1([torch.ones(2), -torch.ones(3)], reduction="mean", scale=0.5)
        tensor(0.5000)
    """
    check_number("scale", scale)
    tensors, masks = pieces("x", x, mask)
    return scale * reduce([t.abs() for t in tensors], masks, reduction=reduction)


@names_its_options
def l2(
    x: Tensors,
    /,
    *,
    reduction: Reduction = "sum",
    center: Literal["mean"] | float | Tensor | None = None,
    clip: float | None = None,
    clip_mode: Literal["cap", "huber"] = "cap",
    mask: Tensors | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "..."]:
    """Sum of squares: ``scale · Σ(xᵢ − center)²``. There is no ½: the gradient is 2·scale·(x−c).

    ``center="mean"`` is the (masked) mean of all entries, and is differentiated through. ``clip=k``
    acts after centering: ``clip_mode="cap"`` holds entries at ±k before they are squared, so that
    outliers have gradient 0; ``"huber"`` lets the penalty go on as a line, ``k·(2|y| − k)``, so
    that they keep the gradient ±2k.

    *At the edge:* empty gives 0. NaN and inf propagate, except under the mask. Half precision is
    computed and returned in float32. In AdamW's terms ``weight_decay=λ`` is ``scale=λ/2``, and
    only for plain SGD the same.

    Examples:
        >>> import torch, equipoise as eq
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> (
        ...     eq.l2(x),
        ...     eq.l2(x, center="mean"),
        ...     eq.l2(x, clip=2.0),
        ...     eq.l2(x, clip=2.0, clip_mode="huber"),
        ... )
        (tensor(14.), tensor(2.), tensor(9.), tensor(13.))
    """
    check_choice("clip_mode", clip_mode, ("cap", "huber"))
    if clip is not None:
        check_number("clip", clip, above=0.0)
    elif clip_mode == "huber":
        raise OptionError(
            "`clip_mode='huber'` needs the point where the line begins, got clip=None. "
            "Use `clip=1.0`."
        )
    check_number("scale", scale)
    tensors, masks = pieces("x", x, mask)
    if center is not None:
        middle = _center(center, tensors, masks)
        tensors = [select(t - middle.to(t), m) for t, m in zip(tensors, masks, strict=True)]
    return scale * reduce(
        [_square(t, clip, clip_mode) for t in tensors], masks, reduction=reduction
    )


def _center(
    center: Literal["mean"] | float | Tensor, tensors: list[Tensor], masks: list[Tensor | None]
) -> Tensor:
    if isinstance(center, Tensor):
        for t in tensors:
            check_fits("center", center, t.shape)
        return center
    if isinstance(center, str):
        check_choice("center", center, ("mean",))
        return reduce(tensors, masks, reduction="mean")
    check_number("center", center)
    return filled_as(tensors[0], center)


def _square(y: Tensor, clip: float | None, clip_mode: str) -> Tensor:
    if clip is None:
        return y.square()
    held = y.clamp(-clip, clip)
    # held·(2y − held) is y² within ±k and k·(2|y| − k) outside, with one formula for both.
    return held * (2 * y - held) if clip_mode == "huber" else held.square()


@names_its_options
def elastic_net(
    x: Tensors,
    /,
    *,
    l1_ratio: float = 0.5,
    reduction: Reduction = "sum",
    mask: Tensors | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "..."]:
    """Between lasso and ridge: ``scale · Σ(a·|xᵢ| + (1−a)·xᵢ²)`` with ``a = l1_ratio``.

    At ``l1_ratio=1`` it is `l1`, at 0 it is `l2`.

    *At the edge:* the gradient at 0 is 0; ``l1_ratio`` outside [0, 1] is refused; otherwise as
    `l1` and `l2`.

    Examples:
        >>> import torch, equipoise as eq
        >>> eq.elastic_net(torch.tensor([1.0, -2.0]), l1_ratio=0.25)
        tensor(4.5000)
    """
    check_number("l1_ratio", l1_ratio, low=0.0, high=1.0)
    check_number("scale", scale)
    tensors, masks = pieces("x", x, mask)
    return scale * reduce([_mixed(t, l1_ratio) for t in tensors], masks, reduction=reduction)


def _mixed(x: Tensor, ratio: float) -> Tensor:
    # The ends leave the other part out: 0·inf would be NaN.
    if ratio in (0.0, 1.0):
        return x.abs() if ratio else x.square()
    return ratio * x.abs() + (1 - ratio) * x.square()


@names_its_options
def output_magnitude(
    x: Float[Tensor, "..."],
    /,
    *,
    target: float = 1.0,
    norm: Literal["rms", "l2"] = "rms",
    dim: Dims = None,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Squared distance of a norm from its target: ``(‖x‖ − target)²``.

    ``norm="rms"`` is the root of the mean square, so that ``target`` does not depend on the size;
    ``"l2"`` the root of the sum. The norm is taken over ``dim`` (all dimensions by default), the
    reduction over the rest. A cheap stand-in for a gradient penalty.

    *At the edge:* at x = 0 the value is target² and the gradient 0, with finite second
    derivative; an empty ``dim`` counts as x = 0. Half precision is computed and returned in
    float32.

    Examples:
        >>> import torch, equipoise as eq
        >>> eq.output_magnitude(torch.tensor([3.0, 4.0]), target=1.0, norm="l2")
        tensor(16.)
    """
    check_choice("norm", norm, ("rms", "l2"))
    check_number("target", target)
    check_tensor("x", x)
    if dim is not None:
        check_dims("dim", dim, x.dim())
    x = full_precision(x)
    length = vector_norm(x, dim)
    if norm == "rms":
        length = length / max(x.numel() / max(length.numel(), 1), 1) ** 0.5
    return reduce([(length - target).square()], [None], reduction=reduction)
