"""Any rule from inner products to weights; TorchJD's among them, from the real package."""

import re
from collections.abc import Callable

import pytest
import torch
import torchjd.aggregation as jd
from torch import Tensor

import equipoise as eq
from equipoise.balance import from_gram
from tests.balance.networks import along, around, descended, evaluated, numbers, pipeline_of

ROWS = [[3.0, 1.0, 0.0], [-2.0, 1.0, 1.0], [0.5, -4.0, 2.0]]
LOSSES = {name: along(row) for name, row in zip("abc", ROWS, strict=True)}
J = torch.tensor(ROWS, dtype=torch.float64)
RULES = {
    "UPGrad": (jd.UPGradWeighting, jd.UPGrad),
    "MGDA": (jd.MGDAWeighting, jd.MGDA),
    "Mean": (jd.MeanWeighting, jd.Mean),
    "IMTLG": (jd.IMTLGWeighting, jd.IMTLG),
    "DualProj": (jd.DualProjWeighting, jd.DualProj),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("start", [1.0, 0.01])
def test_the_gradient_is_torchjds(rule: str, start: float) -> None:
    """The total gradient is what TorchJD's aggregator makes of the Jacobian, from any weights."""
    weighting, aggregator = RULES[rule]
    balancer = from_gram(weighting(), limits=(1e-9, 1e4))
    pipeline = pipeline_of(LOSSES, a=start, b=1.0, c=2.0)
    pipeline = balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    pipeline(x).total.backward()
    # Weights are float32.
    torch.testing.assert_close(x.grad, aggregator()(J), rtol=1e-5, atol=1e-5)


def test_the_function_is_given_the_gram_matrix() -> None:
    """It sees the inner products of gradients without weights, in the order of the terms."""
    seen: list[Tensor] = []

    def rule(gram: Tensor) -> Tensor:
        seen.append(gram)
        return torch.ones(2)

    balancer = from_gram(rule, terms=["c", "a"])
    pipeline = pipeline_of(LOSSES, a=7.0, c=-0.3)
    balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    torch.testing.assert_close(seen[0], J[[2, 0]] @ J[[2, 0]].T, rtol=1e-12, atol=1e-12)
    assert numbers(balancer) == {"c": -1.0, "a": 1.0}


def test_mgda_comes_to_rest_at_the_known_point() -> None:
    """Two quadratics from a point on their axis of symmetry: the middle of their optima."""
    losses = {"a": around([1.0, 0.0]), "b": around([-1.0, 0.0])}
    balancer = from_gram(jd.MGDAWeighting())
    at, *_ = descended(balancer, pipeline_of(losses), [0.0, 2.0], lr=0.2, steps=100)
    torch.testing.assert_close(at, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-6)
    assert numbers(balancer) == pytest.approx({"a": 0.5, "b": 0.5})


def test_upgrad_never_makes_a_loss_worse() -> None:
    """With opposing gradients every loss falls in every step; with fixed weights one rises."""
    losses = {"a": around([1.0, 0.0], 9.0), "b": around([0.0, 1.0])}
    balancer, pipeline = from_gram(jd.UPGradWeighting()), pipeline_of(losses)
    # The first step has the weights the pipeline came with.
    pipeline = balancer.update(evaluated(pipeline, [2.0, 2.0]), pipeline)
    at = torch.tensor([2.0, 2.0], dtype=torch.float64)
    before = [torch.inf, torch.inf]
    for _ in range(40):
        leaf = at.clone().requires_grad_()
        result = pipeline(leaf, track="gram")
        pipeline_before = pipeline
        result.total.backward()
        pipeline = balancer.update(result, pipeline_before)
        leaf = at.clone().requires_grad_()
        pipeline(leaf).total.backward()
        assert leaf.grad is not None
        at = at - 0.02 * leaf.grad
        now = [float(loss(at)) for loss in losses.values()]
        assert all(n < b + 1e-7 for n, b in zip(now, before, strict=True))
        before = now


def test_the_base_keeps_weight_one() -> None:
    """With a base among the terms the others are relative to it; without, weights are as given."""
    balancer = from_gram(lambda _: torch.tensor([4.0, 1.0, 2.0]))
    pipeline = pipeline_of(dict(zip(("base", "b", "c"), LOSSES.values(), strict=True)))
    balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    assert numbers(balancer) == {"b": 0.25, "c": 0.5}


def test_a_weight_of_zero_comes_back() -> None:
    """What a rule gave no weight is kept just measurable, and may get weight again."""
    weights = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])]
    rules = iter(weights)
    seen: list[Tensor] = []

    def rule(gram: Tensor) -> Tensor:
        seen.append(gram)
        return next(rules)

    balancer, pipeline = from_gram(rule), pipeline_of(LOSSES)
    pipeline = balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    assert numbers(balancer)["b"] == pytest.approx(1e-6)
    pipeline = balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-6, atol=1e-6)
    assert numbers(balancer)["b"] == 1.0


