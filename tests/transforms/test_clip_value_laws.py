"""Clipping entry by entry: its laws, and where the range is empty or turned round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import clip_by_percentile, clip_by_value
from tests.transforms.assertions import assert_same_bits, once

FLOAT32 = st.floats(-(2.0**60), 2.0**60, width=32)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two gradients of one size."""
    n = draw(st.integers(1, 6))
    both = [torch.tensor(draw(st.lists(FLOAT32, min_size=n, max_size=n))) for _ in range(2)]
    return both[0], both[1]


@given(both=pairs(), low=FLOAT32, high=FLOAT32)
def test_non_expansive(both: tuple[Tensor, Tensor], low: float, high: float) -> None:
    """Clipped gradients are no farther apart than before, entry by entry."""
    a, b = (once(clip_by_value(low, high), [x])[0] for x in both)
    assert a is not None
    assert b is not None
    assert ((a.double() - b.double()).abs() <= (both[0].double() - both[1].double()).abs()).all()


@given(both=pairs(), low=FLOAT32, high=FLOAT32)
def test_the_definition(both: tuple[Tensor, Tensor], low: float, high: float) -> None:
    """min(high, max(low, g)) in plain Python, also where `low` is above `high`."""
    for got, g in zip(once(clip_by_value(low, high), both), both, strict=True):
        assert got is not None
        assert got.tolist() == [min(high, max(low, x)) for x in g.tolist()]


@given(both=pairs(), low=FLOAT32, high=FLOAT32)
def test_idempotence(both: tuple[Tensor, Tensor], low: float, high: float) -> None:
    """Clipping twice is clipping once, exactly."""
    first = once(clip_by_value(low, high), both)
    assert_same_bits(once(clip_by_value(low, high), first), first)


@given(both=pairs(), limit=st.floats(0, 2.0**40, width=32), k=st.integers(-30, 30))
def test_scale_law(both: tuple[Tensor, Tensor], limit: float, k: int) -> None:
    """clip(c·g, c·m) = c·clip(g, m) exactly for powers of two."""
    c = 2.0**k
    scaled = once(clip_by_value(-c * limit, c * limit), [c * g for g in both])
    assert_same_bits(
        scaled, [c * g for g in once(clip_by_value(-limit, limit), both) if g is not None]
    )


@given(both=pairs(), percent=st.integers(0, 100), k=st.integers(-30, 30))
def test_percentiles_have_no_scale(both: tuple[Tensor, Tensor], percent: int, k: int) -> None:
    """Percentile clipping commutes with any factor, is idempotent, and keeps every sign."""
    clip, c = clip_by_percentile(percent), 2.0**k
    out = [g for g in once(clip, both) if g is not None]
    assert_same_bits(once(clip, [c * g for g in both]), [c * g for g in out])
    assert_same_bits(once(clip, out), out)
    for got, g in zip(out, both, strict=True):
        assert (got.sign() * g.sign() >= 0).all()
        assert (got.abs() <= g.abs()).all()


def test_parts_of_complex_numbers() -> None:
    """Of a complex gradient the real and the imaginary part are clipped each."""
    out = once(clip_by_value(-1.0, 2.0), [torch.tensor([3 - 4j, 0.5 + 5j])])[0]
    assert_same_bits(out, torch.tensor([2 - 1j, 0.5 + 2j]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_limits_beyond_the_type(dtype: torch.dtype) -> None:
    """A limit that the type cannot hold clips nothing that it can."""
    grad = torch.tensor([6e4, -6e4, 0.0]).to(dtype)
    assert_same_bits(once(clip_by_value(-1e300, 1e300), [grad])[0], grad)


def test_limits_that_follow_schedules() -> None:
    """Both ends may move, counted from 0 by the transform."""
    clip = clip_by_value(eq.schedules.linear(-3.0, -1.0, 3), eq.schedules.linear(1.0, 3.0, 3))
    params = [torch.zeros(2)]
    state = clip.init(params)
    seen = []
    for _ in range(4):
        (out,), state = clip.update([torch.tensor([-9.0, 9.0])], state, params)
        seen.append(out.tolist())
    assert seen == [[-3.0, 1.0], [-2.0, 2.0], [-1.0, 3.0], [-1.0, 3.0]]


def test_a_schedule_that_gives_no_number() -> None:
    """The error names the number, the schedule and the step."""
    clip = clip_by_value(-1.0, lambda step: 1.0 / step if step else float("inf"))
    with pytest.raises(eq.OptionError, match="`high` must be a finite number") as error:
        once(clip, [torch.ones(1)])
    assert error.value.__notes__ == ["from the schedule <lambda> at step 0"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "1", None, torch.tensor(1.0)])
def test_numbers_that_are_none(wrong: object) -> None:
    """What is no finite Python number is refused where the transform is built."""
    for make in (
        lambda: clip_by_value(wrong, 1.0),  # type: ignore[arg-type]
        lambda: transforms.clip_by_norm(wrong),  # type: ignore[arg-type]
        lambda: transforms.clip_by_global_norm(wrong),  # type: ignore[arg-type]
        lambda: clip_by_percentile(wrong),  # type: ignore[arg-type]
        lambda: transforms.adaptive_clip(wrong),  # type: ignore[arg-type]
        lambda: transforms.add_noise(wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(eq.OptionError, match="must be a"):
            make()
