"""Divergences and entropy against SciPy and `torch.distributions`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import scipy.spatial.distance
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical
from torch.distributions import kl_divergence as torch_kl

import equipoise as eq
from tests.penalties.assertions import assert_close, assert_same_function
from tests.penalties.inputs import tensors

logits = tensors(2, 3, 5, size=6.0)


def probabilities(x: Tensor) -> Tensor:
    """What SciPy wants."""
    return x.softmax(-1)


def with_zeros(x: Tensor) -> Tensor:
    """Distributions in which the last two entries are impossible."""
    blocked = torch.tensor([False, False, False, True, True])
    return x.masked_fill(blocked, -torch.inf)


# Kullback-Leibler --------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@given(both=logits)
def test_kl_is_the_sum_of_scipy_relative_entropies(
    zeros: bool, direction: str, both: Tensor
) -> None:
    """`rel_entr` sums to KL row by row, also where both are 0."""
    p, q = with_zeros(both) if zeros else both
    first, second = (p, q) if direction == "forward" else (q, p)
    terms = scipy.special.rel_entr(probabilities(first).numpy(), probabilities(second).numpy())
    wanted = torch.from_numpy(terms.sum(-1))
    for given_as in ({"from_logits": True}, {}):
        inputs = (p, q) if given_as else (p.log_softmax(-1), q.log_softmax(-1))
        rows = eq.kl_divergence(*inputs, direction=direction, reduction="none", **given_as)
        assert_close(rows, wanted)


def test_kl_is_infinite_where_scipy_says_so() -> None:
    """Row by row inf, finite and finite, as in `rel_entr`."""
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    wanted = scipy.special.rel_entr(p.numpy(), q.numpy()).sum(-1)
    rows = eq.kl_divergence(p.log(), q.log(), reduction="none")
    assert_close(rows, torch.from_numpy(wanted))
    assert rows[0] == math.inf


@given(both=logits)
def test_kl_is_that_of_torch_distributions(both: Tensor) -> None:
    """`torch.distributions.kl_divergence` of two categoricals, in value and gradient."""
    assert_same_function(
        partial(eq.kl_divergence, from_logits=True, reduction="none"),
        lambda p, q: torch_kl(Categorical(logits=p), Categorical(logits=q)),
        *both,
    )


@pytest.mark.parametrize("ours_theirs", [("mean", "batchmean"), ("sum", "sum")])
@given(both=logits)
def test_kl_is_the_kl_loss_with_the_target_first(
    ours_theirs: tuple[str, str], both: Tensor
) -> None:
    """`F.kl_div(input, target)` is KL(target‖input): ours takes P first."""
    ours, theirs = ours_theirs
    assert_same_function(
        partial(eq.kl_divergence, reduction=ours),
        lambda p, q: F.kl_div(q, p, reduction=theirs, log_target=True),
        *both.log_softmax(-1),
    )


@given(both=logits, temperature=st.floats(0.5, 4.0))
def test_distillation_is_hinton_s(both: Tensor, temperature: float) -> None:
    """T²·KL(softmax(teacher/T)‖softmax(student/T)), as written in 2015."""
    teacher, student = both
    wanted = F.kl_div(
        (student / temperature).log_softmax(-1),
        (teacher / temperature).softmax(-1),
        reduction="batchmean",
    )
    ours = partial(eq.kl_divergence, from_logits=True, temperature=temperature)
    assert_close(ours(teacher, student, temperature_squared=True), temperature**2 * wanted)


def test_kl_by_hand() -> None:
    """KL([½, ½]‖[¼, ¾]) = ½·ln 2 + ½·ln ⅔; reversed ¼·ln ½ + ¾·ln 1½."""
    p = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    q = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    reverse = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert_close(eq.kl_divergence(p, q), forward)
    assert_close(eq.kl_divergence(p, q, direction="reverse"), reverse)
    assert_close(eq.kl_divergence(p, q, direction="symmetric"), (forward + reverse) / 2)


# Jensen-Shannon ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
@given(both=logits)
def test_js_is_the_square_of_scipy_s_distance(zeros: bool, both: Tensor) -> None:
    """SciPy's Jensen-Shannon distance is the root, in nats and in bits."""
    p, q = with_zeros(both) if zeros else both
    # SciPy takes the root of Σ p·log(p/m), which cancels to about 1e-16 where p ≈ q, and of a
    # negative sum is NaN: equal rows are left to the laws.
    differ = (probabilities(p) - probabilities(q)).abs().amax(-1) > 1e-3
    for base in ("e", 2):
        distances = scipy.spatial.distance.jensenshannon(
            probabilities(p)[differ].numpy(),
            probabilities(q)[differ].numpy(),
            base=None if base == "e" else base,
            axis=-1,
        )
        rows = eq.js_divergence(p, q, from_logits=True, base=base, reduction="none")
        assert_close(rows[differ], torch.from_numpy(distances**2))


