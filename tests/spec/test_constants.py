"""How wrong roots, exponentials and logarithms are here: the one measured constant of the balls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flint import arb
from torch import Tensor

from equipoise import spec

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
}
STRIDE = 1021
"""A prime, so that all exponents and all last digits are met."""


def some_of_all_floats() -> Tensor:
    """Every so many of the numbers of float32, from the first pattern of bits to the last."""
    bits = torch.arange(-(1 << 31), 1 << 31, STRIDE, dtype=torch.int64).to(torch.int32)
    numbers = bits.view(torch.float32)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_keeps_to_the_constant(name: str) -> None:
    """Next to float64, four million numbers are within 2 ulp; subnormal results within a unit."""
    x = some_of_all_floats()
    found, exact = FUNCTIONS[name](x), FUNCTIONS[name](x.double())
    there = found.isfinite() & (exact.abs() <= torch.finfo(torch.float32).max)
    error = (found[there].double() - exact[there]).abs()
    units = exact[there].abs() * 2.0**-24
    assert there.sum() > 1 << 20
    assert bool((error <= spec.Rounding.elementary * units + 2.0**-149).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_keeps_to_the_constant(name: str) -> None:
    """Next to real numbers, by balls: two thousand samples of all sizes, within 2 ulp."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.empty(2000, dtype=torch.float64).uniform_(-40, 6, generator=generator).exp()
    x = sizes if name in ("sqrt", "log") else sizes * torch.randn(2000, generator=generator).sign()
    x = x.clamp(min=-0.75) if name == "log1p" else x
    results = FUNCTIONS[name](x).tolist()

    def off() -> list[float]:
        pairs = zip(x.tolist(), results, strict=True)
        return [value for value, result in pairs if not _within(name, value, result)]

    assert spec.decided(off) == []


def _within(name: str, value: float, result: float) -> bool:
    exact = getattr(arb(value), name)()
    unit = abs(exact) * arb(2.0**-53) + arb(2.0**-1074)
    return bool(abs(arb(result) - exact) <= spec.Rounding.elementary * unit)


def test_a_worse_function_would_be_noticed() -> None:
    """Computed in bfloat16 a logarithm is not within the constant."""
    x = some_of_all_floats()
    x = x[x > 2]
    error = (x.bfloat16().log().double() - x.double().log()).abs()
    assert bool((error > spec.Rounding.elementary * x.double().log() * 2.0**-24).any())
