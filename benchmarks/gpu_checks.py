"""Whether the kernels are right on this GPU: fresh data, poisoned outputs, float64 as the judge.

``python -m benchmarks.gpu_checks CASE`` checks one case alone: several can be checked at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

import equipoise as eq
from benchmarks.gpu_measure import DEVICE, ON_GPU, kernels_on
from equipoise import Pipeline, Term
from equipoise.kernels._launch import evaluate
from equipoise.kernels._recognise import Request, plan

LOGITS = {"from_logits": True}
SIZES = {
    "l1": Term(eq.l1, inputs="x", weight=1e-5),
    "l2": Term(eq.l2, inputs="x", weight=0.3, options={"reduction": "mean"}),
    "elastic_net": Term(eq.elastic_net, inputs="x", weight=1e-5, options={"l1_ratio": 0.3}),
    "magnitude": Term(eq.output_magnitude, inputs="x", weight=0.2, options={"target": 0.5}),
}
BASE = {"base": Term(F.cross_entropy, inputs=("x", "labels"))}


def rows(
    direction: str = "forward", temperature: float = 1.0, beta: float = 0.5
) -> dict[str, Term]:
    """Entropy and divergences, as far as one temperature allows."""
    warm = {**LOGITS, "temperature": temperature}
    found = {
        "entropy": Term(eq.entropy, inputs="x", weight=-0.2, options=warm),
        "kl": Term(
            eq.kl_divergence,
            inputs=("y", "x"),
            weight=0.7,
            options={**warm, "direction": direction},
        ),
    }
    if temperature == 1.0:
        mixed = {**LOGITS, "beta": beta}
        found["js"] = Term(eq.js_divergence, inputs=("y", "x"), weight=0.5, options=mixed)
    return found


CASES: dict[str, dict[str, Term]] = {
    "sizes": SIZES,
    "all": {**BASE, **SIZES, **rows()},
    "reverse": {**BASE, **rows("reverse", beta=0.2)},
    "symmetric": {**SIZES, **rows("symmetric", beta=0.9)},
    "temperature": {**SIZES, **rows(temperature=2.0)},
    "base alone": BASE,
}
SMALL = ((3, 3), (2, 1023))
SHAPES = (*SMALL, (64, 1023), (33, 4097), (1, 128256), (256, 32768)) if ON_GPU else SMALL


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_all(*only: str) -> None:
    """Every case, or those named, at every shape and type, and the pipeline as a whole."""
    worst = {torch.float32: 0.0, torch.bfloat16: 1.0}
    faults: list[str] = []
    for shape in SHAPES:
        for name in only or CASES:
            terms = CASES[name]
            for dtype, pick in ((torch.float32, max), (torch.bfloat16, min)):
                try:
                    figure = _check(f"{name} {shape} {dtype}", terms, shape, dtype)
                except AssertionError as error:
                    faults.append(str(error)[:600])
                    continue
                worst[dtype] = pick(worst[dtype], figure)
    _check_pipeline()
    print(*faults, f"{len(faults)} faults", sep="\n")
    print(f"largest relative error of a gradient, float32: {worst[torch.float32]:.1e}")
    print(
        f"bfloat16 entries within one unit of the exact: {worst[torch.bfloat16]:.5f} at the least"
    )
    if faults:
        sys.exit("the kernels are wrong; nothing is worth timing")


def _check(label: str, terms: dict[str, Term], shape: tuple[int, int], dtype: torch.dtype) -> float:
    inputs: dict[str, Any] = {
        "x": (2 * torch.randn(shape, device=DEVICE)).to(dtype),
        "y": (2 * torch.randn(shape, device=DEVICE)).to(dtype),
        "labels": torch.randint(shape[1], shape[:1], device=DEVICE),
    }
    requests = [
        Request(name, t.penalty, t.options, tuple(inputs[k] for k in t.inputs or ()))
        for name, t in terms.items()
    ]
    found = plan(requests, inputs["x"])
    assert found is not None, label
    assert set(found.names) == set(terms), label
    with poisoned():
        fused = evaluate(found, {name: t.weight for name, t in terms.items()}, measure="gram")
    values, slopes = _exactly(terms, inputs)
    total = torch.stack([slopes[name] for name in fused.names]).sum(0)
    vectors = torch.stack([slopes[name].flatten() for name in fused.names])
    gram = vectors @ vectors.T
    lengths = gram.diagonal().sqrt()
    exact = torch.stack([values[n] for n in fused.names])
    _assert_near(f"{label}: values", fused.values, exact, 1e-5)
    scale = lengths.outer(lengths).clamp(min=1e-10)
    _assert_near(f"{label}: gram", fused.gram / scale, gram / scale, 2e-5)
    _assert_near(f"{label}: norms", fused.squares[:-1].sqrt(), lengths, 5e-6)
    length = torch.linalg.vector_norm(total).clamp(min=1e-12)
    _assert_near(f"{label}: total", fused.squares[-1:].sqrt(), length, 5e-6)
    error = (torch.linalg.vector_norm(fused.gradient.double() - total) / length).item()
    if dtype == torch.float32:
        assert error <= 1e-6 or length < 1e-9, f"{label}: gradient is off by {error}"
        return error
    return _within_one_unit(fused.gradient, total)


def _exactly(
    terms: dict[str, Term], inputs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and weighted gradients by the plain definitions in float64."""
    wide = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    values, slopes = {}, {}
    for name, term in terms.items():
        leaf = wide["x"].clone().requires_grad_()
        arguments = [leaf if key == "x" else wide[key] for key in term.inputs or ()]
        value = term.penalty(*arguments, **term.options)
        (slope,) = torch.autograd.grad(value, leaf)
        values[name], slopes[name] = value.detach(), term.weight * slope
    return values, slopes


