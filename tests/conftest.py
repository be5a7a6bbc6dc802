"""What every test runs under: one profile of random inputs, one seed, one thread a worker."""

import os

# Read when Triton is first imported, which any library may do: the kernels' tests need no GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings

# No deadline: the first call of a compiled or vectorised function takes its time.
settings.register_profile("here", deadline=None, max_examples=50)
# The same examples on every run, so that a red CI can be repeated.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Workers share the cores: one thread each, or they wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# The first call of a vectorised function loads its kernels; no test shall be timed with that.
torch.ones(16).exp().log().sqrt()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state, in whatever order the tests run."""
    torch.manual_seed(0)
