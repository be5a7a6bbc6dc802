"""Laws of `consistency`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import (
    assert_close,
    assert_equal,
    assert_gradients,
    assert_same_function,
    assert_zero_gradients,
    value_and_gradients,
)
from tests.penalties.inputs import bools, nonzero, repeats, spoiled, tensors

METRICS = ("mse", "l1", "cosine", "kl")
BY_ENTRY = ("mse", "l1")
BY_ROW = ("cosine", "kl")

every_metric = pytest.mark.parametrize("metric", METRICS)
by_entry = pytest.mark.parametrize("metric", BY_ENTRY)
by_row = pytest.mark.parametrize("metric", BY_ROW)
every_reduction = st.sampled_from(["sum", "mean", "none"])
sum_and_mean = st.sampled_from(["sum", "mean"])

ROWS, WIDTH = 4, 3
pairs = tensors(2, ROWS, WIDTH)
# A vector so short that its direction turns with a rounding has any slope.
long_pairs = nonzero(2, ROWS, WIDTH)


def fitting(metric: str, both: Tensor) -> Tensor:
    """Inputs that the metric is meant for: log-probabilities for the divergence."""
    return both.log_softmax(-1) if metric == "kl" else both


@every_metric
@given(both=long_pairs, reduction=every_reduction)
def test_the_distance_is_symmetric(metric: str, both: Tensor, reduction: str) -> None:
    """Swapping the sides keeps the value and swaps the gradients."""
    distance = partial(eq.consistency, metric=metric, reduction=reduction)
    assert_same_function(distance, lambda a, b: distance(b, a), *fitting(metric, both))


@every_metric
@given(a=nonzero(ROWS, WIDTH))
def test_equal_outputs_are_at_no_distance(metric: str, a: Tensor) -> None:
    """Identical inputs have value 0 and gradient 0, both exactly, in every metric."""
    a = fitting(metric, a)
    distance = partial(eq.consistency, metric=metric)
    assert_equal(distance(a, a.clone()), 0.0)
    assert_zero_gradients(distance, a, a)


@every_metric
@given(both=pairs)
def test_the_distance_is_never_negative(metric: str, both: Tensor) -> None:
    """No entry and no row is below 0."""
    assert (eq.consistency(*fitting(metric, both), metric=metric, reduction="none") >= 0).all()


@by_entry
@given(both=pairs)
def test_only_equal_entries_are_at_no_distance(metric: str, both: Tensor) -> None:
    """Entry by entry the value is 0 where, and only where, the inputs are equal."""
    assume(((both[0] - both[1]).abs() > 1e-150).logical_or(both[0] == both[1]).all())
    values = eq.consistency(*both, metric=metric, reduction="none")
    assert torch.equal(values == 0, both[0] == both[1])


@given(both=pairs)
def test_only_equal_distributions_are_at_no_distance(both: Tensor) -> None:
    """The divergence of a row is at least half the square of Σ|a − b| (Pinsker)."""
    a, b = both.log_softmax(-1)
    rows = eq.consistency(a, b, metric="kl", reduction="none")
    assert (rows >= 0.5 * (a.exp() - b.exp()).abs().sum(-1).square() - 1e-15).all()


@every_metric
@given(both=long_pairs)
def test_sum_and_mean(metric: str, both: Tensor) -> None:
    """The sum adds all values; the mean, which is the default, divides by their number."""
    distance = partial(eq.consistency, metric=metric)
    inputs = fitting(metric, both)
    number = ROWS * WIDTH if metric in BY_ENTRY else ROWS
    each = partial(distance, reduction="none")
    assert_same_function(distance, lambda a, b: each(a, b).sum() / number, *inputs)
    assert_same_function(partial(distance, reduction="sum"), lambda a, b: each(a, b).sum(), *inputs)


# Metrics -----------------------------------------------------------------------------------------


@by_entry
@given(both=pairs, c=st.floats(-4, 4, allow_subnormal=False))
def test_scaling_both_sides_scales_the_distance(metric: str, both: Tensor, c: float) -> None:
    """By |c| for "l1" and c² for "mse"."""
    distance = partial(eq.consistency, metric=metric)
    factor = c**2 if metric == "mse" else abs(c)
    assert_close(distance(*(c * both)), factor * distance(*both))


@by_entry
@given(both=pairs)
def test_the_distance_is_the_magnitude_of_the_difference(metric: str, both: Tensor) -> None:
    """With "mse" it is l2 of a − b, with "l1" it is l1 of it."""
    magnitude = {"mse": eq.l2, "l1": eq.l1}[metric]
    assert_same_function(
        partial(eq.consistency, metric=metric),
        lambda a, b: magnitude(a - b, reduction="mean"),
        *both,
    )


@given(both=long_pairs, c=st.floats(0.01, 100.0), d=st.floats(0.01, 100.0))
def test_cosine_does_not_see_lengths(both: Tensor, c: float, d: float) -> None:
    """Stretching either side changes nothing."""
    cosine = partial(eq.consistency, metric="cosine")
    assert_close(cosine(c * both[0], d * both[1]), cosine(*both))


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_cosine_holds_at_extreme_lengths(size: float) -> None:
    """Vectors whose squares vanish or overflow have the direction they have."""
    a = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
    b = torch.tensor([1.0, 0.0], dtype=torch.float64) * size
    assert_close(eq.consistency(a, b, metric="cosine"), 1 - 0.6)


@given(both=long_pairs)
def test_cosine_lies_between_zero_and_two(both: Tensor) -> None:
    """Turning one side around turns 1 − cos into 1 + cos."""
    cosine = partial(eq.consistency, metric="cosine", reduction="none")
    assert_close(cosine(-both[0], both[1]), 2 - cosine(*both))
    assert_close(cosine(-both[0], both[0]), torch.full((ROWS,), 2.0))


def test_a_zero_vector_is_at_distance_one() -> None:
    """It has cosine term 1, on either side and against itself, and gradient 0 on both."""
    zero, one = torch.zeros(2, dtype=torch.float64), torch.tensor([0.6, 0.8]).double()
    for pair in ((zero, one), (one, zero), (zero, zero)):
        assert_equal(eq.consistency(*pair, metric="cosine"), 1.0)
        assert_zero_gradients(partial(eq.consistency, metric="cosine"), *pair)


@given(both=long_pairs)
def test_the_gradient_of_cosine_is_at_right_angles(both: Tensor) -> None:
    """Moving along a does not change its direction: ⟨∂/∂a, a⟩ = 0, and so for b."""
    _, slopes = value_and_gradients(partial(eq.consistency, metric="cosine"), *both)
    for slope, x in zip(slopes, both, strict=True):
        assert_close((slope * x).sum(-1), torch.zeros(ROWS))


@given(both=pairs)
def test_kl_is_the_symmetric_divergence(both: Tensor) -> None:
    """With "kl" it is (KL(a‖b) + KL(b‖a))/2 of log-probabilities."""
    assert_same_function(
        partial(eq.consistency, metric="kl"),
        lambda a, b: 0.5 * (eq.kl_divergence(a, b) + eq.kl_divergence(b, a)),
        *both.log_softmax(-1),
    )


@pytest.mark.parametrize("dim", [0, 1, 2, -3])
@by_row
@given(both=nonzero(2, 2, 3, 4))
def test_rows_lie_along_a_dimension(metric: str, dim: int, both: Tensor) -> None:
    """`dim` is the dimension of the vectors: the same as moving it to the end."""
    a, b = both
    distance = partial(eq.consistency, metric=metric, reduction="none")
    assert_close(distance(a, b, dim=dim), distance(a.movedim(dim, -1), b.movedim(dim, -1)))


@by_row
@given(both=long_pairs)
def test_each_row_is_compared_alone(metric: str, both: Tensor) -> None:
    """A batch of rows has the distances of its rows, not of one long vector."""
    distance = partial(eq.consistency, metric=metric)
    inputs = fitting(metric, both)
    assert_same_function(
        partial(distance, reduction="none"),
        lambda a, b: torch.stack([distance(*row) for row in zip(a, b, strict=True)]),
        *inputs,
    )


# Masks and gradients -----------------------------------------------------------------------------


@by_entry
@given(both=pairs, keep=bools(ROWS, WIDTH), reduction=sum_and_mean)
def test_masking_an_entry_is_deleting_it(
    metric: str, both: Tensor, keep: Tensor, reduction: str
) -> None:
    """Masked entries, NaN or inf or not, could as well not be there; no entry gives 0."""
    distance = partial(eq.consistency, metric=metric, reduction=reduction)
    assert_same_function(
        partial(distance, mask=keep),
        lambda a, b: distance(a[keep], b[keep]),
        *(spoiled(x, keep) for x in both),
    )


@by_row
@given(both=long_pairs, keep=bools(ROWS), reduction=sum_and_mean)
def test_masking_a_row_is_deleting_it(
    metric: str, both: Tensor, keep: Tensor, reduction: str
) -> None:
    """Masked rows, NaN or inf or not, could as well not be there; no row gives 0."""
    distance = partial(eq.consistency, metric=metric, reduction=reduction)
    assert_same_function(
        partial(distance, mask=keep),
        lambda a, b: distance(a[keep], b[keep]),
        *(spoiled(x, keep[:, None]) for x in fitting(metric, both)),
    )


@by_row
def test_a_masked_row_is_zero_when_nothing_is_reduced(metric: str) -> None:
    """`reduction="none"` has 0 under the mask."""
    keep = torch.tensor([True, False])
    a, b = torch.tensor([[[0.2, 0.8], [0.5, 0.5]], [[0.6, 0.4], [0.5, 0.5]]]).log()
    distance = partial(eq.consistency, metric=metric, reduction="none")
    masked = distance(spoiled(a, keep[:, None]), b, mask=keep)
    assert_equal(masked, torch.stack([distance(a, b)[0], torch.zeros(())]))


@every_metric
@given(both=long_pairs, weights=repeats(ROWS), reduction=sum_and_mean)
def test_a_whole_weight_is_a_repetition(
    metric: str, both: Tensor, weights: Tensor, reduction: str
) -> None:
    """A row of weight 3 counts as three rows, in value and gradient."""
    distance = partial(eq.consistency, metric=metric, reduction=reduction)
    mask = weights[:, None] if metric in BY_ENTRY else weights
    assert_same_function(
        partial(distance, mask=mask),
        lambda a, b: distance(*(x.repeat_interleave(weights.long(), 0) for x in (a, b))),
        *fitting(metric, both),
    )


@every_metric
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_empty_mask_gives_zero(metric: str, reduction: str) -> None:
    """Where nothing counts the value is 0 and so are the gradients."""
    nothing = torch.zeros(ROWS, WIDTH if metric in BY_ENTRY else 1, dtype=torch.bool)
    a = spoiled(torch.zeros(ROWS, WIDTH), nothing)
    mask = nothing if metric in BY_ENTRY else nothing[:, 0]
    masked = partial(eq.consistency, metric=metric, mask=mask, reduction=reduction)
    assert_equal(masked(a, a.flip(0)), 0.0)
    assert_zero_gradients(masked, a, a.flip(0))


@every_metric
@pytest.mark.parametrize("side", ["first", "second"])
@given(both=long_pairs)
def test_nothing_flows_into_a_stopped_side(metric: str, side: str, both: Tensor) -> None:
    """`stop_gradient` keeps the value and the other side's gradient; its own side has none."""
    a, b = (x.clone().requires_grad_() for x in fitting(metric, both))
    stopped, learning = (a, b) if side == "first" else (b, a)
    value = eq.consistency(a, b, metric=metric, stop_gradient=side)
    wanted = eq.consistency(a, b, metric=metric)
    assert_equal(value, wanted)
    slope, none = torch.autograd.grad(value, [learning, stopped], allow_unused=True)
    assert none is None
    assert_equal(slope, torch.autograd.grad(wanted, learning)[0])


@every_metric
@given(both=long_pairs)
def test_by_default_both_sides_learn(metric: str, both: Tensor) -> None:
    """The gradients of both sides are those of two calls that stop one each."""
    inputs = fitting(metric, both)
    distance = partial(eq.consistency, metric=metric)
    _, (by_a, by_b) = value_and_gradients(distance, *inputs)
    assert_gradients(lambda a: distance(a, inputs[1]), inputs[:1], [by_a])
    assert_gradients(lambda b: distance(inputs[0], b), inputs[1:], [by_b])
