"""Clipping by the lengths of the last gradients: which percentile, which window, what enters it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import GradientTransform, clip_by_norm_history, clip_by_zscore
from tests.transforms.assertions import assert_same_bits


def lengths(transform: GradientTransform, sizes: list[float]) -> list[float]:
    """Of one gradient of one entry, after each step."""
    params = [torch.zeros(1, dtype=torch.float64)]
    state = transform.init(params)
    found = []
    for size in sizes:
        (grad,), state = transform.update([torch.tensor([size]).double()], state, params)
        found.append(grad.item())
    return found


def by_hand(sizes: list[float], percent: int, window: int) -> list[float]:
    """AutoClip in three lines of Python: nearest rank below, non-finite norms never enter."""
    seen: list[float] = []
    found = []
    for size in sizes:
        seen = [*seen, size] if math.isfinite(size) else seen
        last = sorted(seen[-window:])
        limit = last[percent * (len(last) - 1) // 100] if last else math.inf
        found.append(min(size, limit) if math.isfinite(size) else size)
    return found


@given(
    sizes=st.lists(st.floats(0.125, 1e3, width=16), min_size=1, max_size=12),
    percent=st.integers(0, 100),
    window=st.integers(1, 6),
)
def test_the_limit_is_the_percentile(sizes: list[float], percent: int, window: int) -> None:
    """Every step is clipped to the nearest rank of the last norms, as counted by hand."""
    got = lengths(clip_by_norm_history(percent, window), sizes)
    assert got == pytest.approx(by_hand(sizes, percent, window), rel=1e-15)


@given(
    sizes=st.lists(
        st.floats(0.125, 1e3, width=16) | st.sampled_from([math.inf, math.nan]),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_not_finite_never_enters(sizes: list[float]) -> None:
    """NaN and inf pass as they are, and the limits are those of a run without them."""
    got = lengths(clip_by_norm_history(50, 4), sizes)
    assert got == pytest.approx(by_hand(sizes, 50, 4), rel=1e-15, nan_ok=True)


@pytest.mark.parametrize(
    "transform", [clip_by_norm_history(100), clip_by_norm_history(10)], ids=str
)
def test_the_first_step_is_its_own_limit(transform: GradientTransform) -> None:
    """The first gradient passes bit by bit, however its norm was rounded."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        grads: list[Tensor | None] = [torch.randn(n, generator=generator) for n in (5000, 700, 3)]
        params = [torch.zeros_like(g) for g in grads if g is not None]
        out, state = transform.update(grads, transform.init(params), params)
        assert_same_bits(list(out), grads)
        assert state["recorded"]["clipped_fraction"].item() == 0


def test_the_largest_so_far_is_never_clipped_at_100_percent() -> None:
    """With 100 % the limit is the largest norm: nothing is ever changed, to the last bit."""
    clip, params = clip_by_norm_history(100, window=3), [torch.zeros(3000)]
    state = clip.init(params)
    for step in range(6):
        grad = torch.randn(3000) * (1 + step % 4)
        (out,), state = clip.update([grad], state, params)
        if step < 3:
            limit = state["recorded"]["limit"].item()
            assert limit >= state["recorded"]["norm"].item()
        assert_same_bits(out, grad)


def test_a_percentage_that_follows_a_schedule() -> None:
    """The percentage of step t is the schedule's at t, whole numbers of it counted exactly."""
    falling = clip_by_norm_history(lambda step: (100, 50, 0, 101)[step], window=3)
    assert lengths(falling, [2.0, 8.0, 4.0]) == [2.0, 2.0, 2.0]
    with pytest.raises(
        eq.OptionError,
        match="`percent` must be a finite number at least 0 and at most 100, got 101",
    ):
        lengths(falling, [2.0, 8.0, 4.0, 1.0])


def test_a_threshold_that_follows_a_schedule() -> None:
    """The threshold of step t is the schedule's at t: after 1 and 3 the limit is 2 + t · 1."""
    for last, expected in ((1.0, 3.0), (0.0, 2.0)):
        clip = clip_by_zscore(lambda step, last=last: last if step == 2 else 9.0, warmup=2)
        assert lengths(clip, [1.0, 3.0, 9.0])[-1] == pytest.approx(expected, rel=1e-15)


def test_how_they_print() -> None:
    """What is not the default is written, as it would be in code."""
    assert str(clip_by_norm_history()) == "clip_by_norm_history(10, 1000)"
    assert (
        str(clip_by_zscore(2.0, 50, warmup=3, nonfinite="skip"))
        == "clip_by_zscore(2.0, 50, warmup=3, nonfinite='skip')"
    )


@given(sizes=st.lists(st.floats(0.125, 1e3, width=16), min_size=1, max_size=10))
def test_zscore_by_hand(sizes: list[float]) -> None:
    """The limit is mean + threshold · deviation of the last norms as clipped, from `warmup` on."""
    seen: list[float] = []
    expected = []
    for size in sizes:
        last = seen[-4:]
        limit = math.inf
        if len(last) >= 2:
            mean = math.fsum(last) / len(last)
            spread = math.sqrt(math.fsum((x - mean) ** 2 for x in last) / len(last))
            limit = mean + 1.5 * spread
        expected.append(min(size, limit))
        seen.append(expected[-1])
    got = lengths(clip_by_zscore(1.5, 4, warmup=2), sizes)
    # The deviation is a difference of what is nearly equal: 1e-8 of the mean where it is nearly 0.
    assert got == pytest.approx(expected, rel=1e-9)


def test_a_spike_neither_hides_nor_widens() -> None:
    """A spike is held to the limit, which the next step finds where it was."""
    got = lengths(clip_by_zscore(3.0, 10, warmup=3), [1.0, 1.0, 1.0, 100.0, 100.0, 1.0])
    assert got == [1.0] * 6


def test_a_window_of_one_percent_steps_is_exact() -> None:
    """29 % of 101 norms is the one with 29 below it, not 28 as in floating point."""
    sizes = [float(n) for n in range(1, 102)]
    clip = clip_by_norm_history(29, window=101)
    assert lengths(clip, sizes)[-1] == pytest.approx(30.0, rel=1e-15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clip_by_norm_history(101), "`percent` must be a finite number at least 0 and at"),
        (lambda: clip_by_norm_history(-1), "`percent` must be a finite number at least 0 and at"),
        (lambda: clip_by_norm_history(10, 0), "`window` must be a finite number at least 1, got 0"),
        (lambda: clip_by_norm_history(10, 2.5), "`window` must be a whole number, got 2.5"),
        (lambda: clip_by_zscore(-1.0), "`threshold` must be a finite number at least 0, got -1.0"),
        (
            lambda: clip_by_zscore(window=5),
            "`warmup` must be at most the window of 5 norms, got 10",
        ),
        (lambda: clip_by_zscore(nonfinite="keep"), "`nonfinite` must be 'propagate', 'raise'"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    """What is out of range is refused where the transform is built, and the range is named."""
    assert callable(call)
    with pytest.raises(eq.OptionError, match=message):
        call()


def test_figures() -> None:
    """The limit is recorded beside what every clip records."""
    clip = clip_by_norm_history(0, window=2)
    params = [torch.zeros(1)]
    _, state = clip.update([torch.tensor([2.0])], clip.init(params), params)
    _, state = clip.update([torch.tensor([8.0])], state, params)
    assert {name: f.item() for name, f in transforms.recorded(state).items()} == {
        "norm": 8.0,
        "norm_clipped": 2.0,
        "clipped_fraction": 1.0,
        "limit": 2.0,
    }
