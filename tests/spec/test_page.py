"""The page is written from the spec, and the table checks what it says."""

import sys
from pathlib import Path

import pytest

from equipoise.spec import __main__ as program
from equipoise.spec.claims import Claim, checked_by_tests, checked_here, claims, proved
from equipoise.spec.page import page
from tests.house.paths import ROOT


def test_the_page_is_what_the_generator_writes() -> None:
    """Write it anew with `python -m equipoise.spec page > docs/spec.md`."""
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("claim", checked_here(), ids=lambda claim: claim.statement)
def test_what_needs_no_runtime_is_checked_again(claim: Claim) -> None:
    """Closed forms, left folds, and every number of half precision."""
    assert claim.check is not None
    assert claim.check() == []


def test_what_tests_check_names_a_test_that_is_there() -> None:
    """The claims on the runtime are checked by files of this folder."""
    assert all((ROOT / claim.by).is_file() for claim in checked_by_tests())


def test_the_table_shows_each_claim_and_whether_it_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that fails is shown with its faults, and counted in the exit status."""
    some = [
        Claim("one", "proved", "every n", "z3", list),
        Claim("two", "certified", "", "arb", lambda: ["a fault"]),
        Claim("three", "believed", "", "faith"),
    ]
    monkeypatch.setattr(program, "claims", lambda: some)
    assert program.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("proved     one [every n]: holds (z3, ")
    assert lines[1].startswith("certified  two: FAILED (arb, ")
    assert lines[2:] == ["           a fault", "believed   three: faith", "1 claims FAILED."]


def test_the_program_prints_the_page_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """One argument is known."""
    assert program.main(["page"]) == 0
    assert capsys.readouterr().out == page()
    assert program.main(["pages"]) == 2
    assert capsys.readouterr().err == (
        "The argument must be 'page' or nothing, got 'pages'. Use `python -m equipoise.spec`.\n"
    )


def test_a_missing_library_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without z3 the first theorem says what to install, and the program ends."""
    monkeypatch.setitem(sys.modules, "z3", None)
    monkeypatch.setattr(program, "claims", lambda: proved()[1:])
    assert program.main([]) == 2
    assert capsys.readouterr().err == (
        "The exact layer needs `z3` for this, which is not installed. "
        "Use `pip install 'equipoise[spec]'`.\n"
    )


def test_no_statement_is_claimed_twice() -> None:
    """And all five levels are used."""
    statements = [claim.statement for claim in claims()]
    assert len(statements) == len(set(statements))
    levels = {claim.level for claim in claims()}
    assert levels == {"proved", "certified", "exhaustive", "tested", "believed"}


def test_the_page_names_no_file_that_is_gone() -> None:
    """Whatever it says is in tests/spec is."""
    words = page().replace("|", " ").split()
    assert all(
        (ROOT / word).is_file() for word in words if Path(word).parts[:2] == ("tests", "spec")
    )
