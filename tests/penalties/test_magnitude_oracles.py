"""`l1`, `l2`, `elastic_net` and `output_magnitude` against torch's losses, NumPy and AdamW."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import equipoise as eq
from tests.penalties.assertions import assert_close, assert_same_function, leaves
from tests.penalties.inputs import tensors

REDUCTIONS = ("sum", "mean", "none")
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def zero(x: Tensor) -> Tensor:
    """Zeros in the same shape."""
    return torch.zeros_like(x)


@every_reduction
@given(x=tensors(3, 4))
def test_l1_is_the_l1_loss_against_zero(reduction: str, x: Tensor) -> None:
    """torch's L1 loss against zeros, in value and gradient."""
    assert_same_function(
        lambda x: eq.l1(x, reduction=reduction),
        lambda x: F.l1_loss(x, zero(x), reduction=reduction),
        x,
    )


@every_reduction
@given(x=tensors(3, 4), c=st.floats(-3, 3))
def test_l2_is_the_mean_squared_error_against_its_center(
    reduction: str, x: Tensor, c: float
) -> None:
    """torch's squared error against a constant, in value and gradient."""
    assert_same_function(
        lambda x: eq.l2(x, center=c, reduction=reduction),
        lambda x: F.mse_loss(x, torch.full_like(x, c), reduction=reduction),
        x,
    )


@every_reduction
@given(x=tensors(3, 4), k=st.floats(0.1, 4.0))
def test_the_huber_mode_is_twice_the_huber_loss(reduction: str, x: Tensor, k: float) -> None:
    """torch's Huber loss has a ½ in front: ours, without, is twice as large everywhere."""
    assert_same_function(
        lambda x: eq.l2(x, clip=k, clip_mode="huber", reduction=reduction),
        lambda x: 2 * F.huber_loss(x, zero(x), delta=k, reduction=reduction),
        x,
    )


@given(x=tensors(12))
def test_around_the_mean_l2_is_the_variance(x: Tensor) -> None:
    """NumPy's variance is the mean of l2 around the mean."""
    value = eq.l2(x, center="mean", reduction="mean")
    assert_close(value, float(np.var(x.numpy())))


@given(x=tensors(4, 3))
def test_sums_are_powers_of_numpy_norms(x: Tensor) -> None:
    """NumPy's norms of the flat vector: its 1-norm is l1, the square of its 2-norm is l2."""
    flat = x.numpy().ravel()
    assert_close(eq.l1(x), float(np.linalg.norm(flat, 1)))
    assert_close(eq.l2(x), float(np.linalg.norm(flat) ** 2))


@pytest.mark.parametrize("size", [1e-170, 1e160])
def test_the_root_mean_square_neither_overflows_nor_vanishes(size: float) -> None:
    """Squares of these entries do not exist in float64; the norm does."""
    x = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
    distance = eq.output_magnitude(x, target=5 * size, norm="l2")
    assert distance <= (1e-15 * 5 * size) ** 2


@given(x=tensors(3, 4), target=st.floats(-3, 3))
def test_the_output_magnitude_is_that_of_numpy(x: Tensor, target: float) -> None:
    """(‖x‖ − target)² with NumPy's norm, over everything and over rows."""
    array = x.numpy()
    rows = (np.linalg.norm(array, axis=1) - target) ** 2
    assert_close(
        eq.output_magnitude(x, target=target, norm="l2"),
        float((np.linalg.norm(array) - target) ** 2),
    )
    assert_close(
        eq.output_magnitude(x, target=target, norm="l2", dim=1, reduction="none"),
        torch.from_numpy(rows),
    )
    root_mean_square = float(np.sqrt(np.mean(array**2)))
    assert_close(eq.output_magnitude(x, target=target), (root_mean_square - target) ** 2)


@pytest.mark.parametrize("scale", [0.01, 0.5])
def test_l2_is_weight_decay_for_plain_descent(scale: float) -> None:
    """A step of SGD with the penalty `scale=λ/2` is a step with `weight_decay=λ`."""
    model = nn.Linear(3, 2).double()
    ours, theirs = ([*leaves(*model.parameters())] for _ in range(2))
    plain = torch.optim.SGD(ours, lr=0.1)
    decayed = torch.optim.SGD(theirs, lr=0.1, weight_decay=2 * scale)
    for weights in (ours, theirs):
        sum((w**3).sum() for w in weights).backward()
    eq.l2(ours, scale=scale).backward()
    plain.step()
    decayed.step()
    for w, wanted in zip(ours, theirs, strict=True):
        assert_close(w, wanted)


def test_an_elastic_net_by_hand() -> None:
    """0.25·(1 + 2 + 3) + 0.75·(1 + 4 + 9) = 12, and slopes 0.25·sign + 1.5·x."""
    (x,) = leaves(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    value = eq.elastic_net(x, l1_ratio=0.25)
    value.backward()
    assert_close(value, 12.0)
    assert_close(x.grad, torch.tensor([1.75, -3.25, 4.75]))
