"""What the pages show of the examples, and how it is written again.

``python -m tests.examples.shown`` runs every example and puts what it prints into its page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.paths import ROOT

# Programs for other hosts are on the page of integrations.
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("examples", "integrations")]
SECONDS = 60.0
"""The most that a program may take."""
# The name of a program, and below it, before the next one, the block of what it prints.
SECTION = re.compile(r"(^`examples/(\w+)\.py`.*?^```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def sections() -> dict[str, str]:
    """What the pages show, by the name of the program."""
    found = [part for page in PAGES for part in SECTION.findall(page.read_text(encoding="utf-8"))]
    return {name: text for _, name, text, _ in found}


def printed(name: str, folder: Path) -> str:
    """What a program prints when it is run in a folder; warnings are errors."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    return done.stdout


def frame(text: str) -> list[list[str]]:
    """The words, with every number replaced."""
    return [NUMBER.sub("#", line).split() for line in text.splitlines()]


def strange(now: str, before: str) -> list[tuple[str, str]]:
    """Numbers that are off by more than a quarter, and by more than two in the last digit."""
    pairs = zip(NUMBER.findall(now), NUMBER.findall(before), strict=True)
    return [(a, b) for a, b in pairs if abs(float(a) - float(b)) > _allowed(b)]


def _allowed(number: str) -> float:
    digits, _, exponent = number.partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    # A little more, for numbers that are not what they are in binary.
    return 1.000001 * max(0.25 * abs(float(number)), 2 * last_digit)


def write() -> None:
    """Run everything, and show what it prints now."""
    with tempfile.TemporaryDirectory() as folder:
        now = {name: printed(name, Path(folder)) for name in sections()}
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            text = SECTION.sub(lambda found: found[1] + now[found[2]] + found[4], text)
            page.write_text(text, encoding="utf-8")
        picture = Path(folder) / "wgan_gp.png"
        (ROOT / "docs" / "wgan_gp.png").write_bytes(picture.read_bytes())


if __name__ == "__main__":
    write()
