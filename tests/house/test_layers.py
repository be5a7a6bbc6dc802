"""Imports point down only, nothing goes round, and leaves do not reach through facades."""

from pathlib import Path

import pytest

from tests.house.layers import modules, violations
from tests.house.paths import SOURCE


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """A package named equipoise below `folder`, with an `__init__` wherever one is needed."""
    package = folder / "equipoise"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for parent in (path.parent, package):
            (parent / "__init__.py").touch()
    return package


def test_the_package_keeps_its_layers() -> None:
    """No module of equipoise breaks a rule, and the checker has read all of them."""
    assert "equipoise.penalties" in modules(SOURCE)
    assert violations(SOURCE) == []


GOOD = {
    "_types.py": "import torch\n",
    "_errors.py": "",
    "_numerics.py": "from equipoise import _types\nfrom . import _errors\n",
    "penalties/_magnitude.py": "from .._numerics import norm\nfrom ._divergence import kl\n",
    "penalties/_divergence.py": "import equipoise._errors\n",
    "penalties/__init__.py": "from . import _divergence\nfrom ._magnitude import l1\n",
    "integrations/__init__.py": "",
    "integrations/host.py": "def attach():\n    from equipoise.penalties._magnitude import l1\n",
    "spec/sums.py": "import math\nimport equipoise.spec.scalars\nfrom . import scalars\n",
    "spec/scalars.py": "",
    "__init__.py": "from equipoise.penalties import l1\n",
}


def test_a_layered_package_has_no_violation(tmp_path: Path) -> None:
    """Imports down and sideways pass, in each of the ways Python has to write them."""
    assert violations(write_package(tmp_path, GOOD)) == []


def test_imports_for_types_may_go_round(tmp_path: Path) -> None:
    """A cycle that only a type checker walks is none at run time."""
    for_types = "import typing\nif typing.TYPE_CHECKING:\n    from equipoise._types import T\n"
    files = {"_types.py": "import equipoise._errors\n", "_errors.py": for_types}
    assert violations(write_package(tmp_path, files)) == []


BAD = {
    "up": (
        {"_types.py": "from equipoise._numerics import norm\n", "_numerics.py": ""},
        "equipoise._types:1 imports equipoise._numerics: up from layer 0 to layer 1",
    ),
    "up, inside a function": (
        {"_types.py": "def f():\n    import equipoise.training\n", "training.py": ""},
        "equipoise._types:2 imports equipoise.training: up from layer 0 to layer 5",
    ),
    "up, for types": (
        {
            "_types.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from . import _pipeline\n",
            "_pipeline.py": "",
        },
        "equipoise._types:3 imports equipoise._pipeline: up from layer 0 to layer 3",
    ),
    "up, by dots": (
        {"penalties/_a.py": "from ..tracking import norms\n", "tracking.py": ""},
        "equipoise.penalties._a:1 imports equipoise.tracking: up from layer 2 to layer 4",
    ),
    "the package from a leaf": (
        {"training.py": "import equipoise\n"},
        "equipoise.training:1 imports equipoise: up from layer 5 to layer 6",
    ),
    "a facade from a leaf above": (
        {"training.py": "from equipoise.penalties import l1\n", "penalties/_a.py": ""},
        "equipoise.training:1 imports equipoise.penalties: a leaf imports a facade",
    ),
    "its own facade from a leaf": (
        {"penalties/_a.py": "from . import l1\n"},
        "equipoise.penalties._a:1 imports equipoise.penalties: a leaf imports a facade",
    ),
    "sideways, forbidden": (
        {"transforms/a.py": "from ..penalties.b import l1\n", "penalties/b.py": ""},
        "equipoise.transforms.a:1 imports equipoise.penalties.b: they stay apart",
    ),
    "an integration from elsewhere": (
        {"training.py": "import equipoise.integrations.host\n", "integrations/host.py": ""},
        "equipoise.training:1 imports equipoise.integrations.host: integrations are for users only",
    ),
    "torch on the island": (
        {"spec/sums.py": "from torch.func import grad\n"},
        "equipoise.spec.sums:1 imports torch.func: spec is an island",
    ),
    "the runtime on the island": (
        {"spec/sums.py": "from equipoise._types import T\n", "_types.py": ""},
        "equipoise.spec.sums:1 imports equipoise._types: spec is an island",
    ),
    "the island from the runtime": (
        {"balance/_a.py": "from equipoise.spec.sums import l1\n", "spec/sums.py": ""},
        "equipoise.balance._a:1 imports equipoise.spec.sums: spec is an island",
    ),
    "a module that is not there": (
        {"training.py": "import equipoise.gone\n"},
        "equipoise.training:1 imports equipoise.gone: no such module",
    ),
    "a module in no layer": ({"utils.py": ""}, "equipoise.utils: in no layer"),
    "a cycle": (
        {
            "penalties/_a.py": "from equipoise.penalties._b import b\n",
            "penalties/_b.py": "def f():\n    from equipoise.penalties._a import a\n",
        },
        "cycle: equipoise.penalties._a -> equipoise.penalties._b -> equipoise.penalties._a",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_each_breach_is_reported(tmp_path: Path, name: str) -> None:
    """Every rule has a package that breaks it alone, and the report says just that."""
    files, fault = BAD[name]
    assert violations(write_package(tmp_path, files)) == [fault]
