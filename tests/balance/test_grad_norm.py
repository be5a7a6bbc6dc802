"""GradNorm's fixed points, its two forces, and its agreement with the formula."""

import math
import re
from collections.abc import Callable

import pytest
import torch

import equipoise as eq
from equipoise import Term
from equipoise.balance import GradNorm
from tests.balance.networks import along, descended, evaluated, numbers, pipeline_of

CONSTANT = {"a": along([3.0, 4.0]), "b": along([0.0, 0.5]), "c": along([2.0, 0.0])}


def test_equal_rates_give_equal_gradients() -> None:
    """With alpha 0 the weights settle where all norms are equal, and keep their sum."""
    balancer = GradNorm(["a", "b", "c"], alpha=0.0, lr=0.01)
    pipeline = pipeline_of({n: lambda x, f=f: f(x) + 10.0 for n, f in CONSTANT.items()})
    for _ in range(800):
        pipeline = balancer.update(evaluated(pipeline), pipeline)
    inverse = {"a": 1 / 5, "b": 2.0, "c": 1 / 2}
    expected = {n: 3.0 * i / sum(inverse.values()) for n, i in inverse.items()}
    # They swing around the fixed point by a factor of e^lr.
    assert numbers(balancer) == pytest.approx(expected, rel=0.03)
    assert sum(numbers(balancer).values()) == pytest.approx(3.0, rel=1e-6)


def test_one_step_is_the_formula() -> None:
    """Two updates are those computed by hand from norms and values, in Python's floats."""
    alpha, lr = 1.5, 0.05
    balancer = GradNorm(["a", "b"], alpha=alpha, lr=lr)
    values = [{"a": 2.0, "b": 8.0}, {"a": 1.0, "b": 7.0}]
    lengths = {"a": 5.0, "b": 0.5}
    weights = {"a": 1.0, "b": 3.0}
    pipeline = pipeline_of({n: CONSTANT[n] for n in "ab"}, **weights)
    for now in values:
        report = evaluated(pipeline).gradients
        pipeline = balancer.update(
            report,
            pipeline,
            values={n: torch.tensor(v, dtype=torch.float64) for n, v in now.items()},
        )
        norms = {n: weights[n] * lengths[n] for n in weights}
        mean = sum(norms.values()) / 2
        pace = {n: now[n] / values[0][n] for n in now}
        rates = {n: p / (sum(pace.values()) / 2) for n, p in pace.items()}
        moved = {
            n: weights[n]
            * math.exp(
                -lr * math.copysign(1, norms[n] - mean * rates[n] ** alpha) * norms[n] / mean
            )
            for n in weights
        }
        weights = {n: m * sum(weights.values()) / sum(moved.values()) for n, m in moved.items()}
        assert numbers(balancer) == pytest.approx(weights, rel=1e-6)


def test_a_term_that_falls_behind_gets_more() -> None:
    """Of two equal gradients the one whose loss has fallen less gets the larger weight."""
    balancer = GradNorm(["a", "b"], alpha=1.0, lr=0.05)
    pipeline = pipeline_of({"a": along([1.0, 0.0]), "b": along([0.0, 1.0])})
    for values in ({"a": 1.0, "b": 1.0}, {"a": 0.2, "b": 0.9}, {"a": 0.1, "b": 0.9}):
        given = {n: torch.tensor(v) for n, v in values.items()}
        pipeline = balancer.update(evaluated(pipeline).gradients, pipeline, values=given)
    weights = numbers(balancer)
    assert weights["b"] > weights["a"]


def test_the_base_keeps_weight_one() -> None:
    """With the base among the terms all weights are divided by its own."""
    losses = {"base": lambda x: along([3.0, 4.0])(x) + 9, "b": lambda x: along([0.0, 0.5])(x) + 9}
    balancer = GradNorm(["base", "b"], alpha=0.0, lr=0.01)
    pipeline = pipeline_of(losses)
    for _ in range(800):
        pipeline = balancer.update(evaluated(pipeline), pipeline)
    assert list(balancer.weights) == ["b"]
    assert numbers(balancer)["b"] == pytest.approx(10.0, rel=0.03)


