"""Kernels run through Triton's interpreter on the CPU; without Triton there are no such tests."""

import importlib.util
import sys

if importlib.util.find_spec("triton") is None:
    # On Linux it belongs to the test set-up, and leaving these tests out would hide its absence.
    assert sys.platform != "linux", "the tests of the kernels need triton; run `make test`"
    collect_ignore_glob = ["test_*.py"]
