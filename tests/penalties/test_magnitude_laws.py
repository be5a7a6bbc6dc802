"""Laws of `l1`, `l2`, `elastic_net` and `output_magnitude`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import (
    EXACT,
    U,
    assert_close,
    assert_equal,
    assert_gradients,
    assert_rounded_within,
    assert_same_function,
    assert_zero_gradients,
    leaves,
    value_and_gradients,
)
from tests.penalties.inputs import bools, repeats, singles, spoiled, tensors

Penalty = Callable[..., Tensor]

# No simple fraction: a random entry does not lie on the kink, where a rounding chooses the slope.
CLIP = 1.2345

PENALTIES: dict[str, Penalty] = {
    "l1": eq.l1,
    "l2": eq.l2,
    "l2 around the mean": partial(eq.l2, center="mean"),
    "l2 around a number": partial(eq.l2, center=0.3),
    "l2 around a tensor": partial(eq.l2, center=torch.tensor(-0.7, dtype=torch.float64)),
    "l2 capped": partial(eq.l2, clip=CLIP),
    "l2 Huber": partial(eq.l2, clip=CLIP, clip_mode="huber"),
    "l2 capped around the mean": partial(eq.l2, center="mean", clip=CLIP),
    "l2 Huber around the mean": partial(eq.l2, center="mean", clip=CLIP, clip_mode="huber"),
    "elastic net": partial(eq.elastic_net, l1_ratio=0.3),
}
EVEN = ("l1", "l2", "l2 around the mean", "l2 capped", "l2 Huber", "elastic net")

every_penalty = pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
every_norm = pytest.mark.parametrize("norm", ["rms", "l2"])
every_reduction = st.sampled_from(["sum", "mean", "none"])
sum_and_mean = st.sampled_from(["sum", "mean"])
# For each of ten penalties: together as many examples as usual.
few = settings(max_examples=12)

factors = st.floats(-4, 4, allow_subnormal=False)


# Size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("penalty", "degree"), [(eq.l1, 1), (eq.l2, 2)], ids=["l1", "l2"])
@given(x=tensors(7), c=factors, reduction=every_reduction)
def test_scaling_the_input_scales_the_penalty(
    penalty: Penalty, degree: int, reduction: str, x: Tensor, c: float
) -> None:
    """l1(c·x) = |c|·l1(x) and l2(c·x) = c²·l2(x)."""
    scaled = penalty(c * x, reduction=reduction)
    assert_close(scaled, abs(c) ** degree * penalty(x, reduction=reduction))


@every_penalty
@few
@given(x=tensors(7), c=factors)
def test_scale_multiplies_value_and_gradient(penalty: Penalty, x: Tensor, c: float) -> None:
    """`scale` is a factor in front, of any sign."""
    assert_same_function(partial(penalty, scale=c), lambda x: c * penalty(x), x)


@pytest.mark.parametrize("name", EVEN)
@given(x=tensors(7))
def test_the_penalty_is_even(name: str, x: Tensor) -> None:
    """Changing every sign changes nothing, not even a rounding."""
    assert_equal(PENALTIES[name](-x), PENALTIES[name](x))


@given(x=tensors(7), y=tensors(7))
def test_l1_obeys_the_triangle_inequality(x: Tensor, y: Tensor) -> None:
    """l1(x + y) ≤ l1(x) + l1(y)."""
    assert eq.l1(x + y) <= eq.l1(x) + eq.l1(y) + EXACT


@given(x=tensors(7), y=tensors(7))
def test_the_root_of_l2_obeys_the_triangle_inequality(x: Tensor, y: Tensor) -> None:
    """√l2(x + y) ≤ √l2(x) + √l2(y)."""
    assert eq.l2(x + y).sqrt() <= eq.l2(x).sqrt() + eq.l2(y).sqrt() + EXACT


@every_penalty
@few
@given(x=tensors(7), order=st.permutations(range(7)), reduction=sum_and_mean)
def test_the_order_of_entries_does_not_matter(
    penalty: Penalty, reduction: str, x: Tensor, order: list[int]
) -> None:
    """A permutation keeps the value and permutes the gradient."""
    reduced = partial(penalty, reduction=reduction)
    assert_same_function(lambda x: reduced(x[order]), reduced, x)


@every_penalty
@few
@given(x=tensors(7))
def test_the_mean_is_the_sum_by_the_number(penalty: Penalty, x: Tensor) -> None:
    """Over n entries the mean is the sum divided by n."""
    assert_same_function(partial(penalty, reduction="mean"), lambda x: penalty(x) / 7, x)


@every_penalty
@few
@given(x=tensors(7))
def test_no_reduction_keeps_what_would_be_summed(penalty: Penalty, x: Tensor) -> None:
    """The entries of `reduction="none"` sum to the sum."""
    assert_same_function(lambda x: penalty(x, reduction="none").sum(), penalty, x)


# Many tensors ------------------------------------------------------------------------------------


KINDS = ("unmasked", "masked", "weighted")


def cut(x: Tensor) -> list[Tensor]:
    """Eleven entries as tensors of several shapes, an empty one and a number among them."""
    return [x[:6].reshape(2, 3), x[6:6], x[6:10], x[10]]


@every_penalty
@few
@given(x=tensors(11), weights=repeats(11), kind=st.sampled_from(KINDS), reduction=every_reduction)
def test_an_iterable_is_its_concatenation(
    penalty: Penalty, reduction: str, kind: str, x: Tensor, weights: Tensor
) -> None:
    """Several tensors have value and gradient of one long vector."""
    mask = {"unmasked": None, "masked": weights > 0, "weighted": weights}[kind]
    masks = None if mask is None else cut(mask)
    options = {"reduction": reduction}
    assert_same_function(
        lambda x: penalty(iter(cut(x)), mask=masks, **options),
        lambda x: penalty(x, mask=mask, **options),
        x,
    )


# Masks -------------------------------------------------------------------------------------------


@every_penalty
@few
@given(x=tensors(7), keep=bools(7), reduction=sum_and_mean)
def test_masking_is_deleting(penalty: Penalty, reduction: str, x: Tensor, keep: Tensor) -> None:
    """What is masked could as well not be there, NaN or inf or not: value and gradient say so."""
    reduced = partial(penalty, reduction=reduction)
    assert_same_function(partial(reduced, mask=keep), lambda x: reduced(x[keep]), spoiled(x, keep))


@every_penalty
@few
@given(x=tensors(7), keep=bools(7))
def test_a_masked_entry_is_zero_when_nothing_is_reduced(
    penalty: Penalty, x: Tensor, keep: Tensor
) -> None:
    """`reduction="none"` has 0 under the mask and the usual values elsewhere."""
    values = penalty(spoiled(x, keep), mask=keep, reduction="none")
    assert_close(values[keep], penalty(x[keep], reduction="none"))
    assert_equal(values[~keep], torch.zeros(int((~keep).sum())))


@every_penalty
@few
@given(x=tensors(5), weights=repeats(5), reduction=sum_and_mean)
def test_a_whole_weight_is_a_repetition(
    penalty: Penalty, reduction: str, x: Tensor, weights: Tensor
) -> None:
    """An entry of weight 3 counts as three entries, in value and gradient."""
    reduced = partial(penalty, reduction=reduction)
    assert_same_function(
        partial(reduced, mask=weights),
        lambda x: reduced(x.repeat_interleave(weights.long())),
        x,
    )


@every_penalty
@few
@given(x=tensors(4, 3), keep=bools(4, 1), reduction=sum_and_mean)
def test_a_mask_broadcasts_and_counts_what_it_covers(
    penalty: Penalty, reduction: str, x: Tensor, keep: Tensor
) -> None:
    """A mask of one column is the same mask written out."""
    reduced = partial(penalty, reduction=reduction)
    full = keep.expand(4, 3).clone()
    assert_same_function(partial(reduced, mask=keep), partial(reduced, mask=full), x)


@every_penalty
@few
@given(x=tensors(7), reduction=sum_and_mean)
def test_an_empty_mask_gives_zero(penalty: Penalty, reduction: str, x: Tensor) -> None:
    """Where nothing counts the value is 0 and so is the gradient."""
    nothing = torch.zeros(7, dtype=torch.bool)
    masked = partial(penalty, mask=nothing, reduction=reduction)
    assert_equal(masked(spoiled(x, nothing)), 0.0)
    assert_zero_gradients(masked, spoiled(x, nothing))


# Centers, clips and mixtures ---------------------------------------------------------------------


@pytest.mark.parametrize("clip_mode", ["cap", "huber"])
@given(x=tensors(7), c=factors)
def test_around_the_mean_a_shift_does_not_matter(clip_mode: str, x: Tensor, c: float) -> None:
    """Shifting every entry changes nothing, so the gradient, through the mean too, sums to 0."""
    around_mean = partial(eq.l2, center="mean", clip=CLIP, clip_mode=clip_mode)
    assert_close(around_mean(x + c), around_mean(x))
    _, (slope,) = value_and_gradients(around_mean, x)
    assert_close(slope.sum(), 0.0)


@given(x=tensors(3, 4), c=tensors(4))
def test_a_center_is_subtracted_and_learns(x: Tensor, c: Tensor) -> None:
    """l2(x, center=c) is l2(x − c), by x and by a center that requires a gradient."""
    assert_same_function(lambda x, c: eq.l2(x, center=c), lambda x, c: eq.l2(x - c), x, c)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@given(x=tensors(7), c=tensors(7), keep=bools(7))
def test_what_a_center_holds_under_the_mask_is_deleted(
    reduction: str, x: Tensor, c: Tensor, keep: Tensor
) -> None:
    """A target padded with NaN and inf is one that ends before: value and both gradients."""
    l2 = partial(eq.l2, reduction=reduction)
    assert_same_function(
        lambda x, c: l2(x, center=c, mask=keep),
        lambda x, c: l2(x[keep] - c[keep]),
        spoiled(x, keep),
        spoiled(c, keep),
    )


@given(x=tensors(7))
def test_a_cap_holds_the_entries(x: Tensor) -> None:
    """l2(x, clip=k) is l2 of x held within ±k: outside the gradient is 0."""
    assert_same_function(partial(eq.l2, clip=CLIP), lambda x: eq.l2(x.clamp(-CLIP, CLIP)), x)


@given(x=tensors(7))
def test_a_wide_clip_does_nothing(x: Tensor) -> None:
    """Where no entry reaches the clip, both modes are the plain square."""
    for clip_mode in ("cap", "huber"):
        assert_same_function(partial(eq.l2, clip=9.0, clip_mode=clip_mode), eq.l2, x)


@given(x=tensors(7))
def test_beyond_the_clip_the_huber_slope_stays(x: Tensor) -> None:
    """The gradient of the Huber mode is 2·x held within ±2k."""
    huber = partial(eq.l2, clip=CLIP, clip_mode="huber")
    assert_gradients(huber, [x], [(2 * x).clamp(-2 * CLIP, 2 * CLIP)])


@given(x=tensors(7), reduction=every_reduction)
def test_the_elastic_net_at_its_ends(reduction: str, x: Tensor) -> None:
    """At l1_ratio=1 it is l1, at 0 it is l2, to the last bit in value and gradient."""
    for ratio, end in ((1.0, eq.l1), (0.0, eq.l2), (1, eq.l1), (0, eq.l2)):
        net = partial(eq.elastic_net, l1_ratio=ratio, reduction=reduction)
        assert_same_function(net, partial(end, reduction=reduction), x, within=0.0)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("entry", [math.inf, -math.inf])
def test_an_infinite_entry_makes_the_elastic_net_infinite(ratio: float, entry: float) -> None:
    """At the ends as in between: the part that is left out adds no 0·inf."""
    x = torch.tensor([1.0, entry])
    assert_equal(eq.elastic_net(x, l1_ratio=ratio), math.inf)
    _, (slope,) = value_and_gradients(partial(eq.elastic_net, l1_ratio=ratio), x)
    wanted = math.copysign(1.0 if ratio == 1.0 else math.inf, entry)
    assert_equal(slope[1], wanted)


@given(x=tensors(7), a=st.floats(0, 1), reduction=every_reduction)
def test_the_elastic_net_is_a_mixture(reduction: str, x: Tensor, a: float) -> None:
    """In between it is a·l1 + (1−a)·l2."""
    options = {"reduction": reduction}
    assert_same_function(
        partial(eq.elastic_net, l1_ratio=a, **options),
        lambda x: a * eq.l1(x, **options) + (1 - a) * eq.l2(x, **options),
        x,
    )


# Output magnitude --------------------------------------------------------------------------------

targets = st.floats(-3, 3, allow_subnormal=False)


@every_norm
@given(x=tensors(3, 2), c=factors, target=targets)
def test_scaling_output_and_target_scales_the_distance(
    norm: str, x: Tensor, c: float, target: float
) -> None:
    """Output and target times |c| give the distance times c²."""
    scaled = eq.output_magnitude(c * x, target=abs(c) * target, norm=norm)
    assert_close(scaled, c**2 * eq.output_magnitude(x, target=target, norm=norm))


@every_norm
@given(x=tensors(3, 2), order=st.permutations(range(6)))
def test_the_order_of_outputs_does_not_matter(norm: str, x: Tensor, order: list[int]) -> None:
    """Permuting and negating every entry changes nothing."""
    magnitude = partial(eq.output_magnitude, norm=norm)
    shuffled = -x.flatten()[order].reshape(3, 2)
    assert_close(magnitude(shuffled), magnitude(x))


@given(x=tensors(6), target=targets)
def test_the_root_mean_square_does_not_depend_on_the_size(x: Tensor, target: float) -> None:
    """Two copies have the magnitude of one."""
    magnitude = partial(eq.output_magnitude, target=target)
    assert_same_function(lambda x: magnitude(torch.cat([x, x])), magnitude, x)


@every_norm
@pytest.mark.parametrize("dim", [1, -2, (0, 2), (-1,), [0, -1]], ids=str)
@given(x=tensors(2, 3, 4), reduction=every_reduction)
def test_each_norm_is_taken_over_its_dimensions(
    norm: str, reduction: str, dim: int | tuple[int, ...] | list[int], x: Tensor
) -> None:
    """Over `dim` every slice has its own distance; the reduction is over the slices."""
    dims = (dim,) if isinstance(dim, int) else dim
    over = sorted(d % 3 for d in dims)
    rest = [d for d in range(3) if d not in over]
    kept = [x.shape[d] for d in rest]
    slices = x.permute(*rest, *over).flatten(0, len(rest) - 1)
    each = torch.stack([eq.output_magnitude(s, norm=norm) for s in slices]).reshape(kept)
    wanted = {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]
    assert_close(eq.output_magnitude(x, norm=norm, dim=dim, reduction=reduction), wanted)


@every_norm
@given(target=targets)
def test_no_output_is_at_distance_target(norm: str, target: float) -> None:
    """At x = 0 the value is target², with gradient 0."""
    magnitude = partial(eq.output_magnitude, norm=norm, target=target)
    # Not target**2: Python's power may round the other way than a product.
    assert_equal(magnitude(torch.zeros(3, 2, dtype=torch.float64)), target * target)
    assert_zero_gradients(magnitude, torch.zeros(3, 2, dtype=torch.float64))


@every_norm
def test_no_output_has_a_finite_second_derivative(norm: str) -> None:
    """At x = 0 the second derivative is 0 too, for any target."""
    (x,) = leaves(torch.zeros(3, dtype=torch.float64))
    hessian = torch.autograd.functional.hessian(partial(eq.output_magnitude, norm=norm), x)
    assert_equal(hessian, torch.zeros(3, 3))


@every_norm
@pytest.mark.parametrize("entry", [math.inf, -math.inf])
def test_an_infinite_output_is_infinitely_far(norm: str, entry: float) -> None:
    """One infinite entry makes the distance inf; in rows, only that of its own."""
    x = torch.tensor([[1.0, entry], [0.6, 0.8]])
    magnitude = partial(eq.output_magnitude, norm=norm)
    assert_equal(magnitude(x), math.inf)
    rows = magnitude(x, dim=-1, reduction="none")
    assert_equal(rows[0], math.inf)
    assert_equal(rows[1], magnitude(x[1]))


# Rounding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@given(data=st.data())
def test_l1_rounds_as_a_sum_may(length: int, data: st.DataObject) -> None:
    """Float32 l1 is within (n−1)·u·Σ|x| of the exact sum, whatever the order of adding."""
    x = data.draw(singles(length, size=2.0**100))
    double = eq.l1(x.double())
    # |x| is exact, so only the n−1 additions round. The float64 sum is off by up to (n−1)·2⁻⁵³.
    assert_rounded_within(eq.l1(x), double, (length - 1) * (U + 2**-53) * double)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@given(data=st.data())
def test_l2_rounds_as_a_sum_of_squares_may(length: int, data: st.DataObject) -> None:
    """Float32 l2 is within [(n−1)·u·(1+u) + u]·Σx² of the exact sum, and half a subnormal each."""
    x = data.draw(singles(length, size=2.0**50))
    double = eq.l2(x.double())
    # One rounding for each square, relative u or half of the smallest subnormal 2⁻¹⁴⁹, then n−1
    # additions. The float64 value has the same bound with 2⁻⁵³ for u.
    relative = sum((length - 1) * u * (1 + u) + u for u in (U, 2.0**-53))
    bound = relative * double + length * 2.0**-150 * (1 + length * U)
    assert_rounded_within(eq.l2(x), double, bound)
