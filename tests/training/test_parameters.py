"""Parameters by pattern, type and selection: each once, frozen ones left out."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, tracking
from equipoise.training import NamedParameters, parameters
from equipoise.transforms import select


def network() -> nn.Sequential:
    """Two linear layers with a norm between; the last is tied to the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


CHOICES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all": ({}, ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"]),
    "pattern": ({"include": "*.weight"}, ["0.weight", "1.weight"]),
    "patterns": ({"include": ["0.*", "2.*"]}, ["0.weight", "0.bias", "2.bias"]),
    "type": ({"include": nn.LayerNorm}, ["1.weight", "1.bias"]),
    "without": ({"exclude": ["*bias", nn.LayerNorm]}, ["0.weight"]),
    "both": ({"include": nn.Linear, "exclude": "*bias"}, ["0.weight"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choices(case: str) -> None:
    """Names, types and lists of them choose what they say, tied weights under their first name."""
    options, names = CHOICES[case]
    model = network()
    chosen = parameters(model, **options)
    named = dict(model.named_parameters())
    assert list(chosen.names) == names
    assert all(p is named[name] for name, p in zip(names, chosen, strict=True))


def test_a_tied_parameter_answers_to_each_of_its_names() -> None:
    """By its second name and by the kind of its second module it is chosen, or left out, too."""
    model = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    model[1].weight = model[0].weight
    for second in ("1.weight", nn.Linear):
        assert parameters(model, include=second).names == ("0.weight",)
        assert parameters(model, exclude=second).names == ("2.weight", "2.bias")
    shared = nn.Sequential(model[0], nn.Sequential(model[0]))
    assert parameters(shared, include="1.*").names == ("0.weight",)


def test_a_selection_chooses() -> None:
    """What `transforms.select` gives is understood, and joins with patterns."""
    model = network()
    selection = select.no_bias_or_norm(model)
    assert parameters(model, include=selection).names == ("0.weight",)
    assert parameters(model, include=[selection, "1.bias"]).names == ("0.weight", "1.bias")
    assert len(parameters(model, exclude=selection)) == 4


def test_frozen_parameters_are_left_out() -> None:
    """A frozen layer has no penalty."""
    model = network()
    model[1].requires_grad_(requires_grad=False)
    assert parameters(model).names == ("0.weight", "0.bias", "2.bias")


def test_the_list_is_an_input_of_penalties_and_pipelines() -> None:
    """The value is that of the plain list, and tracking sees one input with all its tensors."""
    model = network()
    chosen = parameters(model, include="*.weight")
    pipeline = Pipeline(decay=Term(eq.l2, inputs="weights", weight=0.5))
    result = pipeline(weights=chosen, track=True)
    result.total.backward()
    length = torch.cat([p.detach().flatten() for p in chosen]).norm()
    assert torch.equal(result.total, 0.5 * eq.l2(list(chosen)))
    torch.testing.assert_close(result.gradients.weighted["decay"], length.double())
    assert all(torch.equal(p.grad, p.detach()) for p in chosen)  # type: ignore[arg-type]
    report = tracking.parameter_gradients(pipeline(weights=chosen), chosen, set_grad=False)
    torch.testing.assert_close(report.total_norm, length.double())


def test_it_goes_through_the_compiler() -> None:
    """A compiled function reads the list, and so does a compiled pipeline."""
    chosen = parameters(network(), include="*.weight")
    pipeline = Pipeline(decay=Term(eq.l2, inputs="weights", weight=0.5))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(weights: NamedParameters) -> torch.Tensor:
        return pipeline(weights=weights).total

    torch.testing.assert_close(loss(chosen), pipeline(weights=chosen).total)


def test_it_prints_names_and_shapes() -> None:
    """A reader sees what was chosen."""
    chosen = parameters(network(), include="1.*")
    assert repr(chosen) == "NamedParameters(1.weight: (3,), 1.bias: (3,))"


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "misspelt": ({"include": "*.wieght"}, eq.InputError, "pattern '*.wieght' must match"),
    "nothing": ({"include": nn.Conv2d}, eq.InputError, "at least one parameter that requires grad"),
    "everything": ({"exclude": "*"}, eq.InputError, "exclude='*'. Use wider patterns"),
    "kind": ({"include": 3}, eq.OptionError, "selection, got 3. Use '*.weight'"),
    "kind inside": ({"include": [3]}, eq.OptionError, "`include` must be a pattern of names, a"),
    "class": ({"exclude": dict}, eq.OptionError, "`exclude` must be a pattern of names, a type"),
    "empty": ({"exclude": []}, eq.OptionError, "`exclude` must name something, got an empty list"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong choice is refused."""
    options, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        parameters(network(), **options)


def test_a_selection_of_another_model_is_refused() -> None:
    """Selections are known by identity, so that those of a copy choose nothing here."""
    with pytest.raises(eq.InputError, match="selections of one model"):
        parameters(network(), exclude=select.everything(network()))
