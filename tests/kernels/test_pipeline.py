"""A pipeline whose terms a fast path takes, beside the same pipeline without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import Evaluation, Pipeline, Term
from equipoise.fast import _one_pass, _take
from tests.fast.beside import hands_over, serves
from tests.kernels.terms import BASE, LOGITS, SIZES, entropy, js, kl

# The interpreter computes with NumPy, which warns where IEEE arithmetic goes on.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TERMS = {**BASE, "l1": SIZES["l1"], "rms": SIZES["rms"], **entropy(), **kl(), **js(beta=0.3)}
Log = pytest.LogCaptureFixture
Inputs = dict[str, Any]


@pytest.fixture
def fast(way: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Evaluation]:
    """Evaluate by the path under test."""
    if way == "kernels":
        monkeypatch.setattr(_take, "KERNELS_ON", {"cpu"})
        return lambda terms, inputs, **how: Pipeline(**terms)(**inputs, **how)
    monkeypatch.setattr(_one_pass.torch, "compile", lambda function, **_: function)
    return lambda terms, inputs, **how: Pipeline(**terms).compiled()(**inputs, **how)


def plain(terms: dict[str, Term], inputs: Inputs, **how: Any) -> Evaluation:
    """By the definitions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_take, "KERNELS_ON", set())
        return Pipeline(**terms)(**inputs, **how)


