"""A pipeline can live in a file, and what is wrong in the file is named by its path."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, schedules


def mine(x: Tensor, *, power: float = 2.0) -> Tensor:
    """A penalty of one's own."""
    return x.abs().pow(power).sum()


PIPELINE = Pipeline(
    base=Term(F.mse_loss, inputs=("x", "y")),
    sparsity=Term(eq.l1, inputs="x", weight=1e-3, every=4, rescale=False),
    entropy=Term(
        eq.entropy,
        inputs="x",
        weight=schedules.chained(
            {0: schedules.warmup(1.0, steps=10), 10: schedules.piecewise({0: 1.0, 5: 0.5})}
        ),
        options={"mode": "bonus", "from_logits": True},
        enabled=False,
    ),
    own=Term(mine, inputs="x", weight=schedules.linear(0.0, 0.5, steps=11), options={"power": 3.0}),
    fixed=Term(eq.l2, inputs="x", differentiable=False),
)
OWN = {"mine": mine}


@pytest.mark.parametrize(
    "journey",
    [
        lambda c: c,
        lambda c: json.loads(json.dumps(c)),
        lambda c: yaml.safe_load(yaml.safe_dump(c, sort_keys=False)),
    ],
    ids=["data", "json", "yaml"],
)
def test_round_trip(journey: Any) -> None:
    """Written, sent through JSON or YAML and read again, a pipeline is the same."""
    config = PIPELINE.to_config()
    again = Pipeline.from_config(journey(config), penalties=OWN)
    assert repr(again) == repr(PIPELINE)
    assert again.to_config() == config
    x, y = torch.linspace(-1, 1, 6).reshape(2, 3), torch.ones(2, 3)
    for step in (0, 3, 12):
        ours, theirs = again(x=x, y=y, step=step), PIPELINE(x=x, y=y, step=step)
        assert ours.metrics() == theirs.metrics()


def test_defaults_are_left_out() -> None:
    """A term with nothing but a penalty is written as nothing but a penalty."""
    assert Pipeline(l1=Term(eq.l1)).to_config() == {"l1": {"penalty": "l1"}}


def test_a_torch_loss_is_written_with_its_place() -> None:
    """Functions of torch keep their module's name, and are the same function when read."""
    config = Pipeline(base=Term(F.mse_loss, inputs=("x", "y"))).to_config()
    assert config["base"]["penalty"] == "torch.nn.functional.mse_loss"
    assert Pipeline.from_config(config)["base"].penalty is F.mse_loss


def test_a_short_form_is_read() -> None:
    """One input may be written as a word."""
    pipeline = Pipeline.from_config({"a": {"penalty": "l1", "inputs": "hidden", "weight": 2}})
    assert str(pipeline) == "2·a(hidden)"


