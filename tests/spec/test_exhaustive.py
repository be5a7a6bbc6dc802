"""Entry by entry, for every float16 and every bfloat16 number there is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import spec, transforms
from tests.spec.oracle import HALVES, assert_agrees, assert_decoupled, entries, flatten, name_of

RULES: list[tuple[str, dict[str, Any]]] = [
    ("l1", {"scale": 0.75}),
    ("l2", {"center": 0.3}),
    ("l2", {"clip": 0.7}),
    ("l2", {"clip": 0.7, "clip_mode": "huber"}),
    ("elastic_net", {"l1_ratio": 0.3}),
    ("consistency", {"metric": "mse"}),
    ("consistency", {"metric": "l1"}),
    ("sampled_kl", {"estimator": "k1"}),
    ("sampled_kl", {"estimator": "k2"}),
    ("sampled_kl", {"estimator": "k3"}),
    ("sampled_kl", {"estimator": "k1", "gradient": "k2"}),
]
PAIRED = 0.3
"""What the penalties of two tensors hold every number against."""


def patterns(dtype: torch.dtype) -> Tensor:
    """What all 65,536 patterns of bits stand for."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype)


def every(dtype: torch.dtype) -> Tensor:
    """All finite numbers of the type, both zeros too."""
    numbers = patterns(dtype)
    return numbers[numbers.isfinite()]


def assert_all_agree(
    runtime: Tensor, balls: Sequence[spec.Enclosure], dtype: torch.dtype = torch.float32
) -> None:
    """Every entry lies in its ball, or is infinite where that leaves the numbers of the format.

    On the way to a result something four times as large may leave them.
    """
    finite = runtime.isfinite().tolist()
    kept = [ball for ball, there in zip(balls, finite, strict=True) if there]
    assert_agrees(runtime[runtime.isfinite()], kept, dtype)
    beyond = [ball for ball, there in zip(balls, finite, strict=True) if not there]
    assert not runtime.isnan().any()
    assert all(_size(ball) > torch.finfo(dtype).max / 4 for ball in beyond)


def _size(ball: spec.Enclosure) -> float:
    return float(abs(ball.exact).abs_upper())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("name", "options"), RULES, ids=str)
def test_penalties_of_every_number(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Value and gradient of each entry, computed in float32, lie in their balls."""
    x = every(dtype)
    other = torch.full_like(x, PAIRED)
    if name == "sampled_kl":  # logarithms of probabilities, up to where their quotient overflows
        x, other = x[(x <= 0) & (x > -80)], other[(x <= 0) & (x > -80)] - 1
    tensors = [x, other] if name in ("consistency", "sampled_kl") else [x]
    leaf = tensors[0].requires_grad_()
    value = getattr(eq, name)(*tensors, reduction="none", **options)
    value.sum().backward()
    K = spec.Rounding("float32", steps=4)

    def check() -> None:
        data: list[Any] = [entries(K, t) for t in tensors]
        if name == "consistency":
            data = [[row] for row in data]
        assert_all_agree(
            value, flatten([getattr(spec, name)(K, *data, reduction="none", **options)])
        )
        slopes = getattr(spec, f"{name}_grad")(K, *data, reduction="none", **options)
        assert leaf.grad is not None
        assert_all_agree(leaf.grad, flatten(slopes if len(data) < 2 else slopes[0]), dtype)

    spec.decided(check)


def once(transform: Any, x: Tensor, weights: Tensor | None = None) -> list[float]:
    """One step of a transform on a copy."""
    param = [torch.zeros_like(x) if weights is None else weights]
    out, _ = transform.update([x.clone()], transform.init(param), param)
    result: list[float] = out[0].tolist()
    return result


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_clamps_of_every_number(dtype: torch.dtype) -> None:
    """Exactly, by value and by percentile."""
    x = every(dtype)
    exact = x.tolist()
    assert once(transforms.clip_by_value(-1.5, 40.0), x) == spec.clip_by_value(
        spec.Float(), exact, -1.5, 40
    )
    for pct in (0, 29, 97.5, 100):
        bounded = spec.clip_by_percentile(spec.Float(), exact, pct)
        assert once(transforms.clip_by_percentile(pct), x) == bounded


DECAYS: list[tuple[str, dict[str, float]]] = [
    ("add_l2_decay", {"rate": 0.03}),
    ("add_l1_decay", {"rate": 0.25}),
    ("add_elastic_net_decay", {"rate": 0.03, "l1_ratio": 0.3}),
]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("name", "options"), DECAYS, ids=str)
def test_decay_of_every_weight(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """What is added for each weight lies in its ball; for a sign exactly the rate."""
    w = every(dtype)
    zeros = torch.zeros_like(w)
    out = once(getattr(transforms, name)(**options), zeros, w)
    K = spec.Rounding(name_of(dtype), steps=2)

    def check() -> None:
        balls = getattr(spec, name)(K, entries(K, zeros), entries(K, w), **options)
        assert_all_agree(torch.tensor(out, dtype=dtype), balls, dtype)

    spec.decided(check)
    if name == "add_l1_decay":
        assert out == [options["rate"] * ((x > 0) - (x < 0)) for x in w.tolist()]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("name", "options"), DECAYS, ids=str)
def test_decoupled_decay_of_every_weight(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """What the optimizer's step leaves of each weight lies in its ball."""
    agreement = partial(assert_all_agree, dtype=dtype)
    assert_decoupled(name, options, every(dtype), agreement)


def alike(found: Iterable[float], expected: Iterable[float]) -> bool:
    """Whether all are equal, NaN to NaN."""
    pairs = zip(found, expected, strict=True)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_no_number_follows_the_same_formulas(dtype: torch.dtype) -> None:
    """The other patterns, NaN and ±inf: sizes are inf, clamps their bounds, and NaN stays NaN."""
    x = patterns(dtype)
    x = x[~x.isfinite()]
    numbers = x.tolist()
    sizes = [abs(v) for v in numbers]
    assert len(every(dtype)) + len(x) == 1 << 16
    for name, options in [rule for rule in RULES if rule[0] != "sampled_kl"]:
        tensors = [x, torch.full_like(x, PAIRED)] if name == "consistency" else [x]
        value = getattr(eq, name)(*tensors, reduction="none", **options)
        held = options == {"clip": 0.7}
        most = [v if math.isnan(v) else torch.tensor(0.7).square().item() for v in sizes]
        assert alike(value.tolist(), most if held else sizes)
    clamped = [v if math.isnan(v) else 40.0 if v > 0 else -1.5 for v in numbers]
    assert alike(once(transforms.clip_by_value(-1.5, 40.0), x), clamped)
    # The sign of NaN is 0, as torch has it; such a weight is NaN whatever is added.
    signs = [0.0 if math.isnan(v) else math.copysign(0.25, v) for v in numbers]
    zeros = torch.zeros_like(x)
    assert alike(once(transforms.add_l1_decay(0.25), zeros, x), signs)
    for decay in (transforms.add_l2_decay(0.25), transforms.add_elastic_net_decay(0.25)):
        assert alike(once(decay, zeros, x), numbers)
