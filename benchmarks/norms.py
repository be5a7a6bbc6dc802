"""Norms: accuracy and time against torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import equipoise as eq
from benchmarks.measure import seconds, table
from equipoise._numerics import total_norm

ENTRIES = 10**8


def exact(x: Tensor) -> float:
    """The norm from float64 squares, added exactly."""
    return math.sqrt(math.fsum(c.double().square().sum().item() for c in x.split(1 << 16)))


def main() -> None:
    """Equal and random entries, ours against `torch.linalg.vector_norm`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, x in (
        ("equal", torch.full((ENTRIES,), 0.1, device=device)),
        ("random", torch.randn(ENTRIES, device=device)),
    ):
        cases = {
            "equipoise, for reports": lambda x=x: total_norm([x]),
            "equipoise, differentiable": lambda x=x: eq.output_magnitude(
                x, target=0.0, norm="l2"
            ).sqrt(),
            "torch.linalg.vector_norm": lambda x=x: torch.linalg.vector_norm(x),
            "the same, dtype=float64": lambda x=x: torch.linalg.vector_norm(x, dtype=torch.float64),
        }
        times, true = seconds(cases, repeats=3), exact(x)
        base = times["torch.linalg.vector_norm"]
        for case, run in cases.items():
            error = abs(run().item() - true) / true
            rows.append(
                [
                    name,
                    case,
                    f"{error:.1e}",
                    f"{times[case] * 1e3:.0f} ms",
                    f"{times[case] / base:.1f}×",
                ]
            )
    table(["10⁸ float32 entries", "way", "relative error", "time", "of torch's"], rows)


if __name__ == "__main__":
    main()
