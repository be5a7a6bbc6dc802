"""A term holds what it was given, checked once; it prints, copies and pickles as itself."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.penalties.assertions import assert_equal

ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}

SETTINGS: dict[str, Term] = {
    "plain": Term(eq.l1),
    "inputs": Term(eq.kl_divergence, inputs=("teacher", "student")),
    "everything": Term(
        eq.entropy,
        inputs="student",
        weight=-0.25,
        options={"mode": "bonus", "temperature": 2.0},
        enabled=False,
        differentiable=False,
        every=4,
        rescale=False,
    ),
    "schedule": Term(eq.l1, weight=schedules.linear(0.0, 0.5, steps=3)),
    "whole number": Term(eq.l2, weight=3),
}


class Distance(nn.Module):
    """A penalty with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.tensor([1.0, -1.0]))

    def forward(self, x: Tensor, *, power: int = 2) -> Tensor:
        return (x - self.center).abs().pow(power).sum()


def settings(term: Term) -> dict[str, Any]:
    """Everything a term holds."""
    names = ("penalty", "inputs", "weight", "enabled", "differentiable", "every", "rescale")
    return {**{name: getattr(term, name) for name in names}, "options": dict(term.options)}


def assert_same_term(first: Term, second: Term) -> None:
    """Two terms hold the same."""
    assert settings(first) == settings(second)


# What it holds -----------------------------------------------------------------------------------


def test_the_defaults() -> None:
    """A bare penalty reads the one input, counts once, and is differentiated at every step."""
    assert settings(Term(eq.l1)) == {
        "penalty": eq.l1,
        "inputs": None,
        "weight": 1.0,
        "options": {},
        "enabled": True,
        "differentiable": True,
        "every": 1,
        "rescale": True,
    }


def test_one_input_needs_no_tuple() -> None:
    """A name alone is the tuple of that name, not of its letters; a list becomes a tuple."""
    assert Term(eq.l1, inputs="hidden").inputs == ("hidden",)
    assert Term(eq.kl_divergence, inputs=["p", "q"]).inputs == ("p", "q")


def test_a_partial_is_a_penalty_with_options() -> None:
    """Its keywords become options, also through several of them; given options win."""
    inner = partial(eq.l2, clip=1.0, scale=3.0)
    term = Term(partial(inner, clip=2.0), options={"reduction": "mean", "scale": 5.0})
    assert term.penalty is eq.l2
    assert dict(term.options) == {"clip": 2.0, "scale": 5.0, "reduction": "mean"}


def test_a_partial_with_positional_arguments_stays_whole() -> None:
    """They belong to the function; the keywords with them."""
    bound = partial(eq.kl_divergence, torch.zeros(3), from_logits=True)
    term = Term(bound, options={"temperature": 2.0})
    assert term.penalty is bound
    assert dict(term.options) == {"temperature": 2.0}
    logits = torch.tensor([1.0, 0.0, -1.0])
    expected = eq.kl_divergence(torch.zeros(3), logits, from_logits=True, temperature=2.0)
    assert_equal(Pipeline(kl=term)(logits).total, expected)


def test_options_are_a_copy() -> None:
    """Changing the mapping that was given changes nothing; the term's own cannot be changed."""
    given = {"clip": 1.0}
    term = Term(eq.l2, options=given)
    given["clip"] = 9.0
    assert dict(term.options) == {"clip": 1.0}
    with pytest.raises(TypeError, match="does not support item assignment"):
        operator.setitem(term.options, "clip", 9.0)


def test_a_term_is_frozen() -> None:
    """Its settings cannot be assigned."""
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'weight'"):
        Term(eq.l1).weight = 2.0  # type: ignore[misc]


def test_changes_make_a_copy_that_is_checked() -> None:
    """The original keeps its settings, and what cannot be is refused again."""
    term = SETTINGS["everything"]
    before = settings(term)
    changed = term.with_changes(weight=2.0, enabled=True)
    assert settings(changed) == {**before, "weight": 2.0, "enabled": True}
    assert settings(term) == before
    with pytest.raises(eq.OptionError, match="got 'mod'"):
        term.with_changes(options={"mod": "bonus"})