FAULTS: list[tuple[Any, str]] = [
    ([], r"a pipeline must be a mapping from names to terms, got list\."),
    ({"a": 3}, r"a: a term must be a mapping of settings, got int\."),
    ({"a": {}}, r"a\.penalty: a penalty must be known by name, got None\."),
    ({"a": {"penalty": "l3"}}, r"a\.penalty: a penalty must be known by name, got 'l3'\."),
    ({"a": {"penalty": "torch.nn.functional.nope"}}, r"a\.penalty: .* got 'torch\.nn\.functional"),
    ({"a": {"penalty": "l1", "wieght": 1}}, r"a\.wieght: .* Did you mean 'weight'\?"),
    ({"a": {"penalty": "l1", "weight": "high"}}, r"a\.weight: `weight` must be a finite number"),
    ({"a": {"penalty": "l1", "weight": "1e-3"}}, r"a\.weight: .* Use 0\.001 or 1\.0e-3, say: YAML"),
    (
        {"a": {"penalty": "l1", "enabled": "no"}},
        r"a\.enabled: `enabled` must be True or False, got",
    ),
    ({"a": {"penalty": "l1", "rescale": 1}}, r"a\.rescale: `rescale` must be True or False, got 1"),
    ({"a": {"penalty": "l1", "options": ["scale"]}}, r"a\.options: `options` must be a mapping"),
    ({"a": {"penalty": "l1", "inputs": 3}}, r"a\.inputs: `inputs` must be a name or a sequence"),
    ({"a": {"penalty": "l1", "weight": {"linaer": {}}}}, r"a\.weight: .* Did you mean 'linear'\?"),
    (
        {"a": {"penalty": "l1", "weight": {"linear": {"start": 0, "stop": 1}}}},
        r"a\.weight: `linear` takes .*'stop'",
    ),
    (
        {"a": {"penalty": "l1", "options": {"scael": 1}}},
        r"a\.options: .* Did you mean 'scale'\?",
    ),
    ({"a": {"penalty": "l1", "inputs": ["step"]}}, r"a\.inputs: `inputs` must not be"),
    ({"a": {"penalty": "l1", "every": 0}}, r"a\.every: `every` must be a whole number of steps"),
    ({"total": {"penalty": "l1"}}, r"a term's name must not be total"),
    ({"base": {"penalty": "l1", "weight": 2}}, r"base: the base must have weight 1, got 2"),
    ({"base": {"penalty": "l1", "every": 2}}, r"base: the base must be evaluated at every step"),
    (
        {"a": {"penalty": "l1", "weight": {"piecewise": {"values": {"soon": 1.0}}}}},
        r"a\.weight: `step` must be a finite number at least 0, got 'soon'",
    ),
    (
        {"a": {"penalty": "l1", "weight": {"chained": {"schedules": {0: 0.5}}}}},
        r"a\.weight: a schedule must be a mapping from its kind to arguments, got 0\.5\. Use",
    ),
]


@pytest.mark.parametrize(("config", "message"), FAULTS, ids=lambda c: str(c)[:50])
def test_a_fault_is_named_by_its_path(config: Any, message: str) -> None:
    """Each fault in the data is an error that begins with where it is."""
    with pytest.raises(eq.OptionError, match=message):
        Pipeline.from_config(config)


def test_what_is_no_plain_data_cannot_be_written() -> None:
    """A tensor among the options is refused, with its path."""
    pipeline = Pipeline(a=Term(eq.l1, options={"mask": torch.ones(3)}))
    with pytest.raises(
        eq.OptionError, match=r"a\.options: `mask` must be plain data .* got Tensor"
    ):
        pipeline.to_config()


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    """A sweep over `np.logspace` makes weights, options and schedules that YAML knows not."""
    number = np.float64(1e-3)
    pipeline = Pipeline(
        a=Term(eq.l1, weight=number, options={"scale": number}),
        b=Term(eq.l1, weight=schedules.linear(number, number, steps=3)),
        c=Term(eq.l1, weight=schedules.piecewise({0: number})),
    )
    config = pipeline.to_config()
    assert yaml.safe_load(yaml.safe_dump(config)) == config
    assert type(config["a"]["weight"]) is float


def test_keys_that_are_no_text_cannot_be_written() -> None:
    """JSON would make a text of them: another table, read back."""
    pipeline = Pipeline(a=Term(table, options={"by": {0: 1.0}}))
    with pytest.raises(eq.OptionError, match=r"a\.options: `by` must be plain data .* with keys"):
        pipeline.to_config()
    assert Pipeline(a=Term(table, options={"by": {"0": 1.0}})).to_config()["a"]["options"] == {
        "by": {"0": 1.0}
    }


def table(x: Tensor, *, by: Any) -> Tensor:
    """With a mapping as its option."""
    return by * x


def test_two_penalties_of_one_name_cannot_be_written() -> None:
    """Read back, they would be the same; the same one twice is no fault."""
    mean, total = torch.nn.MSELoss(), torch.nn.MSELoss(reduction="sum")
    pipeline = Pipeline(
        a=Term(mean, inputs=("x", "y")),
        b=Term(mean, inputs=("y", "x")),
        c=Term(total, inputs=("x", "y")),
    )
    with pytest.raises(
        eq.OptionError, match=r"c\.penalty: .* got two that are called 'MSELoss'\. Use `pen"
    ):
        pipeline.to_config()
    assert pipeline.without("c").to_config()["b"]["penalty"] == "MSELoss"


