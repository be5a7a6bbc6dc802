"""The page of the documentation that is written from the definitions and the claims."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module

from equipoise.spec.claims import claims

AREAS = {
    "How large": ("magnitude", ("l1", "l2", "elastic_net", "output_magnitude")),
    "How far apart": ("divergence", ("kl_divergence",)),
    "How far from their mixture": ("mixture", ("js_divergence",)),
    "From samples": ("sampled", ("sampled_kl",)),
    "Pairs": ("agreement", ("consistency",)),
    "How uncertain": ("uncertainty", ("entropy",)),
    "How far from orthogonal": ("structure", ("orthogonality",)),
    "How steep": ("smoothness", ("gradient_penalty", "interpolated_gradient_penalty")),
    "Clipping by a limit": (
        "clipping",
        ("clip_by_value", "clip_by_norm", "clip_by_global_norm", "adaptive_clip"),
    ),
    "Clipping by rank and history": (
        "percentile",
        ("clip_by_percentile", "clip_by_norm_history", "clip_by_zscore"),
    ),
    "Decay, noise, means": (
        "decay",
        (
            "add_l2_decay",
            "add_l1_decay",
            "add_elastic_net_decay",
            "add_noise",
            "centralize",
            "skip_nonfinite",
        ),
    ),
}

HEAD = """# Definitions and claims

Each quantity is defined once, in plain Python over any scalar (`equipoise.spec`), and the fast code
is checked against it. This page is written from those definitions, by
`python -m equipoise.spec page`; a test holds it to them. `python -m equipoise.spec` prints the
claims and checks them again (install `'equipoise[spec]'`), and `make spec` runs every check.

- **proved**: for all real numbers, through the same functions, by z3 and an induction over the
  terms of a sum; the hypotheses can be satisfied, and faulty versions are refuted.
- **certified**: on given inputs, with an error bound that is derived and not chosen: the definition
  is run over balls that hold every result floating-point arithmetic may give.
- **exhaustive**: for every number of a format.
- **tested**: on examples and random inputs.
- **believed**: what the rest stands on.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, _table(), "## Definitions\n"]
    for title, (module, names) in AREAS.items():
        parts.append(f"### {title}\n")
        parts += [_definition(import_module(f"equipoise.spec.{module}"), name) for name in names]
    return "\n".join(parts)


def _table() -> str:
    rows = ["## Claims\n", "| claim | level | for | by |", "|---|---|---|---|"]
    for claim in claims():
        cells = (claim.statement, f"**{claim.level}**", claim.scope, claim.by)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _definition(module: object, name: str) -> str:
    value, edge = _said(getattr(module, name))
    slope, slope_edge = _said(getattr(module, f"{name}_grad"))
    return (
        f"#### `{name}`\n\n{value}\n\n"
        f"**Derivative.** {slope}\n\n"
        f"**At the edge.** {edge} Derivative: {slope_edge}\n"
    )


def _said(function: Callable[..., object]) -> tuple[str, str]:
    """The formula and the edge of a docstring, in Markdown."""
    text = (inspect.getdoc(function) or "").partition("Examples:")[0]
    formula, _, edge = text.partition("At the edge:")
    return _spans(formula), " ".join(_spans(edge).split())


def _spans(text: str) -> str:
    return text.strip().replace("``", "`")
