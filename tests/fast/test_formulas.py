"""Terms whose gradients have formulas are not differentiated, and give the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from equipoise.kernels import _formulas
from tests.fast.beside import assert_as_plain, hands_over, plainly, serves

LOGITS = {"from_logits": True}
TERMS = {
    "base": Term(F.cross_entropy, inputs=("x", "labels")),
    "l1": Term(eq.l1, inputs="x", weight=1e-2),
    "length": Term(eq.output_magnitude, inputs="x", weight=0.3, options={"norm": "l2"}),
    "elastic": Term(eq.elastic_net, inputs="x", weight=-0.1, options={"reduction": "mean"}),
    "entropy": Term(eq.entropy, inputs="x", weight=0.5, options={**LOGITS, "mode": "bonus"}),
    "kl": Term(eq.kl_divergence, inputs=("y", "x"), weight=0.7, options=LOGITS),
    "js": Term(eq.js_divergence, inputs=("x", "y"), weight=0.2, options={**LOGITS, "beta": 0.3}),
}
Log = pytest.LogCaptureFixture


def draw(dtype: torch.dtype = torch.float64, rows: int = 4, width: int = 11) -> dict[str, Any]:
    """Logits that move, others that do not, and labels of which one does not count."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(width, (rows,), generator=generator)
    labels[1] = -100
    x, y = torch.randn(2, rows, width, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x.requires_grad_(), "y": y, "labels": labels}


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the formulas have been asked."""
    count = [0]
    evaluate = _formulas.evaluate

    def counted(*given: Any, **more: Any) -> Any:
        count[0] += 1
        return evaluate(*given, **more)

    monkeypatch.setattr("equipoise.fast._formulas.evaluate", counted)
    return count


@pytest.mark.parametrize("level", [False, "norms", "gram"])
def test_every_figure_is_that_of_the_definitions(level: Any, caplog: Log, uses: list[int]) -> None:
    """Total, parts, gradient, norms and inner products, in one pass that hands nothing over."""
    with serves(caplog):
        assert_as_plain(Pipeline(**TERMS).compiled(), draw, track=level, within=1e-11)
    assert uses == [1]


def test_generated_code_agrees(generated: None, uses: list[int]) -> None:  # noqa: ARG001
    """The default backend gives the same with its own machine code."""
    assert_as_plain(Pipeline(**TERMS).compiled(), draw, track="gram", within=1e-11)
    single = Pipeline(**TERMS).compiled()
    assert_as_plain(single, lambda: draw(torch.float32), track="norms", within=2e-5)
    assert uses == [2]


@pytest.mark.parametrize("name", ["kl_divergence", "js_divergence"])
def test_distributions_that_hardly_differ(generated: None, name: str) -> None:  # noqa: ARG001
    """Compiled, alone and in a pipeline, nothing cancels that does not cancel without."""
    penalty = getattr(eq, name)
    inputs = draw(torch.float32, rows=4, width=500)
    x = inputs["x"].detach()
    y = x + 1e-4 * inputs["y"]
    exact = penalty(y.double(), x.double(), from_logits=True).item()
    alone = torch.compile(lambda p, q: penalty(p, q, from_logits=True), fullgraph=True)
    assert alone(y, x).item() == pytest.approx(exact, rel=2e-3)
    pipeline = Pipeline(term=Term(penalty, inputs=("y", "x"), options=LOGITS)).compiled()
    assert pipeline(y=y, x=x.requires_grad_()).total.item() == pytest.approx(exact, rel=2e-3)


def test_weights_options_and_shapes_compile_nothing_new(
    counted: list[int], uses: list[int]
) -> None:
    """Schedules, weights on the device, temperatures, denominators: one function, made general."""
    weight = torch.tensor(0.1)
    entropy = Term(eq.entropy, inputs="x", weight=schedules.linear(0.0, 1.0, 10), options=LOGITS)
    pipeline = Pipeline(entropy=entropy, l2=Term(eq.l2, inputs="x", weight=weight)).compiled()
    for step in range(10):
        weight.fill_(step)
        options = {"entropy": {"temperature": 1.5 + step, "denominator": 2.0 + step}}
        x = draw(torch.float32, rows=3 + step)["x"]
        found = pipeline(x=x, step=step, options=options).total
        same = plainly(pipeline)(x=x, step=step, options=options).total
        torch.testing.assert_close(found, same)
    assert uses == [10]
    assert counted == [2]


@pytest.mark.parametrize("label", [11, -1])
def test_a_label_that_does_not_exist(label: int, caplog: Log) -> None:
    """Compiled code would end the process; the plain definition raises torch's own error."""
    inputs = draw()
    inputs["labels"][2] = label
    with hands_over(caplog, "a label of 'base'"), pytest.raises(IndexError, match="out of bounds"):
        Pipeline(**TERMS).compiled()(**inputs)


