"""Kernels run through Triton's interpreter on the CPU; without Triton there are no such tests."""

import importlib.util
import os
import sys

# Read when the kernels are decorated, that is when they are first imported.
os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is None:
    # On Linux it belongs to the test set-up, and leaving these tests out would hide its absence.
    assert sys.platform != "linux", "the tests of the kernels need triton; run `make test`"
    collect_ignore_glob = ["test_*.py"]
