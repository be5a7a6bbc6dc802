"""A small model with a pipeline on top, its base given in each of the three ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, schedules

BASES = ("term", "callable", "tensor", "none")

TERMS = {
    "sparsity": Term(eq.l1, inputs="hidden", weight=1e-2),
    "distill": Term(
        eq.kl_divergence,
        inputs=("teacher", "student"),
        weight=0.7,
        options={"from_logits": True, "temperature": 2.0},
    ),
    "explore": Term(
        eq.entropy,
        inputs="student",
        weight=schedules.linear(0.05, 0.1, steps=11),
        options={"mode": "bonus", "from_logits": True},
    ),
    "spread": Term(eq.l2, inputs="hidden", weight=-0.03, options={"center": "mean"}),
    "both": Term(lambda a, b: (a.mean() * b.mean()).sin(), inputs=("hidden", "student")),
    "decay": Term(eq.elastic_net, inputs="weights", weight=1e-3),
}
"""Terms that share inputs, read several, read a list, and pull backwards."""

LABELS = torch.tensor([0, 3, 1, 2, 2, 0])

BASE = Term(F.cross_entropy, inputs=("student", "labels"))


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """The base as a function whose parameters are named like inputs."""
    return F.cross_entropy(student, labels)


@dataclass
class Network:
    """Leaves, and what is computed from them: the logits come from the hidden layer."""

    leaves: list[Tensor]
    inputs: dict[str, Any]

    def base(self, kind: str) -> Any:
        """The `base=` of a call."""
        if kind == "tensor":
            return cross_entropy(self.inputs["student"], self.inputs["labels"])
        return cross_entropy if kind == "callable" else None


def network(dtype: torch.dtype = torch.float64) -> Network:
    """The same numbers at every call, at fresh leaves."""
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    x, first, second = leaf(6, 3).detach(), leaf(3, 5), leaf(5, 4)
    hidden = (x @ first).tanh()
    inputs = {
        "hidden": hidden,
        "student": hidden @ second,
        "teacher": leaf(6, 4).detach(),
        "labels": LABELS,
        "weights": [first, second],
    }
    return Network([first, second], inputs)


def pipeline(kind: str) -> Pipeline:
    """The terms, with the base among them or not."""
    return Pipeline(base=BASE, **TERMS) if kind == "term" else Pipeline(**TERMS)


def evaluated(
    kind: str = "term", track: Any = False, dtype: torch.dtype = torch.float64
) -> tuple[eq.Evaluation, Network]:
    """An evaluation at fresh leaves."""
    net = network(dtype)
    inputs = {k: x for k, x in net.inputs.items() if k != "labels" or kind in ("term", "callable")}
    result = pipeline(kind)(**inputs, base=net.base(kind), step=3, track=track)
    return result, net


def all_terms(kind: str) -> dict[str, Term]:
    """The terms that are evaluated, the base first."""
    return TERMS if kind == "none" else {"base": BASE, **TERMS}