def _assert_near(label: str, actual: Tensor, expected: Tensor, within: float) -> None:
    torch.testing.assert_close(
        actual.double().reshape(-1),
        expected.double().reshape(-1),
        rtol=within,
        atol=within,
        msg=lambda text: f"{label}: {text}",
    )


def _within_one_unit(actual: Tensor, exact: Tensor) -> float:
    """The part of bfloat16 entries at most one unit from the correctly rounded one."""
    rounded = exact.float().to(torch.bfloat16)
    steps = (_ordered(actual) - _ordered(rounded)).abs()
    tiny = exact.abs() < torch.finfo(torch.bfloat16).tiny
    return ((steps <= 1) | tiny).double().mean().item()


def _ordered(x: Tensor) -> Tensor:
    """Bit patterns as numbers that count the representable values."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def _check_pipeline() -> None:
    """A pipeline on the GPU gives, by itself, what the plain one gives; scaled and masked too."""
    drawn = torch.Generator().manual_seed(5)
    mask = torch.rand(64, generator=drawn) > 0.3
    x, y = torch.randn(2, 64, 512, generator=drawn)
    labels = torch.randint(512, (64,), generator=drawn)
    labels[3] = -100
    pipe = Pipeline(**BASE, **SIZES, **rows())

    def found(device: str) -> tuple[Tensor, dict[str, float]]:
        leaf = x.to(device).requires_grad_()
        options = {name: {"mask": mask.to(device)} for name in ("kl", "entropy")}
        given = {"x": leaf, "y": y.to(device), "labels": labels.to(device)}
        result = pipe(**given, track="gram", options=options)
        (result.total * 3).backward()
        assert leaf.grad is not None
        return leaf.grad.cpu(), result.metrics()

    with kernels_on(DEVICE):
        gradient, figures = found(DEVICE)
    with kernels_on():
        plain, wanted = found("cpu")
    torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-8)
    for key, value in wanted.items():
        assert abs(figures[key] - value) <= 1e-5 * abs(value) + 1e-7, key


if __name__ == "__main__":
    check_all(*sys.argv[1:])