def draw(terms: dict[str, Term]) -> Inputs:
    """What the terms read, the same every time; x moves, and a list beside it."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(30, (5,), generator=generator)
    labels[1] = -100
    x, y = torch.randn(2, 5, 30, generator=generator)
    z = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    every = {"x": x.requires_grad_(), "y": y, "labels": labels, "z": z}
    return {k: v for k, v in every.items() if any(k in (t.inputs or ()) for t in terms.values())}


def trained(evaluate: Callable[..., Evaluation], terms: dict[str, Term], **how: Any) -> Any:
    """Figures and gradients of a step, with an upstream scale."""
    inputs = draw(terms)
    result = evaluate(terms, inputs, **how)
    (3 * result.total).backward()
    return result.metrics(), [leaf.grad for leaf in (inputs["x"], *inputs.get("z", []))]


BESIDE: dict[str, dict[str, Term]] = {
    "nothing": {},
    "another input": {"z": Term(eq.l2, inputs="z", weight=0.1)},
    "a term of one's own": {"cube": Term(lambda x: x.pow(3).mean(), inputs="x", weight=0.3)},
    "another temperature": {
        "warm": Term(eq.entropy, inputs="x", options={**LOGITS, "temperature": 2.0})
    },
    "both inputs": {
        "both": Term(lambda x, z: x.sum() * (z[0].sum() + z[1].sum()), inputs=("x", "z"))
    },
    "weight 0": {"off": Term(eq.l2, inputs="x", weight=0.0)},
    "no gradient": {"silent": Term(eq.l2, inputs="x", differentiable=False)},
    "an input that stays": {"still": Term(eq.l2, inputs="y", weight=0.3)},
    "a weight on the device": {"soft": Term(eq.l2, inputs="x", weight=torch.tensor(0.2))},
}


@pytest.mark.parametrize("level", [False, "norms", "gram"])
@pytest.mark.parametrize("beside", BESIDE)
def test_every_figure(beside: str, level: Any, fast: Callable[..., Evaluation]) -> None:
    """Values, norms, the total and the gradients, whichever terms are left to the definitions."""
    terms = {**TERMS, **BESIDE[beside]}
    figures, slopes = trained(fast, terms, track=level)
    wanted, expected = trained(plain, terms, track=level)
    assert figures == pytest.approx(wanted, rel=2e-5, abs=1e-7)
    torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beside", ["no gradient", "an input that stays"])
def test_a_report_is_there_before_the_backward_pass(
    beside: str, fast: Callable[..., Evaluation], caplog: Log
) -> None:
    """It came with the values; a term that has no gradient does not keep anybody waiting."""
    terms = {**TERMS, **BESIDE[beside]}
    with serves(caplog):
        found = fast(terms, draw(terms), track="norms").gradients
    wanted = plain(terms, draw(terms), track="norms").gradients
    assert found.errors == wanted.errors
    torch.testing.assert_close(found.squares, wanted.squares, rtol=2e-5, atol=1e-9)


def test_norms_of_some_terms_are_known_and_of_others_observed(
    way: str, fast: Callable[..., Evaluation], caplog: Log
) -> None:
    """Only inner products need all gradients at one place."""
    terms = {**TERMS, **BESIDE["a term of one's own"]}
    with serves(caplog):
        result = fast(terms, draw(terms), track="norms")
    assert result._recorder.taken == (TERMS.keys() if way == "kernels" else terms.keys())
    if way == "kernels":
        with hands_over(caplog, "inner products need all gradients"):
            assert not fast(terms, draw(terms), track="gram")._recorder.taken


ASKED: dict[str, tuple[str, Callable[[Evaluation, Tensor], Any]]] = {
    "a second derivative": ("differentiated again", lambda r, x: again(r.total, x)),
    "of a part": (
        "a part of the total",
        lambda r, x: slope(r.penalty + 2 * r.terms["kl"].value, x),
    ),
    "of the base": ("a part of the total", lambda r, x: slope(r.base, x)),
    "twice": ("given away", lambda r, x: [slope(5 * r.total, x), slope(5 * r.total, x)]),
    "twice in place": ("given away", lambda r, x: [slope(r.total, x).mul_(2), slope(r.total, x)]),
}


def slope(value: Any, x: Tensor) -> Tensor:
    """A gradient; the graph stays."""
    return torch.autograd.grad(value, x, retain_graph=True)[0]


def again(value: Tensor, x: Tensor) -> Tensor:
    """The gradient of a function of the gradient."""
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    return slope(first.pow(3).sum(), x)


@pytest.mark.parametrize("asked", ASKED)
def test_what_else_is_asked_of_the_graph(
    asked: str, fast: Callable[..., Evaluation], caplog: Log
) -> None:
    """The definitions answer, and the log says why."""
    why, question = ASKED[asked]
    inputs, same = draw(TERMS), draw(TERMS)
    result = fast(TERMS, inputs)
    assert result._recorder.taken == TERMS.keys()
    with hands_over(caplog, why):
        found = question(result, inputs["x"])
    wanted = question(plain(TERMS, same), same["x"])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


GIVEN: dict[str, Callable[[Inputs], Inputs]] = {
    "a teacher that learns": lambda i: {**i, "y": i["y"].requires_grad_()},
    "a teacher that is the student": lambda i: {**i, "y": i["x"]},
    "float16": lambda i: {**i, "x": i["x"].detach().half().requires_grad_()},
    "a column expanded": lambda i: {**i, "y": i["y"][:, :1].expand(5, 30)},
    "columns first": lambda i: {**i, "x": i["x"].detach().t().clone().requires_grad_().t()},
}


@pytest.mark.parametrize("given", GIVEN)
def test_inputs_of_other_kinds(given: str, fast: Callable[..., Evaluation]) -> None:
    """Taken or handed over: the same."""
    slopes, figures = [], []
    for evaluate in (fast, plain):
        inputs = GIVEN[given](draw(TERMS))
        moving = [x for x in (inputs["x"], inputs["y"]) if x.requires_grad]
        result = evaluate(TERMS, inputs, track="norms")
        slopes.append(torch.autograd.grad(result.total, moving))
        figures.append(result.metrics())
    assert figures[0] == pytest.approx(figures[1], rel=2e-5, abs=1e-7)
    half = given == "float16"
    torch.testing.assert_close(*slopes, rtol=1e-2 if half else 1e-5, atol=1e-5 if half else 1e-7)


def test_without_gradients(fast: Callable[..., Evaluation]) -> None:
    """Where nothing shall be differentiated nothing is."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = fast(TERMS, draw(TERMS))
            assert not result.total.requires_grad
            assert not result._recorder.taken
            torch.testing.assert_close(result.total, plain(TERMS, draw(TERMS)).total)


def test_functional_transforms(fast: Callable[..., Evaluation], caplog: Log) -> None:
    """Under `torch.func` the definitions answer."""
    inputs = draw(TERMS)
    x = inputs["x"].detach()
    with hands_over(caplog, "functional transform"):
        found = torch.func.grad(lambda x: fast(TERMS, {**inputs, "x": x}).total)(x)
    torch.testing.assert_close(found, slope(plain(TERMS, inputs).total, inputs["x"]))