class Scorer:
    """An object whose method is a penalty."""

    def __init__(self, by: float) -> None:
        self.by = by

    def entropy(self, x: Tensor) -> Tensor:
        """Named as one of the library."""
        return self.by * x.sum()


def test_one_mapping_of_names_leads_there_and_back() -> None:
    """A lambda, a partial, two modules, a method, a name of the library: each by its own name."""
    scorer = Scorer(2.0)
    penalties = {
        "small": lambda x, y: (x * y).sum(),
        "scaled": partial(scaled, 2.0),
        "mean": torch.nn.MSELoss(),
        "total": torch.nn.MSELoss(reduction="sum"),
        "entropy": scorer.entropy,
    }
    pair, one = {"inputs": ("x", "y")}, {"inputs": "x"}
    pipeline = Pipeline(
        a=Term(penalties["small"], **pair),
        b=Term(penalties["scaled"], **one),
        c=Term(penalties["mean"], **pair),
        d=Term(penalties["total"], **pair),
        e=Term(scorer.entropy, **one),
        f=Term(eq.l1, **one),
    )
    config = json.loads(json.dumps(pipeline.to_config(penalties=penalties)))
    assert [term["penalty"] for term in config.values()] == [*penalties, "l1"]
    again = Pipeline.from_config(config, penalties=penalties)
    x, y = torch.linspace(-1, 1, 6), torch.ones(6)
    assert again(x=x, y=y).metrics() == pipeline(x=x, y=y).metrics()


def test_a_name_that_is_given_to_another_cannot_be_written() -> None:
    """Read back with the same names, the library's penalty would be one's own."""
    with pytest.raises(eq.OptionError, match=r"a\.penalty: .* got 'l1', which is another's"):
        Pipeline(a=Term(eq.l1)).to_config(penalties={"l1": mine})


def test_a_schedule_of_ones_own_cannot_be_written() -> None:
    """A plain function as weight is refused, with its path."""
    pipeline = Pipeline(a=Term(eq.l1, weight=lambda step: 0.1 * step))
    with pytest.raises(eq.OptionError, match=r"a\.weight: `weight` must be plain data"):
        pipeline.to_config()


def scaled(by: float, x: Tensor) -> Tensor:
    """With a number before the input."""
    return by * x.sum()


def entropy(x: Tensor) -> Tensor:
    """Not the one of the library."""
    return x.sum()


@pytest.mark.parametrize(
    ("penalty", "message"),
    [
        (lambda x: x.sum(), r"a\.penalty: .* function with a name .* got function <lambda>\. Use"),
        (partial(scaled, 2.0), r"a\.penalty: .* with a name .* got partial scaled\. Use `pen"),
        (
            entropy,
            r"a\.penalty: .* a name of its own .* got 'entropy', which is another's\. Use",
        ),
    ],
    ids=["lambda", "partial", "name of the library"],
)
def test_a_penalty_that_its_name_does_not_tell_cannot_be_written(
    penalty: Any, message: str
) -> None:
    """Read back by that name, it would be another one, or none."""
    with pytest.raises(eq.OptionError, match=message):
        Pipeline(a=Term(penalty)).to_config()


@pytest.mark.parametrize("penalties", [[mine], {"mine": 3}, "mine"], ids=["list", "number", "text"])
def test_penalties_are_functions_by_name(penalties: Any) -> None:
    """Anything else is refused before the data is read or written."""
    with pytest.raises(
        eq.OptionError, match=r"`penalties` must be a mapping from names to functions, got"
    ):
        Pipeline.from_config({"a": {"penalty": "l1"}}, penalties=penalties)
    with pytest.raises(
        eq.OptionError, match=r"`penalties` must be a mapping from names to functions, got"
    ):
        Pipeline(a=Term(eq.l1)).to_config(penalties=penalties)
