"""Every term that the kernels know, in combinations that share one pass."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

import equipoise as eq
from equipoise import Term

LOGITS = {"from_logits": True}

SIZES = {
    "l1": Term(eq.l1, inputs="x", weight=1e-3),
    "l1_mean": Term(eq.l1, inputs="x", weight=0.1, options={"reduction": "mean", "scale": 0.5}),
    "l2": Term(eq.l2, inputs="x", weight=-0.3, options={"reduction": "mean"}),
    "elastic": Term(eq.elastic_net, inputs="x", weight=1e-3, options={"l1_ratio": 0.3}),
    "rms": Term(eq.output_magnitude, inputs="x", weight=0.2, options={"target": 0.5}),
    "length": Term(eq.output_magnitude, inputs="x", weight=1e-3, options={"norm": "l2"}),
}
BASE = {"base": Term(F.cross_entropy, inputs=("x", "labels"))}


def entropy(weight: float = -0.2, **options: Any) -> dict[str, Term]:
    """The entropy of x."""
    return {"entropy": Term(eq.entropy, inputs="x", weight=weight, options={**LOGITS, **options})}


def kl(*inputs: str, weight: float = 0.7, **options: Any) -> dict[str, Term]:
    """A divergence with y, first or second."""
    order = inputs or ("y", "x")
    return {
        "kl": Term(eq.kl_divergence, inputs=order, weight=weight, options={**LOGITS, **options})
    }


def js(*inputs: str, weight: float = 0.5, **options: Any) -> dict[str, Term]:
    """A Jensen-Shannon divergence with y, first or second."""
    order = inputs or ("y", "x")
    return {
        "js": Term(eq.js_divergence, inputs=order, weight=weight, options={**LOGITS, **options})
    }


CASES: dict[str, dict[str, Term]] = {
    "sizes": SIZES,
    "one size": {"l1": SIZES["l1"]},
    "all": {**BASE, **SIZES, **entropy(), **kl(), **js()},
    "x first": {**entropy(), **kl("x", "y"), **js("x", "y", beta=0.2)},
    "reverse": {**BASE, **kl(direction="reverse")},
    "symmetric": {**SIZES, **kl(direction="symmetric"), **js(beta=0.9)},
    "symmetric, x first": kl("x", "y", direction="symmetric"),
    "warm": {**entropy(temperature=2.0), **kl(temperature=2.0, temperature_squared=True)},
    "cold": {**SIZES, **entropy(temperature=0.5), **kl("x", "y", temperature=0.5)},
    "bits": {**js(base=2, normalized=True, beta=0.3), **entropy(mode="bonus", normalize=True)},
    "sums": {**js(reduction="sum"), **kl(denominator=7.0), **entropy(reduction="sum")},
    "base alone": BASE,
    "summed base": {
        "base": Term(F.cross_entropy, inputs=("x", "labels"), options={"reduction": "sum"})
    },
}
