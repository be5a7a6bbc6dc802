"""`orthogonality`, `consistency` and `gradient_penalty` against NumPy, SciPy and torch's losses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import equipoise as eq
from tests.penalties.assertions import assert_close, assert_same_function
from tests.penalties.inputs import nonzero, tensors

every_reduction = pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
MODES = ("soft", "hard", "spectral", "srip")


# Consistency -------------------------------------------------------------------------------------


@every_reduction
@given(both=nonzero(2, 3, 4))
def test_cosine_is_one_minus_the_cosine_similarity(reduction: str, both: Tensor) -> None:
    """torch's cosine similarity row by row, in value and gradient."""
    reduced = {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}[reduction]
    assert_same_function(
        partial(eq.consistency, metric="cosine", reduction=reduction),
        lambda a, b: reduced(1 - F.cosine_similarity(a, b)),
        *both,
    )


@every_reduction
@pytest.mark.parametrize(("metric", "loss"), [("mse", F.mse_loss), ("l1", F.l1_loss)])
@given(both=tensors(2, 3, 4))
def test_entry_by_entry_it_is_torch_s_loss(
    metric: str, loss: object, reduction: str, both: Tensor
) -> None:
    """torch's squared and absolute error, in value and gradient."""
    assert_same_function(
        partial(eq.consistency, metric=metric, reduction=reduction),
        partial(loss, reduction=reduction),
        *both,
    )


@every_reduction
@given(both=tensors(2, 3, 4))
def test_kl_is_half_of_jeffreys_divergence(reduction: str, both: Tensor) -> None:
    """½·Σ(a − b)(ln a − ln b) row by row, with NumPy."""
    logs = both.log_softmax(-1)
    a, b = logs.exp().numpy()
    rows = torch.from_numpy(0.5 * ((a - b) * (np.log(a) - np.log(b))).sum(-1))
    wanted = {"sum": rows.sum(), "mean": rows.mean(), "none": rows}[reduction]
    assert_close(eq.consistency(*logs, metric="kl", reduction=reduction), wanted)


# Orthogonality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (6, 3), (1, 4), (4, 1)], ids=str)
@settings(max_examples=20)
@given(m=nonzero(6, 5))
def test_every_mode_is_its_formula_in_numpy(shape: tuple[int, int], m: Tensor) -> None:
    """Gram matrix and singular values of the rows as they are, from NumPy."""
    m = m[: shape[0], : shape[1]] / 4
    array = m.numpy()
    gram = array @ array.T
    squares = np.linalg.svd(array, compute_uv=False) ** 2
    wanted = {
        "soft": np.square(gram - np.diag(np.diag(gram))).sum(),
        "hard": np.square(gram - np.eye(len(gram))).sum(),
        "spectral": np.square(squares - squares.mean()).sum(),
        "srip": np.abs(squares - 1).max(),
    }
    for mode in MODES:
        value = eq.orthogonality(m, mode=mode, normalize=False)
        assert_close(value, float(wanted[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_torch_s_orthogonal_parametrization_costs_nothing(mode: str) -> None:
    """A layer kept orthogonal by `torch.nn.utils.parametrizations` has value 0."""
    layer = parametrizations.orthogonal(nn.Linear(6, 4, bias=False).double())
    assert_close(eq.orthogonality(layer.weight, mode=mode, normalize=False), 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_training_on_the_penalty_makes_a_matrix_orthogonal(mode: str) -> None:
    """Descending the penalty leads to rows at right angles: it reaches what it promises."""
    m = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([m], lr=0.02)
    for _ in range(600):
        optimizer.zero_grad()
        eq.orthogonality(m, mode=mode, normalize=mode != "srip").backward()
        optimizer.step()
    rows = F.normalize(m.detach())
    # Adam circles the minimum at a distance of about its step.
    assert_close(rows @ rows.mT, torch.eye(3), within=0.05)


# Gradient penalty --------------------------------------------------------------------------------


def network() -> nn.Module:
    """A small smooth network in float64."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def test_the_penalty_is_that_of_the_jacobian() -> None:
    """`torch.func.jacrev` of one sample at a time gives the same norms."""
    model, x = network(), torch.randn(5, 4, dtype=torch.float64)
    jacobians = torch.func.vmap(torch.func.jacrev(model))(x)[:, 0]
    wanted = (torch.linalg.vector_norm(jacobians, dim=1) - 1).square()
    assert_close(eq.gradient_penalty(model, x, reduction="none"), wanted)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """The slope of the R1 penalty by the bias is a difference quotient of the penalty."""
    model, x = network(), torch.randn(5, 4, dtype=torch.float64)
    bias, step = model[0].bias, 1e-5
    penalty = partial(eq.gradient_penalty, model, x, squared=True)
    (slope,) = torch.autograd.grad(penalty(), bias)
    values = []
    with torch.no_grad():
        for shift in (step, -step):
            bias[0] += shift
            values.append(float(penalty()))
            bias[0] -= shift
    # The central quotient is off by step² and by roundings of 1e-16/step.
    assert_close(slope[0], (values[0] - values[1]) / (2 * step), within=1e-8)


def test_training_on_the_penalty_makes_a_function_unit_steep() -> None:
    """Descending the penalty leads to gradient norms of 1."""
    model, x = network(), torch.randn(16, 4, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = eq.gradient_penalty(model, x).detach()
    for _ in range(200):
        optimizer.zero_grad()
        eq.gradient_penalty(model, x).backward()
        optimizer.step()
    assert eq.gradient_penalty(model, x) < 0.01 * before
