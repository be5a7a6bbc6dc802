"""What the page of examples shows, and how it is written again.

``python -m tests.examples.shown`` runs every example and puts what it prints into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.paths import ROOT

PAGE = ROOT / "docs" / "examples.md"
# The name of a program, and below it, before the next one, the block of what it prints.
SECTION = re.compile(r"(^`examples/(\w+)\.py`.*?^```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def sections() -> dict[str, str]:
    """What the page shows, by the name of the program."""
    found = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    return {name: text for _, name, text, _ in found}


def printed(name: str, folder: Path) -> str:
    """What a program prints when it is run in a folder; warnings are errors."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    return done.stdout


def frame(text: str) -> list[list[str]]:
    """The words, with every number replaced."""
    return [NUMBER.sub("#", line).split() for line in text.splitlines()]


def figures(text: str) -> list[float]:
    """The numbers."""
    return [float(number) for number in NUMBER.findall(text)]


def write() -> None:
    """Run everything, and show what it prints now."""
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name in sections():
            now = printed(name, Path(folder))
            text = SECTION.sub(lambda m: m[1] + now + m[4] if m[2] == name else m[0], text)  # noqa: B023
        PAGE.write_text(text, encoding="utf-8")
        picture = Path(folder) / "wgan_gp.png"
        (PAGE.parent / "wgan_gp.png").write_bytes(picture.read_bytes())


if __name__ == "__main__":
    write()