def test_a_rule_that_returns_nan_changes_nothing() -> None:
    """What a rule could not decide leaves all weights as they were."""
    balancer = from_gram(lambda _: torch.tensor([1.0, torch.nan, 2.0]))
    pipeline = pipeline_of(LOSSES, a=0.1, b=0.2, c=0.3)
    balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    assert numbers(balancer) == pytest.approx({"a": 0.1, "b": 0.2, "c": 0.3})


@pytest.mark.parametrize("of_base", [0.0, -1.0])
def test_a_base_without_weight_changes_nothing(of_base: float) -> None:
    """Weights relative to a base that a rule gives none, or a negative one, have no meaning."""
    balancer = from_gram(lambda _: torch.tensor([of_base, 1.0, 2.0]))
    pipeline = pipeline_of(dict(zip(("base", "b", "c"), LOSSES.values(), strict=True)), b=0.3)
    balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    assert numbers(balancer) == pytest.approx({"b": 0.3, "c": 1.0})


def test_a_report_of_nan_reaches_no_solver() -> None:
    """A quadratic programme is not asked about NaN, on which it would raise."""
    balancer = from_gram(jd.UPGradWeighting())
    pipeline = pipeline_of({**LOSSES, "b": lambda x: torch.nan * x.sum()}, b=0.2)
    balancer.update(evaluated(pipeline, [0.0] * 3), pipeline)
    assert numbers(balancer) == pytest.approx({"a": 1.0, "b": 0.2, "c": 1.0})


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no function": (
        lambda: from_gram(3),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`fn` must be a function of a Gram matrix, got int. Use",
    ),
    "text": (
        lambda: from_gram(torch.diagonal, terms="kl"),
        eq.OptionError,
        "`terms` must be a list of names, got 'kl'. Use ['kl'].",
    ),
    "decay": (
        lambda: from_gram(torch.diagonal, decay=1.0),
        eq.OptionError,
        "`decay` must be below 1, got 1.0. Use 0.9, say.",
    ),
    "shape": (
        lambda: updated(lambda gram: gram),
        eq.InputError,
        "`fn` must return one weight for each of a, b, c, got (3, 3). Use a function whose",
    ),
    "kind": (
        lambda: updated(lambda _: 1.0),  # type: ignore[arg-type, return-value]
        eq.InputError,
        "one weight for each of a, b, c, got float. Use",
    ),
    "norms": (
        lambda: updated(jd.MeanWeighting(), gram=False),
        eq.GradientError,
        "got a report of norms. Use `track='gram'`.",
    ),
}


def updated(fn: Callable[[Tensor], Tensor], *, gram: bool = True) -> object:
    """An update with this rule."""
    pipeline = pipeline_of(LOSSES)
    return from_gram(fn).update(evaluated(pipeline, [0.0] * 3, gram=gram), pipeline)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong use is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()
