"""Tracking: what it costs to know which of seven terms moves the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import equipoise as eq
from benchmarks.measure import peak_bytes, seconds, table
from equipoise import Pipeline, Term

Size = tuple[int, int, torch.dtype]
CPU_SIZES: list[Size] = [(256, 32000, torch.float32)]
GPU_SIZES: list[Size] = [(8192, 32768, torch.float32), (4096, 128256, torch.bfloat16)]
GIB = 2**30
LOGITS = {"from_logits": True}
TERMS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], float, dict[str, Any]]] = {
    "l1": (eq.l1, ("logits",), 1e-7, {}),
    "l2": (eq.l2, ("logits",), 1e-7, {}),
    "elastic_net": (eq.elastic_net, ("logits",), 1e-7, {}),
    "entropy": (eq.entropy, ("logits",), 0.01, LOGITS),
    "kl": (eq.kl_divergence, ("teacher", "logits"), 0.1, LOGITS),
    "js": (eq.js_divergence, ("teacher", "logits"), 0.1, LOGITS),
    "magnitude": (eq.output_magnitude, ("logits",), 0.01, {}),
}
PIPELINE = Pipeline(
    **{
        name: Term(penalty, inputs=inputs, weight=weight, options=options)
        for name, (penalty, inputs, weight, options) in TERMS.items()
    }
)


def values(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weighted term, by hand."""
    return {
        name: weight * penalty(*(named[key] for key in inputs), **options)
        for name, (penalty, inputs, weight, options) in TERMS.items()
    }


def by_hand(named: dict[str, Tensor]) -> None:
    """The weighted sum, as one writes it without a library."""
    sum(values(named).values()).backward()


def pipeline(named: dict[str, Tensor], track: Literal[False, "norms", "gram"]) -> None:
    """The pipeline, and its report read to the end where it is tracked."""
    result = PIPELINE(**named, track=track)
    result.total.backward()
    if track:
        _ = result.gradients.norms


def retained(named: dict[str, Tensor]) -> None:
    """One `autograd.grad(retain_graph=True)` a term, then the backward pass."""
    terms = values(named)
    norms = []
    for value in terms.values():
        (gradient,) = torch.autograd.grad(value, named["logits"], retain_graph=True)
        norms.append(torch.linalg.vector_norm(gradient))
    sum(terms.values()).backward()


def recomputed(named: dict[str, Tensor]) -> None:
    """N + 1 further evaluations with a backward pass each, then that of training."""
    for name in (*TERMS, None):
        terms = values(named) if name is None else {name: values_of(name, named)}
        (gradient,) = torch.autograd.grad(sum(terms.values()), named["logits"])
        torch.linalg.vector_norm(gradient)
    by_hand(named)


def values_of(name: str, named: dict[str, Tensor]) -> Tensor:
    """One weighted term, by hand."""
    penalty, inputs, weight, options = TERMS[name]
    return weight * penalty(*(named[key] for key in inputs), **options)


def small_overhead() -> list[str]:
    """What composing costs a term on tensors too small to matter."""
    x = torch.ones(4, requires_grad=True)
    many = Pipeline(**{f"t{i}": Term(eq.l1, weight=0.1) for i in range(20)})
    cases: dict[str, Callable[[], object]] = {
        "bare": lambda: [eq.l1(x) for _ in range(20)],
        "untracked": lambda: many(x),
        "tracked": lambda: many(x, track=True),
    }
    times = seconds(cases, repeats=200)
    return [
        f"{(times[name] - times['bare']) / 20 * 1e6:.1f} µs a term over the bare call, {name}"
        for name in ("untracked", "tracked")
    ]


def compared(size: Size, device: str) -> None:
    """Every way of knowing, side by side."""
    rows, vocabulary, dtype = size
    logits = torch.randn(rows, vocabulary, device=device, dtype=dtype, requires_grad=True)
    named = {"logits": logits, "teacher": torch.randn_like(logits, requires_grad=False)}
    cases = {
        "weighted sum by hand": partial(by_hand, named),
        "pipeline, untracked": partial(pipeline, named, False),
        "pipeline, norms": partial(pipeline, named, "norms"),
        "pipeline, gram": partial(pipeline, named, "gram"),
        "retain_graph, one pass a term": partial(retained, named),
        "N+1 further evaluations": partial(recomputed, named),
    }
    times = seconds(cases, repeats=12)
    plain, untracked = times["weighted sum by hand"], times["pipeline, untracked"]
    header = [f"7 terms, [{rows}, {vocabulary}] {dtype}", "time", "of by hand", "of untracked"]
    lines = [
        [name, f"{t * 1e3:.1f} ms", f"{t / plain:.2f}×", f"{t / untracked:.2f}×"]
        for name, t in times.items()
    ]
    if device == "cuda":
        header.append("peak memory")
        for line, run in zip(lines, cases.values(), strict=True):
            logits.grad = None
            line.append(f"+{peak_bytes(run) / GIB:.2f} GiB")
    table(header, lines)
    print()


def main() -> None:
    """Seven terms on one logits tensor, value and gradient, side by side."""
    on_gpu = torch.cuda.is_available()
    for size in GPU_SIZES if on_gpu else CPU_SIZES:
        compared(size, "cuda" if on_gpu else "cpu")
    for line in small_overhead():
        print(line)


if __name__ == "__main__":
    main()