def test_functions_without_a_signature_are_trusted() -> None:
    """Some functions written in C cannot be asked what they take."""
    x = torch.tensor([1.0, 2.0])
    assert_equal(Pipeline(norm=Term(torch.dot, inputs=("a", "b")))(a=x, b=x).total, 5.0)


def test_any_keyword_is_an_option_of_a_function_that_takes_any() -> None:
    """`**options` in the penalty's signature admits whatever it is given."""

    def power(x: Tensor, **options: float) -> Tensor:
        return x.pow(options["exponent"]).sum()

    term = Term(power, options={"exponent": 3})
    assert_equal(Pipeline(power=term)(torch.tensor([1.0, 2.0])).total, 9.0)


# Print -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_print_shows_what_is_not_default(name: str) -> None:
    """What is printed evaluates to the same term, names of penalties and schedules given."""
    names = {
        "Term": Term,
        **{f.__name__: f for f in (eq.l1, eq.l2, eq.entropy, eq.kl_divergence)},
    }
    if name == "schedule":
        assert repr(SETTINGS[name]) == "Term(l1, weight=linear(0→0.5))"
    else:
        assert_same_term(eval(repr(SETTINGS[name]), names), SETTINGS[name])


def test_print_in_full() -> None:
    """Settings in the order of the signature."""
    assert repr(SETTINGS["everything"]) == (
        "Term(entropy, inputs=('student',), weight=-0.25, "
        "options={'mode': 'bonus', 'temperature': 2.0}, enabled=False, differentiable=False, "
        "every=4, rescale=False)"
    )
    assert repr(Term(Distance())) == "Term(Distance)"


def test_print_does_not_read_tensors() -> None:
    """A weight on the device is shown as a tensor, also one that happens to be 1."""
    for weight in (torch.tensor(1.0), torch.tensor(2.0, device="meta")):
        assert repr(Term(eq.l1, weight=weight)) == "Term(l1, weight=<tensor>)"


# Copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_terms_travel(way: str, name: str) -> None:
    """A term that was pickled or copied holds the same."""
    travelled = ROUND_TRIPS[way](SETTINGS[name])
    assert travelled is not SETTINGS[name]
    assert_same_term(travelled, SETTINGS[name])


@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_a_pipeline_travels(way: str) -> None:
    """Names, order and results are the same on the other side, and it is still frozen."""
    pipeline = Pipeline(**{f"t{i}": Term(eq.l1, weight=0.1 * i) for i in (3, 1, 2)}).disable("t1")
    travelled = ROUND_TRIPS[way](pipeline)
    assert list(travelled) == ["t3", "t1", "t2"]
    assert str(travelled) == str(pipeline)
    x = torch.tensor([1.0, -2.0])
    assert travelled(x).metrics() == pipeline(x).metrics()
    with pytest.raises(AttributeError, match="a pipeline is frozen"):
        travelled.anything = 1


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_module_travels_with_its_parameters(way: str) -> None:
    """A deep copy has parameters of its own, with the same numbers."""
    term = Term(Distance(), options={"power": 1})
    travelled = ROUND_TRIPS[way](term)
    assert dict(travelled.options) == {"power": 1}
    assert travelled.penalty is not term.penalty
    with torch.no_grad():
        term.penalty.center.zero_()
    assert_equal(travelled.penalty.center, torch.tensor([1.0, -1.0]))
    assert_equal(Pipeline(d=travelled)(torch.zeros(2)).total, 2.0)


def test_a_tensor_weight_travels() -> None:
    """A 0-d weight keeps its number and whether it learns."""
    weight = torch.tensor(0.5, requires_grad=True)
    for way in ("pickle", "deepcopy"):
        travelled = ROUND_TRIPS[way](Term(eq.l1, weight=weight))
        assert_equal(travelled.weight, 0.5)
        assert travelled.weight.requires_grad
        assert travelled.weight is not weight
