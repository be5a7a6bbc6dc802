"""The faults of earlier libraries of this kind, each shown to be absent here."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.penalties.assertions import assert_close, assert_equal
from tests.pipeline.assertions import LEVELS, assert_norm


def point() -> Tensor:
    """(3, −4) as a leaf."""
    return torch.tensor([3.0, -4.0], dtype=torch.float64, requires_grad=True)


# Training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_composition_never_reaches_training(track: Any) -> None:
    """A step on the total moves the model by the gradients of base and penalties alike."""
    net = nn.Linear(2, 1, bias=False).double()
    nn.init.constant_(net.weight, 1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pipeline = Pipeline(
        base=Term(lambda out: out.sum(), inputs="out"),
        decay=Term(eq.l2, inputs="weights", weight=0.5),
    )
    result = pipeline(out=net(point().detach()), weights=[net.weight], track=track)
    result.total.backward()
    optimizer.step()
    moved = 1.0 - 0.1 * (torch.tensor([[3.0, -4.0]], dtype=torch.float64) + 1.0)
    assert_close(net.weight, moved)


def test_training_in_inference_mode() -> None:
    """Evaluating leaves grad mode and the modules' modes as they were, whatever happens."""
    module = nn.Dropout(0.5).train()
    failing = Pipeline(p=Term(lambda x: module(x).sum(), differentiable=False), bad=Term(no_good))
    with pytest.raises(ZeroDivisionError):
        failing(point())
    assert torch.is_grad_enabled()
    assert module.training
    assert failing.without("bad")(point()).total.requires_grad is False
    assert torch.is_grad_enabled()


def no_good(_: Tensor) -> Tensor:
    """A penalty with a bug."""
    raise ZeroDivisionError


def test_scheduling_does_nothing() -> None:
    """The weight follows the step, in the total and in the gradient."""
    pipeline = Pipeline(l2=Term(eq.l2, weight=schedules.linear(1.0, 0.0, steps=5)))
    for step, weight in enumerate((1.0, 0.75, 0.5, 0.25, 0.0)):
        x = point()
        total = pipeline(x, step=step).total
        total.backward()
        assert_equal(total, 25 * weight)
        assert_equal(x.grad, 2 * weight * x)


def test_an_entropy_bonus_with_the_wrong_sign() -> None:
    """A step down the total with a bonus makes the model less certain; with a penalty, more."""
    for mode, sign in (("bonus", 1.0), ("penalty", -1.0)):
        logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
        before = entropy(logits)
        pipeline = Pipeline(e=Term(eq.entropy, options={"mode": mode, "from_logits": True}))
        pipeline(logits).total.backward()
        after = entropy(logits - 0.1 * logits.grad)
        assert sign * (after - before) > 0.001


def entropy(logits: Tensor) -> Tensor:
    """−Σ p log p of the softmax."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()


# Composition -------------------------------------------------------------------------------------


def test_a_registered_divergence_crashes_in_a_single_tensor_pipeline() -> None:
    """That it needs two inputs is said when the term is built, and with two it works there too."""
    with pytest.raises(eq.OptionError, match=r"callable with 1 input\(s\).*Use `inputs` to name"):
        Term(eq.kl_divergence)
    x = point()
    logits = Term(eq.kl_divergence, inputs=("fixed", "x"), options={"from_logits": True})
    result = Pipeline(l1=Term(eq.l1), kl=logits)(x, fixed=torch.zeros(2).double())
    assert_close(result.terms["kl"].value, -math.log(2) - x.log_softmax(-1).mean())


def test_unknown_options_are_dropped_in_silence() -> None:
    """They are refused, when a term is built and at the call."""
    with pytest.raises(eq.OptionError, match=r"got 'temprature'\. Did you mean 'temperature'"):
        Term(eq.entropy, options={"temprature": 2.0})
    pipeline = Pipeline(e=Term(eq.entropy))
    with pytest.raises(eq.OptionError, match=r"got 'temprature'\. Did you mean 'temperature'"):
        pipeline(point(), options={"e": {"temprature": 2.0}})
    with pytest.raises(eq.OptionError, match="got 'f'"):
        pipeline(point(), options={"f": {"temperature": 2.0}})


def test_duplicates_are_accepted() -> None:
    """A name is taken once; neither adding nor renaming covers a term up."""
    pipeline = Pipeline(a=Term(eq.l1), b=Term(eq.l2))
    with pytest.raises(eq.OptionError, match="unique, got 'a' again"):
        pipeline.with_term("a", Term(eq.l2))
    with pytest.raises(eq.OptionError, match="unique"):
        pipeline.renamed(a="b")
    assert_equal(pipeline(point()).total, 32.0)


def test_references_are_read_from_the_first_example_only() -> None:
    """A batch of references reaches the penalty whole, list or tensor, and all of it counts."""
    students = [torch.tensor([-1.0, -2.0]).requires_grad_(), torch.tensor([-3.0]).requires_grad_()]
    references = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0])]
    k1 = Term(eq.sampled_kl, inputs=("ours", "reference"), options={"estimator": "k1"})
    result = Pipeline(kl=k1)(ours=students, reference=references)
    assert_close(result.total, ((-1 + 1) + (-2 + 1) + (-3 + 1)) / 3, within=1e-6)  # float32
    result.total.backward()
    for student in students:
        assert_close(student.grad, torch.full_like(student, 1 / 3), within=1e-6)


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_custom_loss_is_evaluated_twice_and_then_not_reported(track: Any) -> None:
    """A base given as a function is called once, with its value, metrics and norm reported."""
    calls: list[Tensor] = []

    def task(x: Tensor) -> tuple[Tensor, dict[str, float]]:
        calls.append(x)
        return 2 * x.sum(), {"accuracy": 0.75}

    x = point()
    result = Pipeline(l1=Term(eq.l1))(x, base=task, track=track)
    result.total.backward()
    metrics = result.metrics()
    assert len(calls) == 1
    assert metrics["base"] == -2.0
    assert metrics["base/accuracy"] == 0.75
    data = result.to_dict()["base_loss"]
    assert data["custom"] == {"accuracy": 0.75}
    assert data["grad_norm"] == (pytest.approx(2 * math.sqrt(2)) if track else None)


# Tracking ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", LEVELS)
def test_a_divergence_reports_gradient_norm_zero_always(track: str) -> None:
    """By the logits of Q the gradient of KL(P‖Q) is softmax(q) − p."""
    p = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    q = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    term = Term(eq.kl_divergence, inputs=("p", "q"), options={"from_logits": True})
    result = Pipeline(kl=term)(p=p, q=q, track=track)
    result.total.backward()
    assert_norm(result.gradients["kl"].grad_norm, math.sqrt(2) * 0.4)


@pytest.mark.parametrize("track", LEVELS)
def test_only_the_first_input_is_tracked(track: str) -> None:
    """A term's norm is over all its inputs, and each of them has its own."""
    a, b = point(), point().detach().mul(2).requires_grad_()
    term = Term(eq.consistency, inputs=("a", "b"), options={"reduction": "sum"})
    result = Pipeline(same=term)(a=a, b=b, track=track)
    result.total.backward()
    for key in ("a", "b"):
        assert_norm(result.gradients.by_input[key]["same"].grad_norm, 10.0)
    assert_norm(result.gradients["same"].grad_norm, 10 * math.sqrt(2))


