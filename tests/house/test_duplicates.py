"""Nothing is written twice."""

from pathlib import Path

import pytest

from tests.house.duplicates import duplicates
from tests.house.paths import SOURCE


def function(name: str, *, lines: int) -> str:
    """A function of so many lines, the same for every name."""
    body = "".join(f"    x = step_{line}(x)\n" for line in range(lines - 1))
    return f'def {name}(x):\n    """Does {name}."""\n{body}    return x\n\n\n'


def test_no_two_places_share_six_lines() -> None:
    """No run of six or more like lines of code stands in two places of the package."""
    report = duplicates(SOURCE)
    assert not report, report


@pytest.mark.parametrize("names", [("a.py", "b.py"), ("a.py", "a.py")])
def test_six_like_lines_are_found(tmp_path: Path, names: tuple[str, str]) -> None:
    """Six like lines are reported in two files and within one, with their place."""
    for file, name in zip(names, ("f", "g"), strict=True):
        with (tmp_path / file).open("a", encoding="utf-8") as stream:
            stream.write(function(name, lines=6))
    second = 3 if names[1] == "b.py" else 13
    assert duplicates(tmp_path) == f"{names[0]}:3-8 ~ {names[1]}:{second}-{second + 5}"


def test_five_like_lines_may_repeat(tmp_path: Path) -> None:
    """Five like lines are below the measure."""
    (tmp_path / "a.py").write_text(function("f", lines=5), encoding="utf-8")
    (tmp_path / "b.py").write_text(function("g", lines=5), encoding="utf-8")
    assert duplicates(tmp_path) == ""


def test_exports_may_repeat(tmp_path: Path) -> None:
    """A facade lists the names of the facades below it."""
    exports = "__all__ = [\n" + "".join(f'    "name_{i}",\n' for i in range(8)) + "]\n"
    (tmp_path / "a.py").write_text(exports, encoding="utf-8")
    (tmp_path / "b.py").write_text(exports, encoding="utf-8")
    assert duplicates(tmp_path) == ""
