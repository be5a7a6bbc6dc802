"""What the laws say, as assertions: values and gradients, never shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EXACT = 1e-10
"""Float64 laws. Inputs are at most 8 and 40 in number: sums of their squares and of their products
with logarithms stay below 4000, and 40 roundings of 2⁻⁵³ of that are 2e-11."""

U = 2.0**-24
"""Unit roundoff of float32: half the distance from 1 to the next number."""


def assert_close(actual: Tensor, expected: Tensor | float, *, within: float = EXACT) -> None:
    """Same shape, and entry by entry no further apart than `within`, absolutely or relatively."""
    wanted = torch.as_tensor(expected, dtype=actual.dtype).detach()
    torch.testing.assert_close(actual.detach(), wanted, rtol=within, atol=within)


def assert_equal(actual: Tensor, expected: Tensor | float) -> None:
    """Same shape, and the same number in every entry; NaN equals nothing."""
    wanted = torch.as_tensor(expected, dtype=actual.dtype).detach()
    torch.testing.assert_close(actual.detach(), wanted, rtol=0, atol=0)


def leaves(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Copies that collect gradients."""
    return tuple(x.detach().clone().requires_grad_() for x in inputs)


def gradients(value: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Derivatives of a value; of Σ k·valueₖ, k from 1, where there are several."""
    weights = torch.arange(1, value.numel() + 1, dtype=value.dtype).reshape(value.shape)
    return torch.autograd.grad((value * weights).sum(), inputs, create_graph=True)


def value_and_gradients(
    function: Callable[..., Tensor], *inputs: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The function and its derivative by each input, at fresh leaves."""
    fresh = leaves(*inputs)
    value = function(*fresh)
    return value, gradients(value, fresh)


def assert_same_function(
    first: Callable[..., Tensor],
    second: Callable[..., Tensor],
    *inputs: Tensor,
    within: float = EXACT,
) -> None:
    """Two functions have the same value and the same gradient by every input."""
    value, slopes = value_and_gradients(first, *inputs)
    wanted, wanted_slopes = value_and_gradients(second, *inputs)
    assert_close(value, wanted, within=within)
    for slope, wanted_slope in zip(slopes, wanted_slopes, strict=True):
        assert_close(slope, wanted_slope, within=within)


def assert_same_curvature(
    first: Callable[..., Tensor], second: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """Two functions have the same second derivative, in one direction that mixes all inputs."""
    for bent, wanted in zip(curvature(first, *inputs), curvature(second, *inputs), strict=True):
        assert_close(bent, wanted)


def curvature(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The Hessian times the vector 1, 2, 3, … over all entries of all inputs."""
    fresh = leaves(*inputs)
    slopes = gradients(function(*fresh), fresh)
    return gradients(torch.cat([slope.flatten() for slope in slopes]), fresh)


def assert_gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    expected: Sequence[Tensor | float],
    *,
    within: float = EXACT,
) -> None:
    """The derivative by each input is the one expected (a number stands for all entries)."""
    _, slopes = value_and_gradients(function, *inputs)
    for slope, wanted in zip(slopes, expected, strict=True):
        everywhere = torch.as_tensor(wanted, dtype=slope.dtype).expand_as(slope)
        assert_close(slope, everywhere, within=within)


def assert_zero_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The derivative by every input is exactly 0."""
    _, slopes = value_and_gradients(function, *inputs)
    for slope in slopes:
        assert_equal(slope, torch.zeros_like(slope))


def assert_rounded_within(single: Tensor, double: Tensor, bound: Tensor) -> None:
    """A float32 result lies within a bound of the float64 one."""
    assert single.dtype == torch.float32
    assert (single.double() - double).abs() <= bound
