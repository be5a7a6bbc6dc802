"""Laws of `orthogonality`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import equipoise as eq
from tests.penalties.assertions import (
    EXACT,
    assert_close,
    assert_equal,
    assert_same_function,
    assert_zero_gradients,
    value_and_gradients,
)
from tests.penalties.inputs import nonzero

MODES = ("soft", "hard", "spectral", "srip")
SMOOTH = MODES[:3]
SHAPES = [(3, 5), (4, 4), (5, 3)]

every_mode = pytest.mark.parametrize("mode", MODES)
smooth_mode = pytest.mark.parametrize("mode", SMOOTH)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
both_lengths = pytest.mark.parametrize("normalize", [True, False], ids=["unit rows", "as is"])
every_reduction = st.sampled_from(["sum", "mean"])
few = settings(max_examples=15)


def matrix(*shape: int) -> Tensor:
    """A fixed matrix in general position."""
    return torch.randn(*shape, dtype=torch.float64)


def orthonormal(n: int, d: int) -> Tensor:
    """Random orthonormal rows, n ≤ d."""
    return torch.linalg.qr(matrix(d, d)).Q[:n]


def singular_squares(m: Tensor, *, normalize: bool) -> Tensor:
    """σ² of a matrix, its rows made unit length if asked: an independent decomposition."""
    rows = m / m.norm(dim=-1, keepdim=True) if normalize else m
    return torch.linalg.svdvals(rows).square()


# Zero --------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("n", [1, 3, 5])
def test_orthonormal_rows_cost_nothing(mode: str, n: int) -> None:
    """Orthonormal rows have value 0 in every mode."""
    m = orthonormal(n, 5)
    for normalize in (True, False):
        assert_close(eq.orthogonality(m, mode=mode, normalize=normalize), 0.0)


@given(lengths=nonzero(3))
def test_orthogonal_rows_of_any_length_cost_nothing_in_soft_mode(lengths: Tensor) -> None:
    """Soft mode sees angles only; hard mode sees Σ (length² − 1)² too, unless rows are unit."""
    m = lengths[:, None] * orthonormal(3, 5)
    excess = (lengths.square() - 1).square().sum()
    assert_close(eq.orthogonality(m, normalize=False), 0.0)
    assert_close(eq.orthogonality(m, mode="hard", normalize=False), excess)
    for mode in MODES:
        assert_close(eq.orthogonality(m, mode=mode), 0.0)


@pytest.mark.parametrize(("n", "d"), [(5, 3), (6, 2), (4, 4)])
def test_spectral_reaches_zero_with_more_rows_than_columns(n: int, d: int) -> None:
    """A matrix with orthonormal columns has equal singular values: 0, where soft mode cannot be."""
    tight = orthonormal(d, n).mT
    assert_close(eq.orthogonality(tight, mode="spectral", normalize=False), 0.0)
    if n > d:
        assert eq.orthogonality(tight, mode="soft", normalize=False) > 0.1


@smooth_mode
def test_one_row_costs_nothing(mode: str) -> None:
    """A single row, given as a vector or a matrix, has value 0 and gradient 0."""
    row = matrix(4)
    one = partial(eq.orthogonality, mode=mode)
    assert_close(one(row), 0.0)
    assert_close(one(row[None]), 0.0)
    assert_same_function(one, lambda x: 0 * x.sum(), row)


@every_mode
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (2, 0, 3)], ids=str)
def test_empty_costs_nothing(mode: str, reduction: str, shape: tuple[int, ...]) -> None:
    """No rows, or rows of no entries, have value 0."""
    assert_equal(eq.orthogonality(torch.zeros(shape), mode=mode, reduction=reduction), 0.0)


# Definitions -------------------------------------------------------------------------------------


@every_shape
@both_lengths
@few
@given(data=st.data())
def test_soft_and_hard_are_sums_over_the_gram_matrix(
    shape: tuple[int, int], normalize: bool, data: st.DataObject
) -> None:
    """Soft is Σ_{i≠j} G_ij², hard Σ (G − I)_ij², with G = M·Mᵀ; means are over n(n−1) and n²."""
    m, n = data.draw(nonzero(*shape)), shape[0]

    def entries(m: Tensor, *, identity: bool) -> Tensor:
        rows = m / m.norm(dim=-1, keepdim=True) if normalize else m
        gram = rows @ rows.mT
        diagonal = torch.eye(n, dtype=m.dtype)
        return (gram - diagonal if identity else gram * (1 - diagonal)).square().sum()

    for mode, number in (("soft", n * (n - 1)), ("hard", n * n)):
        by_definition = partial(entries, identity=mode == "hard")
        penalty = partial(eq.orthogonality, mode=mode, normalize=normalize)
        assert_same_function(penalty, by_definition, m)
        mean = partial(penalty, reduction="mean")
        assert_same_function(mean, lambda m, f=by_definition, k=number: f(m) / k, m)


@every_shape
@both_lengths
def test_spectral_is_the_spread_of_the_singular_values(
    shape: tuple[int, int], normalize: bool
) -> None:
    """Spectral is Σ (σ² − mean σ²)² over the min(n, d) singular values; its mean the variance."""
    m = matrix(*shape)
    squares = singular_squares(m, normalize=normalize)
    spectral = partial(eq.orthogonality, m, mode="spectral", normalize=normalize)
    assert_close(spectral(), (squares - squares.mean()).square().sum())
    assert_close(spectral(reduction="mean"), squares.var(correction=0))


@every_shape
@both_lengths
def test_the_gradient_of_spectral_is_that_of_the_decomposition(
    shape: tuple[int, int], normalize: bool
) -> None:
    """Without a decomposition the gradient is the one through the singular values."""

    def spread(m: Tensor) -> Tensor:
        squares = singular_squares(m, normalize=normalize)
        return (squares - squares.mean()).square().sum()

    penalty = partial(eq.orthogonality, mode="spectral", normalize=normalize)
    assert_same_function(penalty, spread, matrix(*shape))


@every_shape
@both_lengths
def test_srip_is_the_largest_deviation_of_a_singular_value(
    shape: tuple[int, int], normalize: bool
) -> None:
    """Srip is max |σ² − 1|, in value and gradient; its mean over one matrix is itself."""

    def deviation(m: Tensor) -> Tensor:
        return (singular_squares(m, normalize=normalize) - 1).abs().max()

    srip = partial(eq.orthogonality, mode="srip", normalize=normalize)
    m = matrix(*shape)
    assert_same_function(srip, deviation, m)
    assert_equal(srip(m, reduction="mean"), srip(m))


def test_srip_finds_the_smallest_singular_value_too() -> None:
    """Where a matrix shrinks more than it stretches, the deviation is that of the smallest σ."""
    m = torch.diag(torch.tensor([1.1, 0.2], dtype=torch.float64))
    assert_close(eq.orthogonality(m, mode="srip", normalize=False), 1 - 0.04)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_with_unit_rows_and_no_more_rows_than_columns_three_modes_coincide(
    shape: tuple[int, int],
) -> None:
    """Soft, hard and spectral are one number, and one gradient, for n ≤ d unit rows."""
    m = matrix(*shape)
    for mode in ("hard", "spectral"):
        assert_same_function(partial(eq.orthogonality, mode=mode), eq.orthogonality, m)


@every_shape
def test_without_unit_rows_the_modes_give_different_numbers(shape: tuple[int, int]) -> None:
    """Rows of other lengths have four different numbers."""
    m = matrix(*shape)
    values = [float(eq.orthogonality(m, mode=mode, normalize=False)) for mode in MODES]
    gaps = torch.tensor(sorted(values)).diff()
    assert gaps.min() > 0.01


def test_with_more_rows_than_columns_spectral_differs() -> None:
    """For n > d unit rows spectral is lower than soft by what no rows can avoid: n²/d − n."""
    m = matrix(5, 3)
    soft, hard, spectral = (eq.orthogonality(m, mode=mode) for mode in SMOOTH)
    assert_close(hard, soft)
    assert_close(spectral, soft - (25 / 3 - 5))


# Invariances -------------------------------------------------------------------------------------


@every_mode
@every_shape
@both_lengths
@few
@given(data=st.data())
def test_order_signs_and_rotation_do_not_matter(
    mode: str, shape: tuple[int, int], normalize: bool, data: st.DataObject
) -> None:
    """Permuting rows, negating some, and turning all of them keeps the value."""
    n, d = shape
    m = data.draw(nonzero(n, d))
    order = data.draw(st.permutations(range(n)))
    signs = torch.tensor(data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=n, max_size=n)))
    turned = (signs[:, None] * m)[order] @ orthonormal(d, d)
    penalty = partial(eq.orthogonality, mode=mode, normalize=normalize)
    # Values reach (5·8²·5)² ≈ 3e6, which is only seen through its relative part.
    assert_close(penalty(turned), penalty(m))


@every_mode
@given(lengths=nonzero(3))
def test_unit_rows_do_not_see_lengths(mode: str, lengths: Tensor) -> None:
    """With `normalize` stretching a row changes nothing."""
    m = matrix(3, 5)
    penalty = partial(eq.orthogonality, mode=mode)
    assert_close(penalty(lengths[:, None] * m), penalty(m))


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_unit_rows_hold_at_extreme_lengths(size: float) -> None:
    """Rows whose squares vanish or overflow have the direction they have."""
    m = torch.tensor([[size, 0.0], [3 * size / 5, 4 * size / 5]], dtype=torch.float64)
    assert_close(eq.orthogonality(m), 0.72)


@every_mode
@every_shape
@both_lengths
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("zeros", [1, 4])
def test_zero_rows_change_nothing(
    *, mode: str, shape: tuple[int, int], normalize: bool, reduction: str, zeros: int
) -> None:
    """Appended zero rows count for nothing: same value, same gradient, and 0 for themselves."""
    penalty = partial(eq.orthogonality, mode=mode, normalize=normalize, reduction=reduction)
    n, d = shape
    padded = torch.cat([matrix(n, d), torch.zeros(zeros, d, dtype=torch.float64)])
    assert_same_function(penalty, lambda x: penalty(x[:n]), padded)


@every_mode
@both_lengths
@pytest.mark.parametrize("d", [4, 8])
def test_zero_rows_between_others_have_gradient_zero(mode: str, normalize: bool, d: int) -> None:
    """Exactly 0, though the rounding of a decomposition would give them a part in it."""
    penalty = partial(eq.orthogonality, mode=mode, normalize=normalize)
    for _ in range(20):
        m = torch.randn(8, d)
        m[[0, 2]] = 0
        _, (slope,) = value_and_gradients(penalty, m)
        assert_equal(slope[[0, 2]], torch.zeros(2, d))


@every_mode
@both_lengths
@pytest.mark.parametrize("shape", [(3, 4), (4, 3)], ids=str)
def test_nothing_but_zero_rows_costs_nothing(
    mode: str, normalize: bool, shape: tuple[int, int]
) -> None:
    """The zero matrix has value 0 and gradient 0, in the sum and the mean."""
    for reduction in ("sum", "mean"):
        penalty = partial(eq.orthogonality, mode=mode, normalize=normalize, reduction=reduction)
        assert_equal(penalty(torch.zeros(shape)), 0.0)
        assert_zero_gradients(penalty, torch.zeros(shape))


@smooth_mode
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_rows_among_many_zeros_are_never_below_zero(mode: str, reduction: str) -> None:
    """Orthonormal rows in a long padded sequence: no rounding makes the value negative."""
    penalty = partial(eq.orthogonality, mode=mode, reduction=reduction)
    padded = [torch.cat([orthonormal(3, 4).float(), torch.zeros(20, 4)]) for _ in range(50)]
    values = torch.stack([penalty(m) for m in padded])
    assert (values >= 0).all()
    # Sums of about four squares near 1 in float32.
    assert_close(values, torch.zeros(50), within=1e-5)


@every_mode
@both_lengths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_propagates(mode: str, normalize: bool, bad: float) -> None:
    """NaN and inf reach value and gradient; no mode stops the training with an error of its own."""
    penalty = partial(eq.orthogonality, mode=mode, normalize=normalize)
    for shape in SHAPES:
        m = matrix(*shape)
        m[1, 2] = bad
        value, (slope,) = value_and_gradients(penalty, m)
        assert not value.isfinite()
        assert not slope.isfinite().all()


@every_mode
def test_what_is_not_finite_stays_in_its_sample(mode: str) -> None:
    """One Gram matrix a sample: the gradient of the other samples is their own."""
    x = matrix(2, 3, 4)
    x[0, 1, 2] = torch.nan
    penalty = partial(eq.orthogonality, mode=mode)
    value, (slope,) = value_and_gradients(partial(penalty, per_sample=True), x)
    _, (wanted,) = value_and_gradients(penalty, x[1])
    assert value.isnan()
    assert_close(slope[1], wanted)


# Means that do not grow --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 10, 40])
@given(cosine=st.floats(0.0, 0.9))
def test_the_mean_of_soft_does_not_grow_with_the_rows(n: int, cosine: float) -> None:
    """n rows that all meet at one angle have mean cos², for every n, while the sum grows."""
    shared = torch.full((n, 1), cosine**0.5, dtype=torch.float64)
    m = torch.cat([shared, (1 - cosine) ** 0.5 * torch.eye(n, dtype=torch.float64)], 1)
    assert_close(eq.orthogonality(m, reduction="mean"), cosine**2)
    assert_close(eq.orthogonality(m), n * (n - 1) * cosine**2)


@pytest.mark.parametrize("n", [1, 2, 10, 40])
def test_the_mean_of_hard_does_not_grow_with_the_rows(n: int) -> None:
    """n copies of a vector of squared length ½ miss the identity by ½ everywhere: mean ¼."""
    m = torch.full((n, 2), 0.5, dtype=torch.float64)
    hard = partial(eq.orthogonality, mode="hard", normalize=False)
    assert_close(hard(m, reduction="mean"), 0.25)
    assert_close(hard(m), n * n / 4)


@every_shape
@pytest.mark.parametrize("mode", ["spectral", "srip"])
def test_the_mean_over_singular_values_does_not_grow_with_copies(
    mode: str, shape: tuple[int, int]
) -> None:
    """Two copies side by side on the diagonal have every singular value twice: the same mean."""
    m = matrix(*shape)
    mean = partial(eq.orthogonality, mode=mode, normalize=False, reduction="mean")
    assert_close(mean(torch.block_diag(m, m)), mean(m))


# Axes and samples --------------------------------------------------------------------------------

B, S, V = 2, 3, 4
CUBE = torch.arange(1.0, B * S * V + 1, dtype=torch.float64).sin().reshape(B, S, V)
AXES = [
    ("rows", CUBE.reshape(B * S, V)),
    ("sequence", CUBE.permute(1, 0, 2).reshape(S, B * V)),
    ("vocabulary", CUBE.permute(2, 0, 1).reshape(V, B * S)),
    (0, CUBE.reshape(B, S * V)),
    (1, CUBE.permute(1, 0, 2).reshape(S, B * V)),
    (-1, CUBE.permute(2, 0, 1).reshape(V, B * S)),
]


@every_mode
@both_lengths
@pytest.mark.parametrize(("axis", "rows"), AXES, ids=[str(axis) for axis, _ in AXES])
def test_an_axis_of_three_dimensions_says_what_a_row_is(
    mode: str, normalize: bool, axis: str | int, rows: Tensor
) -> None:
    """[b, s, v] becomes [b·s, v], [s, b·v] or [v, b·s]; a number takes that dimension."""
    penalty = partial(eq.orthogonality, mode=mode, normalize=normalize)
    assert_close(penalty(CUBE, axis=axis), penalty(rows))


@every_mode
@pytest.mark.parametrize(
    ("axis", "transposed"),
    [("rows", False), ("sequence", False), ("vocabulary", True), (0, False), (1, True)],
)
def test_an_axis_of_two_dimensions_says_what_a_row_is(
    mode: str, axis: str | int, transposed: bool
) -> None:
    """[s, v] is taken as it is for rows and sequence, and transposed for vocabulary."""
    m = matrix(3, 4)
    penalty = partial(eq.orthogonality, mode=mode, normalize=False)
    assert_close(penalty(m, axis=axis), penalty(m.mT if transposed else m))


@every_mode
@both_lengths
@pytest.mark.parametrize("axis", ["rows", "sequence", "vocabulary", 1, 2, -1])
def test_per_sample_adds_up_the_samples(mode: str, normalize: bool, axis: str | int) -> None:
    """One Gram matrix a sample: the sum of the samples' values, or the mean of their means."""
    x = matrix(3, 4, 5)
    penalty = partial(eq.orthogonality, mode=mode, normalize=normalize)
    turned = axis in ("vocabulary", 2, -1)

    def looped(x: Tensor, reduction: str) -> Tensor:
        samples = [penalty(m.mT if turned else m, reduction=reduction) for m in x]
        return torch.stack(samples).sum() if reduction == "sum" else torch.stack(samples).mean()

    for reduction in ("sum", "mean"):
        each = partial(penalty, axis=axis, per_sample=True, reduction=reduction)
        assert_same_function(each, partial(looped, reduction=reduction), x)


