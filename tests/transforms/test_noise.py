"""Gradient noise: its size, its fading, and that seed and step alone decide it."""

from __future__ import annotations

import math

import pytest
import torch

import equipoise as eq
from equipoise.transforms import add_noise
from tests.transforms.assertions import assert_same_bits, once

N = 200_000


def test_the_variance_of_every_step() -> None:
    """At step t the variance is η/(1+t)^γ, within five deviations of its estimate."""
    noise, params = add_noise(0.04, 0.55), [torch.zeros(N, dtype=torch.float64)]
    state = noise.init(params)
    for t in range(5):
        (drawn,), state = noise.update([torch.zeros(N, dtype=torch.float64)], state, params)
        variance = 0.04 / (1 + t) ** 0.55
        assert drawn.var().item() == pytest.approx(variance, rel=5 * math.sqrt(2 / N))
        assert abs(drawn.mean().item()) < 5 * math.sqrt(variance / N)


def test_steps_tensors_and_seeds_are_independent() -> None:
    """Noise of two tensors, two steps or two seeds has no correlation beyond chance."""
    params = [torch.zeros(N), torch.zeros(N)]
    drawn = []
    for seed in (0, 1):
        noise = add_noise(1.0, 0.0, seed=seed)
        state = noise.init(params)
        for _ in range(2):
            grads, state = noise.update([torch.zeros(N)] * 2, state, params)
            drawn.extend(grads)
    correlations = torch.corrcoef(torch.stack([g for g in drawn if g is not None]))
    assert (correlations - torch.eye(8)).abs().max() < 5 / math.sqrt(N)


def test_torchs_generator_is_left_alone() -> None:
    """The noise neither reads nor moves the global random state."""
    before = torch.get_rng_state()
    first = once(add_noise(seed=4), [torch.zeros(5)])
    assert_same_bits(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert_same_bits(once(add_noise(seed=4), [torch.zeros(5)]), first)


def test_it_is_added() -> None:
    """Gradient plus noise, drawn in float32 for half precision and rounded once."""
    noise = once(add_noise(1.0, seed=1), [torch.zeros(6)])[0]
    assert noise is not None
    g = torch.randn(6)
    torch.testing.assert_close(once(add_noise(1.0, seed=1), [g])[0], g + noise)
    half = g.bfloat16()
    got = once(add_noise(1.0, seed=1), [half])[0]
    assert_same_bits(got, (half.float() + noise).bfloat16())


def test_complex_noise_has_the_variance_in_all() -> None:
    """Real and imaginary part have half of it each."""
    drawn = once(add_noise(0.5), [torch.zeros(N, dtype=torch.complex64)])[0]
    assert drawn is not None
    for part in (drawn.real, drawn.imag):
        assert part.var().item() == pytest.approx(0.25, rel=5 * math.sqrt(2 / N))


def test_a_fading_that_follows_a_schedule() -> None:
    """At step 1 an exponent of 2 leaves a quarter of the variance, half of every entry."""
    noises = []
    for exponent in (0.0, 2.0):
        noise, params = add_noise(1.0, lambda step, e=exponent: e * step), [torch.zeros(5)]
        _, state = noise.update([torch.zeros(5)], noise.init(params), params)
        noises.append(noise.update([torch.zeros(5)], state, params)[0][0])
    assert noises[0] is not None
    torch.testing.assert_close(noises[1], noises[0] / 2)


def test_no_noise() -> None:
    """Variance 0 is the identity."""
    g = torch.randn(5)
    assert_same_bits(once(add_noise(0.0), [g])[0], g)


def test_refusals() -> None:
    """A negative variance, a negative seed: refused where they are given."""
    with pytest.raises(
        eq.OptionError, match="`variance` must be a finite number at least 0, got -1"
    ):
        add_noise(-1.0)
    with pytest.raises(eq.OptionError, match="`seed` must be a finite number at least 0, got -1"):
        add_noise(seed=-1)
    with pytest.raises(eq.OptionError, match="`decay` must be a finite number, got nan"):
        add_noise(decay=float("nan"))
