"""Shares and ratios of the gradient hold, and are where descent comes to rest."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, tracking
from equipoise.balance import GradientRatio, GradientShare
from tests.balance.networks import along, around, descended, evaluated, numbers, pipeline_of

LOSSES = {"base": along([3.0, 4.0]), "kl": along([0.0, 2.0]), "l1": along([-1.0, 0.0])}


@given(
    kl=st.floats(0.01, 0.4),
    l1=st.floats(0.01, 0.4),
    weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
)
def test_shares_hold_after_one_report(kl: float, l1: float, weights: tuple[float, float]) -> None:
    """Whatever the weights were, after one report each norm is its part of the sum of norms."""
    balancer = GradientShare({"kl": kl, "l1": l1})
    pipeline = pipeline_of(LOSSES, kl=weights[0], l1=weights[1])
    pipeline = balancer.update(evaluated(pipeline, gram=False), pipeline)
    norms = evaluated(pipeline).gradients.weighted
    together = sum(float(n) for n in norms.values())  # type: ignore[arg-type]
    shares = {name: float(n) / together for name, n in norms.items()}  # type: ignore[arg-type]
    # Weights are float32.
    assert shares == pytest.approx({"base": 1 - kl - l1, "kl": kl, "l1": l1}, rel=1e-6)


@given(ratio=st.floats(0.01, 10.0), scale=st.floats(0.1, 100.0))
def test_ratios_hold_after_one_report(ratio: float, scale: float) -> None:
    """The weighted norm is the ratio times the base's, whatever the loss is scaled with."""
    balancer = GradientRatio({"kl": ratio})
    pipeline = pipeline_of({**LOSSES, "kl": along([0.0, scale])})
    pipeline = balancer.update(evaluated(pipeline), pipeline)
    assert pipeline["kl"].weight.item() == pytest.approx(ratio * 5 / scale, rel=1e-6)  # type: ignore[union-attr]
    assert pipeline["l1"].weight == 1.0


def test_descent_comes_to_rest_at_the_known_optimum() -> None:
    """On quadratics with a constant pull: the closed form of point and weight, to 1e-6.

    At rest ``x + w(x−1) + c = 0`` and ``w(1−x) = r·x``, hence ``x = −c/(1−r)``.
    """
    c, share = -0.3, 0.2
    ratio = share / (1 - share)
    losses = {"base": around([0.0]), "pull": around([1.0]), "other": along([c])}
    balancer = GradientShare({"pull": share}, decay=0.5)
    at, pipeline, _ = descended(balancer, pipeline_of(losses), [0.9], steps=400)
    optimum = -c / (1 - ratio)
    assert at.item() == pytest.approx(optimum, rel=1e-6)
    weight = pipeline["pull"].weight
    assert float(weight) == pytest.approx(ratio * optimum / (1 - optimum), rel=1e-6)  # type: ignore[arg-type]


def test_averages_steady_the_weights_under_noise() -> None:
    """With a long memory weights vary far less than without, around the same mean."""
    losses = {"base": around([0.0, 0.0]), "pull": around([1.0, 1.0]), "other": along([-0.4, -0.4])}

    def spread(decay: float) -> tuple[float, float]:
        balancer = GradientRatio({"pull": 0.25}, decay=decay)
        _, _, weights = descended(balancer, pipeline_of(losses), [0.5, 0.5], noise=0.1, steps=600)
        late = torch.tensor([w["pull"] for w in weights[200:]])
        assert late.isfinite().all()
        return float(late.std()), float(late.mean())

    (rough, first), (steady, second) = spread(0.0), spread(0.98)
    assert steady < 0.25 * rough
    assert second == pytest.approx(first, rel=0.1)


def test_the_average_is_unbiased_from_the_first_report() -> None:
    """With memory, the n-th weight is that of the weighted mean of all norms so far."""
    decay, norms = 0.8, [1.0, 4.0, 2.0, 8.0]
    balancer = GradientRatio({"kl": 1.0}, decay=decay)
    for number, norm in enumerate(norms, 1):
        pipeline = pipeline_of({"base": along([6.0, 0.0]), "kl": along([0.0, norm])})
        balancer.update(evaluated(pipeline), pipeline)
        ages = [decay ** (number - 1 - i) for i in range(number)]
        mean = sum(a * n for a, n in zip(ages, norms, strict=False)) / sum(ages)
        assert numbers(balancer)["kl"] == pytest.approx(6.0 / mean, rel=1e-6)


