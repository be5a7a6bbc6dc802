"""A history finds who moved the model, and what looks wrong."""

import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import equipoise as eq
from equipoise import Pipeline, Term, tracking


def linear(x: Tensor, direction: Tensor) -> Tensor:
    """A term whose gradient is exactly the direction it is given."""
    return (x * direction).sum()


def history_of(
    steps: list[dict[str, tuple[list[float], float]]], *, window: int = 100
) -> tracking.History:
    """A history of steps, in each of which every term has a chosen gradient and weight."""
    history = tracking.History(window=window)
    for step in steps:
        x = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
        terms = {name: Term(linear, inputs=("x", name), weight=w) for name, (_, w) in step.items()}
        directions = {n: torch.tensor(d, dtype=torch.float64) for n, (d, _) in step.items()}
        result = Pipeline(**terms)(x, **directions, track="gram")
        result.total.backward()
        history.add(result)
    return history


def norms(*sizes: float) -> list[dict[str, tuple[list[float], float]]]:
    """Steps in which the one term `a` has these gradient norms."""
    return [{"a": ([size, 0.0], 1.0)} for size in sizes]


def test_means_are_over_the_last_steps() -> None:
    """The mean of norms 1, 2, 3, 6 is 3; of the last two it is 4.5."""
    history = history_of(norms(1, 2, 3, 6))
    assert history.means() == {"a": 3.0}
    assert history.means(last=2) == {"a": 4.5}


def test_the_window_forgets() -> None:
    """With a window of two only the last two of four steps are left, also before they are read."""
    history = history_of(norms(1, 2, 3, 6), window=2)
    assert len(history._arriving) == 2
    assert len(history) == 2
    assert history.means() == {"a": 4.5}


def test_ema_weighs_the_past_by_its_decay() -> None:
    """With decay ¾ the average of 4, 2, 8 is ¾·(¾·4 + ¼·2) + ¼·8 = 4.625."""
    assert history_of(norms(4, 2, 8)).ema(decay=0.75) == {"a": 4.625}


def test_trends_compare_the_halves() -> None:
    """Norms 1, 1, 3, 3 have tripled; the middle one of three counts in both halves."""
    assert history_of(norms(1, 1, 3, 3)).trends() == {"a": 3.0}
    assert history_of(norms(1, 2, 3)).trends() == {"a": 2.5 / 1.5}
    assert history_of(norms(7)).trends() == {"a": 1.0}


def test_who_dominated_depends_on_the_steps_asked_for() -> None:
    """One term led before, another over the last two steps."""
    early = {"a": ([9.0, 0.0], 1.0), "b": ([1.0, 0.0], 1.0)}
    late = {"a": ([1.0, 0.0], 1.0), "b": ([2.0, 0.0], 1.0)}
    history = history_of([early, early, late, late])
    assert history.dominant() == "a"
    assert history.dominant(last=2) == "b"


def test_a_lazy_term_counts_with_its_mean() -> None:
    """Four times 3 at every fourth step is 3 a step: less than 5, and no reason to dominate."""
    rest = {"a": ([5.0, 0.0], 1.0)}
    history = history_of([{**rest, "lazy": ([3.0, 0.0], 4.0)}, rest, rest, rest] * 2)
    assert history.means() == {"a": 5.0, "lazy": 3.0}
    assert history.dominant() == "a"
    assert history.ema() == pytest.approx({"a": 5.0, "lazy": 12.0})


def test_a_lazy_term_is_dominated_by_its_mean() -> None:
    """Four times ½ at every fourth step is 120 times below 60, not 30 times."""
    rest = {"a": ([60.0, 0.0], 1.0)}
    history = history_of([{**rest, "lazy": ([0.5, 0.0], 4.0)}, rest, rest, rest])
    (finding,) = history.findings()
    assert (finding.kind, finding.evidence["mean norm"]) == ("dominated", 0.5)


def test_a_step_without_weight_counts_as_nothing() -> None:
    """A term that weighs 0 at one of two steps, and then pulls with 4, pulls with 2 on average."""
    assert history_of([{"a": ([4.0, 0.0], 0.0)}, {"a": ([4.0, 0.0], 1.0)}]).means() == {"a": 2.0}


def kinds(history: tracking.History) -> set[tuple[str, str]]:
    """What was found, in which term."""
    return {(finding.kind, finding.term) for finding in history.findings()}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    """Two terms of similar size at right angles give no finding."""
    step = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 2.0], 1.0)}
    assert kinds(history_of([step] * 5)) == set()


@pytest.mark.parametrize(("factor", "found"), [(99.0, set()), (101.0, {("dominated", "b")})])
def test_a_term_a_hundred_times_below_is_dominated(
    factor: float, found: set[tuple[str, str]]
) -> None:
    """101 times below the largest is a finding, 99 times is none."""
    step = {"a": ([factor, 0.0], 1.0), "b": ([0.0, 1.0], 1.0)}
    assert kinds(history_of([step] * 3)) == found


