"""Draw what `benchmarks.gpu` wrote: every path's time over the physical floor.

``python -m benchmarks.plot benchmarks/h200 benchmarks/h200.png``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OURS, OTHERS = "#1b6ca8", "#b0b7bf"
LABELS = {
    "kernels, track=norms, and backward": "six terms, norms",
    "kernels, base, track=gram, and backward": "the same, base, inner products",
    "kernels, JS, track=norms, and backward": "seven terms, norms",
    "kernels, JS, base, track=gram, and backward": "the same, base, inner products ",
    "pipeline.compiled(), norms, JS, and backward": "seven terms, compiled pipeline",
    "sum by hand, compiled, JS, and backward": "seven terms, compiled by hand",
    "this library's plain definitions, untracked, JS, and backward": "seven terms, eager",
    "one `autograd.grad` a term, JS, and backward": "seven terms, one pass a term",
    "kl_divergence, kernels": "KL",
    "kl_divergence, compiled": "KL, compiled",
    "kl_divergence, Liger, log-probabilities float32": "KL, Liger",
    "js_divergence, kernels": "JS",
    "js_divergence, compiled": "JS, compiled",
    "js_divergence, Liger, log-probabilities float32": "JS, Liger",
}


def main(folder: str, file: str) -> None:
    """One panel a shape; the bars of the kernels stand out."""
    results = [
        row
        for path in sorted(Path(folder).glob("*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))["results"]
        if row["way"] in LABELS
    ]
    shapes = list(dict.fromkeys(row["shape"] for row in results))
    figure, panels = plt.subplots(1, len(shapes), figsize=(11, 5), sharey=True, sharex=True)
    for panel, shape in zip(panels, shapes, strict=True):
        draw(panel, shape, {r["way"]: r["over_floor"] for r in results if r["shape"] == shape})
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def draw(panel: Axes, title: str, over_floor: dict[str, Any]) -> None:
    """Bars from the floor upwards, on a logarithmic axis."""
    ways = [way for way in LABELS if way in over_floor][::-1]
    colors = [OURS if "kernels" in way else OTHERS for way in ways]
    bars = panel.barh([LABELS[way] for way in ways], [over_floor[w] for w in ways], color=colors)
    panel.bar_label(bars, [f"{over_floor[way]:.3g}×" for way in ways], padding=3, fontsize=8)
    panel.axvline(1.0, color="black", linewidth=1)
    panel.set(xscale="log", xlim=(0.8, 700), title=title, xlabel="time over the physical floor")
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(*sys.argv[1:])
