"""Nothing is missing: what the runtime offers, the spec defines, with a derivative beside it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import equipoise as eq
from equipoise import penalties, spec, transforms
from equipoise.spec.decay import COMBINATORS
from equipoise.spec.page import AREAS
from tests.spec.cases import cases
from tests.spec.test_smoothness import OPTIONS

# What takes a context first: the definitions, and nothing else in the spec.
DEFINED = {name for name in spec.__all__ if inspect.isfunction(getattr(spec, name))} - {"decided"}
PENALTIES = set(penalties.__all__)
TRANSFORMS = {n for n in transforms.__all__ if inspect.isfunction(getattr(transforms, n))}


def test_every_penalty_and_transform_is_defined_and_nothing_else() -> None:
    """The names are the same, but for combinators, which compute nothing of their own."""
    values = {name for name in DEFINED if not name.endswith("_grad")}
    assert values == PENALTIES | (TRANSFORMS - set(COMBINATORS))
    assert set(COMBINATORS) <= TRANSFORMS


def test_every_definition_has_its_derivative() -> None:
    """A value without one, or one without a value, is a gap."""
    values = {name for name in DEFINED if not name.endswith("_grad")}
    assert {name.removesuffix("_grad") for name in DEFINED - values} == values


def test_every_definition_is_on_the_page() -> None:
    """The documentation leaves none out."""
    shown = {name for _, names in AREAS.values() for name in names}
    assert shown == {name for name in DEFINED if not name.endswith("_grad")}


TAKING_FUNCTIONS = {"gradient_penalty", "interpolated_gradient_penalty"}
# What does not change the value of a definition: how it is computed, drawn, checked or laid out.
LAYOUT = {"dim", "chunk", "check", "generator", "sample", "per_sample", "axis"}


@pytest.mark.parametrize("name", sorted(PENALTIES))
def test_every_option_that_changes_a_value_is_defined_and_tried(name: str) -> None:
    """The options of the definition are those of the runtime, and every choice has a case."""
    options = [case.options for case in cases() if case.penalty == name]
    if name in TAKING_FUNCTIONS:  # ε is given in every test of theirs
        options = [{**option, "epsilon": 0} for option in OPTIONS]
    runtime = _options(getattr(eq, name)) - LAYOUT
    assert _options(getattr(spec, name)) == runtime
    hints = get_type_hints(inspect.unwrap(getattr(eq, name)))
    for option in runtime:
        tried = [given[option] for given in options if option in given]
        assert tried, option
        default = inspect.signature(getattr(eq, name)).parameters[option].default
        untried = [c for c in _choices(hints[option]) if c not in (default, None)]
        assert all(any(choice == some for some in tried) for choice in untried), option


def _choices(hint: object) -> list[object]:
    """What a literal type lets one choose from; True and False, for a bool."""
    if hint is bool:
        return [False, True]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _options(function: object) -> set[str]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_spec_needs_neither_torch_nor_numpy_nor_its_own_package() -> None:
    """It is imported, and computes, where torch, NumPy and equipoise's front page are not."""
    code = (
        "import sys, types, pathlib\n"
        "for name in ('torch', 'numpy', 'flint', 'z3', 'ml_dtypes'): sys.modules[name] = None\n"
        "front = types.ModuleType('equipoise'); front.__path__ = [sys.argv[1]]\n"
        "sys.modules['equipoise'] = front\n"
        "from equipoise import spec\n"
        "print(spec.l2(spec.Float(), [3.0, 4.0]))\n"
        "try: spec.Ball()\n"
        "except ImportError as error: print(error)\n"
    )
    folder = eq.__path__[0]
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "25.0",
        (
            "The exact layer needs `flint` for this, which is not installed. "
            "Use `pip install 'equipoise[spec]'`."
        ),
    ]
