"""Entry by entry, for every float16 and every bfloat16 number there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import spec, transforms
from tests.spec.oracle import HALVES, assert_agrees, entries, flatten, name_of

RULES: dict[str, dict[str, Any]] = {
    "l1": {"scale": 0.75},
    "l2": {"center": 0.3},
    "elastic_net": {"l1_ratio": 0.3},
}


def every(dtype: torch.dtype) -> Tensor:
    """All finite numbers of the type, both zeros too."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    return numbers[numbers.isfinite()]


def tame(dtype: torch.dtype) -> Tensor:
    """Those whose square is within float32, where results are kept."""
    numbers = every(dtype)
    return numbers[numbers.float().abs() < 2.0**60]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_penalties_of_every_number(name: str, dtype: torch.dtype) -> None:
    """Value and gradient of each entry, computed in float32, lie in their balls."""
    x = tame(dtype).requires_grad_()
    value = getattr(eq, name)(x, reduction="none", **RULES[name])
    value.sum().backward()
    K = spec.Rounding("float32", steps=4)

    def check() -> None:
        data = entries(K, x)
        assert_agrees(
            value, flatten([getattr(spec, name)(K, data, reduction="none", **RULES[name])])
        )
        assert x.grad is not None
        # A slope beyond the type's numbers is infinite there: those have no ball.
        slopes = getattr(spec, f"{name}_grad")(K, data, reduction="none", **RULES[name])
        inside = x.grad.isfinite()
        kept = [slope for slope, there in zip(slopes, inside.tolist(), strict=True) if there]
        assert_agrees(x.grad[inside], kept, dtype)
        assert bool((x[~inside].abs().double() * 2.5 > torch.finfo(dtype).max).all())

    spec.decided(check)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_clamps_of_every_number(dtype: torch.dtype) -> None:
    """Exactly, by value and by percentile; the sign of every number too."""
    x = every(dtype)
    exact = x.tolist()
    param = [torch.zeros_like(x)]

    def once(transform: Any) -> list[float]:
        out, _ = transform.update([x.clone()], transform.init(param), param)
        result: list[float] = out[0].tolist()
        return result

    assert once(transforms.clip_by_value(-1.5, 40.0)) == spec.clip_by_value(
        spec.Float(), exact, -1.5, 40
    )
    for pct in (0, 29, 97.5, 100):
        bounded = spec.clip_by_percentile(spec.Float(), exact, pct)
        assert once(transforms.clip_by_percentile(pct)) == bounded


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_decay_of_every_weight(dtype: torch.dtype) -> None:
    """What is added for each weight lies in its ball; for a sign exactly the rate."""
    w = tame(dtype)
    zeros = torch.zeros_like(w)
    K = spec.Rounding(name_of(dtype), steps=2)
    for name, rate in (("add_l2_decay", 0.03), ("add_l1_decay", 0.25)):
        transform = getattr(transforms, name)(rate)
        (out,), _ = transform.update([zeros.clone()], transform.init([w]), [w])

        def check(name: str = name, rate: float = rate, out: Tensor = out) -> None:
            expected = getattr(spec, name)(K, entries(K, zeros), entries(K, w), rate=rate)
            assert_agrees(out, expected)

        spec.decided(check)
