"""The length of one gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._errors import GradientError, InputError, InputTypeError, check_tensor
from equipoise._numerics import total_norm
from equipoise._types import ScalarFunction


def grad_norm(fn: ScalarFunction, x: Float[Tensor, "..."], /) -> Float[Tensor, ""]:
    """Length of a gradient: ``‖∇fn(x)‖₂`` of a scalar function, at any shape of ``x``.

    A figure to look at, as a tensor without graph: it works under `torch.no_grad` and
    `torch.inference_mode`, touches no ``.grad``, and does not wait for the device.

    *At the edge:* squares add up in float64, so that the relative error stays below 1e-6 for 10⁸
    entries. What cannot be differentiated is refused with the reason; it never becomes 0. A
    gradient with NaN has norm NaN, a sparse one that of what it holds. Half precision is returned
    as float32.

    Examples:
        >>> import torch, equipoise as eq
        >>> eq.grad_norm(eq.l2, torch.tensor([1.0, 2.0, 3.0]))
        tensor(7.4833)
    """
    check_tensor("x", x)
    if not callable(fn):
        raise InputTypeError(
            f"`fn` must be a function of one tensor, got {type(fn).__name__}. Use `lambda x: ...`."
        )
    with torch.inference_mode(False), torch.enable_grad():
        # A tensor made in inference mode has a copy that can be differentiated.
        leaf = (x.clone() if x.is_inference() else x).detach().requires_grad_()
        value = fn(leaf)
        _check_scalar(value)
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    if gradient is None:
        raise GradientError(
            "`fn` must depend on its argument to have a gradient, got a result that depends only "
            "on other tensors. Use the argument `fn` is called with."
        )
    return total_norm([gradient])


def _check_scalar(value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputTypeError(
            f"`fn` must return a tensor, got {type(value).__name__}. "
            "Use the loss itself where it comes with metrics."
        )
    if value.numel() != 1:
        raise InputError(
            f"`fn` must return a scalar, got shape {tuple(value.shape)}. Use `.sum()` or `.mean()`."
        )
    if not value.requires_grad:
        raise GradientError(
            f"`fn` must return something that can be differentiated, got a {value.dtype} result "
            "without a graph. Use no `argmax`, rounding to integers, `.detach()` or `no_grad` "
            "inside."
        )