@pytest.mark.parametrize("when", ["observed", "on demand"])
def test_norms_are_computed_with_other_options_than_values(when: str) -> None:
    """Options of the term and of the call hold for both."""
    pipeline = Pipeline(l2=Term(eq.l2, options={"center": 1.0}))
    x = point()
    result = pipeline(x, options={"l2": {"scale": 3.0}}, track="norms")
    assert_equal(result.total, 3 * (4.0 + 25.0))
    if when == "observed":
        result.total.backward()
    assert_norm(result.gradients["l2"].grad_norm, 6 * math.hypot(2, 5))


@pytest.mark.parametrize("track", LEVELS)
def test_a_failed_norm_is_reported_as_zero_as_nothing_or_not_at_all(track: str) -> None:
    """It is None with a reason in the report, a flag in the metrics, a dash in the table."""
    terms = {"l2": Term(eq.l2), "rounded": Term(lambda x: x.round().detach().sum())}
    result = Pipeline(**terms)(point(), track=track)
    result.total.backward()
    report = result.gradients["rounded"]
    assert report.grad_norm is None
    assert report.grad_norm_weighted is None
    assert "detached or not differentiable" in str(report.grad_error)
    metrics = result.metrics()
    assert metrics["rounded_grad_norm_error"] == 1.0
    assert "rounded_grad_norm" not in metrics
    assert "l2_grad_norm_error" not in metrics
    assert "–" in str(result)
    assert result.to_dict()["regularizers"]["rounded"]["grad_norm"] is None


@pytest.mark.parametrize("track", LEVELS)
def test_a_gradient_of_zero_is_taken_for_a_failure(track: str) -> None:
    """At its minimum a term has a norm, and it is 0."""
    result = Pipeline(l2=Term(eq.l2), l1=Term(eq.l1))(
        torch.zeros(2, requires_grad=True), track=track
    )
    result.total.backward()
    metrics = result.metrics()
    assert metrics["l2_grad_norm"] == metrics["l1_grad_norm"] == metrics["total_grad_norm"] == 0.0
    assert not any(name.endswith("_error") for name in metrics)


def test_tracking_costs_a_pass_more_for_every_term() -> None:
    """Each penalty is computed once and differentiated once, however many are tracked."""
    counts = {"forward": 0, "backward": 0}

    def counted(x: Tensor) -> Tensor:
        counts["forward"] += 1
        y = x * 1
        y.register_hook(lambda _: counts.__setitem__("backward", counts["backward"] + 1))
        return y.sum()

    result = Pipeline(**{f"t{i}": Term(counted) for i in range(5)})(point(), track="gram")
    result.total.backward()
    result.metrics()
    assert counts == {"forward": 5, "backward": 5}
    assert_norm(result.gradients.total_norm, 5 * math.sqrt(2))


# Reporting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_logger_crashes_on_a_zero(track: Any) -> None:
    """Values, weights, norms and totals of 0 are printed and written as any other."""
    zero = torch.zeros(2, requires_grad=True)
    result = Pipeline(base=Term(eq.l2), l1=Term(eq.l1, weight=0.0))(zero, track=track)
    assert result.metrics()["total"] == 0.0
    assert json.loads(result.to_json())["loss_total"] == 0.0
    assert str(result).splitlines()[1].split()[:4] == ["base", "0", "1", "0"]
    assert "<td>0</td>" in result._repr_html_()


def test_an_error_loses_the_name_of_its_term() -> None:
    """The note says which one it was; the error is the penalty's own."""
    pipeline = Pipeline(fine=Term(eq.l1), bad=Term(no_good))
    with pytest.raises(ZeroDivisionError) as caught:
        pipeline(point())
    assert caught.value.__notes__ == ["in the term 'bad'"]


def test_a_not_finite_loss_breaks_the_report() -> None:
    """NaN in one term is seen in its place, and valid JSON comes out."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    result = Pipeline(base=Term(lambda x: F.mse_loss(x, x * math.nan)), l1=Term(eq.l1))(x)
    data = json.loads(result.to_json())
    assert data["loss_total"] == "NaN"
    assert data["regularizers"]["l1"]["value"] == 3.0
