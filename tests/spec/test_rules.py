"""A definition asks its context for everything but + − × ÷."""

from pathlib import Path

import pytest

from equipoise import spec
from tests.spec.rules import DEFINITIONS, breaches

FOLDER = Path(spec.__file__).parent
NOT_DEFINITIONS = {
    "__init__",
    "__main__",
    "balls",
    "claims",
    "formats",
    "page",
    "rechecks",
    "scalars",
    "symbols",
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_keep_the_rules(name: str) -> None:
    """No builtin of numbers, no comparison, no float, no branch on a scalar."""
    assert breaches(FOLDER / f"{name}.py") == []


def test_every_file_is_one_or_the_other() -> None:
    """A new file is a definition, and keeps the rules, unless it is named here."""
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert files == {*DEFINITIONS, *NOT_DEFINITIONS}


BAD = {
    "def f(K, x):\n    return x if K.gt(x, x) else x\n": (
        "bad:2 branches on a comparison of scalars"
    ),
    "def f(K, xs):\n    return [x for x in xs if K.gt(x, x)]\n": (
        "bad:2 branches on a comparison of scalars"
    ),
    "def f(K, x):\n    more = K.gt(x, x)\n    return x if more else -x\n": (
        "bad:3 branches on a comparison of scalars"
    ),
    "def f(K, x):\n    return K.ite(not K.gt(x, x), lambda: x, lambda: -x)\n": (
        "bad:2 branches on a comparison of scalars"
    ),
    "def f(K, x):\n    return max(x, x)\n": "bad:2 calls the builtin max",
    "def f(K, xs):\n    return sorted(xs)\n": "bad:2 calls the builtin sorted",
    "def f(K, x):\n    return x == x\n": "bad:2 compares without the context",
    "def f(K, x):\n    return x < x\n": "bad:2 compares without the context",
    "def f(K, x):\n    return x * 0.1\n": "bad:2 has the float 0.1 in a formula",
    "import math\n": "bad:1 imports numbers from elsewhere",
}


@pytest.mark.parametrize("text", BAD)
def test_each_breach_is_seen(tmp_path: Path, text: str) -> None:
    """Every rule has a definition that breaks it alone."""
    path = tmp_path / "bad.py"
    path.write_text(text, encoding="utf-8")
    assert breaches(path) == [BAD[text]]


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    """Choices by name, lengths, None, defaults."""
    path = tmp_path / "good.py"
    path.write_text(
        "def f(K, xs, mode='a', rate=0.1):\n"
        "    if mode == 'a' and len(xs) > 1 and xs is not None:\n"
        "        return K.ite(K.gt(xs[0], xs[1]), lambda: xs[0], lambda: xs[1])\n",
        encoding="utf-8",
    )
    assert breaches(path) == []
