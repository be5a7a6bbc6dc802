"""Schedules: their formulas, where they begin and end, and their way to plain data and back."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise import schedules

values = st.floats(-10, 10, allow_subnormal=False)
steps = st.integers(0, 2000)
lengths = st.integers(1, 1000)

CLOSE = 1e-12
"""A handful of roundings of numbers up to 20."""

ALL: dict[str, schedules.Schedule] = {
    "constant": schedules.constant(0.5),
    "linear": schedules.linear(0.25, -1.0, steps=5),
    "cosine": schedules.cosine(1.0, 0.0, steps=5),
    "warmup": schedules.warmup(2.0, steps=4),
    "decay": schedules.decay(2.0, rate=0.5),
    "piecewise": schedules.piecewise({0: 1.0, 10: 0.5, 20: 0.0}),
    "chained": schedules.chained(
        {0: schedules.warmup(1.0, steps=10), 10: schedules.piecewise({0: 1.0, 5: 0.5})}
    ),
    "epochs": schedules.piecewise({0: 1.0, 10.5: 0.5}),  # type: ignore[dict-item]
}


def close(value: float) -> object:
    """Equal to within roundings."""
    return pytest.approx(value, rel=CLOSE, abs=CLOSE)


# Formulas ----------------------------------------------------------------------------------------


@given(value=values, step=steps)
def test_constant(value: float, step: int) -> None:
    """The same number at every step."""
    assert schedules.constant(value)(step) == value


@given(start=values, end=values, length=lengths, step=steps)
def test_linear(start: float, end: float, length: int, step: int) -> None:
    """start + (end − start)·min(step/max(steps − 1, 1), 1)."""
    part = min(step / max(length - 1, 1), 1.0)
    assert schedules.linear(start, end, length)(step) == start + (end - start) * part


@given(start=values, end=values, length=st.integers(2, 1000))
def test_linear_and_cosine_begin_and_end_alike(start: float, end: float, length: int) -> None:
    """Both start at step 0, are half way in the middle, end at steps − 1 and stay there."""
    for kind in (schedules.linear, schedules.cosine):
        schedule = kind(start, end, length)
        assert schedule(0) == start
        assert schedule((length - 1) / 2) == close((start + end) / 2)
        for later in (length - 1, length, 10 * length):
            assert schedule(later) == close(end)


@given(start=values, end=values, length=lengths, step=steps)
def test_cosine(start: float, end: float, length: int, step: int) -> None:
    """The way from start to end is gone as (1 − cos πt)/2."""
    t = min(step / max(length - 1, 1), 1.0)
    along = (1 - math.cos(math.pi * t)) / 2
    assert schedules.cosine(start, end, length)(step) == close(start * (1 - along) + end * along)


def test_a_cosine_is_slow_at_both_ends() -> None:
    """After a quarter of the way it has gone (1 − √½)/2 of it."""
    assert schedules.cosine(0.0, 1.0, steps=5)(1) == close((1 - math.sqrt(0.5)) / 2)


@pytest.mark.parametrize("kind", [schedules.linear, schedules.cosine])
def test_one_step_is_over_after_the_first(kind: Callable[..., schedules.Schedule]) -> None:
    """With steps=1 the start holds at step 0 and the end from step 1 on."""
    schedule = kind(3.0, 7.0, 1)
    assert [schedule(step) for step in (0, 1, 2)] == [3.0, 7.0, 7.0]


@given(value=values, length=lengths, step=steps)
def test_warmup(value: float, length: int, step: int) -> None:
    """value·min(step/steps, 1): 0 at step 0, the value at `steps`, and from there on."""
    schedule = schedules.warmup(value, length)
    assert schedule(step) == close(value * step / length if step < length else value)
    assert schedule(0) == 0.0
    assert schedule(length) == value


def test_warmup_without_steps_is_warm() -> None:
    """With steps=0 it is the value at once."""
    assert schedules.warmup(0.7, steps=0)(0) == 0.7


@given(value=values, rate=st.floats(0, 1, allow_subnormal=False), step=st.integers(0, 50))
def test_decay(value: float, rate: float, step: int) -> None:
    """value·rate^step: each step multiplies by the rate, and rate⁰ is 1."""
    schedule = schedules.decay(value, rate)
    assert schedule(0) == value
    assert schedule(step + 1) == close(schedule(step) * rate)


def test_piecewise_holds_the_latest_value() -> None:
    """The value of the last entry that was reached, however the entries are ordered."""
    schedule = schedules.piecewise({20: 0.0, 0: 1.0, 10: 0.5})
    found = [schedule(step) for step in (0, 9, 9.5, 10, 19, 20, 1000)]
    assert found == [1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0]


@given(step=steps)
def test_chained_counts_from_where_each_begins(step: int) -> None:
    """The second schedule sees the steps since its own beginning."""
    first, second = schedules.linear(0.0, 1.0, steps=8), schedules.decay(1.0, rate=0.9)
    schedule = schedules.chained({0: first, 8: second})
    assert schedule(step) == (first(step) if step < 8 else second(step - 8))


def test_chained_takes_any_function() -> None:
    """A lambda is a schedule among others."""
    assert schedules.chained({0: lambda step: 10.0 * step, 3: schedules.constant(1.0)})(2) == 20.0


@pytest.mark.parametrize("name", ALL)
def test_epochs_may_be_fractions(name: str) -> None:
    """Any number that counts up will do, as `step=` or by position."""
    assert ALL[name](step=2.0) == ALL[name](2)
    assert isinstance(ALL[name](0.5), float)


# Print -------------------------------------------------------------------------------------------


def test_schedules_print_themselves() -> None:
    """Short enough for the formula of a pipeline."""
    assert {name: repr(schedule) for name, schedule in ALL.items()} == {
        "constant": "constant(0.5)",
        "linear": "linear(0.25→-1)",
        "cosine": "cosine(1→0)",
        "warmup": "warmup(0→2)",
        "decay": "decay(2·0.5^step)",
        "piecewise": "piecewise(0: 1, 10: 0.5, 20: 0)",
        "chained": "chained(0: warmup(0→1), 10: piecewise(0: 1, 5: 0.5))",
        "epochs": "piecewise(0: 1, 10.5: 0.5)",
    }


def test_nothing_does_not_grow() -> None:
    """0·rate^step is 0 also where rate^step is beyond all numbers."""
    assert schedules.decay(0.0, rate=10.0)(400) == 0.0


@pytest.mark.parametrize("rate", [10, 10.0])
def test_growth_beyond_all_numbers_is_infinite(rate: float) -> None:
    """Which a weight must not be: the error names the term, where Python's own names nothing."""
    schedule = schedules.decay(-1.0, rate=rate)
    assert schedule(400) == -math.inf
    with pytest.raises(
        eq.OptionError, match="`weight` must be a finite number, got -inf"
    ) as caught:
        eq.Pipeline(grown=eq.Term(eq.l1, weight=schedule))(torch.ones(2), step=400)
    assert caught.value.__notes__ == ["in the term 'grown'"]