def test_a_dominated_term_comes_with_its_numbers() -> None:
    """Threshold, window and both means are part of the finding."""
    step = {"a": ([400.0, 0.0], 1.0), "b": ([0.0, 1.0], 1.0)}
    (finding,) = history_of([step] * 3).findings()
    assert (finding.threshold, finding.window) == (100.0, 3)
    assert finding.evidence == {"mean norm": 1.0, "mean norm of a": 400.0}
    assert str(finding) == "b: 400× below a on average, and hardly moves the model"


def test_a_term_without_gradient_is_dead() -> None:
    """A gradient of 0 at a value that is not 0 is dead; one gradient that is not 0 saves it."""
    dead = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 0.0], 1.0)}
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    history = tracking.History()
    pipeline = Pipeline(a=Term(eq.l1), b=Term(lambda x: (x * 0).sum() + 3))
    for _ in range(2):
        result = pipeline(x, track=True)
        result.total.backward()
        history.add(result)
    assert kinds(history) == {("dead", "b")}
    alive = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 0.1], 1.0)}
    assert kinds(history_of([dead, dead, alive])) == set()


def test_a_term_that_was_detached_is_dead() -> None:
    """It has no gradient to be 0, which is no better; one that is switched off is no finding."""
    history = tracking.History()
    pipeline = Pipeline(
        a=Term(eq.l1), lost=Term(lambda x: x.detach().sum()), off=Term(eq.l2, differentiable=False)
    )
    for _ in range(3):
        result = pipeline(torch.ones(2, requires_grad=True), track=True)
        result.total.backward()
        history.add(result)
    (finding,) = history.findings()
    assert (finding.kind, finding.term, finding.window) == ("dead", "lost", 3)
    assert finding.evidence == {"steps without a graph": 3.0}
    assert str(finding).endswith(
        "something in it is detached or not differentiable, in all 3 steps"
    )


def test_a_step_without_a_direction_is_no_part_of_the_mean() -> None:
    """Opposed in nine of ten steps, and 0 in one, where no cosine is."""
    opposed = {"a": ([1.0, 0.0], 1.0), "b": ([-1.0, 0.0], 1.0)}
    still = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 0.0], 1.0)}
    (finding,) = history_of([opposed] * 9 + [still]).findings()
    assert (finding.kind, finding.window) == ("conflict", 10)
    assert finding.evidence == {"mean cosine": -1.0, "part of steps": 0.9}


def test_a_value_of_zero_without_gradient_looks_like_an_empty_mask() -> None:
    """A masked term whose mask is empty is found as empty."""
    history = tracking.History()
    x = torch.ones(3, requires_grad=True)
    mask = torch.zeros(3, dtype=torch.bool)
    pipeline = Pipeline(a=Term(eq.l2), b=Term(eq.l1, options={"mask": mask}))
    result = pipeline(x, track=True)
    result.total.backward()
    history.add(result)
    assert kinds(history) == {("empty", "b")}


def test_a_weight_of_zero_throughout_is_found() -> None:
    """Weight 0 in every step is a finding; in all but one it is none."""
    zero = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 1.0], 0.0)}
    some = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 1.0], 0.5)}
    assert kinds(history_of([zero, zero])) == {("weightless", "b")}
    assert kinds(history_of([zero, some])) == set()


@pytest.mark.parametrize(("against", "found"), [(9, {("conflict", "a")}), (8, set())])
def test_a_conflict_is_constant_in_nine_of_ten_steps(
    against: int, found: set[tuple[str, str]]
) -> None:
    """Opposed gradients in 9 of 10 steps are a finding, in 8 they are not."""
    opposed = {"a": ([1.0, 0.0], 1.0), "b": ([-1.0, 0.0], 1.0)}
    apart = {"a": ([1.0, 0.0], 1.0), "b": ([0.0, 1.0], 1.0)}
    history = history_of([opposed] * against + [apart] * (10 - against))
    assert kinds(history) == found


@pytest.mark.parametrize(("last", "found"), [(9.9, set()), (10.1, {("exploding", "a")})])
def test_a_norm_ten_times_its_median_has_exploded(last: float, found: set[tuple[str, str]]) -> None:
    """10.1 times the median is a finding, 9.9 times is none."""
    assert kinds(history_of(norms(1, 1, 1, 1, last))) == found


