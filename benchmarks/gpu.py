"""One GPU: the fused kernels checked, then timed beside peers and the physical floor.

``python -m benchmarks.gpu FOLDER`` checks on fresh random data with poisoned outputs, prints one
table, and writes a JSON file a part into the folder; parts may be named after it. With
``--rehearse`` every case runs once and nothing is timed: several such processes fill the compilers'
caches sooner than one. So it runs without a GPU too, with ``TRITON_INTERPRET=1``, on a few numbers.
Liger is a peer if it can be imported.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
import triton
from torch import Tensor

import equipoise as eq
from benchmarks.gpu_checks import check_all
from benchmarks.gpu_measure import (
    DEVICE,
    ON_GPU,
    REHEARSE,
    Case,
    copy_bandwidth,
    host_milliseconds,
    kernels_on,
    milliseconds,
    peak,
)
from benchmarks.measure import table
from benchmarks.penalties import js_by_hand
from benchmarks.tracking import TERMS, recomputed, retained
from benchmarks.tracking import by_hand as summed
from equipoise import Pipeline, Term
from equipoise._track import Track
from equipoise.kernels import _launch as launch

SHAPES = {
    "fp32 8192×32768": (8192, 32768, torch.float32),
    "bf16 4096×128256": (4096, 128256, torch.bfloat16),
}
FEW = {"fp32 4×600": (4, 600, torch.float32), "bf16 4×600": (4, 600, torch.bfloat16)}
"""Where there is no GPU."""
BASE = {"base": Term(F.cross_entropy, inputs=("logits", "labels"))}
LOGITS = {"from_logits": True}
USUAL = {
    "kl_divergence": lambda y, x: F.kl_div(
        x.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="batchmean"
    ),
    "js_divergence": js_by_hand,
}

Result = dict[str, Any]


def inputs(rows: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random logits that move, a teacher that does not, and labels."""
    generator = torch.Generator(DEVICE).manual_seed(torch.seed() % 2**31)
    draw = partial(torch.randn, rows, vocabulary, device=DEVICE, generator=generator)
    return {
        "logits": draw().to(dtype).requires_grad_(),
        "teacher": draw().to(dtype),
        "labels": torch.randint(vocabulary, (rows,), device=DEVICE),
    }


def pipeline(*, js: bool, base: bool) -> Pipeline:
    """The seven terms of the tracking benchmark, or those wanted of them."""
    terms = {
        name: Term(penalty, inputs=keys, weight=weight, options=options)
        for name, (penalty, keys, weight, options) in TERMS.items()
        if js or name != "js"
    }
    return Pipeline(**(BASE if base else {}), **terms)


def forward(pipe: Pipeline, given: dict[str, Tensor], track: Track) -> None:
    """Values, figures and gradient; the fast paths have all of them after this."""
    pipe(**needed(pipe, given), track=track)


def step(pipe: Pipeline, given: dict[str, Tensor], track: Track) -> None:
    """The same, and the backward pass."""
    given["logits"].grad = None
    result = pipe(**needed(pipe, given), track=track)  # held: nothing is noted for nobody
    result.total.backward()


def afresh(way: Callable[[dict[str, Tensor]], None], given: dict[str, Tensor]) -> None:
    """Another way, which finds no gradient to add its own to."""
    given["logits"].grad = None
    way(given)


