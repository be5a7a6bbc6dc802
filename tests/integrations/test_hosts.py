"""Without its host a module says which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest

import equipoise.integrations

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
