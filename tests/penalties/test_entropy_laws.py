"""Laws of `entropy` beyond those of all rows of distributions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import (
    EXACT,
    U,
    assert_close,
    assert_equal,
    assert_gradients,
    assert_rounded_within,
    assert_same_function,
    assert_zero_gradients,
)
from tests.penalties.inputs import log_softmax, singles, spoiled, supports, tensors

VOCABULARY = 5
logits = tensors(3, VOCABULARY, size=30.0)


@given(x=logits)
def test_entropy_lies_between_zero_and_the_logarithm_of_the_vocabulary(x: Tensor) -> None:
    """0 ≤ H ≤ ln V for every row."""
    rows = eq.entropy(x, from_logits=True, reduction="none")
    assert (rows >= 0.0).all()
    assert (rows <= math.log(VOCABULARY) + EXACT).all()


@given(x=logits, keep=supports(3, VOCABULARY))
def test_normalized_entropy_lies_between_zero_and_one(x: Tensor, keep: Tensor) -> None:
    """Divided by the logarithm of how many entries exist, it is at most 1."""
    rows = eq.entropy(x, from_logits=True, normalize=True, support=keep, reduction="none")
    assert (rows >= 0.0).all()
    assert (rows <= 1.0 + EXACT).all()


@given(keep=supports(3, VOCABULARY))
def test_a_uniform_distribution_reaches_the_bound(keep: Tensor) -> None:
    """Equal logits over k entries have H = ln k; normalised that is 1, and 0 for one entry."""
    sizes = keep.sum(-1).double()
    uniform = spoiled(torch.zeros(3, VOCABULARY, dtype=torch.float64), keep)
    rows = partial(eq.entropy, from_logits=True, support=keep, reduction="none")
    assert_close(rows(uniform), sizes.log())
    assert_close(rows(uniform, normalize=True), (sizes > 1).double())


@pytest.mark.parametrize("normalize", [False, True])
@given(x=tensors(1))
def test_one_entry_is_certain(normalize: bool, x: Tensor) -> None:
    """A vocabulary of one has entropy 0 with gradient 0, normalised or not."""
    certain = partial(eq.entropy, from_logits=True, normalize=normalize)
    assert_equal(certain(x), 0.0)
    assert_zero_gradients(certain, x)


@given(x=logits)
def test_the_bonus_is_the_negative_penalty(x: Tensor) -> None:
    """`mode="bonus"` is −H to the last bit, and the default is +H."""
    assert_same_function(
        partial(eq.entropy, mode="bonus", from_logits=True),
        lambda x: -eq.entropy(x, mode="penalty", from_logits=True),
        x,
        within=0.0,
    )
    assert_equal(eq.entropy(x, from_logits=True), eq.entropy(x, mode="penalty", from_logits=True))


@given(x=logits)
def test_entropy_is_what_is_missing_to_uniform(x: Tensor) -> None:
    """H(P) + KL(P‖uniform) = ln V, in value and gradient."""
    uniform = torch.zeros_like(x)
    assert_same_function(
        partial(eq.entropy, from_logits=True),
        lambda x: math.log(VOCABULARY) - eq.kl_divergence(x, uniform, from_logits=True),
        x,
    )


@given(x=logits, y=logits)
def test_entropy_of_independent_pairs_adds(x: Tensor, y: Tensor) -> None:
    """The joint distribution of two independent ones has the sum of their entropies."""
    log_p, log_q = log_softmax(x, y)
    joint = (log_p[:, :, None] + log_q[:, None, :]).flatten(1)
    assert_close(eq.entropy(joint), eq.entropy(log_p) + eq.entropy(log_q))


@given(x=logits)
def test_the_gradient_of_entropy(x: Tensor) -> None:
    """By the logits the gradient of H is −p·(log p + H)."""
    (log_p,) = log_softmax(x)
    rows = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    slope = -log_p.exp() * (log_p + rows) / len(x)
    assert_gradients(partial(eq.entropy, from_logits=True), [x], [slope])


@given(x=logits, low=st.floats(0.2, 1.0), high=st.floats(1.0, 5.0))
def test_heat_makes_uncertain(x: Tensor, low: float, high: float) -> None:
    """Entropy does not fall as the temperature rises."""
    rows = partial(eq.entropy, from_logits=True, reduction="none")
    assert (rows(x, temperature=high) >= rows(x, temperature=low) - EXACT).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_an_entry_of_probability_zero_adds_nothing(normalize: bool) -> None:
    """A zero leaves the entropy at ln 2 and has gradient 0, but counts as an entry that exists."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    size = math.log(3) if normalize else 1.0
    assert_close(eq.entropy(p, normalize=normalize), math.log(2) / size)
    slope = torch.tensor([-0.5, -0.5, 0.0], dtype=torch.float64) * (1 - math.log(2)) / size
    assert_gradients(partial(eq.entropy, normalize=normalize), [p], [slope])


K_EXP = 2
"""The float32 exponential is off by at most 1.07 roundings (measured over all its inputs)."""


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@given(data=st.data())
def test_entropy_rounds_as_its_sum_may(length: int, data: st.DataObject) -> None:
    """Float32 entropy is within ((n−1) + k_exp + 1)·u·Σ|p·log p| of the exact sum."""
    p = data.draw(singles(length, size=30.0)).log_softmax(-1)
    # The exponential and the product of a term round, then n−1 additions. Second order:
    # (1 + 70u)⁷⁰ < 1.001. Below 2⁻¹²⁶ a product is off by half a subnormal, 2⁻¹⁵⁰.
    terms = (p.double().exp() * p.double()).abs().sum()
    bound = 1.001 * (length - 1 + K_EXP + 1) * U * terms + length * 2.0**-149
    assert_rounded_within(eq.entropy(p), eq.entropy(p.double()), bound)