LABELLED: dict[str, Term] = {
    "module": Term(nn.CrossEntropyLoss(ignore_index=3), inputs=("x", "labels")),
    "likelihood": Term(nn.NLLLoss(ignore_index=3), inputs=("x", "labels")),
    "function": Term(F.nll_loss, inputs=("x", "labels"), options={"ignore_index": 3}),
    "option": Term(F.cross_entropy, inputs="x", options={"target": torch.tensor([1, 12, 3, 3])}),
}


@pytest.mark.parametrize("term", LABELLED.values(), ids=LABELLED)
def test_labels_of_other_spellings(term: Term, caplog: Log) -> None:
    """They are looked at too, and what is ignored need not exist."""
    inputs = draw()
    inputs["labels"] = torch.tensor([1, 12, 3, 3])
    pipeline = Pipeline(loss=term, l1=TERMS["l1"]).compiled()
    given = {key: inputs[key] for key in {"x", *(term.inputs or ())}}
    with hands_over(caplog, "a label of 'loss'"), pytest.raises(IndexError, match="out of bounds"):
        pipeline(**given)
    if "labels" in given:
        given["labels"][1] = 3
        assert_as_plain(pipeline, lambda: {**given, "x": draw()["x"]}, track="norms")


MISTAKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a number in quotes": (eq.l1, {"scale": "2"}),
    "a tensor for a number": (eq.entropy, {**LOGITS, "temperature": torch.tensor(2.0)}),
    "no number": (eq.entropy, {"temperature": None}),
    "out of range": (eq.entropy, {**LOGITS, "denominator": -1.0}),
    "no flag": (eq.entropy, {**LOGITS, "normalize": "no"}),
    "unused here": (eq.entropy, {**LOGITS, "chunk": 0}),
    "not finite": (eq.elastic_net, {"scale": torch.inf}),
}


@pytest.mark.parametrize(("penalty", "options"), MISTAKES.values(), ids=MISTAKES)
def test_what_the_definition_refuses(penalty: Any, options: dict[str, Any]) -> None:
    """It is refused in the same words, beside terms that have formulas."""
    pipeline = Pipeline(rows=TERMS["js"], term=Term(penalty, inputs="x", options=options))
    inputs = draw()
    del inputs["labels"]
    with pytest.raises(eq.OptionError) as plain:
        pipeline(**inputs)
    with pytest.raises(eq.OptionError) as caught:
        pipeline.compiled()(**inputs)
    assert str(caught.value) == str(plain.value)
    assert caught.value.__notes__ == ["in the term 'term'"]


def test_one_term_without_a_formula(caplog: Log, uses: list[int]) -> None:
    """All of the pipeline is differentiated, in one compiled function as before."""
    cubes = Term(lambda x: x.pow(3).mean(), inputs="x")
    with serves(caplog):
        assert_as_plain(Pipeline(**TERMS, cubes=cubes).compiled(), draw, track="gram", within=1e-11)
    assert uses == [0]


def test_without_the_folder_of_kernels(monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    """The library does the same, slower."""
    for module in [name for name in sys.modules if name.startswith("equipoise.kernels")]:
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("_formulas", "_fusable"):
        monkeypatch.delitem(sys.modules, f"equipoise.{module}", raising=False)
    with serves(caplog):
        assert_as_plain(Pipeline(**TERMS).compiled(), draw, track="norms", within=1e-11)