def test_per_sample_means_divide_by_the_entries_summed() -> None:
    """Samples padded with zero rows count only their own pairs."""
    x = matrix(2, 4, 5)
    x[0, 2:] = 0
    pairs = 2 * 1 + 4 * 3
    mean = eq.orthogonality(x, per_sample=True, reduction="mean")
    assert_close(mean, (eq.orthogonality(x[0]) + eq.orthogonality(x[1])) / pairs)


def test_samples_do_not_meet() -> None:
    """Samples with the same orthonormal rows cost nothing each, but a lot as one set of rows."""
    x = orthonormal(3, 5).expand(2, 3, 5)
    assert_close(eq.orthogonality(x, per_sample=True), 0.0)
    assert_close(eq.orthogonality(x), 6.0)


# Memory ------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the most entries any operation put out."""

    entries = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the operation and look at its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.entries = max(self.entries, leaf.numel())
        return result


@every_mode
@pytest.mark.parametrize(
    ("shape", "options"),
    [((8, 64, 4), {}), ((8, 64, 4), {"per_sample": True}), ((512, 4), {}), ((4, 512), {})],
    ids=str,
)
def test_the_smaller_gram_matrix_is_formed(
    mode: str, shape: tuple[int, ...], options: dict[str, bool]
) -> None:
    """Nothing larger than the input is made, forward or backward: no 512×512, no 64×64 a sample."""
    x = torch.randn(shape, requires_grad=True)
    with Largest() as largest:
        eq.orthogonality(x, mode=mode, **options).backward()
    assert largest.entries == x.numel()


