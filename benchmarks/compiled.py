"""Compiled pipelines: seven terms and their norms in one function, beside what one does by hand.

``python -m benchmarks.compiled --guard`` fails where a ratio is worse than its limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import seconds, table
from benchmarks.tracking import PIPELINE, by_hand, values

ROWS, VOCABULARY = 256, 32000

# Of plain eager without tracking, and of the hand-written sum compiled without tracking. Ratios of
# one run: seconds depend on the machine, and on what else it does.
LIMITS = {"of eager by hand": 0.25, "of compiled by hand": 0.5}


def compiled_sum() -> Callable[[dict[str, Tensor]], None]:
    """The weighted sum by hand, compiled, with its backward pass."""

    def total(logits: Tensor, teacher: Tensor) -> Tensor:
        return torch.stack([*values({"logits": logits, "teacher": teacher}).values()]).sum()

    function = torch.compile(total, fullgraph=True)
    return lambda named: function(**named).backward()


def ratios() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Seconds of each way, and those of the compiled pipeline over those by hand."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(ROWS, VOCABULARY, device=device, requires_grad=True)
    named = {"logits": logits, "teacher": torch.randn(ROWS, VOCABULARY, device=device)}
    pipeline, hand = PIPELINE.compiled(), compiled_sum()

    def tracked(track: str | bool) -> None:
        result = pipeline(**named, track=track)  # type: ignore[arg-type]
        result.total.backward()
        if track:
            _ = result.gradients.norms

    cases: dict[str, Callable[[], object]] = {
        "weighted sum by hand": partial(by_hand, named),
        "the same, compiled": partial(hand, named),
        "compiled pipeline, untracked": partial(tracked, False),
        "compiled pipeline, norms": partial(tracked, "norms"),
        "compiled pipeline, gram": partial(tracked, "gram"),
    }
    times = seconds(cases, repeats=9)
    eager, compiled = times["weighted sum by hand"], times["the same, compiled"]
    return times, {
        name: {"of eager by hand": t / eager, "of compiled by hand": t / compiled}
        for name, t in times.items()
    }


def main(*, guard: bool = False) -> None:
    """One table; with ``guard``, an error where a limit is passed."""
    times, found = ratios()
    table(
        [f"7 terms, [{ROWS}, {VOCABULARY}]", "time", *LIMITS],
        [
            [name, f"{t * 1e3:.0f} ms", *(f"{found[name][of]:.2f}×" for of in LIMITS)]
            for name, t in times.items()
        ],
    )
    worse = [of for of, limit in LIMITS.items() if found["compiled pipeline, norms"][of] > limit]
    if guard and worse:
        sys.exit(f"the compiled pipeline with norms has become slower: {worse} above {LIMITS}")


if __name__ == "__main__":
    main(guard="--guard" in sys.argv)
