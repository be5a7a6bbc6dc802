"""Hosts: which versions were tested, and what is said where one is missing."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

import equipoise.integrations
from tests.house.paths import ROOT

NEEDS = {
    "lightning": ("Lightning 2.6", "without it", ["lightning", "lightning.pytorch"]),
    "transformers": ("Transformers 5 and Accelerate", "without them", ["transformers"]),
    "accelerate": ("Accelerate 1", "without it", ["accelerate"]),
}


@pytest.mark.parametrize("host", NEEDS)
def test_a_missing_host_names_its_extra(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the module where the host is missing says what to type."""
    name = f"equipoise.integrations.{host}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(equipoise.integrations, host, raising=False)
    needed, without, modules = NEEDS[host]
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as error:
        importlib.import_module(name)
    assert str(error.value) == (
        f"`{name}` needs {needed}, got an environment {without}. "
        f"Use `pip install 'equipoise[{host}]'`."
    )


def test_the_page_says_which_versions_were_tested() -> None:
    """The versions on the page are those that development and CI install."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^(\w+)==(.+)$", constraints, re.MULTILINE))
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    row = f"| tested with, on the CPU, under torch {pins['torch']} |"
    assert f"{row} {' | '.join(pins[host] for host in NEEDS)} |" in page