# Drawing rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("sample", "taken"), [(1, 1), (3, 3), (6, 6), (9, 6)])
def test_so_many_rows_are_drawn(per_sample: bool, sample: int, taken: int) -> None:
    """k equal rows have soft value k(k−1), in each of two samples; no more than all are drawn."""
    x = torch.ones(2, 6, 3) if per_sample else torch.ones(6, 3)
    value = eq.orthogonality(x, sample=sample, per_sample=per_sample)
    # Unit rows of float32 have products 1 within 3 roundings: 30 pairs of them twice.
    assert_close(value, (2 if per_sample else 1) * taken * (taken - 1.0), within=1e-5)


def drawn(seed: int, *, x: Tensor, sample: int, per_sample: bool = False) -> Tensor:
    """Which rows are drawn: those with a gradient of Σ (length² − 1)²."""
    x = x.clone().requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    value = eq.orthogonality(
        x,
        mode="hard",
        normalize=False,
        sample=sample,
        per_sample=per_sample,
        generator=generator,
    )
    return (torch.autograd.grad(value, x)[0] != 0).any(-1)


def test_rows_are_drawn_without_repetition() -> None:
    """Three different rows of six are taken, and over many draws each about half of the time."""
    counts = sum(drawn(seed, x=2 * torch.eye(6), sample=3).long() for seed in range(200))
    assert all(drawn(seed, x=2 * torch.eye(6), sample=3).sum() == 3 for seed in range(20))
    # Binomial with 200 draws at ½: seven standard deviations of 7.07 either side of 100.
    assert counts.min() > 50
    assert counts.max() < 150


