"""Adaptive clipping: the limit of a unit is a part of the length of its weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from equipoise.transforms import adaptive_clip
from tests.transforms.assertions import assert_same_bits, length, once

SHAPES = [(3, 4), (2, 3, 2, 2), (5,), (), (1, 7), (70, 130)]


def by_unit(g: Tensor, w: Tensor, factor: float, eps: float, *, whole: bool) -> Tensor:
    """The definition, a loop over units in float64."""
    rows = 1 if whole or g.dim() < 2 else len(g)
    out = []
    for one, weights in zip(g.reshape(rows, -1), w.reshape(rows, -1), strict=True):
        most = factor * max(length(weights), eps)
        size = length(one)
        out.append(one * (most / size) if size > most else one)
    return torch.stack(out).reshape(g.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per", ["unit", "tensor"])
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 3.0), eps=st.floats(1e-6, 3.0))
def test_the_definition(dtype: torch.dtype, per: str, seed: int, factor: float, eps: float) -> None:
    """Every unit by itself: rows of two or more dimensions, whole tensors of fewer."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    out = once(adaptive_clip(factor, eps, per=per), grads, params)  # type: ignore[arg-type]
    for got, g, w in zip(out, grads, params, strict=True):
        expected = by_unit(g.double(), w.double(), factor, eps, whole=per == "tensor")
        u = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 8e-3}[dtype]
        assert got is not None
        torch.testing.assert_close(got.double(), expected, rtol=u, atol=0)


@given(k=st.integers(-20, 20), j=st.integers(-20, 20))
def test_no_scale(k: int, j: int) -> None:
    """Gradients and weights by a power of two each: the result scales as the limit does."""
    g, w = torch.randn(4, 3), torch.randn(4, 3) * 4
    expected = once(adaptive_clip(0.01), [g * 2.0**30], [w])[0]
    assert expected is not None
    got = once(adaptive_clip(0.01), [g * 2.0 ** (30 + k)], [w])[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    scaled = once(adaptive_clip(0.01, 1e-9), [g * 2.0**30], [w * 2.0**j])[0]
    torch.testing.assert_close(scaled, expected * 2.0**j, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("size", "weight"), [(1e30, 1e30), (1e-30, 1e-30), (1e30, 1e-5)])
def test_extreme_float32(size: float, weight: float) -> None:
    """Squares that leave float32 do no harm."""
    g, w = torch.full((2, 3), size), torch.full((2, 3), weight)
    out = once(adaptive_clip(0.5, 1e-38), [g], [w])[0]
    torch.testing.assert_close(out, w * 0.5, rtol=1e-6, atol=0)


def test_long_rows_of_equal_entries() -> None:
    """A row of a million equal entries has its length within 1e-6."""
    g, w = torch.full((1, 1 << 20), 0.1), torch.full((1, 1 << 20), 0.3)
    out = once(adaptive_clip(0.1), [g], [w])[0]
    torch.testing.assert_close(out, w * 0.1, rtol=1e-6, atol=0)


def test_unclipped_units_keep_their_bits() -> None:
    """A unit within its limit is the identity, beside one that is clipped."""
    w = torch.tensor([[30.0, 40.0], [30.0, 40.0]])
    g = torch.tensor([[0.3, 0.4], [3.0, 4.0]])
    out = once(adaptive_clip(0.02), [g], [w])[0]
    assert_same_bits(out, torch.tensor([[0.3, 0.4], [0.6, 0.8]]))


def test_zero_weights_move() -> None:
    """`eps` stands for the length of weights that are smaller."""
    out = once(adaptive_clip(0.1, 0.5), [torch.tensor([3.0, 4.0])], [torch.zeros(2)])[0]
    torch.testing.assert_close(out, torch.tensor([0.03, 0.04]))


def test_the_clipped_fraction_is_of_units() -> None:
    """Three units of four are clipped: two rows, and the bias; not the third row."""
    w = [torch.ones(3, 4), torch.ones(2)]
    g = [torch.tensor([[1.0] * 4, [1e-3] * 4, [1.0] * 4]), torch.ones(2)]
    clip = adaptive_clip(0.1)
    _, state = clip.update(g, clip.init(w), w)
    assert state["recorded"]["clipped_fraction"].item() == 0.75


def test_refusals() -> None:
    """A factor below 0 would turn the gradient round; a wrong unit is named."""
    with pytest.raises(eq.OptionError, match="`factor` must be a finite number at least 0, got -0"):
        adaptive_clip(-0.1)
    with pytest.raises(eq.OptionError, match="`eps` must be a finite number at least 0, got -1"):
        adaptive_clip(0.1, -1.0)
    with pytest.raises(eq.OptionError, match="`per` must be 'unit' or 'tensor', got 'row'"):
        adaptive_clip(per="row")  # type: ignore[arg-type]