def test_two_quadratics_reach_their_optimum_together() -> None:
    """One term 20 times steeper than the other: balanced, both are at 0 sooner than without."""
    losses = {
        "steep": lambda x: 10.0 * x[0].square(),
        "flat": lambda x: 0.5 * x[1].square(),
    }
    balancer = GradNorm(["steep", "flat"], alpha=1.5, lr=0.05)
    at, _, weights = descended(balancer, pipeline_of(losses), [1.0, 1.0], steps=250, lr=0.01)
    plain = torch.tensor([1.0, 1.0], dtype=torch.float64)
    for _ in range(250):
        plain = plain - 0.01 * plain * torch.tensor([20.0, 1.0], dtype=torch.float64)
    assert at.norm() < 0.5 * plain.norm()
    assert all(0 < w < 2 for step in weights for w in step.values())


def test_lazy_terms_are_balanced_by_what_they_do_on_average() -> None:
    """A term evaluated at every fourth step with four times its weight gets the plain weight."""
    plain = pipeline_of({n: lambda x, f=f: f(x) + 10.0 for n, f in CONSTANT.items()})
    lazy = plain.without("b").with_term("b", Term(plain["b"].penalty, every=4))
    found = []
    for begun in (plain, lazy):
        balancer, pipeline = GradNorm(["a", "b", "c"], lr=0.1), begun
        for step in range(9):
            x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
            result = pipeline(x, step=step, track=step % 4 == 0)
            result.total.backward()
            pipeline = balancer.update(result, pipeline)
        found.append(numbers(balancer))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_weight_leaves_its_limit_at_once() -> None:
    """However long a weight was held at a limit, the first report the other way moves it."""
    balancer = GradNorm(["a", "b"], alpha=0.0, lr=0.1, limits=(0.5, 4.0))
    steep = {"a": lambda x: along([100.0, 0.0])(x) + 50, "b": lambda x: along([0.0, 1.0])(x) + 50}
    pipeline = pipeline_of(steep)
    for _ in range(100):
        pipeline = balancer.update(evaluated(pipeline), pipeline)
    assert numbers(balancer)["a"] == 0.5
    assert 1.5 < numbers(balancer)["b"] < 1.6  # the rest of 2, and what the limit gives back
    flat = pipeline_of({"a": along([0.01, 0.0]), "b": steep["b"]}, **numbers(balancer))
    given = {name: torch.tensor(50.0) for name in "ab"}
    balancer.update(evaluated(flat).gradients, flat, values=given)
    assert numbers(balancer)["a"] > 0.5


def test_values_that_are_not_positive_change_nothing() -> None:
    """A loss ratio of a loss at or below 0 means nothing."""
    balancer = GradNorm(["a", "b"])
    pipeline = pipeline_of({n: CONSTANT[n] for n in "ab"})
    given = {"a": torch.tensor(1.0), "b": torch.tensor(-1.0)}
    pipeline = balancer.update(evaluated(pipeline).gradients, pipeline, values=given)
    assert numbers(balancer) == {"a": 1.0, "b": 1.0}


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "one": (
        lambda: GradNorm(["a"]),
        eq.OptionError,
        "`terms` must be two or more names, each once, got ['a']. Use",
    ),
    "twice": (lambda: GradNorm(["a", "a", "b"]), eq.OptionError, "each once, got ['a', 'a', 'b']"),
    "text": (lambda: GradNorm("ab"), eq.OptionError, "each once, got 'ab'. Use"),
    "lr": (lambda: GradNorm(["a", "b"], lr=0.0), eq.OptionError, "`lr` must be a finite number ab"),
    "alpha": (lambda: GradNorm(["a", "b"], alpha=-1.0), eq.OptionError, "`alpha` must be a finite"),
    "values": (
        lambda: updated(None),
        eq.GradientError,
        "GradNorm looks at the terms' values too, got a gradient report alone. Use",
    ),
    "some values": (
        lambda: updated({"a": torch.ones(())}),
        eq.InputError,
        "`values` must hold all of a, b, got none of b. Use",
    ),
}


def updated(values: dict[str, torch.Tensor] | None) -> object:
    """An update from a report alone."""
    pipeline = pipeline_of({n: CONSTANT[n] for n in "ab"})
    report = evaluated(pipeline).gradients
    return GradNorm(["a", "b"]).update(report, pipeline, values=values)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong use is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_it_prints_itself() -> None:
    """Terms and both numbers are in the text."""
    assert repr(GradNorm(["a", "b"])) == "GradNorm(['a', 'b'], alpha=1.5, lr=0.025)"
