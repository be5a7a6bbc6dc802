"""What users see is what `__all__` says, and every function there says what it does."""

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import equipoise

PUBLIC_MODULES = [
    "equipoise",
    *(
        f"equipoise.{found.name}"
        for found in pkgutil.iter_modules(equipoise.__path__)
        if not found.name.startswith("_")
    ),
]


def surface_faults(module: ModuleType) -> list[str]:
    """What is wrong with the names a module offers, one line each."""
    offered: list[str] = module.__all__
    order = [] if offered == sorted(set(offered)) else ["`__all__` is not sorted and unique"]
    missing = [f"`{name}` does not exist" for name in offered if not hasattr(module, name)]
    hidden = [f"`{name}` is not in `__all__`" for name in _defined(module) if name not in offered]
    return order + missing + hidden


def _defined(module: ModuleType) -> list[str]:
    """Public names of a module: all that a package shows, all that a plain module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and (hasattr(module, "__path__") or getattr(value, "__module__", "") == module.__name__)
    ]


def docstring_faults(function: object) -> list[str]:
    """What the docstring of a public function lacks."""
    text = inspect.getdoc(function) or ""
    return [part for part in (">>> ", "At the edge:") if part not in text]


def public_functions() -> list[str]:
    """Every public function of every public module, by dotted name."""
    loaded = [importlib.import_module(name) for name in PUBLIC_MODULES]
    return [
        f"{module.__name__}.{name}"
        for module in loaded
        for name in module.__all__
        if inspect.isfunction(getattr(module, name, None))
    ]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_is_sorted_and_true(name: str) -> None:
    """`__all__` is sorted, without repeats; each name exists and no public name is left out."""
    assert surface_faults(importlib.import_module(name)) == []


@pytest.mark.parametrize("name", public_functions())
def test_public_functions_have_an_example_and_their_edges(name: str) -> None:
    """The docstring of a public function shows a call and says what happens at the edge."""
    module, _, function = name.rpartition(".")
    assert docstring_faults(getattr(importlib.import_module(module), function)) == []


def test_the_package_offers_functions() -> None:
    """The list of public functions is read from the package, and is not empty."""
    assert "equipoise.l1" in public_functions()


def test_faults_of_a_surface_are_reported() -> None:
    """Disorder, a name without a thing and a thing without a name are each seen."""
    module = ModuleType("shop")
    module.__path__ = []
    vars(module).update(b=2, c=3, os=inspect, _private=0, __all__=["b", "a"])
    assert surface_faults(module) == [
        "`__all__` is not sorted and unique",
        "`a` does not exist",
        "`c` is not in `__all__`",
    ]


def test_faults_of_a_docstring_are_reported() -> None:
    """A bare docstring lacks both the example and the edge."""
    assert docstring_faults(surface_faults) == [">>> ", "At the edge:"]
