"""How seconds and bytes are measured."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def seconds(cases: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """The median time of each case.

    The cases take turns, and another one begins each round: noise falls on all of them, and so does
    what a case leaves behind in the allocator for the next.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(repeats + 1):
        first = round_ % len(cases)
        for name in [*cases][first:] + [*cases][:first]:
            _finish()
            start = time.perf_counter()
            cases[name]()
            _finish()
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(run: Callable[[], object]) -> int:
    """Memory taken at the most by a call, beyond what was held before it.

    On a GPU the allocator knows. On the CPU it is the highest resident size of this process, so a
    process can measure one case only: see `alone`.
    """
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        _finish()
        return torch.cuda.max_memory_allocated() - before
    before = _highest()
    run()
    return _highest() - before


def _highest() -> int:
    if STATUS.exists():  # the other figure would include that of the process which started this one
        (line,) = (x for x in STATUS.read_text(encoding="utf-8").splitlines() if "VmHWM" in x)
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def alone(module: str, *arguments: str) -> list[float]:
    """Run one case of a benchmark in a process of its own, and read the numbers it prints."""
    command = [sys.executable, "-m", module, *arguments]
    # What keeps memory for the next case would count as this one's.
    variables = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=variables
    ).stdout
    return [float(word) for word in printed.split()]


def table(header: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")
