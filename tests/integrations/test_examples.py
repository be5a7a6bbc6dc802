"""The programs run, and the documentation shows what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.house.paths import ROOT

NAMES = ["lightning_sparse", "transformers_language_model", "accelerate_distillation"]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def shown(name: str) -> str:
    """The first block of text below the program's name."""
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    block = re.search(r"^```text\n(.*?)^```$", page[page.index(name) :], re.MULTILINE | re.DOTALL)
    assert block is not None
    return block.group(1)


def frame(text: str) -> list[list[str]]:
    """The words, with every number replaced."""
    return [NUMBER.sub("#", line).split() for line in text.splitlines()]


def figures(text: str) -> list[float]:
    """The numbers."""
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_what_the_documentation_shows(name: str) -> None:
    """The same words, and numbers within a quarter.

    Another processor adds in another order,
    and training makes the difference larger.
    """
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert frame(done.stdout) == frame(shown(name))
    assert figures(done.stdout) == pytest.approx(figures(shown(name)), rel=0.25, abs=0.05)
