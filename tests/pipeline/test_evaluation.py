"""What an evaluation says: flat metrics, nested data, JSON, a table, in one transfer each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term
from tests.contracts.test_device import NoWaiting
from tests.penalties.assertions import assert_equal
from tests.pipeline.networks import evaluated

Read = Callable[[eq.Evaluation], Any]
READERS: dict[str, Read] = {
    "metrics": lambda result: result.metrics(),
    "to_dict": lambda result: result.to_dict(),
    "to_json": lambda result: result.to_json(),
    "print": str,
    "html": lambda result: result._repr_html_(),
}


POINT = torch.tensor([3.0, -4.0], dtype=torch.float64)


def point() -> Tensor:
    """(3, −4): Σ|x| = 7, Σx² = 25, ‖∇Σ|x|‖ = √2, ‖∇Σx²‖ = 10."""
    return POINT.clone().requires_grad_()


def custom(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Σ|x|, with a tensor, a number and a flag to tell."""
    return x.abs().sum(), {"largest": x.abs().max(), "entries": x.numel(), "negative": x.min() < 0}


def squares(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Σx², with the number of entries."""
    return x.square().sum(), {"seen": 2}


PIPELINE = Pipeline(
    base=Term(squares), l1=Term(custom, weight=0.5), off=Term(lambda x: x.detach().sum())
)
PLAIN = {
    "total": 25 + 3.5 - 1,
    "base": 25.0,
    "penalty": 2.5,
    "l1": 7.0,
    "l1_weighted": 3.5,
    "off": -1.0,
    "off_weighted": -1.0,
    "base/seen": 2.0,
    "l1/largest": 4.0,
    "l1/entries": 2.0,
    "l1/negative": 1.0,
}
TRACKED = {
    "base_grad_norm": 10.0,
    "l1_grad_norm": math.sqrt(2),
    "l1_grad_norm_weighted": math.sqrt(0.5),
    "off_grad_norm_error": 1.0,
    "total_grad_norm": math.hypot(6.5, 8.5),
}


def result_of(track: Any, *, backward: bool = False) -> eq.Evaluation:
    """The pipeline above at the point above."""
    result = PIPELINE(point(), track=track)
    if backward:
        result.total.backward()
    return result


def close(figures: dict[str, Any]) -> object:
    """Equal but for the roundings of a root."""
    return pytest.approx(figures, rel=1e-15)


# Metrics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_metrics_without_tracking(backward: bool) -> None:
    """Total, base, penalty, each term's value and contribution, custom metrics: no more."""
    assert result_of(False, backward=backward).metrics() == PLAIN


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("track", [True, "norms", "gram"])
def test_metrics_with_tracking(track: Any, backward: bool) -> None:
    """Besides these each norm by name, and a flag where there is none; the base has no weight."""
    assert result_of(track, backward=backward).metrics() == close(PLAIN | TRACKED)


def test_metrics_without_a_base() -> None:
    """No base, no figure of one."""
    metrics = Pipeline(l2=Term(eq.l2, weight=2.0))(point(), track="norms").metrics()
    assert metrics == {
        "total": 50.0,
        "penalty": 50.0,
        "l2": 25.0,
        "l2_weighted": 50.0,
        "l2_grad_norm": 10.0,
        "l2_grad_norm_weighted": 20.0,
        "total_grad_norm": 20.0,
    }


@pytest.mark.parametrize("weight", [-2.0, torch.tensor(-2.0)], ids=["number", "tensor"])
def test_a_norm_is_not_negative(weight: Any) -> None:
    """A negative weight scales the norm by its size."""
    metrics = Pipeline(l2=Term(eq.l2, weight=weight))(point(), track="norms").metrics()
    assert metrics["l2_weighted"] == -50.0
    assert metrics["l2_grad_norm"] == 10.0
    assert metrics["l2_grad_norm_weighted"] == 20.0


def test_a_base_that_has_no_gradient() -> None:
    """Its flag stands in place of its norm."""
    metrics = Pipeline(base=Term(lambda x: x.detach().sum()), l2=Term(eq.l2))(
        point(), track=True
    ).metrics()
    assert metrics["base_grad_norm_error"] == 1.0
    assert "base_grad_norm" not in metrics
    assert metrics["total_grad_norm"] == 10.0


@pytest.mark.parametrize("track", [False, "gram"])
def test_metrics_are_python_numbers(track: Any) -> None:
    """Every logger takes them: strings to floats."""
    metrics = result_of(track).metrics()
    assert {type(name) for name in metrics} == {str}
    assert {type(figure) for figure in metrics.values()} == {float}


def test_metrics_of_different_types_come_together() -> None:
    """Half, single, double, integers and flags are one transfer, and shape (1,) is a number."""

    def penalty(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.sum().bfloat16(), {
            "half": torch.tensor(0.5, dtype=torch.float16),
            "double": torch.tensor(0.1, dtype=torch.float64),
            "count": torch.tensor(16_777_217),
            "flag": torch.tensor(True),
            "one": torch.tensor([2.5]),
            "learning": x.max(),
        }

    metrics = Pipeline(p=Term(penalty))(point()).metrics()
    assert {name: metrics[f"p/{name}"] for name in ("half", "double", "count", "flag")} == {
        "half": 0.5,
        "double": 0.1,
        "count": 16_777_217.0,
        "flag": 1.0,
    }
    assert (metrics["p/one"], metrics["p/learning"]) == (2.5, 3.0)


# One transfer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 12])
@pytest.mark.parametrize("track", [False, "norms", "gram"])
@pytest.mark.parametrize("name", READERS)
def test_reading_is_one_transfer(
    name: str, track: Any, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many terms there are, one `tolist` fetches everything and nothing else waits."""
    pipeline = Pipeline(
        base=Term(squares),
        **{f"t{i}": Term(custom, weight=torch.tensor(0.1)) for i in range(terms)},
    )
    result = pipeline(point(), track=track)
    result.total.backward()
    fetched: list[Tensor] = []
    true = Tensor.tolist

    def counting(self: Tensor) -> Any:
        fetched.append(self)
        return true(self)

    monkeypatch.setattr(Tensor, "tolist", counting)
    monkeypatch.setattr(Tensor, "numpy", None)
    with NoWaiting():
        READERS[name](result)
    assert len(fetched) == 1


@pytest.mark.parametrize("track", [False, "norms", "gram"])
def test_an_evaluation_waits_for_nothing_before_it_is_read(
    track: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluating and differentiating fetch nothing at all."""
    monkeypatch.setattr(Tensor, "tolist", None)
    monkeypatch.setattr(Tensor, "numpy", None)
    with NoWaiting():
        result = result_of(track, backward=True)
        if track:
            _ = result.gradients.norms


# Nested data -------------------------------------------------------------------------------------


def nested(track: Any) -> dict[str, Any]:
    """The data expected of the pipeline above."""

    def figure(name: str) -> float | None:
        return TRACKED.get(name) if track else None

    return {
        "loss_total": 27.5,
        "base_loss": {
            "value": 25.0,
            "grad_norm": figure("base_grad_norm"),
            "custom": {"seen": 2.0},
        },
        "regularizers": {
            "l1": {
                "value": 7.0,
                "weight": 0.5,
                "contribution": 3.5,
                "grad_norm": figure("l1_grad_norm"),
                "grad_norm_weighted": figure("l1_grad_norm_weighted"),
                "custom": {"largest": 4.0, "entries": 2.0, "negative": 1.0},
            },
            "off": {
                "value": -1.0,
                "weight": 1.0,
                "contribution": -1.0,
                "grad_norm": None,
                "grad_norm_weighted": None,
                "custom": {},
            },
        },
        "regularizer_total": 2.5,
        "total_grad_norm": figure("total_grad_norm"),
    }


def rounded(data: Any) -> Any:
    """Numbers to twelve digits, so that nested data can be compared."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return float(f"{data:.12g}") if isinstance(data, float) else data


@pytest.mark.parametrize("track", [False, "norms", "gram"])
def test_nested_data(track: Any) -> None:
    """Every key of the schema and no other, None where there is no figure."""
    assert rounded(result_of(track).to_dict()) == rounded(nested(track))


@pytest.mark.parametrize("track", [False, "norms"])
def test_json_is_the_nested_data(track: Any) -> None:
    """What is read back is what `to_dict` gives; `indent` only changes the layout."""
    result = result_of(track)
    assert json.loads(result.to_json()) == result.to_dict()
    assert json.loads(result.to_json(indent=2)) == result.to_dict()
    assert "\n" not in result.to_json()
    assert '\n  "loss_total": 27.5' in result.to_json(indent=2)


def test_no_base_is_null() -> None:
    """Without a base its place is empty."""
    assert Pipeline(l1=Term(eq.l1))(point()).to_dict()["base_loss"] is None


def strict(text: str) -> Any:
    """Read JSON, and refuse what only Python's reader accepts."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_keys_of_metrics_become_text() -> None:
    """JSON has no others; flat and nested figures call them the same."""
    result = Pipeline(a=Term(lambda x: (x.sum(), {("f", 1): 2.0, 3: 4.0})))(torch.ones(2))
    assert json.loads(result.to_json())["regularizers"]["a"]["custom"] == {
        "('f', 1)": 2.0,
        "3": 4.0,
    }
    assert result.metrics()["a/('f', 1)"] == 2.0


def test_json_is_valid_whatever_happened() -> None:
    """NaN and infinities become strings, at every depth; `to_dict` keeps them as numbers."""

    def penalty(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.sum() * math.inf, {"nan": math.nan, "low": torch.tensor(-math.inf)}

    result = Pipeline(base=Term(lambda x: x.sum() * math.nan), bad=Term(penalty, weight=-1.0))(
        torch.ones(2, requires_grad=True), track="norms"
    )
    data = strict(result.to_json())
    assert data["loss_total"] == "NaN"
    assert data["base_loss"]["value"] == "NaN"
    assert data["base_loss"]["grad_norm"] == "NaN"
    bad = data["regularizers"]["bad"]
    assert (bad["value"], bad["contribution"]) == ("Infinity", "-Infinity")
    assert bad["custom"] == {"nan": "NaN", "low": "-Infinity"}
    assert bad["grad_norm"] == "Infinity"
    assert math.isnan(result.to_dict()["loss_total"])
    assert result.to_dict()["regularizers"]["bad"]["value"] == math.inf


# Tables ------------------------------------------------------------------------------------------

UNTRACKED_TABLE = """\
term     value    weight    contribution
base        25         1              25
l1           7       0.5             3.5
off         -1         1              -1
total                               27.5"""

NORMS_TABLE = """\
term     value    weight    contribution    gradient
base        25         1              25          10
l1           7       0.5             3.5      0.7071
off         -1         1              -1           –
total                               27.5        10.7"""


def cells(table: str) -> list[list[str]]:
    """A table as its cells: widths and paddings apart."""
    return [line.split() for line in table.splitlines()]


def test_print_without_tracking() -> None:
    """A row a term, the base first, the total last."""
    assert str(result_of(False)) == UNTRACKED_TABLE


@pytest.mark.parametrize("backward", [False, True])
def test_print_with_norms(backward: bool) -> None:
    """One column more, with a dash where there is no gradient."""
    assert str(result_of("norms", backward=backward)) == NORMS_TABLE
    assert repr(result_of("norms")) == NORMS_TABLE


def test_print_with_inner_products() -> None:
    """And two more: the share in the step, and the cosine to the base."""
    x = point()
    gradients = {"base": 2 * x, "l1": 0.5 * x.sign()}
    total = sum(gradients.values())
    shares = {n: (g * total).sum() / total.square().sum() for n, g in gradients.items()}
    cosine = torch.nn.functional.cosine_similarity(*gradients.values(), dim=0)
    rows = cells(str(result_of("gram")))
    assert rows[0] == [*cells(NORMS_TABLE)[0], "share", "cosine", "to", "base"]
    assert rows[1] == [*cells(NORMS_TABLE)[1], f"{shares['base']:.4g}", "1"]
    assert rows[2] == [*cells(NORMS_TABLE)[2], f"{shares['l1']:.4g}", f"{cosine:.4g}"]
    assert rows[3] == [*cells(NORMS_TABLE)[3], "–", "–"]
    assert rows[4] == cells(NORMS_TABLE)[4]


def test_print_without_base_has_no_cosine_to_it() -> None:
    """Shares alone, then."""
    rows = cells(str(Pipeline(l2=Term(eq.l2))(point(), track="gram")))
    assert rows[0] == ["term", "value", "weight", "contribution", "gradient", "share"]
    assert rows[1] == ["l2", "25", "1", "25", "10", "1"]


def test_print_of_a_base_without_gradient() -> None:
    """It has a dash as any other term."""
    result = Pipeline(base=Term(lambda x: x.detach().sum()), l2=Term(eq.l2))(point(), track=True)
    assert cells(str(result))[1] == ["base", "-1", "1", "-1", "–"]


def test_names_like_columns_do_not_mix_with_them() -> None:
    """A term called `a_share` has its own value in the table, whatever the share of `a`."""
    result = Pipeline(a=Term(eq.l1), a_share=Term(eq.l2), a_cosine=Term(eq.l2))(
        point(), track="gram"
    )
    assert [row[1] for row in cells(str(result))[1:4]] == ["7", "25", "25"]


def test_notebooks_get_the_same_table() -> None:
    """Header and cells are those of the printed one."""
    html = result_of("norms")._repr_html_()
    assert html.startswith("<table><thead><tr><th>term</th><th>value</th>")
    assert "<tr><td>l1</td><td>7</td><td>0.5</td><td>3.5</td><td>0.7071</td></tr>" in html
    assert html.endswith("<td>27.5</td><td>10.7</td></tr></tbody></table>")
    assert html.count("<tr>") == len(NORMS_TABLE.splitlines())


def test_html_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever gets into a cell is text: no markup of it is left."""
    hostile = '<script>alert("1")</script>&'
    monkeypatch.setattr("equipoise._evaluation.number", lambda _: hostile)
    html = result_of(False)._repr_html_()
    assert "<script" not in html
    assert "<td>&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;</td>" in html


# In the graph ------------------------------------------------------------------------------------


def test_values_are_in_the_graph() -> None:
    """Total, penalty, base, and each value and contribution can be differentiated."""
    x = point()
    result = Pipeline(base=Term(eq.l2), l1=Term(eq.l1, weight=0.5))(x, track="norms")
    l1 = result.terms["l1"]
    assert result.base is not None
    for tensor, wanted in [
        (result.total, 2 * x + 0.5 * x.sign()),
        (result.penalty, 0.5 * x.sign()),
        (result.base, 2 * x),
        (l1.value, x.sign()),
        (l1.contribution, 0.5 * x.sign()),
    ]:
        assert tensor.dim() == 0
        assert_equal(torch.autograd.grad(tensor, x, retain_graph=True)[0], wanted)


def test_reading_changes_nothing() -> None:
    """After metrics, data, JSON and tables the training goes on as before."""
    x = point()
    result = PIPELINE(x, track="gram")
    for read in READERS.values():
        read(result)
        assert x.grad is None
    result.total.backward()
    assert_equal(x.grad, 2 * x + 0.5 * x.sign())


def test_an_evaluation_is_frozen() -> None:
    """Neither it nor its terms can be assigned."""
    result = result_of(False)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'total'"):
        result.total = torch.zeros(())  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'value'"):
        result.terms["l1"].value = torch.zeros(())  # type: ignore[misc]


def test_large_evaluations_of_a_model_read_the_same_everywhere() -> None:
    """Flat and nested figures of a model agree, name by name."""
    result, _ = evaluated("tensor", "norms")
    result.total.backward()
    metrics, data = result.metrics(), result.to_dict()
    assert data["loss_total"] == metrics["total"]
    assert data["base_loss"]["grad_norm"] == metrics["base_grad_norm"]
    assert data["total_grad_norm"] == metrics["total_grad_norm"]
    for name, term in data["regularizers"].items():
        assert term["value"] == metrics[name]
        assert term["contribution"] == metrics[f"{name}_weighted"]
        assert term["grad_norm"] == metrics[f"{name}_grad_norm"]
        assert term["grad_norm_weighted"] == metrics[f"{name}_grad_norm_weighted"]
    assert set(data["regularizers"]) == set(result.terms)
