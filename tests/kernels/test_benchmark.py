"""The script that measures kernels on a GPU: without one it can at least be rehearsed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_measure import REHEARSE, kernels_on
from equipoise._recorder import Recorder

# The interpreter computes with NumPy, which warns where IEEE arithmetic goes on.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there it measures"),
]


@pytest.fixture(autouse=True)
def way() -> None:
    """Once is enough; and nothing is compiled, which takes minutes."""


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_a_rehearsal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks, kernels, peers and other ways run through, and leave no figures behind."""
    monkeypatch.setattr(gpu.sys, "argv", ["gpu", REHEARSE])
    gpu.main(str(tmp_path), "check_all", *gpu.TIMED, "fp32")
    printed = capsys.readouterr().out
    assert "0 faults" in printed
    for way in ("kernels, JS, base, track=gram, forward", "js_divergence, kernels", "probes, JS"):
        assert f"fp32 4×600 | {way}" in printed.replace("this library's plain definitions, ", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("track", ["norms", "gram"])
def test_what_is_timed_as_tracked_is_tracked(track: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation is held until its backward pass: what nobody holds notes no gradient."""
    noted = []
    passed = Recorder._all_passed

    def seen(recorder: Recorder, place: Any, gradient: torch.Tensor) -> None:
        passed(recorder, place, gradient)
        noted.append((recorder.taken, recorder.figures))

    monkeypatch.setattr(Recorder, "_all_passed", seen)
    pipe = gpu.pipeline(js=True, base=False)
    given = gpu.inputs(4, 60, torch.float32)
    with kernels_on("cpu"):
        gpu.plainly(lambda: gpu.step(pipe, given, track))()
        gpu.step(pipe, given, track)
    (by_none, figures), (by_kernels, nothing) = noted
    assert not by_none
    assert set(figures["logits", 0].names) == set(pipe.terms)
    assert by_kernels == pipe.terms.keys()
    assert not nothing  # the kernels had them before


def test_no_figures_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not measured is not printed."""
    monkeypatch.setattr(gpu.sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="there is no GPU"):
        gpu.main()
