"""The examples run, in less than a minute each, and print what the page shows."""

from pathlib import Path

import pytest

from tests.examples.shown import figures, frame, printed, sections
from tests.house.paths import ROOT

SHOWN = sections()
# The demo is run by `make demo`; programs for other hosts are on the page of integrations.
ELSEWHERE = {"demo", "accelerate_distillation", "lightning_sparse", "transformers_language_model"}


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_prints_what_the_page_shows(name: str, tmp_path: Path) -> None:
    """The same words, and numbers within a quarter.

    Another processor adds in another order, and training makes the difference larger.
    """
    now = printed(name, tmp_path)
    assert frame(now) == frame(SHOWN[name])
    assert figures(now) == pytest.approx(figures(SHOWN[name]), rel=0.25, abs=0.05)


def test_every_example_is_shown() -> None:
    """No program of the folder is left out of the pages."""
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names - ELSEWHERE == set(SHOWN)


def test_other_words_are_seen() -> None:
    """A word or a row more, and a number beyond the tolerance, each make a difference."""
    assert frame("loss 1.5") == frame("loss  -2e-3")
    assert frame("loss 1.5") != frame("cost 1.5")
    assert figures("loss 1.5, step 3") == [1.5, 3.0]
