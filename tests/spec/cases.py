"""Every penalty, with every mode and option that changes its value, and inputs that are nasty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.spec.oracle import Case, entries, rows

SOME_ENTRIES = torch.tensor([[True, False, True, True], [True, True, False, True]]).repeat(2, 4)
ENTRY_WEIGHTS = torch.tensor([[0.5, 0.0, 2.0, 0.3]]).repeat(4, 4)
SOME_ROWS = torch.tensor([True, False, True, True])
ROW_WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 0.3], dtype=torch.float64)
SHAPE = (4, 16)

# The orders in which masks, scales and divisors are multiplied differ, and autograd multiplies by
# the upstream 1; for the definition's one rounding a product there are at most two.
ELEMENTWISE = 2
# A norm is taken of x/s and multiplied by s: for each square (1 rounding in the definition) there
# are x/s, twice in the square, and the square itself, 3; and one more product after the root, whose
# own bound is four times as wide. The gradient passes the same way back.
SCALED = 4
# A term p·(log p − log q) + (q − p) is computed as p·(d + expm1(−d)) where |d| < 1, and its slope
# with respect to log p as p·(d + expm1(−d)) + p·(1 − e^−d): at most three parts of a size below
# 1.72·p·|d|, with an elementary function in two. For |d| ≥ 1 the parts are p·d, p and p, of sizes
# below p·|d|. Each part carries the error of d once, so less than six times that of the definition;
# two more for the product with the mask and the divisor. Mixtures add a logarithm of β.
DISTRIBUTION = 8
# ½‖u − v‖² for 1 − u·v: terms (u − v)² ≤ 2(u² + v²), Σ of which is 4, of the size of u·v's own
# bound Σ|uᵢvᵢ| + 1 up to a factor 4; times the two roundings a product has; twice for x/s.
COSINE = 16
# Matrix products may run in any order and fused; 4·H·M is computed as H·M + Hᵀ·M of doubled parts.
# Unit rows go through x/s: three roundings a square and two a quotient, for one. Tall matrices use
# MᵀM, whose entries are not those of MMᵀ: their sums of squares are equal and of one sign, and what
# is subtracted (the diagonal) is part of them. What spectral adds beside them are (gᵢᵢ − tr/n)²,
# with two roundings before the square and one after, at most six of gᵢᵢ² + (tr/n)²; and
# tr²·(1/n − 1/r), with four in each of two parts that are no larger than tr²/r: eight of it, where
# the definition has two.
MATRIX = 8


def cases() -> list[Case]:
    """One for each option that changes the mathematics."""
    return [*_sizes(), *_magnitudes(), *_distributions(), *_samples(), *_pairs(), *_matrices()]


def _sizes() -> list[Case]:
    shared: list[dict[str, Any]] = [
        {},
        {"reduction": "mean"},
        {"reduction": "none"},
        {"mask": SOME_ENTRIES, "reduction": "mean"},
        {"mask": ENTRY_WEIGHTS},
        {"mask": ENTRY_WEIGHTS, "reduction": "mean"},
        {"scale": 0.3},
    ]
    own: dict[str, list[dict[str, Any]]] = {
        "l1": [],
        "l2": [
            {"center": "mean"},
            {"center": "mean", "mask": SOME_ENTRIES},
            {"center": "mean", "mask": ENTRY_WEIGHTS, "reduction": "mean"},
            {"center": 0.3},
            {"center": torch.linspace(-1, 1, 64).reshape(SHAPE)},
            {"clip": 0.7},
            {"clip": 0.7, "clip_mode": "huber"},
            {"center": "mean", "clip": 0.7},
            {"center": 0.3, "clip": 0.7, "clip_mode": "huber", "scale": 0.25},
        ],
        "elastic_net": [{"l1_ratio": 0.0}, {"l1_ratio": 1.0}, {"l1_ratio": 0.3}],
    }
    # Huber as held·(2y − held): four roundings for the definition's two.
    steps = {"l1": ELEMENTWISE, "l2": 2 * ELEMENTWISE, "elastic_net": 2 * ELEMENTWISE}
    return [
        Case(name, options, entries, steps[name], listed=_flat(options))
        for name, extra in own.items()
        for options in [*shared, *extra]
    ]


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v.flatten().tolist() for k, v in options.items() if isinstance(v, Tensor)}


def _magnitudes() -> list[Case]:
    whole: dict[str, Any] = {"reduction": "none", "dim": -1}
    options: list[dict[str, Any]] = [
        {"dim": -1},
        {"dim": -1, "norm": "l2", "target": 0.3},
        {**whole, "target": 2.5},
        {"dim": -1, "reduction": "sum"},
    ]
    return [Case("output_magnitude", o, rows, SCALED) for o in options]


def _distributions() -> list[Case]:
    shared: list[dict[str, Any]] = [
        {},
        {"from_logits": True},
        {"mask": SOME_ROWS},
        {"mask": ROW_WEIGHTS, "from_logits": True},
        {"support": SOME_ENTRIES, "from_logits": True},
        {"chunk": 3, "from_logits": True, "mask": SOME_ROWS, "support": SOME_ENTRIES},
        {"reduction": "none"},
        {"reduction": "sum", "from_logits": True},
        {"denominator": 5.5},
    ]
    own: dict[str, list[dict[str, Any]]] = {
        "kl_divergence": [
            {"direction": "reverse"},
            {"direction": "reverse", "from_logits": True},
            {"direction": "symmetric"},
            {"direction": "symmetric", "from_logits": True},
            {"direction": "symmetric", "floor": -1.3},
            {"direction": "reverse", "from_logits": True, "floor": -2.3},
            {"floor": -1.3},
            {"floor": -2.3, "from_logits": True},
            {"temperature": 2.7},
            {"temperature": 0.3, "temperature_squared": True, "from_logits": True},
        ],
        "js_divergence": [
            {"beta": 0.2},
            {"base": 2},
            {"beta": 0.3, "normalized": True, "from_logits": True},
            {"beta": 0.0, "normalized": True},
            {"beta": 1.0, "normalized": True, "from_logits": True},
        ],
        "entropy": [
            {"mode": "bonus"},
            {"normalize": True},
            {"normalize": True, "support": SOME_ENTRIES, "from_logits": True},
            {"temperature": 2.7},
            {"mode": "bonus", "temperature": 0.3, "from_logits": True},
        ],
    }
    return [
        Case(name, options, rows, DISTRIBUTION, inputs=1 if name == "entropy" else 2)
        for name, extra in own.items()
        for options in [*shared, *extra]
    ]


def _samples() -> list[Case]:
    options: list[dict[str, Any]] = [
        {"estimator": "k1"},
        {"estimator": "k2"},
        {"estimator": "k3"},
        {"estimator": "k3", "gradient": "k2"},
        {"estimator": "k1", "gradient": "k2", "reduction": "sum"},
        {"mask": SOME_ENTRIES, "reduction": "mean"},
        {"mask": ENTRY_WEIGHTS, "denominator": 7.5},
        {"reduction": "none"},
    ]
    # r − 1 − log r as expm1(log r) − log r: never more roundings than with e^x.
    return [
        Case("sampled_kl", o, entries, 2 * ELEMENTWISE, inputs=2, listed=_flat(o)) for o in options
    ]


def _pairs() -> list[Case]:
    entrywise: list[dict[str, Any]] = [
        {"metric": metric, **extra}
        for metric in ("mse", "l1")
        for extra in ({}, {"mask": SOME_ENTRIES}, {"mask": ENTRY_WEIGHTS, "reduction": "sum"})
    ]
    entrywise += [{"reduction": "none"}, {"stop_gradient": "first"}, {"stop_gradient": "second"}]
    by_row: list[dict[str, Any]] = [
        {"metric": metric, **extra}
        for metric in ("cosine", "kl")
        for extra in ({}, {"mask": SOME_ROWS}, {"mask": ROW_WEIGHTS}, {"reduction": "none"})
    ]
    return [
        *(
            Case("consistency", o, rows, 2 * ELEMENTWISE, inputs=2, listed=_flat(o))
            for o in entrywise
        ),
        *(
            Case("consistency", o, rows, COSINE if o["metric"] == "cosine" else DISTRIBUTION, 2)
            for o in by_row
        ),
    ]


def _matrices() -> list[Case]:
    return [
        Case("orthogonality", {"mode": mode, **extra}, rows, MATRIX)
        for mode in ("soft", "hard", "spectral", "srip")
        for extra in ({}, {"normalize": False}, {"reduction": "mean"})
    ]


def draw(case: Case, kind: str, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """Inputs of one kind for a case: the same at every call."""
    generator = torch.Generator().manual_seed(len(case.id) + len(kind))
    return [_draw(case, kind, shape, generator).to(dtype) for _ in range(case.inputs)]


KINDS = {
    "sizes": ("plain", "wide", "zeros"),
    "rows": ("plain", "sharp", "near", "holes"),
    "samples": ("plain", "near"),
    "matrices": ("plain", "tall", "zeros", "few"),
}


def kinds(case: Case) -> tuple[str, ...]:
    """The kinds of input that a case is tried on."""
    if case.penalty == "orthogonality":
        return KINDS["matrices"]
    if case.penalty == "sampled_kl":
        return KINDS["samples"]
    divergent = case.penalty in ("kl_divergence", "js_divergence", "entropy")
    if divergent or case.options.get("metric") == "kl":
        return KINDS["rows"]
    return KINDS["sizes"]


def _draw(case: Case, kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    if case.penalty == "orthogonality":
        return _matrix(kind, normal)
    if case.penalty == "sampled_kl":
        return -3 - (0.01 if kind == "near" else 1) * normal(*shape).abs()
    if kinds(case) is KINDS["rows"]:
        return _rows_of_logs(kind, normal, shape)
    x = normal(*shape)
    if kind == "wide":
        return x.sign() * (4 * normal(*shape)).exp().clamp(max=1e4)
    if kind == "zeros":
        return torch.where(torch.rand(shape, generator=generator) < 0.5, x, 0.0) * torch.tensor(
            [1.0, 1.0, 0.0, 1.0]
        ).unsqueeze(-1)
    return x


def _matrix(kind: str, normal: Any) -> Tensor:
    if kind == "few":  # a tall matrix whose rows that are not zero are a wide one
        return normal(6, 4).index_fill(0, torch.tensor([0, 2, 5]), 0.0)
    x: Tensor = normal(*((12, 3) if kind == "tall" else (4, 7)))
    return x.index_fill(0, torch.tensor(1), 0.0) if kind == "zeros" else x


def _rows_of_logs(kind: str, normal: Any, shape: tuple[int, ...]) -> Tensor:
    sizes = {"plain": 1.0, "sharp": 30.0, "near": 1e-4, "holes": 1.0}
    logits = sizes[kind] * normal(*shape)
    if kind == "holes":
        # The same places for P and Q, and one row with one possible entry.
        logits[:, ::3] = -torch.inf
        logits[1, 2:] = -torch.inf
    return logits.log_softmax(-1)
