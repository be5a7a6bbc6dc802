"""The public API is typed: right calls have their type, wrong ones are errors."""

import subprocess
import sys
from pathlib import Path

import equipoise
from tests.house.paths import ROOT

EXAMPLES = ROOT / "tests" / "house" / "typed_examples.py"


def strict_check(file: Path) -> str:
    """What mypy says of one file under the project's strict settings."""
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT).stdout


def test_the_examples_have_the_types_they_claim() -> None:
    """Every stated type is the inferred one, and every expected error is one."""
    assert strict_check(EXAMPLES) == "Success: no issues found in 1 source file\n"


def test_a_wrong_claim_is_found(tmp_path: Path) -> None:
    """A type that is not inferred and an expected error that is none are both reported."""
    file = tmp_path / "wrong_claims.py"
    file.write_text(
        "from typing import assert_type\n"
        "import torch\n"
        "import equipoise as eq\n"
        "assert_type(eq.l1(torch.ones(2)), int)\n"
        "eq.l1(torch.ones(2), reduction='mean')  # type: ignore[arg-type]\n",
        encoding="utf-8",
    )
    report = strict_check(file)
    assert 'Expression is of type "Tensor", not "int"' in report
    assert 'Unused "type: ignore" comment' in report
    assert "Found 2 errors" in report


def test_the_package_says_that_it_is_typed() -> None:
    """The marker that lets type checkers read an installed package is there."""
    assert Path(equipoise.__file__).with_name("py.typed").is_file()