def test_vqgan_is_a_special_case() -> None:
    """On the last layer's report: the adaptive weight of Esser et al. (2021), with its δ."""
    torch.manual_seed(0)
    body, last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
    critic = nn.Linear(3, 1).double()
    x = torch.randn(16, 4, dtype=torch.float64)
    out = last(body(x).tanh())
    pipeline = Pipeline(
        base=Term(lambda y: (y - 1).abs().mean(), inputs="out"),
        gan=Term(lambda y: -critic(y).mean(), inputs="out", weight=0.3),
    )
    result = pipeline(out=out)
    report = tracking.parameter_gradients(result, [last.weight], set_grad=False)
    balancer = GradientRatio({"gan": 0.8}, eps=1e-4)
    weight = balancer.update(report, pipeline)["gan"].weight

    values = [term.value for term in result.results.values()]
    nll, gan = (torch.autograd.grad(v, last.weight, retain_graph=True)[0] for v in values)
    expected = (nll.norm() / (gan.norm() + 1e-4)).clamp(0.0, 1e4) * 0.8
    torch.testing.assert_close(weight, expected.float(), rtol=1e-6, atol=0)


def test_limits_hold() -> None:
    """A weight is never below the first limit nor above the second."""
    for limits, expected in ((0.5, 1.0), 1.0), ((10.0, 20.0), 10.0), ((1e-6, 1e4), 2.5):
        balancer = GradientRatio({"kl": 1.0}, limits=limits)
        pipeline = pipeline_of(LOSSES)
        assert balancer.update(evaluated(pipeline), pipeline)["kl"].weight == expected


def test_a_negative_weight_keeps_its_sign() -> None:
    """A bonus stays one: only the size of its weight is set."""
    balancer = GradientRatio({"kl": 1.0})
    pipeline = pipeline_of(LOSSES, kl=-0.1)
    assert balancer.update(evaluated(pipeline), pipeline)["kl"].weight == -2.5


def test_a_warm_start_keeps_the_pipelines_weights() -> None:
    """During the first reports the pipeline is the same object; averages have begun."""
    balancer = GradientRatio({"kl": 1.0}, decay=0.5, warmup=2)
    pipeline = pipeline_of(LOSSES, kl=0.1)
    for _ in range(2):
        assert balancer.update(evaluated(pipeline), pipeline) is pipeline
        assert balancer.weights == {}
    assert balancer.update(evaluated(pipeline), pipeline)["kl"].weight == 2.5


def test_lazy_terms_are_balanced_by_what_they_do_on_average() -> None:
    """A term evaluated at every fourth step with four times its weight gets the plain weight."""
    plain = pipeline_of(LOSSES)
    lazy = plain.without("kl").with_term("kl", Term(LOSSES["kl"], weight=0.3, every=4))
    balancer = GradientRatio({"kl": 1.0})
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for step in range(5):
        result = lazy(x, step=step, track=True)
        result.total.backward()
        lazy = balancer.update(result, lazy)
    assert lazy["kl"].weight == 2.5


def test_any_term_may_be_the_measure() -> None:
    """`base=` names another term to measure against, which keeps its weight."""
    balancer = GradientShare({"kl": 0.5}, base="l1")
    pipeline = pipeline_of(LOSSES, l1=4.0)
    pipeline = balancer.update(evaluated(pipeline), pipeline)
    assert (pipeline["kl"].weight, pipeline["l1"].weight) == (2.0, 4.0)


def test_they_print_themselves() -> None:
    """Targets and measure are in the text."""
    assert repr(GradientShare({"kl": 0.1})) == "GradientShare({'kl': 0.1}, base='base')"
    assert repr(GradientRatio({"kl": 2.0}, base="a")) == "GradientRatio({'kl': 2.0}, base='a')"


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "too much": (
        lambda: GradientShare({"a": 0.6, "b": 0.4}),
        "`shares` must leave something to the base, got {'a': 0.6, 'b': 0.4}, which add up to 1.",
    ),
    "nothing": (lambda: GradientShare({}), "`shares` must be a mapping from terms to numbers, got"),
    "zero": (lambda: GradientRatio({"a": 0.0}), "`ratios['a']` must be a finite number above 0"),
    "nan": (lambda: GradientRatio({"a": math.nan}), "`ratios['a']` must be a finite number above"),
    "base": (
        lambda: GradientShare({"base": 0.1}),
        "`shares` must be of other terms than the one they are measured against, got 'base'. Use",
    ),
    "itself": (lambda: GradientRatio({"a": 1.0}, base="a"), "measured against, got 'a'. Use"),
    "decay": (lambda: GradientShare({"a": 0.1}, decay=1.0), "`decay` must be below 1, got 1.0. U"),
    "low": (lambda: GradientShare({"a": 0.1}, limits=(0.0, 1.0)), "`limits[0]` must be a finite"),
    "high": (lambda: GradientShare({"a": 0.1}, limits=(2.0, 1.0)), "`limits[1]` must be a finite"),
    "one limit": (
        lambda: GradientShare({"a": 0.1}, limits=3.0),  # type: ignore[arg-type]
        "`limits` must be the smallest and the largest weight, got 3.0. Use (1e-06, 10000.0).",
    ),
    "warmup": (lambda: GradientShare({"a": 0.1}, warmup=-1), "`warmup` must be a finite number at"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong option is refused when the balancer is made."""
    call, text = REFUSALS[case]
    with pytest.raises(eq.OptionError, match=re.escape(text)):
        call()