def test_each_sample_draws_its_own_rows() -> None:
    """With `per_sample` the rows of one sample say nothing about those of another."""
    x = (2 * torch.eye(8)).expand(5, 8, 8)
    rows = drawn(0, x=x, sample=4, per_sample=True)
    assert rows.sum(-1).tolist() == [4] * 5
    assert len(rows.unique(dim=0)) > 1


def test_a_seeded_draw_can_be_repeated() -> None:
    """The same generator state draws the same rows, another one others, each call anew."""
    x = 2 * torch.eye(20)
    assert torch.equal(drawn(1, x=x, sample=5), drawn(1, x=x, sample=5))
    assert not torch.equal(drawn(1, x=x, sample=5), drawn(2, x=x, sample=5))
    generator = torch.Generator().manual_seed(0)
    m = matrix(20, 30)
    values = {float(eq.orthogonality(m, sample=5, generator=generator)) for _ in range(4)}
    assert len(values) == 4


def test_a_given_generator_leaves_the_global_one_alone() -> None:
    """Only where no generator is given does a draw advance torch's own."""
    before = torch.get_rng_state()
    eq.orthogonality(torch.eye(6), sample=3, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)
    eq.orthogonality(torch.eye(6), sample=3)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_global_seed_repeats_a_draw() -> None:
    """Without a generator `torch.manual_seed` decides."""
    m = matrix(20, 30)
    values = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        values.append(float(eq.orthogonality(m, sample=5)))
    assert values[0] == values[1]
    assert abs(values[0] - values[2]) > EXACT