ZERO, RIGHT, LEFT = [0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]
EVIDENCE: dict[str, tuple[dict[str, tuple[list[float], float]], float, dict[str, float]]] = {
    "conflict": (
        {"a": (RIGHT, 1.0), "b": (LEFT, 1.0)},
        -0.1,
        {"mean cosine": -1.0, "part of steps": 1.0},
    ),
    "dominated": (
        {"a": ([200.0, 0.0], 1.0), "b": ([0.0, 1.0], 1.0)},
        100.0,
        {"mean norm": 1.0, "mean norm of a": 200.0},
    ),
    "empty": ({"a": (RIGHT, 1.0), "b": (ZERO, 1.0)}, 0.0, {"largest norm": 0.0, "mean value": 0.0}),
    "exploding": (
        {"a": ([math.inf, 0.0], 1.0)},
        10.0,
        {"last norm": math.inf, "median norm": 0.0},
    ),
    "weightless": ({"a": (RIGHT, 1.0), "b": (RIGHT, 0.0)}, 0.0, {"largest weight": 0.0}),
}


@pytest.mark.parametrize("kind", EVIDENCE)
def test_a_finding_comes_with_threshold_window_and_numbers(kind: str) -> None:
    """All three are there to be looked at, and nothing else is found."""
    step, threshold, evidence = EVIDENCE[kind]
    (finding,) = history_of([step] * 4).findings()
    assert (finding.kind, finding.threshold, finding.window) == (kind, threshold, 4)
    assert finding.evidence == pytest.approx(evidence)


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_has_exploded(last: float) -> None:
    """NaN and inf count as exploding."""
    assert ("exploding", "a") in kinds(history_of(norms(1, 1, last)))


@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_a_first_norm_that_is_not_finite_has_exploded(size: float) -> None:
    """There is nothing to compare it with, and nothing is needed."""
    assert kinds(history_of(norms(size))) == {("exploding", "a")}


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_nan_dominates_whatever_the_order(names: str) -> None:
    """The term to look at is the one with NaN; among the others the dominated one is still found.

    Comparisons with NaN are False both ways, so that a plain maximum depends on the order.
    """
    sizes = {"a": math.nan, "b": 1.0}
    step = {name: ([sizes[name], 0.0], 1.0) for name in names}
    step["c"] = ([1e-3, 0.0], 1.0)
    history = history_of([step, step])
    assert history.dominant() == "a"
    assert ("dominated", "c") in kinds(history)
    x = torch.ones(2, requires_grad=True)
    terms = {name: Term(lambda x, size=sizes[name]: size * x.sum()) for name in names}
    assert Pipeline(**terms)(x).gradients.dominant() == "a"


def test_a_history_of_reasons_has_no_dominant_term() -> None:
    """Where no term had a gradient, asking which dominated is an error that says so."""
    history = tracking.History()
    result = Pipeline(off=Term(eq.l1, differentiable=False))(
        torch.ones(2, requires_grad=True), track=True
    )
    history.add(result)
    with pytest.raises(eq.GradientError, match=r"no term had a gradient in these steps"):
        history.dominant()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tracking.History(2.5), eq.OptionError, r"`window` must be a whole number, got"),
        (lambda: tracking.History(0), eq.OptionError, r"`window` must be a finite number at least"),
        (lambda: tracking.History().add("x"), eq.InputTypeError, r"`result` must be .* got str"),
        (lambda: history_of(norms(1.0)).means(last=1.5), eq.OptionError, r"`last` must be a whole"),
        (lambda: history_of(norms(1.0)).means(last=101), eq.OptionError, r"`last` .* at most 100"),
    ],
)
def test_what_a_history_refuses(make: Any, error: type[Exception], message: str) -> None:
    """Windows that are no whole number, and what is no evaluation."""
    with pytest.raises(error, match=message):
        make()


def test_untracked_evaluations_are_passed_over() -> None:
    """An evaluation without tracking adds nothing."""
    history = tracking.History()
    result = Pipeline(l1=Term(eq.l1))(torch.ones(2, requires_grad=True))
    result.total.backward()
    history.add(result)
    assert len(history) == 0
    with pytest.raises(eq.GradientError, match="needs at least one tracked evaluation"):
        history.dominant()


def test_a_history_holds_on_to_no_graph() -> None:
    """Of an evaluation that was added, and never differentiated, nothing but figures is left."""
    history = tracking.History()
    hidden = torch.ones(4, requires_grad=True) * 2
    kept = StorageWeakRef(hidden.untyped_storage())
    history.add(Pipeline(square=Term(lambda x: (x * x).sum()))(hidden, track=True))
    del hidden
    gc.collect()
    assert kept.expired()
    assert copy.deepcopy(history).means() == history.means() == {"square": 8.0}


def test_nothing_is_fetched_until_something_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding transfers nothing; reading transfers all that came in one go, and only once."""
    transfers = 0
    plain = Tensor.tolist

    def counted(self: Tensor) -> object:
        nonlocal transfers
        transfers += 1
        return plain(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    history = history_of(norms(1, 2, 3))
    assert transfers == 0
    history.means()
    history.dominant()
    assert transfers == 1
