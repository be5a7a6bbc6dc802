"""Laws of `sampled_kl`: exact on distributions so small that every token can be listed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import (
    assert_close,
    assert_equal,
    assert_gradients,
    assert_same_function,
    assert_zero_gradients,
    gradients,
    leaves,
    value_and_gradients,
)
from tests.penalties.inputs import bools, log_softmax, repeats, spoiled, tensors

ESTIMATORS = ("k1", "k2", "k3")
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
every_gradient = pytest.mark.parametrize("gradient", ["same", "k2"])
every_reduction = st.sampled_from(["sum", "mean", "none"])
sum_and_mean = st.sampled_from(["sum", "mean"])
both_logits = tensors(2, 5, size=3.0)
tokens = tensors(2, 9, size=3.0)


def expected_estimate(p: Tensor, q: Tensor, **options: str) -> Tensor:
    """The mean over all tokens, each as often as P draws it: the mask holds P's probabilities."""
    log_p, log_q = log_softmax(p, q)
    often = log_p.detach().exp()
    return eq.sampled_kl(log_p, log_q, mask=often, reduction="sum", **options)


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(P‖Q) from logits."""
    return eq.kl_divergence(p, q, from_logits=True)


# Bias --------------------------------------------------------------------------------------------


@every_gradient
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@given(both=both_logits)
def test_k1_and_k3_are_unbiased(estimator: str, gradient: str, both: Tensor) -> None:
    """Averaged over every token that P draws they are the exact KL(P‖Q)."""
    expected = expected_estimate(*both, estimator=estimator, gradient=gradient)
    assert_close(expected, exact_kl(*both))


def test_k2_is_biased() -> None:
    """The expectation of (log r)²/2 is not the divergence: 0.265 against 0.223 on a coin."""
    p, q = torch.tensor([[0.5, 0.5], [0.8, 0.2]], dtype=torch.float64).log()
    wanted = 0.25 * (math.log(1.6) ** 2 + math.log(0.4) ** 2)
    assert_close(expected_estimate(p, q, estimator="k2"), wanted)
    assert abs(wanted - float(exact_kl(p, q))) > 0.02


@every_estimator
@given(both=both_logits)
def test_the_k2_gradient_is_the_gradient_of_the_divergence(estimator: str, both: Tensor) -> None:
    """With `gradient="k2"` every estimator has, on average, the gradient of KL by P's logits."""
    p, q = both
    (slope,) = value_and_gradients(exact_kl, p, q)[1][:1]
    learned = partial(expected_estimate, estimator=estimator, gradient="k2")
    assert_gradients(lambda p: learned(p, q), [p], [slope])


@given(both=both_logits)
def test_the_own_gradient_of_k3_is_that_of_the_reverse_divergence(both: Tensor) -> None:
    """Differentiated as it stands, k3 averages to the gradient of KL(Q‖P) by P's logits."""
    p, q = both
    (slope,) = value_and_gradients(lambda p: exact_kl(q, p), p)[1]
    assert_gradients(lambda p: expected_estimate(p, q, estimator="k3"), [p], [slope])


def test_the_own_gradient_of_k3_is_not_that_of_the_divergence() -> None:
    """On a coin with p = ½ and q = 0.8 it is ∓0.3, and that of KL(P‖Q) is ∓0.347."""
    p, q = torch.tensor([[0.5, 0.5], [0.8, 0.2]], dtype=torch.float64).log()
    (own,) = value_and_gradients(lambda p: expected_estimate(p, q), p)[1]
    (true,) = value_and_gradients(lambda p: exact_kl(p, q), p)[1]
    assert_close(own, torch.tensor([-0.3, 0.3], dtype=torch.float64))
    assert_close(true, torch.tensor([-1.0, 1.0], dtype=torch.float64) * math.log(4) / 4)


@given(both=both_logits)
def test_the_own_gradient_of_k1_averages_to_nothing(both: Tensor) -> None:
    """E[∇ log p] = 0, so k1 as it stands does not teach P at all."""
    p, q = both
    assert_gradients(lambda p: expected_estimate(p, q, estimator="k1"), [p], [0.0])


