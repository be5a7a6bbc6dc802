"""Large vocabularies: memory and time, whole and in chunks."""

from __future__ import annotations

import sys
import time

import torch

import equipoise as eq
from benchmarks.measure import alone, peak_bytes, table

VOCABULARY = 128256
GIB = 2**30
# The two-sided divergences would not fit whole into 24 GiB on the CPU with all 4096 rows.
CPU_CASES = [("entropy", 4096), ("kl_divergence", 1024), ("js_divergence", 1024)]
GPU_CASES = [(name, 4096) for name in ("entropy", "kl_divergence", "js_divergence")]


def case(name: str, rows: int, chunk: int | None) -> tuple[int, float]:
    """Peak extra memory and seconds for value and gradient on bfloat16 logits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [
        torch.randn(rows, VOCABULARY, dtype=torch.bfloat16, device=device).requires_grad_()
        for _ in range(1 if name == "entropy" else 2)
    ]
    penalty = getattr(eq, name)
    start = time.perf_counter()

    def run() -> None:
        penalty(*inputs, from_logits=True, chunk=chunk).backward()

    taken = peak_bytes(run)
    return taken, time.perf_counter() - start


def main() -> None:
    """Each divergence whole, and 256 and 64 rows at a time; every case in its own process."""
    rows = []
    for name, size in GPU_CASES if torch.cuda.is_available() else CPU_CASES:
        results = {
            chunk: alone("benchmarks.chunks", name, str(size), str(chunk)) for chunk in (0, 256, 64)
        }
        whole_bytes, whole_seconds = results[0]
        for chunk, (taken, duration) in results.items():
            rows.append(
                [
                    f"{name} [{size}, {VOCABULARY}]",
                    str(chunk or "whole"),
                    f"{taken / GIB:.2f} GiB",
                    f"{taken / whole_bytes:.2f}×",
                    f"{duration:.2f} s",
                    f"{duration / whole_seconds:.2f}×",
                ]
            )
    table(["bfloat16 logits", "chunk", "peak extra memory", "of whole", "time", "of whole"], rows)


if __name__ == "__main__":
    name, size, chunk = sys.argv[1:]
    print(*case(name, int(size), int(chunk) or None))
