"""Tracking policies decide by the step, or by what the total did."""

import pytest
import torch

import equipoise as eq
from equipoise import Pipeline, Term, tracking

PIPELINE = Pipeline(l2=Term(eq.l2))


def _tracked(track: object, size: float, step: int | None = None) -> bool:
    x = torch.tensor([size], requires_grad=True)
    return PIPELINE(x, track=track, step=step).tracked  # type: ignore[arg-type]


def test_every_tracks_at_multiples_beginning_with_zero() -> None:
    """`every(3)` tracks steps 0, 3 and 6 of seven, and no other."""
    when = tracking.every(3)
    assert [_tracked(when, 1.0, step) for step in range(7)] == [True, False, False] * 2 + [True]


def test_every_hands_on_its_level() -> None:
    """`every(2, level="gram")` gives inner products where it tracks."""
    x = torch.tensor([3.0], requires_grad=True)
    result = PIPELINE(x, step=4, track=tracking.every(2, level="gram"))
    result.total.backward()
    assert result.gradients.gram.item() == 36


def test_every_needs_the_step() -> None:
    """Without a step `every` cannot decide, and says what to do."""
    with pytest.raises(eq.OptionError, match=r"needs the step, got step=None. Use `pipeline"):
        _tracked(tracking.every(3), 1.0)


@pytest.mark.parametrize("step", ["3", -3, float("nan"), torch.tensor(3)], ids=repr)
def test_every_needs_a_step_that_can_be(step: object) -> None:
    """A text, a negative number and a tensor, which would have to be waited for, are refused."""
    with pytest.raises(eq.OptionError, match=r"`step` must be a (finite|Python) number"):
        tracking.every(3)(step)  # type: ignore[arg-type]


def test_always_needs_no_step() -> None:
    """`always` tracks norms at every call."""
    assert _tracked(tracking.always, 1.0)
    assert tracking.always() == "norms"


def test_a_spike_is_answered_at_the_next_step_and_once() -> None:
    """The total jumps at step 3; step 4 is tracked, and no other."""
    when = tracking.on_spike(factor=2.0)
    totals = [1.0, 1.1, 1.2, 5.0, 1.0, 1.0]
    assert [_tracked(when, size) for size in totals] == [False] * 4 + [True, False]


def test_a_rise_below_the_factor_is_no_spike() -> None:
    """Totals 1, 1.99, 3.9 stay below twice the one before; 7.9 does not."""
    when = tracking.on_spike(factor=2.0)
    for total in (1.0, 1.99, 3.9):
        when.observe(torch.tensor(total))
    assert when() is False
    when.observe(torch.tensor(7.9))
    assert when() == "norms"


def test_a_negative_total_spikes_by_its_size() -> None:
    """From −1 to 1.5 is a rise by more than the size of −1; from −1 to −0.5 is not."""
    for rise, expected in ((-0.5, False), (1.5, "norms")):
        when = tracking.on_spike(factor=2.0)
        for total in (-1.0, rise):
            when.observe(torch.tensor(total))
        assert when() == expected


def test_nan_is_a_spike_and_no_measure() -> None:
    """NaN spikes; the step after it is compared with the last finite total."""
    when = tracking.on_spike(factor=2.0)
    for total in (1.0, float("nan")):
        when.observe(torch.tensor(total))
    assert when() == "norms"
    when.observe(torch.tensor(1.5))
    assert when() is False
    assert when.state_dict() == {"previous": 1.5, "spiked": False}


def test_a_spike_survives_saving() -> None:
    """State taken right after the step that spiked, and loaded elsewhere, is answered there."""
    when, other = tracking.on_spike(factor=2.0), tracking.on_spike(factor=2.0)
    for total in (1.0, 1.0, 40.0):
        _tracked(when, total**0.5)
    state = when.state_dict()
    other.load_state_dict(state)
    assert when() == other() == "norms"
    assert state == {"previous": pytest.approx(40.0), "spiked": True}


def test_policies_print_how_they_are_made() -> None:
    """With the level that they track at."""
    assert repr(tracking.every(100)) == "every(100, level='norms')"
    assert repr(tracking.on_spike(2.5, level="gram")) == "on_spike(factor=2.5, level='gram')"
    assert repr(tracking.History(7)) == "History(0 of 7 steps)"


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", None])
def test_a_number_of_steps_is_whole_and_at_least_one(steps: object) -> None:
    """Anything else is refused when the policy is made."""
    with pytest.raises(eq.OptionError, match=r"`steps` must be a (finite|whole) number.*got"):
        tracking.every(steps)  # type: ignore[arg-type]


def test_an_unknown_level_is_refused_when_the_policy_is_made() -> None:
    """Not at the step that tracks first."""
    for make in (lambda: tracking.every(2, level="gam"), lambda: tracking.on_spike(level="gam")):  # type: ignore[arg-type]
        with pytest.raises(eq.OptionError, match=r"`level` must be 'norms' or 'gram', got 'gam'"):
            make()


@pytest.mark.parametrize("factor", [1.0, 0.0, float("nan")])
def test_a_factor_that_is_no_rise_is_refused(factor: float) -> None:
    """The factor must be above 1."""
    with pytest.raises(eq.OptionError, match="`factor` must be a finite number above 1"):
        tracking.on_spike(factor)
