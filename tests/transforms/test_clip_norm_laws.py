"""Clipping by length: its laws, its exact branch, and its accuracy at every scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise import transforms
from equipoise._numerics import total_norm
from equipoise.transforms import GradientTransform, clip_by_global_norm, clip_by_norm
from equipoise.transforms._lists import row_norms, squared_norms, total_square
from tests.transforms.assertions import assert_same_bits, length, once

U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
CLIPS = [clip_by_global_norm, clip_by_norm]


@st.composite
def lists(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A few gradients with entries of any size that leaves room for a scale."""
    entry = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return [torch.tensor(draw(st.lists(entry, min_size=n, max_size=n)), dtype=dtype) for n in sizes]


LIMITS = st.floats(1e-3, 1e3)
SCALES = st.integers(-30, 30)


@pytest.mark.parametrize("clip", CLIPS)
@given(grads=lists(), limit=LIMITS, k=SCALES)
def test_scale_law(
    clip: type[GradientTransform], grads: list[Tensor], limit: float, k: int
) -> None:
    """clip(c·g, c·m) = c·clip(g, m), exactly where c is a power of two."""
    c = 2.0**k
    scaled = once(clip(c * limit), [c * g for g in grads])
    assert_same_bits(scaled, [c * g for g in once(clip(limit), grads)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@given(data=st.data(), limit=LIMITS)
def test_the_limit_holds(dtype: torch.dtype, data: st.DataObject, limit: float) -> None:
    """No length is above the limit by more than four units of rounding."""
    grads = data.draw(lists(dtype))
    most = limit * (1 + 4 * U[dtype])
    assert length(*once(clip_by_global_norm(limit), grads)) <= most
    for g in once(clip_by_norm(limit), grads):
        assert length(g) <= most


@pytest.mark.parametrize("clip", CLIPS)
@given(grads=lists(torch.float64), limit=LIMITS)
def test_idempotence(clip: type[GradientTransform], grads: list[Tensor], limit: float) -> None:
    """Clipping twice is clipping once, up to the rounding of the first."""
    first = once(clip(limit), grads)
    for again, g in zip(once(clip(limit), first), first, strict=True):
        torch.testing.assert_close(again, g, rtol=4 * U[torch.float64], atol=0)


@given(grads=lists(torch.float64), limit=LIMITS)
def test_the_direction_is_kept(grads: list[Tensor], limit: float) -> None:
    """One factor in [0, 1] for all entries; for each tensor by itself where each is clipped."""
    for clip, groups in (
        (clip_by_global_norm, [list(range(len(grads)))]),
        (clip_by_norm, [[i] for i in range(len(grads))]),
    ):
        out = once(clip(limit), grads)
        for group in groups:
            factor = min(1.0, limit / max(length(*(grads[i] for i in group)), 1e-300))
            for i in group:
                torch.testing.assert_close(out[i], grads[i] * factor, rtol=1e-14, atol=0)


@given(grads=lists(torch.float64), limit=LIMITS)
def test_a_negative_limit_is_its_magnitude(grads: list[Tensor], limit: float) -> None:
    """The direction never turns round."""
    for clip in CLIPS:
        assert_same_bits(once(clip(-limit), grads), once(clip(limit), grads))


def test_a_limit_of_zero_gives_zeros() -> None:
    """Limit 0 makes every gradient 0, zero gradients included."""
    for clip in CLIPS:
        for g in once(clip(0.0), [torch.tensor([3.0, -4.0]), torch.zeros(2)]):
            assert g is not None
            assert not g.any()


TUPLES = [(3, 4, 5), (5, 12, 13), (8, 15, 17), (1, 2, 2, 3), (2, 3, 6, 7), (1, 4, 8, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("numbers", TUPLES, ids=str)
def test_the_branch_is_that_of_exact_arithmetic(
    numbers: tuple[int, ...], split: bool, dtype: torch.dtype
) -> None:
    """At the limit and above the identity, one unit below it a factor: as fractions decide.

    Pythagorean tuples times powers of two have lengths that are numbers; limits are those, and
    neighbours a few units of float64 away.
    """
    for k in (-100, -30, 0, 30, 100):
        *legs, hypotenuse = (math.ldexp(n, k) for n in numbers)
        grads = [torch.tensor([x], dtype=dtype) for x in legs]
        grads = grads if split else [torch.cat(grads)]
        for ulps in range(-3, 4):
            limit = hypotenuse
            for _ in range(abs(ulps)):
                limit = math.nextafter(limit, math.copysign(math.inf, ulps))
            squares = sum(Fraction(x) ** 2 for x in legs)
            clipped = squares > Fraction(limit) ** 2
            transform = clip_by_global_norm(limit)
            _, state = transform.update(grads, transform.init(grads), grads)
            figures = transforms.recorded(state)
            assert figures["clipped_fraction"].item() == clipped
            if not clipped:
                assert_same_bits(once(transform, grads), grads)
            if not split:
                _, state = clip_by_norm(limit).update(grads, clip_by_norm(limit).init([]), grads)
                assert transforms.recorded(state)["clipped_fraction"].item() == clipped


@given(grads=lists(), above=st.integers(0, 3))
def test_identity_up_to_the_limit(grads: list[Tensor], above: int) -> None:
    """A limit no smaller than the exact length changes nothing, not even the sign of a zero."""
    square = sum(Fraction(x) ** 2 for g in grads for x in g.tolist())
    limit = math.sqrt(square)
    while Fraction(limit) ** 2 < square:
        limit = math.nextafter(limit, math.inf)
    for _ in range(above):
        limit = math.nextafter(limit, math.inf)
    for clip in CLIPS:
        assert_same_bits(once(clip(limit), grads), grads)


@given(grads=lists())
def test_clipped_just_below_the_length(grads: list[Tensor]) -> None:
    """A limit whose square is below the exact sum of squares by 1e-12 of it is one that clips."""
    square = sum(Fraction(x) ** 2 for g in grads for x in g.tolist())
    limit = math.sqrt(square) * (1 - 1e-12)
    transform = clip_by_global_norm(limit)
    _, state = transform.update(grads, transform.init(grads), grads)
    assert transforms.recorded(state)["clipped_fraction"].item() == (square > 0)


def groupings(x: Tensor) -> dict[str, list[Tensor]]:
    """The same entries as one tensor, some, and many."""
    return {
        "one": [x],
        "halves": [*x.split(x.numel() // 2 + 1)],
        "uneven": [x[:1], x[1:100], x[100:]],
        "rows": [*x.reshape(-1, 128)],
        "matrices": [*x.reshape(-1, 64, 64)],
        "grid": [x.reshape(-1, 4096)],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numbers", ["normal", "equal", "huge", "tiny", "one of a kind"])
def test_the_norm_does_not_depend_on_grouping(dtype: torch.dtype, numbers: str) -> None:
    """Within 1e-6 of the exact length, however the entries are grouped to tensors."""
    n = 1 << 17
    drawn = {
        "normal": torch.randn(n),
        "equal": torch.full((n,), 0.1),
        "huge": torch.randn(n) * (1e30 if dtype != torch.float16 else 1e4),
        "tiny": torch.randn(n) * (1e-30 if dtype != torch.float16 else 1e-6),
        "one of a kind": torch.cat([torch.tensor([1e4]), torch.full((n - 1,), 1e-4)]),
    }[numbers].to(dtype)
    exact = torch.linalg.vector_norm(drawn.double()).item()
    for name, grads in groupings(drawn).items():
        for each in (clip_by_global_norm(1.0), clip_by_norm(1e30), transforms.snapshot("norm")):
            _, state = each.update(grads, each.init(grads), grads)
            first, *_ = transforms.recorded(state).values()
            assert first.item() == pytest.approx(exact, rel=1e-6), name
    # And what a clip makes of them has the length of the limit.
    if (dtype, numbers) != (torch.float16, "tiny"):  # whose entries have hardly any digits
        clipped = once(clip_by_global_norm(exact / 7), groupings(drawn)["matrices"])
        assert length(*clipped) == pytest.approx(exact / 7, rel=1e-6 + U.get(dtype, 2.0**-11))


@pytest.mark.parametrize(
    "shape",
    [(500,), (1024,), (1152,), (4000,), (5000,), (20, 256), (20, 768), (9, 64, 3, 3)],
    ids=str,
)
def test_entries_that_float32_always_rounds_the_same_way(shape: tuple[int, ...]) -> None:
    """Within 1e-6 at every shape that is measured in its own way, where errors do not cancel."""
    for value in torch.linspace(0.5, 3.5, 400).tolist():
        grads = [torch.full(shape, value) for _ in range(3)]
        snap = transforms.snapshot("norm")
        _, state = snap.update(grads, snap.init(grads), grads)
        exact = grads[0].flatten()[0].double().item() * math.sqrt(3 * grads[0].numel())
        (norm,) = transforms.recorded(state).values()
        assert norm.item() == pytest.approx(exact, rel=1e-6 if len(shape) > 1 else 5e-7)


# Entries that do not lie side by side, which torch adds one after the other.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x,
    "repeated": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize(
    "shape", [(5000,), (40000,), (512, 300), (20, 768), (40, 64, 3, 3)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_does_not_depend_on_the_layout(layout: str, shape: tuple[int, ...]) -> None:
    """All together, each tensor, each unit and a report are within 1e-6 however they are stored."""
    for value in torch.linspace(1.0, 2.0, 40).tolist():
        grad = LAYOUTS[layout](torch.full(shape, value))
        one = grad.flatten()[0].double().item()
        whole, unit = one * math.sqrt(grad.numel()), one * math.sqrt(grad[0].numel())
        found = [
            total_square([grad]).sqrt(),
            squared_norms([grad]).sqrt(),
            row_norms([grad], whole=True),
            total_norm([grad]),
        ]
        for norm in found:
            assert norm.item() == pytest.approx(whole, rel=1e-6)
        if grad.dim() > 1:
            units = row_norms([grad], whole=False)
            torch.testing.assert_close(units, torch.full_like(units, unit), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_million_equal_entries(dtype: torch.dtype) -> None:
    """The norm of 2²³ equal entries is within 1e-6, where float32 sums would drift."""
    grad = torch.full((1 << 23,), 0.1).to(dtype)
    exact = grad[0].double().item() * math.sqrt(1 << 23)
    for grads in ([grad], [*grad.split(1 << 12)]):
        snap = transforms.snapshot("norm")
        _, state = snap.update(grads, snap.init(grads), grads)
        assert state["recorded"][""].item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e300, 1e-300, 1e-320])
def test_float64_at_every_scale(size: float) -> None:
    """Squares neither overflow nor vanish in float64: the norm of (3, 4)·s is 5·s."""
    grads = [torch.tensor([3 * size], dtype=torch.float64), torch.tensor([4 * size]).double()]
    grads[1] = torch.tensor([4 * size], dtype=torch.float64)
    clip = clip_by_global_norm(size)
    out, state = clip.update(grads, clip.init(grads), grads)
    assert state["recorded"]["norm"].item() == pytest.approx(
        5 * size, rel=1e-3 * (size < 1e-310) or 1e-15
    )
    expected = torch.tensor([0.6 * size, 0.8 * size], dtype=torch.float64)
    torch.testing.assert_close(
        torch.cat([g for g in out if g is not None]), expected, rtol=1e-12, atol=1e-323
    )
    each = once(clip_by_norm(size), grads)
    torch.testing.assert_close(
        torch.cat([g for g in each if g is not None]),
        torch.full((2,), size, dtype=torch.float64),
        rtol=1e-12,
        atol=1e-323,
    )


@pytest.mark.parametrize(("size", "limit"), [(1e200, 1.0), (1e149, 1e-149), (1e-200, 1e-220)])
@pytest.mark.parametrize("second", CLIPS)
@pytest.mark.parametrize("first", CLIPS)
def test_float64_neighbours_at_every_scale(
    first: type[GradientTransform], second: type[GradientTransform], size: float, limit: float
) -> None:
    """What a first clip leaves is known to the next, though the square of its factor is 0."""
    grads = [torch.tensor([3 * size, 4 * size], dtype=torch.float64)]
    both = transforms.chain(first(limit), second(limit / 2), transforms.snapshot("after"))
    (out,), state = both.update(grads, both.init(grads), grads)
    expected = torch.tensor([0.3, 0.4], dtype=torch.float64)
    torch.testing.assert_close(out / limit, expected, rtol=1e-14, atol=0)
    norms = [f.item() / limit for n, f in transforms.recorded(state).items() if "fraction" not in n]
    assert norms[1:] == pytest.approx([1.0, 1.0, 0.5, 0.5], rel=1e-14)


def test_float64_tensors_of_different_scales() -> None:
    """A tiny gradient is clipped by its own length also beside a huge one, and beside a NaN."""
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    huge = torch.tensor([3e200, 4e200], dtype=torch.float64)
    nan = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    expected = torch.tensor([6e-201, 8e-201], dtype=torch.float64)
    for others in ([huge], [nan], [huge, nan], [torch.ones(1)]):
        out = once(clip_by_norm(1e-200), [tiny, *others])
        torch.testing.assert_close(out[0], expected, rtol=1e-14, atol=0)
    out = once(clip_by_norm(1e200), [huge, nan])
    torch.testing.assert_close(out[0], huge / 5, rtol=1e-14, atol=0)


def test_a_part_is_measured_in_units_of_its_own() -> None:
    """The norm of some tensors of a chain does not vanish beside what was measured before."""
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    huge = torch.tensor([3e200, 4e200], dtype=torch.float64)
    shaping = transforms.chain(
        transforms.snapshot("all"), transforms.masked(clip_by_global_norm(1e-200), [False, True])
    )
    out = once(shaping, [huge, tiny])
    torch.testing.assert_close(out[1], tiny / 5, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("size", "limit"), [(1e38, 0.1), (1e30, 1e-10), (1e-38, 1e-42)])
def test_float32_factors_below_its_range(size: float, limit: float) -> None:
    """The limit holds where the factor itself is no normal number of float32."""
    grads = [torch.full((4,), size)]
    for clip in CLIPS:
        assert length(*once(clip(limit), grads)) == pytest.approx(
            limit, rel=1e-3 if limit < 1e-38 else 4 * 2.0**-24
        )


def test_figures() -> None:
    """The norm before, the norm after and the clipped part are those of the definition."""
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([0.5]), torch.tensor([12.0])]
    _, state = clip_by_norm(1.0).update(grads, clip_by_norm(1.0).init(grads), grads)
    figures = {name: f.item() for name, f in transforms.recorded(state).items()}
    assert figures["norm"] == pytest.approx(math.sqrt(25 + 0.25 + 144), rel=1e-15)
    assert figures["norm_clipped"] == pytest.approx(math.sqrt(1 + 0.25 + 1), rel=1e-15)
    assert figures["clipped_fraction"] == pytest.approx(2 / 3, rel=1e-15)
    for limit, fraction, after in ((1.0, 1.0, 1.0), (20.0, 0.0, math.sqrt(169.25))):
        clip = clip_by_global_norm(limit)
        _, state = clip.update(grads, clip.init(grads), grads)
        assert state["recorded"]["clipped_fraction"].item() == fraction
        assert state["recorded"]["norm_clipped"].item() == pytest.approx(after, rel=1e-15)
