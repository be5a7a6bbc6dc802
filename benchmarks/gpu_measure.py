"""How time, memory and bandwidth are measured on a GPU; without one, cases are rehearsed."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from equipoise.fast import _take as fast

Case = Callable[[], object]
REHEARSE = "--rehearse"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@contextmanager
def kernels_on(*devices: str) -> Iterator[None]:
    """Kernels are asked about tensors on these devices; on none, as if they were not there."""
    before, fast.KERNELS_ON = fast.KERNELS_ON, set(devices)
    try:
        yield
    finally:
        fast.KERNELS_ON = before


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def milliseconds(case: Case, repeats: int = 9, together: int = 8) -> float:
    """The median time on the device, between events.

    Several calls follow one another without waiting, as in training, where the host runs ahead.
    """
    if REHEARSE in sys.argv:
        case()
        return math.nan
    for _ in range(3):
        case()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(together):
            case()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / together)
    return statistics.median(times)


def host_milliseconds(case: Case) -> float:
    """The time until the host is free again; what it has to be below to run ahead."""
    if REHEARSE in sys.argv:
        case()
        return math.nan
    synchronize()
    start = time.perf_counter()
    for _ in range(10):
        case()
    taken = (time.perf_counter() - start) / 10
    synchronize()
    return taken * 1e3


def peak(case: Case) -> float:
    """Bytes taken beyond those held before."""
    if not ON_GPU:
        case()
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """Bytes a second, read and written, by a copy of 4 GiB."""
    x = torch.randn(2**30 if ON_GPU else 2**10, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / (milliseconds(lambda: y.copy_(x)) * 1e-3)
