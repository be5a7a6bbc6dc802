"""Kernels run through Triton's interpreter on the CPU; without Triton there are no such tests."""

import importlib.util
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    # On Linux it belongs to the test set-up, and leaving these tests out would hide its absence.
    assert sys.platform != "linux", "the tests of the kernels need triton; run `make test`"
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, params=["kernels", "formulas"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fused path under test: Triton's kernels, or the formulas that the compiler is given."""
    from tests.kernels import exactly

    name: str = request.param
    monkeypatch.setattr(exactly, "evaluate", exactly.WAYS[name])
    return name
