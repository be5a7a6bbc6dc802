"""The shapes in the annotations are true: a checker at run time accepts right calls only."""

import subprocess
import sys

import pytest

from tests.house.paths import ROOT

HOOK = """
import jaxtyping
import tests.house.shape_checker
with jaxtyping.install_import_hook("equipoise", "tests.house.shape_checker.check"):
    import equipoise as eq
import torch
x = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
p = x.log_softmax(-1)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that checks every annotated shape of equipoise, running `code`."""
    command = [sys.executable, "-c", HOOK + code]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


def test_right_calls_pass() -> None:
    """Public functions accept the shapes they document, and return those they promise."""
    done = run("print(eq.l1(x).item(), eq.kl_divergence(p, p).item(), eq.consistency(x, x).item())")
    assert (done.returncode, done.stdout) == (0, "6.0 0.0 0.0\n"), done.stderr


@pytest.mark.parametrize("call", ["eq.consistency(x, x[0])", "eq.kl_divergence(p, p[:, :1])"])
def test_a_wrong_shape_is_caught(call: str) -> None:
    """A call that breaks an annotation fails in the checker, before the function's own words."""
    done = run(call)
    assert done.returncode == 1
    assert "jaxtyping.TypeCheckError" in done.stderr