def needed(pipe: Pipeline, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that the pipeline reads."""
    keys = {key for term in pipe.terms.values() for key in term.inputs or ()}
    return {key: x for key, x in given.items() if key in keys}


def plainly(case: Case) -> Case:
    """The case, as it goes without kernels."""

    def run() -> None:
        with kernels_on():
            case()

    return run


def fused_cases(name: str, given: dict[str, Tensor], copy: float, results: list[Result]) -> None:
    """The kernels with and without Jensen-Shannon, base and inner products, beside the floors."""
    x = given["logits"]
    size = x.numel() * x.element_size()
    for js in (False, True):
        floor = (7 if js else 5) * size / copy * 1e3
        for base, track in ((False, False), (False, "norms"), (True, "gram")):
            pipe = pipeline(js=js, base=base)
            label = f"kernels{', JS' if js else ''}{', base' if base else ''}, track={track}"
            x.grad = None
            taken = peak(partial(forward, pipe, given, track))
            for way, case in (("forward", forward), ("and backward", step)):
                ms = milliseconds(partial(case, pipe, given, track))
                results.append(
                    row(name, f"{label}, {way}", ms, floor)
                    | ({"memory": taken / size} if case is forward else {})
                    | {"host_ms": host_milliseconds(partial(case, pipe, given, track))}
                )


def by_hand(pipe: Pipeline, given: dict[str, Tensor]) -> Tensor:
    """The weighted sum without a library's help."""
    total: Any = 0
    for term in pipe.terms.values():
        penalty = term.penalty(*(given[k] for k in term.inputs or ()), **term.options)
        total = total + term.weight * penalty
    return total


def other_ways(name: str, given: dict[str, Tensor], copy: float, results: list[Result]) -> None:
    """What else one can do: plain, compiled by hand, and the compiled pipeline."""
    pipe, x = pipeline(js=True, base=False), given["logits"]
    floor = 7 * x.numel() * x.element_size() / copy * 1e3
    function = torch.compile(partial(by_hand, pipe), dynamic=False)
    compiled = pipe.compiled()

    def hand() -> None:
        x.grad = None
        function(needed(pipe, given)).backward()

    named = needed(pipe, given)
    ways: dict[str, Case] = {
        "sum by hand": partial(afresh, summed, named),
        "one `autograd.grad` a term": partial(afresh, retained, named),
        "N+1 further evaluations": partial(afresh, recomputed, named),
        "this library's plain definitions, untracked": plainly(partial(step, pipe, given, False)),
        "this library's plain definitions, probes": plainly(partial(step, pipe, given, "norms")),
        "sum by hand, compiled": hand,
        "pipeline.compiled(), norms": plainly(partial(step, compiled, given, "norms")),
    }
    for way, case in ways.items():
        ms = milliseconds(case, repeats=5, together=3)
        x.grad = None
        results.append(row(name, f"{way}, JS, and backward", ms, floor))
        results[-1]["memory"] = peak(case) / (x.numel() * x.element_size())


def divergences(name: str, given: dict[str, Tensor], copy: float, results: list[Result]) -> None:
    """One divergence alone, forward and backward, beside Liger's, the compiler's and torch's."""
    x, y = given["logits"], given["teacher"]
    size = x.numel() * x.element_size()
    for penalty, reads in ((eq.kl_divergence, 5), (eq.js_divergence, 7)):
        term = Term(penalty, inputs=("teacher", "logits"), options=LOGITS)
        compiled = torch.compile(partial(penalty, from_logits=True), dynamic=False)

        def loss(function: Callable[..., Tensor]) -> None:
            x.grad = None
            function(y, x).backward()

        ways: dict[str, Case] = {
            "kernels": partial(step, Pipeline(term=term), given, False),
            "compiled": partial(loss, compiled),
            "this library's plain definition": partial(loss, partial(penalty, from_logits=True)),
            "usual lines of torch": partial(loss, USUAL[penalty.__name__]),
        }
        for label, wide in (("bf16/as given", None), ("float32", torch.float32)):
            peer = liger(penalty.__name__, wide)
            if peer is not None:
                ways[f"Liger, log-probabilities {label}"] = partial(loss, peer)
        for way, case in ways.items():
            ms = milliseconds(case, repeats=7)
            results.append(row(name, f"{penalty.__name__}, {way}", ms, reads * size / copy * 1e3))
            x.grad = None
            results[-1]["memory"] = peak(case) / size


def liger(name: str, wide: torch.dtype | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Liger's way from logits to a divergence, if it is here.

    It takes log-probabilities: in the precision of the logits, or in float32, as its own fused
    losses make them.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    if name == "kl_divergence":
        from liger_kernel.ops.kl_div import LigerKLDivLossFunction as Function  # noqa: PLC0415

        return lambda y, x: Function.apply(
            x.log_softmax(-1, wide), y.log_softmax(-1, wide), "batchmean", True, 1e-10
        )
    from liger_kernel.ops.jsd import LigerJSDFunction  # noqa: PLC0415

    return lambda y, x: LigerJSDFunction.apply(
        x.log_softmax(-1, wide), y.log_softmax(-1, wide), None, 0.5, -100
    )


def tuned(name: str, given: dict[str, Tensor], copy: float, results: list[Result]) -> None:
    """Other cuts of a row into tiles; only when asked for by name."""
    size = given["logits"].numel() * given["logits"].element_size()
    before = launch.WARPS, launch.BYTES
    for warps, width in ((4, 8), (4, 16), (8, 16), (8, 8), (2, 16), (16, 16)):
        launch.WARPS, launch.BYTES = warps, width
        for js, base, track in (
            (False, False, "norms"),
            (True, False, "norms"),
            (True, True, "gram"),
        ):
            pipe = pipeline(js=js, base=base)
            ms = milliseconds(partial(forward, pipe, given, track), repeats=7)
            label = f"{warps} warps, {width} bytes, js={js}, track={track}"
            results.append(row(name, label, ms, (7 if js else 5) * size / copy * 1e3))
    launch.WARPS, launch.BYTES = before


def row(shape: str, way: str, ms: float, floor: float) -> Result:
    """One line of the results."""
    print(f"{shape} | {way} | {ms:.3f} ms | {ms / floor:.2f}×", flush=True)
    return {"shape": shape, "way": way, "ms": ms, "floor_ms": floor, "over_floor": ms / floor}


def report(results: list[Result]) -> None:
    """All figures as one table."""
    table(
        ["shape", "way", "time", "over floor", "memory / gradient", "host"],
        [
            [
                r["shape"],
                r["way"],
                f"{r['ms']:.2f} ms",
                f"{r['over_floor']:.2f}×",
                f"{r['memory']:.2f}" if "memory" in r else "",
                f"{r['host_ms']:.2f} ms" if "host_ms" in r else "",
            ]
            for r in results
        ],
    )


PARTS = {part.__name__: part for part in (fused_cases, divergences, other_ways, tuned)}
TIMED = ("fused_cases", "divergences", "other_ways")


def main(folder: str = "", *only: str) -> None:
    """Check, time, print, write; or only the parts named, and the types of numbers named."""
    if not ON_GPU and REHEARSE not in sys.argv:
        sys.exit(f"there is no GPU to measure; with {REHEARSE} every case runs once without one")
    device = torch.cuda.get_device_name() if ON_GPU else "no GPU"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}, Python {platform.python_version()}, {versions}")
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s", flush=True)
    facts = {"device": device, "versions": versions, "copy": copy}
    everything: list[Result] = []
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    every = SHAPES if ON_GPU else FEW
    shapes = {n: s for n, s in every.items() if n.split()[0] in only} or every
    parts = [part for part in only if part in (*PARTS, check_all.__name__)]
    for part in parts or (check_all.__name__, *TIMED):
        if part == check_all.__name__:
            check_all()
            continue
        results: list[Result] = []
        for name, (rows, vocabulary, dtype) in shapes.items():
            with kernels_on(DEVICE):
                PARTS[part](name, inputs(rows, vocabulary, dtype), copy, results)
            if ON_GPU:
                torch.cuda.empty_cache()
        everything += results
        if folder and REHEARSE not in sys.argv:  # a run that is cut short leaves what it has seen
            text = json.dumps({**facts, "results": results}, indent=1, ensure_ascii=False)
            (Path(folder) / f"{part}.json").write_text(text, encoding="utf-8")
    report(everything)


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != REHEARSE))