# Values ------------------------------------------------------------------------------------------


@every_gradient
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [1.0, 1e-3, 1e-5, 1e-7])
def test_k2_and_k3_are_never_negative(
    estimator: str, gradient: str, dtype: torch.dtype, eps: float
) -> None:
    """No token is below 0, not even by a rounding where both models agree almost."""
    logp = -3 * torch.rand(5000, dtype=dtype)
    logq = logp + eps * torch.randn(5000, dtype=dtype)
    values = eq.sampled_kl(logp, logq, estimator=estimator, gradient=gradient, reduction="none")
    assert (values >= 0.0).all()


@given(both=tokens)
def test_each_token_is_its_formula(both: Tensor) -> None:
    """k1 = −log r, k2 = (log r)²/2, k3 = r − 1 − log r with log r = logq − logp."""
    log_ratio = both[1] - both[0]
    formulas = {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": log_ratio.exp() - 1 - log_ratio,
    }
    for estimator, wanted in formulas.items():
        each = partial(eq.sampled_kl, estimator=estimator, reduction="none")
        assert_close(each(*both), wanted)
        assert_equal(each(*both, gradient="k2"), each(*both))


@every_estimator
@given(both=tokens)
def test_the_k2_gradient_of_a_token_is_its_log_ratio(estimator: str, both: Tensor) -> None:
    """With `gradient="k2"` a token has the slope ∓log r, whatever its value is."""
    log_ratio = both[1] - both[0]
    borrowed = partial(eq.sampled_kl, estimator=estimator, gradient="k2", reduction="sum")
    assert_gradients(borrowed, list(both), [-log_ratio, log_ratio])


@every_estimator
@every_gradient
@given(x=tensors(9, size=3.0))
def test_equal_models_are_at_no_distance(estimator: str, gradient: str, x: Tensor) -> None:
    """Where both give a token the same probability the value is exactly 0."""
    assert_equal(eq.sampled_kl(x, x.clone(), estimator=estimator, gradient=gradient), 0.0)


@every_gradient
@every_estimator
def test_a_token_that_cannot_be_sampled_is_nothing(estimator: str, gradient: str) -> None:
    """logp = −inf gives 0 with gradient 0, whatever logq is."""
    logp = torch.tensor([-math.inf, -math.inf, -1.0], dtype=torch.float64)
    logq = torch.tensor([-math.inf, -2.0, -2.0], dtype=torch.float64)
    each = partial(eq.sampled_kl, estimator=estimator, gradient=gradient, reduction="none")
    assert_equal(each(logp, logq)[:2], torch.zeros(2))
    assert_zero_gradients(lambda p, q: each(p, q)[:2], logp, logq)
    assert_close(each(logp, logq)[2], eq.sampled_kl(logp[2], logq[2], estimator=estimator))


@every_gradient
@every_estimator
def test_a_token_that_q_excludes_is_infinite(estimator: str, gradient: str) -> None:
    """logq = −inf alone gives inf."""
    logp, logq = torch.tensor([-1.0, -1.0]), torch.tensor([-math.inf, -1.0])
    each = eq.sampled_kl(logp, logq, estimator=estimator, gradient=gradient, reduction="none")
    assert_equal(each, torch.tensor([math.inf, 0.0]))


@every_estimator
def test_a_token_that_q_excludes_teaches_nothing_by_k2(estimator: str) -> None:
    """Its slope is 0 and not NaN, and the other token keeps its own."""
    logp, logq = torch.tensor([-1.0, -2.0]), torch.tensor([-math.inf, -1.5])
    learned = partial(eq.sampled_kl, estimator=estimator, gradient="k2", reduction="sum")
    assert_gradients(learned, [logp, logq], [torch.tensor([0.0, -0.5]), torch.tensor([0.0, 0.5])])


# Lists, masks and reductions ---------------------------------------------------------------------


