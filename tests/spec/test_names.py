"""Nothing is missing: what the runtime offers, the spec defines, with a derivative beside it."""

from __future__ import annotations

import inspect
import subprocess
import sys

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


IN_BOTH = {"penalties that take a function": {"gradient_penalty", "interpolated_gradient_penalty"}}
# What does not change the value of a definition: how it is computed, drawn, checked or laid out.
LAYOUT = {"dim", "chunk", "check", "generator", "sample", "per_sample", "axis"}


def test_every_option_that_changes_a_value_is_defined_and_tried() -> None:
    """The options of the definition are those of the runtime; each has a case of its own."""
    tried = {name: set() for name in PENALTIES}
    for case in cases():
        tried[case.penalty] |= case.options.keys()
    for name in IN_BOTH["penalties that take a function"]:
        tried[name] = {key for options in OPTIONS for key in options} | {"epsilon"}
    for name in PENALTIES:
        runtime = _options(getattr(eq, name)) - LAYOUT
        assert _options(getattr(spec, name)) == runtime, name
        untried = runtime - tried[name]
        # Masks, scales and reductions are shared, and tried where they are computed.
        assert untried <= {
            "temperature",
            "reduction",
            "mask",
            "scale",
            "denominator",
            "gradient",
        } | {
            "support",
            "temperature_squared",
        }, name


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
            "Use `pip install equipoise[spec]`."
        ),
    ]
