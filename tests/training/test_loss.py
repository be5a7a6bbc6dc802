"""A wrapped loss is a loss: same call, same bits, and its evaluation can be read."""

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from equipoise.training import capture, parameters, wrap_loss

LOGITS = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
LABELS = torch.tensor([0, 2, 1, 1])
PIPELINE = Pipeline(
    calm=Term(
        eq.entropy, inputs="prediction", weight=0.1, options={"from_logits": True, "mode": "bonus"}
    ),
    small=Term(eq.l2, inputs="prediction", weight=0.01),
)


def by_hand(loss_fn: Callable[[Tensor, Tensor], Tensor], logits: Tensor) -> Tensor:
    """The same loss without a pipeline."""
    entropy = eq.entropy(logits, from_logits=True, mode="bonus")
    return loss_fn(logits, LABELS) + (0.1 * entropy + 0.01 * eq.l2(logits))


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["f", "module"])
def test_value_and_gradient_are_those_of_the_sum(loss_fn: Any) -> None:
    """A function and a module, wrapped: the hand-written loss and its gradient."""
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    criterion = wrap_loss(loss_fn, PIPELINE)
    loss, expected = criterion(ours, LABELS), by_hand(loss_fn, theirs)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    # Aliases add the same gradients in another order.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


def test_the_last_evaluation_is_read() -> None:
    """`last` is the evaluation of the last call, its gradients included."""
    logits = LOGITS.clone().requires_grad_()
    criterion = wrap_loss(F.cross_entropy, PIPELINE, track="gram")
    assert criterion.last is None
    criterion(logits, LABELS).backward()
    result = criterion.last
    assert result is not None
    (alone,) = torch.autograd.grad(F.cross_entropy(logits, LABELS), logits)
    torch.testing.assert_close(
        result.gradients.weighted["base"], alone.norm().double(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        result.gradients.total_norm,
        logits.grad.norm().double(),
        rtol=1e-6,
        atol=0,  # type: ignore[union-attr]
    )
    assert set(result.gradients.shares) == {"base", "calm", "small"}


def test_eval_mode_is_the_loss_alone() -> None:
    """No penalty gets into a validation loss, and the terms can still be read."""
    criterion = wrap_loss(F.cross_entropy, PIPELINE).eval()
    with torch.no_grad():
        loss = criterion(LOGITS, LABELS)
    assert torch.equal(loss, F.cross_entropy(LOGITS, LABELS))
    assert criterion.last is not None
    assert criterion.last.metrics()["small"] == pytest.approx(float(eq.l2(LOGITS)))
    assert criterion.train()(LOGITS, LABELS) != loss


def test_without_gradients_nothing_is_tracked() -> None:
    """Under `no_grad` a tracked criterion works and reports values."""
    criterion = wrap_loss(F.cross_entropy, PIPELINE, track=True)
    with torch.no_grad():
        loss = criterion(LOGITS.clone().requires_grad_(), LABELS)
    assert torch.equal(loss, by_hand(F.cross_entropy, LOGITS))
    assert criterion.last is not None
    assert "base_grad_norm" not in criterion.last.metrics()


def test_a_nameless_term_reads_the_prediction() -> None:
    """The simplest pipeline needs no names."""
    criterion = wrap_loss(F.cross_entropy, Pipeline(l2=Term(eq.l2, weight=0.5)))
    assert torch.equal(
        criterion(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS) + 0.5 * eq.l2(LOGITS)
    )


def test_further_inputs() -> None:
    """Captures, mappings and functions give terms what is neither prediction nor target."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    activity = Pipeline(activity=Term(eq.l1, inputs="hidden", weight=0.1))
    decay = Pipeline(decay=Term(eq.l2, inputs="weights", weight=0.1))
    weights = parameters(model)
    seen = capture(model, hidden="0")
    with_hidden = wrap_loss(F.cross_entropy, activity, inputs=seen)
    with_weights = wrap_loss(F.cross_entropy, decay, inputs={"weights": weights})
    out = model(LOGITS)
    base, penalty = F.cross_entropy(out, LABELS), 0.1 * eq.l1(model[0](LOGITS))
    model(LOGITS)
    assert torch.equal(with_hidden(out, LABELS), base + penalty)
    assert torch.equal(with_weights(out, LABELS), base + 0.1 * eq.l2(weights))
    terms = Pipeline(**activity.terms, **decay.terms)
    model(LOGITS)
    both = wrap_loss(F.cross_entropy, terms, inputs=lambda: {**seen.take(), "weights": weights})
    assert both(out, LABELS) == base + (penalty + 0.1 * eq.l2(weights))


def test_captures_are_handed_over() -> None:
    """After the loss was computed the handle holds no activation any more."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    seen = capture(model, hidden="0")
    criterion = wrap_loss(F.cross_entropy, Pipeline(a=Term(eq.l1, inputs="hidden")), inputs=seen)
    out = model(LOGITS)
    alive = weakref.ref(seen["hidden"])
    criterion(out, LABELS).backward()
    criterion.take_last()
    del out
    gc.collect()
    assert alive() is None


def test_schedules_get_the_step() -> None:
    """`criterion.step` is what a schedule is called with."""
    pipeline = Pipeline(l2=Term(eq.l2, weight=schedules.linear(0.0, 1.0, steps=3)))
    criterion = wrap_loss(F.cross_entropy, pipeline)
    base = F.cross_entropy(LOGITS, LABELS)
    for step, weight in enumerate((0.0, 0.5, 1.0)):
        criterion.step = step
        torch.testing.assert_close(criterion(LOGITS, LABELS), base + weight * eq.l2(LOGITS))


def test_the_pipeline_may_be_replaced() -> None:
    """Between calls another pipeline takes over, as a balancer gives it."""
    criterion = wrap_loss(F.cross_entropy, PIPELINE)
    criterion.pipeline = PIPELINE.reweighted(calm=0.0, small=0.0)
    assert torch.equal(criterion(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS))
    assert str(criterion) == "WrappedLoss(0·calm(prediction) + 0·small(prediction))"


def test_a_module_is_a_part() -> None:
    """The wrapped loss's buffers are found, moved and saved."""
    criterion = wrap_loss(nn.CrossEntropyLoss(weight=torch.ones(3)), PIPELINE)
    assert isinstance(criterion, nn.Module)
    assert list(criterion.state_dict()) == ["loss_fn.weight"]
    assert criterion.to(torch.float64).state_dict()["loss_fn.weight"].dtype == torch.float64


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_leave_the_last_evaluation_out(copied: Any) -> None:
    """A graph cannot be copied; the criterion can, also after a call."""
    criterion = wrap_loss(F.cross_entropy, PIPELINE)
    loss = criterion(LOGITS.clone().requires_grad_(), LABELS)
    twin = copied(criterion)
    assert twin.last is None
    assert criterion.last is not None
    assert torch.equal(twin(LOGITS, LABELS), loss)


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "its own base": (
        lambda: wrap_loss(F.mse_loss, Pipeline(base=Term(eq.l2))),
        eq.InputError,
        "the wrapped loss is the base, got a pipeline that has one of its own. Use `pipeline.with",
    ),
    "no pipeline": (
        lambda: wrap_loss(F.mse_loss, Term(eq.l2)),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`pipeline` must be a Pipeline, got Term. Use",
    ),
    "a class": (
        lambda: wrap_loss(nn.MSELoss, PIPELINE),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`loss_fn` must be a function of prediction and target, got <class",
    ),
    "inputs": (
        lambda: wrap_loss(F.mse_loss, PIPELINE, inputs=[LOGITS]),  # type: ignore[arg-type]
        eq.InputTypeError,
        "a function that returns a mapping, got list. Use `{'weights': weights}`",
    ),
    "taken name": (
        lambda: wrap_loss(F.mse_loss, PIPELINE, inputs={"target": LOGITS})(LOGITS, LOGITS),
        eq.InputError,
        "`inputs` must not hold 'target', which is the criterion's own to give, got it again. Use",
    ),
    "a step": (
        lambda: wrap_loss(F.mse_loss, PIPELINE, inputs={"step": 3})(LOGITS, LOGITS),
        eq.InputError,
        "hold 'step', which is the criterion's own to give, got it again. Use `criterion.step`.",
    ),
    "nothing to take": (
        lambda: wrap_loss(F.mse_loss, PIPELINE).take_last(),
        eq.InputError,
        "must have been called to have an evaluation, got no call or one that was taken. Use",
    ),
    "no scalar": (
        lambda: wrap_loss(nn.MSELoss(reduction="none"), PIPELINE)(LOGITS, LOGITS),
        eq.InputError,
        "the term 'base' must return a scalar, got shape (4, 3). Use",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong use is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()
