"""Clipping by percentile: exact for every percentage and any number of entries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import _rank, clip_by_percentile
from tests.contracts.test_device import NoWaiting
from tests.transforms.assertions import assert_same_bits, once


@pytest.fixture(params=["side by side", "digit by digit"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to find the entry: one selection for few, counting digits for many."""
    if request.param == "digit by digit":
        monkeypatch.setattr(_rank, "FEW", 0)


def bound(grads: list[Tensor], percent: float) -> float:
    """What the transform records as its bound."""
    clip = clip_by_percentile(percent)
    _, state = clip.update(grads, clip.init(grads), grads)
    return float(state["recorded"]["bound"])


def by_sorting(entries: list[float], percent: int) -> float:
    """The definition: nearest rank below, in whole numbers."""
    return sorted(map(abs, entries))[percent * (len(entries) - 1) // 100]


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 7, 100, 101, 257])
def test_every_percentage(n: int, dtype: torch.dtype) -> None:
    """For 0 … 100 % of n entries, ties and signs among them, the bound is that of sorting."""
    grads = [torch.randint(-n, n + 1, (n,)).to(dtype) / 8, torch.randn(n).to(dtype)]
    entries = [x for g in grads for x in g.tolist()]
    for percent in range(0, 101, 1 if n in (7, 101) else 13):
        assert bound(grads, percent) == by_sorting(entries, percent)


@given(
    data=st.data(),
    percent=st.integers(0, 100),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_any_entries_in_any_tensors(data: st.DataObject, percent: int, sizes: list[int]) -> None:
    """Subnormal, huge, signed and equal entries, in tensors of any size, empty ones too."""
    entry = st.floats(width=32, allow_nan=False, allow_infinity=False)
    lists = [data.draw(st.lists(entry, min_size=n, max_size=n)) for n in sizes]
    grads = [torch.tensor(entries, dtype=torch.float32) for entries in lists]
    entries = [x for some in lists for x in some]
    out = once(clip_by_percentile(percent), grads)
    if not entries:
        assert_same_bits(out, grads)
        return
    b = by_sorting(entries, percent)
    assert bound(grads, percent) == b
    for got, g in zip(out, grads, strict=True):
        assert_same_bits(got, g.clamp(-b, b))
    each = once(clip_by_percentile(percent, scope="tensor"), grads)
    for got, g, some in zip(each, grads, lists, strict=True):
        assert_same_bits(
            got, g.clamp(-by_sorting(some, percent), by_sorting(some, percent)) if some else g
        )


def test_several_types_together() -> None:
    """One bound over tensors of every type; each is held to what its type makes of it."""
    grads = [torch.randn(50).to(dtype) for dtype in DTYPES]
    entries = [x for g in grads for x in g.tolist()]
    b = by_sorting(entries, 40)
    assert bound(grads, 40) == b
    for got, g in zip(once(clip_by_percentile(40), grads), grads, strict=True):
        limit = torch.tensor(b).double().to(g.dtype)
        assert_same_bits(got, g.clamp(-limit, limit))


def test_fractions_of_a_percent() -> None:
    """The index of 12.5 % of 9 entries is 1; above 100 % counts as 100."""
    grads = [torch.tensor([9.0, -1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0, 8.0])]
    assert bound(grads, 12.5) == 2.0
    assert bound(grads, 12.4) == 1.0
    assert_same_bits(once(clip_by_percentile(100.5), grads), grads)
    assert_same_bits(once(clip_by_percentile(150), grads), grads)


def test_whole_numbers_are_exact() -> None:
    """29 % of 101 entries is the one with 29 below it; in floating point it would be 28."""
    assert math.floor(29 / 100 * 100) == 28
    assert bound([torch.arange(101.0)], 29) == 29.0


def test_nan_counts_as_the_largest() -> None:
    """Few NaN do not move the bound and stay; a bound that is not finite clips nothing."""
    grad = torch.tensor([math.nan, 1.0, -2.0, 3.0, -4.0, math.inf, 2.0])
    out = once(clip_by_percentile(50), [grad])[0]
    assert_same_bits(out, torch.tensor([math.nan, 1.0, -2.0, 3.0, -3.0, 3.0, 2.0]))
    for percent in (90, 100):
        assert_same_bits(once(clip_by_percentile(percent), [grad])[0], grad)


def test_complex_parts_count_each() -> None:
    """Of a complex gradient real and imaginary part are entries of their own."""
    grad = torch.tensor([1 - 4j, -2 + 3j])
    out = once(clip_by_percentile(50), [grad])[0]
    assert_same_bits(out, torch.tensor([1 - 2j, -2 + 2j]))


def test_counting_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on the CPU all digits are found without asking the host."""
    monkeypatch.setattr(_rank, "looking_is_free", lambda _device: False)
    grads = [torch.randn(40), torch.randn(3, 5)]
    clip = clip_by_percentile(35)
    state = clip.init(grads)
    with NoWaiting():
        _, state = clip.update(grads, state, grads)
    entries = [x for g in grads for x in g.flatten().tolist()]
    assert state["recorded"]["bound"].item() == by_sorting(entries, 35)


def test_more_entries_than_torch_quantile_takes() -> None:
    """Of 2²⁴ + 3 entries in two tensors the bound is the entry that a selection finds."""
    small = torch.randn((1 << 24) - 5)
    grads = [small, torch.tensor([8.0, -9.0, 0.0, 1e-3, 0.5, -0.5, 2.0, 3.0])]
    n = small.numel() + 8
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.cat(grads), 0.5)
    expected = torch.cat(grads).abs().kthvalue(73 * (n - 1) // 100 + 1).values
    assert bound(grads, 73) == expected.item()


def test_refusals() -> None:
    """A negative percentage, a wrong scope and a number from a schedule that is none are named."""
    with pytest.raises(
        eq.OptionError, match="`percent` must be a finite number at least 0, got -1"
    ):
        clip_by_percentile(-1)
    with pytest.raises(eq.OptionError, match=r"`scope` must be 'global' or 'tensor', got 'globl'"):
        clip_by_percentile(5, scope="globl")  # type: ignore[arg-type]
    falling = clip_by_percentile(lambda step: 1.0 - step)
    params = [torch.ones(2)]
    state = falling.init(params)
    for _ in range(2):
        _, state = falling.update([torch.ones(2)], state, params)
    with pytest.raises(
        eq.OptionError, match="`percent` must be a finite number at least 0"
    ) as error:
        falling.update([torch.ones(2)], state, params)
    assert "at step 2" in "".join(error.value.__notes__)


def test_a_scheduled_percentage() -> None:
    """The percentage may follow a schedule, counted from 0 by the transform."""
    clip = clip_by_percentile(eq.schedules.linear(100.0, 0.0, 3))
    grad = torch.tensor([1.0, -2.0, 3.0])
    state = clip.init([grad])
    bounds = []
    for _ in range(4):
        _, state = clip.update([grad], state, [grad])
        bounds.append(transforms.recorded(state)["bound"].item())
    assert bounds == [3.0, 2.0, 1.0, 1.0]
