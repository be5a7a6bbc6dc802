"""The examples run, in less than a minute each, and print what the pages show."""

from pathlib import Path

import pytest

from tests.examples.shown import frame, printed, sections, strange
from tests.house.paths import ROOT

SHOWN = sections()
# The demo is run by `make demo`.
ELSEWHERE = {"demo"}


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    """The same words, and numbers within a quarter, or two in the last digit that is shown.

    Another processor adds in another order, and training makes the difference larger.
    """
    now = printed(name, tmp_path)
    assert frame(now) == frame(SHOWN[name])
    assert strange(now, SHOWN[name]) == []


def test_every_example_is_shown() -> None:
    """No program of the folder is left out of the pages."""
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names - ELSEWHERE == set(SHOWN)


def test_other_words_are_seen() -> None:
    """A word or a row more, and a number beyond the tolerance, each make a difference."""
    assert frame("loss 1.5") == frame("loss  -2e-3")
    assert frame("loss 1.5") != frame("cost 1.5")
    assert strange("loss 1.9, norm 0.004, 5%, 1.2e-7", "loss 1.6, norm 0.002, 4%, 1e-7") == []
    assert strange("loss 2.1, norm 0.005, -4%", "loss 1.6, norm 0.002, 4%") == [
        ("2.1", "1.6"),
        ("0.005", "0.002"),
        ("-4", "4"),
    ]
