"""The words around the code are true: the README runs, and the commands it names are CI's."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.house.paths import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
HOME_OF_SOMEONE = re.compile(r"/(?:root|home|Users)/")


def text_of(path: Path) -> str:
    """The text of a file of the repository."""
    return path.read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    """The blocks of Python in a Markdown text, each on its own lines, for true line numbers."""
    return [
        "\n" * text.count("\n", 0, block.start(1)) + block.group(1)
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def files_below(folder: Path, ignored: list[str]) -> Iterator[Path]:
    """All files that no pattern of `ignored` leaves out."""
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in ignored):
            continue
        if path.is_dir():
            yield from files_below(path, ignored)
        else:
            yield path


def repository_files() -> list[Path]:
    """What the repository holds: everything but git's own and what `.gitignore` names."""
    lines = text_of(ROOT / ".gitignore").splitlines()
    return list(files_below(ROOT, [".git", *(line.rstrip("/") for line in lines if line)]))


@pytest.mark.parametrize("command", ["make demo", "make test", "What it is not"])
def test_the_first_screen_shows_the_command(command: str) -> None:
    """A reader meets the two commands, and what this is not, in the first forty lines."""
    assert command in "\n".join(text_of(README).splitlines()[:40])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_run(page: Path) -> None:
    """The Python blocks of the README and of each page run, in order, as one program."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in python_blocks(text_of(page)):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of the repository."""
    links = LINK.findall(text_of(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_link_is_seen() -> None:
    """Relative ones are, with or without a place in the page; others are not."""
    text = "[a](docs/a.md) [b](../b.png#there) [c](https://example.org) [d](#below)"
    assert LINK.findall(text) == ["docs/a.md", "../b.png"]


def test_the_readme_has_examples() -> None:
    """The README and the pages on penalties, pipelines and tracking hold Python blocks."""
    with_blocks = {page.name for page in PAGES if python_blocks(text_of(page))}
    assert {"README.md", "penalties.md", "pipelines.md", "tracking.md"} <= with_blocks


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "index.md"], ids=lambda page: page.name)
def test_a_front_page_shows_what_its_example_prints(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block of text under the first example is what the example prints."""
    text = text_of(page)
    exec(compile(python_blocks(text)[0], str(page), "exec"), {"__name__": page.stem})
    shown = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown.group(1)


def test_blocks_keep_their_lines() -> None:
    """A block of Python is found whole, and others are left out."""
    text = "# Title\n```python\nx = 1\n\ny = 2\n```\n```console\n$ make\n```\n"
    assert python_blocks(text) == ["\n\nx = 1\n\ny = 2\n"]


def test_ci_checks_then_tests() -> None:
    """`.ci/run` calls `make check`, then `make test`, and nothing after."""
    commands = [line for line in text_of(ROOT / ".ci" / "run").splitlines() if "make" in line]
    assert commands == ["make check", "make test"]


def test_the_workflow_runs_both_commands_everywhere() -> None:
    """Each system and Python of the workflow runs all of CI, and the demo."""
    job = yaml.safe_load(text_of(ROOT / ".github" / "workflows" / "ci.yml"))["jobs"]["run"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [
        "bash .ci/run",
        "make demo",
    ]
    assert job["strategy"]["matrix"] == {
        "os": ["ubuntu-latest", "macos-latest"],
        "python": ["3.11", "3.13"],
    }


def test_no_file_names_a_developers_machine() -> None:
    """No text of the repository contains a path below somebody's home."""
    files = repository_files()
    assert README in files
    named = [path for path in files if HOME_OF_SOMEONE.search(path.read_text(errors="replace"))]
    assert named == []


@pytest.mark.parametrize("folder", ["root", "home", "Users"])
def test_a_path_below_a_home_is_seen(folder: str) -> None:
    """The pattern matches such a path, wherever it stands in a line."""
    assert HOME_OF_SOMEONE.search(f'cache = "/{folder}/someone/cache"')