# Plain data --------------------------------------------------------------------------------------


def test_plain_data_is_what_was_written() -> None:
    """The kind, and its arguments by name."""
    assert ALL["linear"].to_config() == {"linear": {"start": 0.25, "end": -1.0, "steps": 5}}
    assert ALL["chained"].to_config() == {
        "chained": {
            "schedules": {
                0: {"warmup": {"value": 1.0, "steps": 10}},
                10: {"piecewise": {"values": {0: 1.0, 5: 0.5}}},
            }
        }
    }


@pytest.mark.parametrize("way", ["plain", "json", "pickle", "deepcopy"])
@pytest.mark.parametrize("name", ALL)
def test_schedules_travel(name: str, way: str) -> None:
    """From plain data, through JSON too, comes a schedule with the same values and print."""
    schedule = ALL[name]
    if way == "json":
        travelled = schedules.from_config(json.loads(json.dumps(schedule.to_config())))
    elif way == "plain":
        travelled = schedules.from_config(schedule.to_config())
    else:
        travelled = (
            copy.deepcopy(schedule) if way == "deepcopy" else pickle.loads(pickle.dumps(schedule))
        )
    assert travelled == schedule
    assert travelled(10.4) == schedule(10.4)
    assert repr(travelled) == repr(schedule)
    assert [travelled(step) for step in range(30)] == [schedule(step) for step in range(30)]


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("step", [-1, -0.5, math.nan, math.inf, "3", None], ids=repr)
def test_impossible_steps_are_refused(name: str, step: Any) -> None:
    """Negative, endless and other steps that cannot be."""
    with pytest.raises(eq.OptionError, match="`step` must be a finite number at least 0, got"):
        ALL[name](step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(math.nan), "`value` must be a finite number, got nan"),
        (lambda: schedules.constant("0.1"), "`value` must be a finite number, got '0.1'"),
        (lambda: schedules.linear(math.inf, 0.0, 5), "`start` must be a finite number, got inf"),
        (lambda: schedules.linear(0.0, None, 5), "`end` must be a finite number, got None"),
        (lambda: schedules.linear(0.0, 1.0, 0), "`steps` must be a finite number at least 1"),
        (lambda: schedules.cosine(0.0, 1.0, 0), "`steps` must be a finite number at least 1"),
        (lambda: schedules.warmup(1.0, -1), "`steps` must be a finite number at least 0, got -1"),
        (lambda: schedules.decay(1.0, -0.5), "`rate` must be a finite number at least 0, got -0.5"),
        (lambda: schedules.piecewise({0: math.nan}), "`values` must be a finite number, got nan"),
        (lambda: schedules.piecewise({5: 1.0}), r"from step 0 on, got steps \[5\]\. Use a first"),
        (lambda: schedules.piecewise({}), r"`piecewise` must say .* got steps \[\]"),
        (lambda: schedules.piecewise({0: 1.0, -5: 1.0}), "`step` must be .* got -5"),
        (lambda: schedules.chained({3: schedules.constant(1.0)}), r"`chained` must say .* \[3\]"),
        (
            lambda: schedules.chained({0: 0.1}),
            r"must be functions of the step, got 0\.1\. Use",
        ),
        *(
            (
                lambda make=make: make([(0, 1.0)]),
                rf"`{make.__name__}` must be given a mapping from first steps, got list\. Use {{0",
            )
            for make in (schedules.piecewise, schedules.chained)
        ),
    ],
)
def test_impossible_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    """When the schedule is made, not at the first step."""
    with pytest.raises(eq.OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"liner": {"start": 0}}, "got 'liner'. Did you mean 'linear'"),
        (
            {"linear": {"start": 0.0, "ende": 1.0, "steps": 3}},
            r"`linear` takes the arguments start, end, steps; got 'ende'\. Did you mean 'end'\?",
        ),
        (
            {"linear": [0.0, 1.0, 3]},
            r"`linear` takes the arguments start, end, steps by name, got list\. Use {'linear'",
        ),
        ({"linear": {"start": 0.0}}, "linear: .* missing 2 required"),
        ({"linear": 3.0}, r"`linear` takes the arguments .* by name, got float\. Use {'linear'"),
        ({"constant": {"value": "much"}}, "`value` must be a finite number, got 'much'"),
        ({}, r"must have one kind, got \[\]\. Use {'linear'"),
        (3.0, r"must be a mapping from its kind to arguments, got 3\.0\. Use {'constant'"),
        (["linear"], r"must be a mapping from its kind to arguments, got \['linear'\]"),
        (
            {"chained": {"schedules": {"later": {"constant": {"value": 1.0}}}}},
            "`step` must be a finite number at least 0, got 'later'",
        ),
        ({"piecewise": {"values": {"0": 1.0, "inf": 2.0}}}, "`step` must be .* got inf"),
        ({"constant": {"value": 1}, "decay": {}}, r"one kind, got \['constant', 'decay'\]"),
    ],
    ids=str,
)
def test_plain_data_that_is_no_schedule_is_refused(config: Mapping[str, Any], message: str) -> None:
    """Unknown kinds and arguments are named."""
    with pytest.raises(eq.OptionError, match=message):
        schedules.from_config(config)


def test_functions_do_not_go_to_plain_data() -> None:
    """A lambda in a chain has no name to be written down by."""
    schedule = schedules.chained({0: lambda step: step})
    with pytest.raises(eq.OptionError, match=r"only schedules of `equipoise\.schedules` go to"):
        schedule.to_config()
