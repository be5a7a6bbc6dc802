"""The kernels give what the plain definitions give, to the precision of float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.exactly import assert_exact, exactly, fused, relative
from tests.kernels.terms import BASE, CASES, SIZES, entropy, js, kl

# The interpreter computes with NumPy, which warns where IEEE arithmetic goes on.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def drawn(
    rows: int, width: int, spread: float = 2.0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random logits, others to compare them with, and labels."""
    return {
        "x": (spread * torch.randn(rows, width)).to(dtype),
        "y": (spread * torch.randn(rows, width)).to(dtype),
        "labels": torch.randint(width, (rows,)),
    }


@pytest.mark.parametrize("name", CASES)
def test_every_combination(name: str) -> None:
    """Each option of each term, over a row that ends within a tile."""
    assert_exact(CASES[name], drawn(3, 1000))


@pytest.mark.parametrize("width", [1, 2, 3, 511, 512, 513, 1023, 4097])
def test_every_width(width: int) -> None:
    """Rows shorter than a tile, just as long, and longer by one."""
    assert_exact(CASES["all"], drawn(2, width))


def test_one_row() -> None:
    """A batch of one, also as a vector without a batch dimension."""
    inputs = drawn(1, 700)
    assert_exact(CASES["all"], inputs)
    flat = {"x": inputs["x"][0], "y": inputs["y"][0]}
    assert_exact({**SIZES, **entropy(), **kl(), **js()}, flat)


def test_more_dimensions() -> None:
    """Leading dimensions are rows; the gradient has the shape of the logits."""
    inputs = {key: x.view(2, 3, 90) for key, x in drawn(6, 90).items() if key != "labels"}
    terms = {**SIZES, **entropy(), **kl(), **js()}
    assert fused(terms, inputs).gradient.shape == (2, 3, 90)
    assert_exact(terms, inputs)


@pytest.mark.parametrize("axis", [0, 1])
def test_non_contiguous(axis: int) -> None:
    """Every other row, every other column."""
    whole = drawn(6, 1400)
    cut = (slice(None, None, 2), slice(None)) if axis == 0 else (slice(0, 3), slice(None, None, 2))
    inputs = {key: whole[key][cut] for key in ("x", "y")}
    inputs["labels"] = whole["labels"][:3] % 700
    assert not inputs["x"].is_contiguous()
    assert_exact(CASES["all"], inputs)


@pytest.mark.parametrize("shift", [-3e4, 300.0, 5e4])
def test_large_logits(shift: float) -> None:
    """A row is the same distribution wherever its logits lie."""
    inputs = drawn(2, 600)
    # In float32 the shifted logits are rounded to 2⁻⁸ or so: they themselves are the input.
    inputs["x"] = inputs["x"] + shift
    assert_exact({**entropy(), **kl(), **js()}, inputs)


@pytest.mark.parametrize("jump", [60.0, 200.0, 1e4])
def test_the_largest_entry_comes_late(jump: float) -> None:
    """A row that outgrows its first tile by more than floating point has room for."""
    inputs = drawn(3, 1600)
    inputs["x"][1, 1500] += jump
    inputs["y"][2, 1599] += jump
    assert_exact({**BASE, **entropy(), **kl(), **js()}, inputs)


def test_only_what_is_asked_for_is_measured() -> None:
    """Without figures values and gradient are the same, bit by bit."""
    inputs = drawn(3, 1000)
    measured, norms, plain = (fused(CASES["all"], inputs, m) for m in ("gram", "norms", None))
    torch.testing.assert_close(plain.values, measured.values, rtol=0, atol=0)
    torch.testing.assert_close(plain.gradient, measured.gradient, rtol=0, atol=0)
    torch.testing.assert_close(norms.squares, measured.squares, rtol=1e-12, atol=0)
    assert plain.gram is None
    assert norms.gram is None


def test_bfloat16_is_rounded_once() -> None:
    """The gradient is the float32 one, rounded: at most one unit from the exact one's rounding."""
    inputs = drawn(4, 3000, dtype=torch.bfloat16)
    found, true = fused(CASES["all"], inputs), exactly(CASES["all"], inputs)
    assert found.gradient.dtype == torch.bfloat16
    rounded = true.total.float().to(torch.bfloat16)
    away = (ordered(found.gradient) - ordered(rounded)).abs() > 1
    assert away.double().mean() <= 1e-3
    assert relative(found.gradient, true.total) <= 2**-8


def ordered(x: Tensor) -> Tensor:
    """Bit patterns of bfloat16 as numbers that count the representable values."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def test_the_judge_sees_a_wrong_gradient() -> None:
    """Two parts in a million in one of the terms are found."""
    inputs = drawn(3, 1000)
    inputs["y"] = inputs["y"] * (1 + 1e-5)
    true = exactly(CASES["all"], inputs)
    inputs["y"] = inputs["y"] / (1 + 1e-5) * (1 + 3e-5)
    assert relative(fused(CASES["all"], inputs).gradient, true.total) > 1e-6
