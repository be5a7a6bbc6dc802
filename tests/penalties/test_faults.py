"""The faults of earlier libraries of this kind, each shown to be absent here."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import (
    assert_close,
    assert_equal,
    assert_gradients,
    assert_zero_gradients,
    value_and_gradients,
)


def distribution(*p: float) -> Tensor:
    """Log-probabilities in float64."""
    return torch.tensor(p, dtype=torch.float64).log()


# Gradients ---------------------------------------------------------------------------------------


def test_the_gradient_of_a_clipped_log_ratio_is_wrong_by_a_square() -> None:
    """The slope of KL by log q is −p for every ratio: nothing is clipped, however far apart."""
    p, q = distribution(0.5, 0.5), torch.tensor([-40.0, -1e-17], dtype=torch.float64)
    assert_gradients(lambda q: eq.kl_divergence(p, q), [q], [-p.exp()])
    assert_gradients(lambda p: eq.kl_divergence(p, q), [p], [p.exp() * (p - q + 1)])


def test_the_gradient_of_l1_at_zero_is_one() -> None:
    """It is 0 there, so that a weight at rest stays at rest."""
    x = torch.tensor([0.0, -0.0, 2.0, -2.0])
    wanted = torch.tensor([0.0, 0.0, 1.0, -1.0])
    assert_gradients(eq.l1, [x], [wanted])
    assert_gradients(partial(eq.elastic_net, l1_ratio=0.5), [x], [wanted / 2 + x])


def test_the_gradient_norm_of_a_divergence_is_always_zero() -> None:
    """By the logits of Q the gradient is softmax(q) − p, and so long is the norm reported."""
    p, q = distribution(0.9, 0.1), distribution(0.5, 0.5)
    norm = eq.grad_norm(lambda q: eq.kl_divergence(p, q, from_logits=True), q)
    assert_close(norm, math.sqrt(2) * 0.4)


def test_only_the_first_input_is_differentiated() -> None:
    """Both sides of every comparison learn."""
    p, q = distribution(0.9, 0.1), distribution(0.4, 0.6)
    for comparison in (eq.kl_divergence, eq.js_divergence, eq.sampled_kl, eq.consistency):
        _, slopes = value_and_gradients(comparison, p, q)
        assert all(slope.abs().min() > 0.01 for slope in slopes)


def test_a_norm_that_failed_is_reported_as_zero() -> None:
    """What cannot be differentiated is an error; only a gradient that is 0 has norm 0."""
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(eq.GradientError):
        eq.grad_norm(lambda x: x.detach().sum(), x)
    with pytest.raises(eq.GradientError):
        eq.grad_norm(lambda x: x.argmax(), x)
    assert_equal(eq.grad_norm(lambda x: 0 * x.sum(), x), 0.0)


# NaN ---------------------------------------------------------------------------------------------


def test_a_shared_zero_probability_gives_nan() -> None:
    """Where P and Q are both 0 every divergence is finite, and has gradient 0 there."""
    p, q = distribution(0.5, 0.5, 0.0), distribution(0.25, 0.75, 0.0)
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert_close(eq.kl_divergence(p, q), forward)
    for comparison in (eq.kl_divergence, eq.js_divergence, partial(eq.consistency, metric="kl")):
        value, slopes = value_and_gradients(comparison, p, q)
        whole, wanted = value_and_gradients(comparison, p[:2], q[:2])
        assert_close(value, whole)
        for slope, inside in zip(slopes, wanted, strict=True):
            assert_close(slope, torch.cat([inside, torch.zeros(1)]))


def test_the_entropy_of_a_certain_distribution_has_a_nan_gradient() -> None:
    """−inf entries add 0 with gradient 0; the certain entry has slope −(log p + 1) = −1."""
    certain = distribution(1.0, 0.0, 0.0)
    assert_equal(eq.entropy(certain), 0.0)
    assert_gradients(eq.entropy, [certain], [torch.tensor([-1.0, 0.0, 0.0])])
    assert_zero_gradients(partial(eq.entropy, from_logits=True), certain)


@pytest.mark.parametrize("mode", ["soft", "hard", "spectral", "srip"])
def test_a_zero_row_has_a_nan_gradient(mode: str) -> None:
    """A zero row counts for nothing in `orthogonality`: its own gradient is 0."""
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    _, (slope,) = value_and_gradients(partial(eq.orthogonality, mode=mode), x)
    _, (wanted,) = value_and_gradients(partial(eq.orthogonality, mode=mode), x[[0, 2]])
    # Two float32 routes to one gradient: a few roundings of 6e-8.
    assert_close(slope[[0, 2]], wanted, within=1e-5)
    assert_equal(slope[1], torch.zeros(3))
    assert wanted.abs().max() > 0.1


def test_a_zero_vector_has_a_nan_gradient() -> None:
    """In the cosine its term is 1 with gradient 0; as an output its magnitude has gradient 0."""
    zero, one = torch.zeros(3), torch.ones(3)
    cosine = partial(eq.consistency, metric="cosine")
    assert_equal(cosine(zero, one), 1.0)
    assert_zero_gradients(cosine, zero, one)
    assert_equal(eq.output_magnitude(zero), 1.0)
    assert_zero_gradients(eq.output_magnitude, zero)


def test_a_flat_function_has_a_nan_penalty_gradient() -> None:
    """Where a critic has gradient 0 the penalty is target², and its parameters get 0."""
    w = torch.ones(3)

    def flat(w: Tensor) -> Tensor:
        return eq.gradient_penalty(lambda x: (w * x**2).sum(-1), torch.zeros(2, 3))

    assert_equal(flat(w), 1.0)
    assert_zero_gradients(flat, w)


@pytest.mark.parametrize("name", ["l1", "l2", "elastic_net", "entropy"])
def test_padding_reaches_the_gradient(name: str) -> None:
    """NaN and inf in padded rows change neither value nor gradient."""
    rows = torch.tensor([[0.5, 0.5], [math.nan, 1.0], [math.inf, -math.inf]]).log()
    real = torch.tensor([True, False, False])
    mask = real if name == "entropy" else real[:, None]
    penalty = getattr(eq, name)
    value, (slope,) = value_and_gradients(partial(penalty, mask=mask), rows)
    wanted, (wanted_slope,) = value_and_gradients(penalty, rows[:1])
    assert_equal(value, wanted)
    assert_equal(slope, torch.cat([wanted_slope, torch.zeros(2, 2)]))


# Meaning -----------------------------------------------------------------------------------------


def test_a_token_axis_is_taken_for_a_vocabulary() -> None:
    """Log-probabilities of sampled tokens are refused by `check`, and `sampled_kl` wants them."""
    logp, logq = torch.tensor([-0.1, -0.2, -0.1]), torch.tensor([-0.3, -0.1, -0.5])
    with pytest.raises(eq.InputError, match="sum to 1 over the last dimension"):
        eq.kl_divergence(logp, logq, check=True)
    with pytest.raises(eq.InputError, match="sum to 1 over the last dimension"):
        eq.entropy(logp, check=True)
    ratio = logq - logp
    wanted = (ratio.exp() - 1 - ratio).mean()
    # Three float32 terms, each by two routes: a few roundings of 6e-8.
    assert_close(eq.sampled_kl(logp, logq), wanted, within=1e-6)


def test_a_divergence_is_negative_and_an_entropy_above_its_bound() -> None:
    """Over [batch, sequence, vocabulary] each token has its own, in range."""
    logits = torch.randn(2, 3, 7, 5)
    kl = eq.kl_divergence(logits[0], logits[1], from_logits=True, reduction="none")
    assert kl.shape == (3, 7)
    assert kl.min() > 0
    entropies = eq.entropy(logits[0], from_logits=True, reduction="none")
    assert entropies.shape == (3, 7)
    assert entropies.max() < math.log(5)


def test_an_entropy_bonus_has_the_wrong_sign() -> None:
    """A step down the bonus makes a policy less certain; a step down the penalty, more."""
    policy = torch.tensor([1.0, 0.0, -1.0])
    before = eq.entropy(policy, from_logits=True)
    for mode, sign in (("bonus", 1), ("penalty", -1)):
        _, (slope,) = value_and_gradients(partial(eq.entropy, mode=mode, from_logits=True), policy)
        after = eq.entropy(policy - 0.1 * slope.detach(), from_logits=True)
        assert sign * (after - before) > 1e-3


def test_three_orthogonality_modes_give_one_number() -> None:
    """On diag(1, 2) as it is: soft 0, hard 9, spectral (1 − 2½)² + (4 − 2½)² = 4½, srip 3."""
    m = torch.diag(torch.tensor([1.0, 2.0]))
    wanted = {"soft": 0.0, "hard": 9.0, "spectral": 4.5, "srip": 3.0}
    for mode, value in wanted.items():
        assert_equal(eq.orthogonality(m, mode=mode, normalize=False), value)


def test_an_orthogonality_sum_grows_with_the_batch() -> None:
    """The mean over pairs, and one Gram matrix a sample, do not see how many samples there are."""
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    mean = partial(eq.orthogonality, per_sample=True, reduction="mean")
    assert_close(mean(x.repeat(8, 1, 1)), mean(x))
    assert_close(mean(x), eq.orthogonality(x[0]) / 12)


def test_one_norm_serves_a_whole_batch() -> None:
    """A critic of slope 1 everywhere has gradient penalty 0, for any number of samples."""
    for samples in (1, 4, 64):
        assert_equal(eq.gradient_penalty(lambda x: x.sum(-1), torch.randn(samples, 1)), 0.0)


def test_samples_of_different_slope_average_before_they_are_compared() -> None:
    """Slopes ½ and 3 cost ¼ and 4: the mean is 2⅛, not the cost of a mean slope."""
    slopes = torch.tensor([[0.5], [3.0]])
    assert_equal(eq.gradient_penalty(lambda x: (slopes * x).sum(-1), torch.randn(2, 1)), 2.125)


def test_one_epsilon_serves_a_whole_batch_and_cannot_be_seeded() -> None:
    """Every sample is mixed by its own number, drawn from the generator that is given."""

    def epsilons(seed: int) -> Tensor:
        # Half the square of x between 0 and 1 is as steep as its place: ε itself.
        return eq.interpolated_gradient_penalty(
            lambda x: 0.5 * x.square().sum(-1),
            torch.ones(6, 1),
            torch.zeros(6, 1),
            target=0.0,
            reduction="none",
            generator=torch.Generator().manual_seed(seed),
        ).detach()

    assert len(epsilons(0).unique()) == 6
    assert torch.equal(epsilons(0), epsilons(0))
    assert not torch.equal(epsilons(0), epsilons(1))


def test_a_cosine_is_taken_over_a_flattened_batch() -> None:
    """Each row is compared by itself: agreeing and opposite rows give 0 and 2, whatever lengths."""
    a = torch.tensor([[100.0, 0.0], [0.0, 1.0]])
    b = torch.tensor([[100.0, 0.0], [0.0, -1.0]])
    cosine = partial(eq.consistency, metric="cosine")
    assert_equal(cosine(a, b, reduction="none"), torch.tensor([0.0, 2.0]))
    assert_equal(cosine(a, b), 1.0)


def test_unknown_options_are_dropped_in_silence() -> None:
    """An option that does not exist stops the call, instead of doing nothing."""
    with pytest.raises(eq.UnknownOptionError, match="got 'lamda'"):
        eq.l1(torch.ones(2), lamda=0.1)
    with pytest.raises(
        eq.UnknownOptionError, match=r"got 'temprature'\. Did you mean 'temperature'"
    ):
        eq.entropy(torch.zeros(2), temprature=2.0)


def test_composition_never_reaches_training() -> None:
    """A sum of penalties has the sum of their gradients, at the parameters of a model."""
    model = torch.nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def slopes(value: Tensor) -> list[Tensor]:
        return torch.autograd.grad(
            value, list(model.parameters()), allow_unused=True, materialize_grads=True
        )

    def terms() -> list[Tensor]:
        out = model(x)
        return [
            0.1 * eq.l2(model.parameters()),
            0.2 * eq.entropy(out, from_logits=True),
            0.3 * eq.gradient_penalty(lambda x: model(x).square().sum(-1), x),
        ]

    together = slopes(sum(terms()))
    each = [slopes(term) for term in terms()]
    for total, parts in zip(together, zip(*each, strict=True), strict=True):
        assert_close(total, sum(parts))
        assert all(part.abs().sum() > 1e-4 for part in parts[:2])