def ragged(x: Tensor) -> list[Tensor]:
    """Nine tokens as sequences of several lengths, an empty one among them."""
    return [x[:4], x[4:4], x[4:9].reshape(5)]


def read_once(mask: Tensor | None) -> Iterator[Tensor] | None:
    """The masks of ragged sequences, as a generator."""
    return None if mask is None else iter(ragged(mask))


@every_estimator
@every_gradient
@given(
    both=tokens,
    weights=repeats(9),
    kind=st.sampled_from(["unmasked", "masked", "weighted"]),
    reduction=every_reduction,
)
def test_sequences_are_their_concatenation(
    *, estimator: str, gradient: str, both: Tensor, weights: Tensor, kind: str, reduction: str
) -> None:
    """Lists of any lengths have value and gradient of one long sequence."""
    mask = {"unmasked": None, "masked": weights > 0, "weighted": weights}[kind]
    estimate = partial(eq.sampled_kl, estimator=estimator, gradient=gradient, reduction=reduction)
    assert_same_function(
        lambda p, q: estimate(iter(ragged(p)), ragged(q), mask=read_once(mask)),
        lambda p, q: estimate(p, q, mask=mask),
        *both,
    )


@every_estimator
@every_gradient
@given(both=tokens, keep=bools(9), reduction=sum_and_mean)
def test_masking_is_deleting(
    estimator: str, gradient: str, both: Tensor, keep: Tensor, reduction: str
) -> None:
    """Padding, NaN and inf or not, could as well not be there; no token at all gives 0."""
    estimate = partial(eq.sampled_kl, estimator=estimator, gradient=gradient, reduction=reduction)
    assert_same_function(
        partial(estimate, mask=keep),
        lambda p, q: estimate(p[keep], q[keep]),
        *(spoiled(x, keep) for x in both),
    )


@every_estimator
@given(both=tokens, weights=repeats(9), reduction=sum_and_mean)
def test_a_whole_weight_is_a_repetition(
    estimator: str, both: Tensor, weights: Tensor, reduction: str
) -> None:
    """A token of weight 3 counts as three tokens, in value and gradient."""
    estimate = partial(eq.sampled_kl, estimator=estimator, reduction=reduction)
    times = weights.long()
    assert_same_function(
        partial(estimate, mask=weights),
        lambda p, q: estimate(p.repeat_interleave(times), q.repeat_interleave(times)),
        *both,
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_empty_mask_gives_zero(reduction: str) -> None:
    """Where no token counts the value is 0 and so are the gradients."""
    nothing = torch.zeros(6, dtype=torch.bool)
    p = spoiled(torch.zeros(6), nothing)
    masked = partial(eq.sampled_kl, mask=nothing, reduction=reduction)
    assert_equal(masked(p, p.flip(0)), 0.0)
    assert_zero_gradients(masked, p, p.flip(0))


@given(both=tokens, number=st.floats(0.5, 20.0))
def test_a_denominator_replaces_the_count(both: Tensor, number: float) -> None:
    """The mean with a denominator is the sum divided by it."""
    assert_same_function(
        partial(eq.sampled_kl, denominator=number),
        lambda p, q: eq.sampled_kl(p, q, reduction="sum") / number,
        *both,
    )


@given(both=tokens, order=st.permutations(range(9)))
def test_the_order_of_tokens_does_not_matter(both: Tensor, order: list[int]) -> None:
    """A permutation of tokens keeps the estimate."""
    assert_close(eq.sampled_kl(*both[:, order]), eq.sampled_kl(*both))


def test_the_k2_gradient_may_be_differentiated_again() -> None:
    """By the log-ratio the second derivative of what is learned is that of k2, which is 1."""
    (logp,) = leaves(torch.tensor([-1.0, -2.0], dtype=torch.float64))
    value = eq.sampled_kl(logp, torch.zeros(2).double(), gradient="k2", reduction="sum")
    (slope,) = gradients(value, [logp])
    assert_close(gradients(slope.sum(), [logp])[0], torch.ones(2))