def test_js_between_the_disjoint_is_scipy_s() -> None:
    """Distributions that share nothing are ln 2 apart, or 1 bit."""
    p = torch.tensor([1.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.0, 1.0], dtype=torch.float64)
    distance = scipy.spatial.distance.jensenshannon(p.numpy(), q.numpy(), base=2)
    assert_close(eq.js_divergence(p.log(), q.log(), base=2), float(distance**2))


@given(both=logits, beta=st.floats(0.05, 0.95))
def test_skewed_js_is_the_information_about_the_coin(both: Tensor, beta: float) -> None:
    """JS_β = H(M) − β·H(P) − (1−β)·H(Q), with SciPy's entropies."""
    p, q = (probabilities(x).numpy() for x in both)
    m = beta * p + (1 - beta) * q
    h = partial(scipy.stats.entropy, axis=-1)
    wanted = torch.from_numpy(h(m) - beta * h(p) - (1 - beta) * h(q))
    assert_close(eq.js_divergence(*both, beta=beta, from_logits=True, reduction="none"), wanted)


# Entropy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True])
@given(both=logits)
def test_entropy_is_that_of_scipy(zeros: bool, both: Tensor) -> None:
    """`scipy.stats.entropy` row by row, from logits and from log-probabilities."""
    x = with_zeros(both[0]) if zeros else both[0]
    wanted = torch.from_numpy(scipy.stats.entropy(probabilities(x).numpy(), axis=-1))
    assert_close(eq.entropy(x, from_logits=True, reduction="none"), wanted)
    assert_close(eq.entropy(x.log_softmax(-1), reduction="none"), wanted)


@given(both=logits)
def test_entropy_is_that_of_torch_distributions(both: Tensor) -> None:
    """`Categorical.entropy`, in value and gradient."""
    assert_same_function(
        partial(eq.entropy, from_logits=True, reduction="none"),
        lambda x: Categorical(logits=x).entropy(),
        both[0],
    )


@given(both=logits)
def test_normalized_entropy_is_the_entropy_in_base_v(both: Tensor) -> None:
    """Divided by ln V it is SciPy's entropy with the vocabulary as base."""
    wanted = scipy.stats.entropy(probabilities(both[0]).numpy(), base=5, axis=-1)
    rows = eq.entropy(both[0], from_logits=True, normalize=True, reduction="none")
    assert_close(rows, torch.from_numpy(wanted))


# Sampled -----------------------------------------------------------------------------------------


def test_the_estimators_find_the_divergence_in_samples() -> None:
    """Over 200 000 draws k1 and k3 are KL within five of their own standard errors."""
    p, q = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    draws = Categorical(logits=p).sample((200_000,))
    wanted = torch_kl(Categorical(logits=p), Categorical(logits=q))
    for estimator in ("k1", "k3"):
        each = eq.sampled_kl(p[draws], q[draws], estimator=estimator, reduction="none")
        error = each.std() / math.sqrt(len(draws))
        assert abs(each.mean() - wanted) < 5 * error
        assert error < 0.01


def test_the_third_estimator_varies_least() -> None:
    """k3 has the mean of k1 and less than its spread: what it is for."""
    p = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    q = (p + 0.3 * torch.randn(6, dtype=torch.float64)).log_softmax(-1)
    draws = Categorical(logits=p).sample((20_000,))
    first, third = (
        eq.sampled_kl(p[draws], q[draws], estimator=estimator, reduction="none").std()
        for estimator in ("k1", "k3")
    )
    assert third < 0.5 * first
