"""Laws of `gradient_penalty` and `interpolated_gradient_penalty`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import equipoise as eq
from tests.penalties.assertions import (
    assert_close,
    assert_equal,
    assert_same_curvature,
    assert_same_function,
    curvature,
)
from tests.penalties.inputs import nonzero, tensors

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": lambda g: g.square().sum(-1).sqrt(),
    "l1": lambda g: g.abs().sum(-1),
    "linf": lambda g: g.abs().amax(-1),
}
"""Norms of rows, as a textbook has them."""

every_norm = pytest.mark.parametrize("norm", NORMS)
every_per = pytest.mark.parametrize("per", ["sample", "batch"])
every_reduction = st.sampled_from(["sum", "mean", "none"])
targets = st.floats(-2.0, 6.0, allow_subnormal=False)
few = settings(max_examples=25)

ROWS, WIDTH = 3, 4


def half_square(x: Tensor) -> Tensor:
    """½·Σx² a sample: its gradient is x."""
    return 0.5 * x.square().flatten(1).sum(-1)


def reduced(values: Tensor, reduction: str) -> Tensor:
    """A reduction, as a textbook has it."""
    return {"sum": values.sum(), "mean": values.mean(), "none": values}[reduction]


def expected(
    gradient: Tensor, *, norm: str, per: str, sided: str, target: float, squared: bool
) -> Tensor:
    """The penalty of each sample from gradients that are known."""
    lengths = NORMS[norm](gradient.reshape(1, -1) if per == "batch" else gradient.flatten(1))
    lengths = lengths[0] if per == "batch" else lengths
    if squared:
        return lengths.square()
    excess = lengths - target
    return (excess.relu() if sided == "one" else excess).square()


# Closed forms ------------------------------------------------------------------------------------


@every_norm
@every_per
@pytest.mark.parametrize("kind", ["two", "one", "squared"])
@few
@given(x=nonzero(ROWS, 2, 2), target=targets, reduction=every_reduction)
def test_a_quadratic_has_the_penalty_of_its_gradient(
    *, norm: str, per: str, kind: str, x: Tensor, target: float, reduction: str
) -> None:
    """For ½·Σx² the gradient is x: the penalty and its gradient are those of the norms of x."""
    squared = kind == "squared"
    options = {"norm": norm, "per": per, "sided": "two" if squared else kind, "target": target}
    assert_same_function(
        lambda x: eq.gradient_penalty(
            half_square, x, squared=squared, reduction=reduction, **options
        ),
        lambda x: reduced(expected(x, squared=squared, **options), reduction),
        x,
    )


@every_norm
@few
@given(x=tensors(ROWS, WIDTH), w=nonzero(WIDTH), target=targets)
def test_a_linear_function_is_as_steep_everywhere(
    norm: str, x: Tensor, w: Tensor, target: float
) -> None:
    """For x·w every sample has the gradient w, and the penalty learns through w."""
    assert_same_function(
        lambda w: eq.gradient_penalty(lambda x: x @ w, x, norm=norm, target=target),
        lambda w: (NORMS[norm](w) - target).square(),
        w,
    )


@given(x=tensors(ROWS, WIDTH), w=nonzero(WIDTH))
def test_one_norm_for_the_batch_grows_with_its_size(x: Tensor, w: Tensor) -> None:
    """`per="batch"` of a linear function is (√n·‖w‖ − 1)², for n samples."""
    value = eq.gradient_penalty(lambda x: x @ w, x, per="batch")
    assert_close(value, (math.sqrt(ROWS) * w.norm() - 1).square())


@given(x=nonzero(ROWS, WIDTH))
def test_the_default_is_two_sided_around_one(x: Tensor) -> None:
    """With no options it is the mean over samples of (‖g‖ − 1)²."""
    assert_close(eq.gradient_penalty(half_square, x), (x.norm(dim=1) - 1).square().mean())


@given(x=nonzero(ROWS, WIDTH), order=st.permutations(range(ROWS)))
def test_samples_are_valued_alone(x: Tensor, order: list[int]) -> None:
    """A sample has the same penalty alone, in any order and in any company."""
    penalty = partial(eq.gradient_penalty, half_square, reduction="none")
    assert_close(penalty(x[order]), penalty(x)[order])
    assert_close(penalty(x[:1]), penalty(x)[:1])


@given(x=nonzero(ROWS, WIDTH))
def test_a_total_and_a_value_a_sample_are_the_same(x: Tensor) -> None:
    """`fn` may sum over the samples itself, or give [n] or [n, 1]."""
    penalty = partial(eq.gradient_penalty, reduction="none")
    wanted = penalty(half_square, x)
    assert_close(penalty(lambda x: half_square(x).sum(), x), wanted)
    assert_close(penalty(lambda x: half_square(x)[:, None], x), wanted)


@every_norm
@given(x=tensors(ROWS, WIDTH, size=0.2))
def test_one_side_forgives_what_is_flat(norm: str, x: Tensor) -> None:
    """Below the target, one-sided, value and gradient are 0."""
    flat = partial(eq.gradient_penalty, half_square, norm=norm, sided="one")
    assert_same_function(flat, lambda x: 0 * x.sum(), x)


def test_no_samples_cost_nothing() -> None:
    """An empty batch has value 0, its sum too, and no values unreduced."""
    x = torch.zeros(0, WIDTH)
    assert_equal(eq.gradient_penalty(half_square, x), 0.0)
    assert_equal(eq.gradient_penalty(half_square, x, reduction="sum"), 0.0)
    assert_equal(eq.gradient_penalty(half_square, x, reduction="none"), torch.zeros(0))


@every_norm
def test_samples_of_no_entries_are_flat(norm: str) -> None:
    """A sample without entries has the gradient norm 0, and costs target²."""
    value = eq.gradient_penalty(lambda x: x.sum(-1), torch.zeros(3, 0), norm=norm, target=2.0)
    assert_equal(value, 4.0)


def test_a_number_is_one_sample() -> None:
    """A 0-d input has one norm: the slope of 3·x is 3."""
    assert_equal(eq.gradient_penalty(lambda x: 3 * x, torch.tensor(2.0)), 4.0)


# Zero gradient -----------------------------------------------------------------------------------


def weighted_squares(x: Tensor, w: Tensor) -> Tensor:
    """Σ w·x² a sample, with gradient 2·w·x: 0 at x = 0."""
    return (w * x.square()).sum(-1)


@every_norm
@every_per
@pytest.mark.parametrize("sided", ["two", "one"])
def test_where_nothing_is_steep_all_derivatives_are_finite(norm: str, per: str, sided: str) -> None:
    """At gradient 0 the value is target² (one-sided 0), and the derivatives by x and w are 0."""
    x, w = torch.zeros(ROWS, WIDTH).double(), torch.ones(WIDTH).double()

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        steepness = partial(weighted_squares, w=w)
        return eq.gradient_penalty(steepness, x, target=1.5, norm=norm, per=per, sided=sided)

    assert_equal(penalty(x, w), 2.25 if sided == "two" else 0.0)
    assert_same_function(
        penalty, lambda x, w: 0 * (x.sum() + w.sum()) + penalty(x, w).detach(), x, w
    )


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_where_nothing_is_steep_the_second_derivative_is_finite(per: str) -> None:
    """At gradient 0 the second derivatives are 0 for the norm, and 2·(2w)² for its square."""
    x, w = torch.zeros(1, 2).double(), torch.tensor([1.0, 2.0]).double()

    def penalty(x: Tensor, w: Tensor, *, squared: bool) -> Tensor:
        steepness = partial(weighted_squares, w=w)
        return eq.gradient_penalty(steepness, x, per=per, squared=squared)

    for bent in curvature(partial(penalty, squared=False), x, w):
        assert_equal(bent, torch.zeros_like(bent))
    by_x, by_w = curvature(partial(penalty, squared=True), x, w)
    # The Hessian by x is diag(8w²), taken times the vector (1, 2).
    assert_close(by_x, torch.tensor([[8.0, 64.0]]))
    assert_equal(by_w, torch.zeros(2))


# Parameters --------------------------------------------------------------------------------------


def critic() -> nn.Module:
    """A small smooth network in float64."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Softplus(), nn.Linear(8, 1)).double()


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP as it is usually written."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((g.norm(dim=1) - 1) ** 2).mean()


def test_parameters_get_the_gradient_of_the_penalty() -> None:
    """The gradient by every parameter is that of the penalty written out with autograd."""
    model, x = critic(), torch.randn(5, WIDTH, dtype=torch.float64)
    parameters = list(model.parameters())
    options = {"allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad(eq.gradient_penalty(model, x), parameters, **options)
    wanted = torch.autograd.grad(by_hand(model, x), parameters, **options)
    assert sum(slope.abs().sum() for slope in wanted) > 0.01
    for slope, wanted_slope in zip(ours, wanted, strict=True):
        assert_close(slope, wanted_slope)


def test_the_penalty_may_be_differentiated_twice_more() -> None:
    """By x, value, gradient and second derivative are those of the gradient's closed form."""
    w = torch.randn(WIDTH, dtype=torch.float64)

    def closed_form(x: Tensor) -> Tensor:
        return ((3 * w * x.square()).norm(dim=1) - 1).square().mean()

    penalty = partial(eq.gradient_penalty, lambda x: (w * x**3).sum(-1))
    x = torch.rand(ROWS, WIDTH, dtype=torch.float64) + 0.5
    assert_same_function(penalty, closed_form, x)
    assert_same_curvature(penalty, closed_form, x)


@pytest.mark.parametrize("learns", [False, True])
def test_a_tangent_is_carried_on(learns: bool) -> None:
    """In forward mode the tangent is that of the gradient, whatever `x` requires."""
    x, direction = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    penalty = partial(eq.gradient_penalty, lambda x: x.pow(3).sum(-1))
    slope = torch.func.grad(penalty)(x)
    with forward_ad.dual_level():
        value = penalty(forward_ad.make_dual(x.requires_grad_(learns), direction))
        tangent = forward_ad.unpack_dual(value).tangent
    assert tangent is not None
    assert_close(tangent, (slope * direction).sum())


def test_leaves_are_not_touched() -> None:
    """Neither `x` nor a parameter has a `.grad` afterwards, and `x` requires what it required."""
    model, x = critic(), torch.randn(5, WIDTH, dtype=torch.float64)
    eq.gradient_penalty(model, x)
    assert not x.requires_grad
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


@every_per
def test_it_works_without_a_graph(per: str) -> None:
    """Under `torch.no_grad` the value is the same, and has no graph."""
    model, x = critic(), torch.randn(5, WIDTH, dtype=torch.float64)
    wanted = eq.gradient_penalty(model, x, per=per)
    with torch.no_grad():
        value = eq.gradient_penalty(model, x, per=per)
    assert_equal(value, wanted)
    assert wanted.requires_grad
    assert not value.requires_grad


@every_per
def test_it_works_in_inference_mode(per: str) -> None:
    """To evaluate a critic, inference mode serves as well as `torch.no_grad`."""
    model, x = critic(), torch.randn(5, WIDTH, dtype=torch.float64)
    wanted = eq.gradient_penalty(model, x, per=per)
    with torch.inference_mode():
        for point in (x, x.clone()):  # the second is made here, and could not be recorded
            assert_close(eq.gradient_penalty(model, point, per=per), wanted)


# Between two batches -----------------------------------------------------------------------------


class Seen:
    """A critic that remembers what it was shown: Σx a sample, steep in all directions alike."""

    def __call__(self, x: Tensor) -> Tensor:
        """Remember the input, return its sums."""
        self.x = x.detach()
        return x.square().flatten(1).sum(-1)


def shown(x: Tensor, reference: Tensor, **options: object) -> Tensor:
    """Where between the batches the function is evaluated."""
    seen = Seen()
    eq.interpolated_gradient_penalty(seen, x, reference, **options)
    return seen.x


def test_each_sample_has_its_own_epsilon() -> None:
    """Epsilon is one number within a sample, differs between samples, and covers [0, 1)."""
    ones = torch.ones(500, 2, 3)
    epsilon = shown(ones, 0 * ones).flatten(1)
    assert torch.equal(epsilon, epsilon[:, :1].expand(500, 6))
    assert len(epsilon[:, 0].unique()) > 490
    assert epsilon.min() >= 0.0
    assert epsilon.max() < 1.0
    # The mean of 500 uniform numbers has standard deviation 0.013: six of them.
    assert abs(epsilon.mean() - 0.5) < 0.08


@given(x=tensors(ROWS, 2, 2), reference=tensors(ROWS, 2, 2), seed=st.integers(0, 2**31))
def test_the_point_lies_on_the_line(x: Tensor, reference: Tensor, seed: int) -> None:
    """The function sees ε·x + (1−ε)·reference, with ε drawn from the generator."""
    epsilon = torch.rand(ROWS, 1, 1, generator=torch.Generator().manual_seed(seed)).double()
    point = shown(x, reference, generator=torch.Generator().manual_seed(seed))
    assert_close(point, epsilon * x + (1 - epsilon) * reference)


@given(x=tensors(ROWS, WIDTH), reference=tensors(ROWS, WIDTH))
def test_epsilon_at_its_ends(x: Tensor, reference: Tensor) -> None:
    """ε = 1 is exactly x, ε = 0 exactly the reference."""
    assert_equal(shown(x, reference, epsilon=1.0), x)
    assert_equal(shown(x, reference, epsilon=0), reference)


@given(x=tensors(ROWS, WIDTH), reference=tensors(ROWS, WIDTH), data=st.data())
def test_epsilon_may_be_given(x: Tensor, reference: Tensor, data: st.DataObject) -> None:
    """A number is for all samples; a tensor has one for each sample, or for each entry."""
    for shape in ((), (ROWS, 1), (ROWS, WIDTH)):
        epsilon = data.draw(tensors(*shape, size=1.0))
        wanted = epsilon * x + (1 - epsilon) * reference
        assert_close(shown(x, reference, epsilon=epsilon), wanted)
    assert_close(shown(x, reference, epsilon=0.25), 0.25 * x + 0.75 * reference)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target": 0.3},
        {"per": "batch"},
        {"sided": "one", "target": 3.0},
        {"norm": "l1"},
        {"norm": "linf"},
        {"squared": True},
        {"reduction": "none"},
        {"reduction": "sum"},
    ],
    ids=str,
)
def test_it_is_the_gradient_penalty_in_between(options: dict[str, object]) -> None:
    """Every option means what it means for `gradient_penalty`, at the point in between."""
    x, reference = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    between = 0.25 * x + 0.75 * reference
    value = eq.interpolated_gradient_penalty(half_square, x, reference, epsilon=0.25, **options)
    assert_close(value, eq.gradient_penalty(half_square, between, **options))


def test_epsilon_takes_the_precision_of_the_batch() -> None:
    """Given in float64 to a batch in float32, it gives what a number gives."""
    x, reference = torch.randn(2, ROWS, WIDTH)
    penalty = partial(eq.interpolated_gradient_penalty, lambda x: x.pow(3).sum(-1), x, reference)
    epsilon = torch.full((ROWS, 1), 0.25, dtype=torch.float64)
    assert_equal(penalty(epsilon=epsilon), penalty(epsilon=0.25))


def test_the_precision_is_that_of_the_first_batch() -> None:
    """A reference in another precision is taken into that of x."""
    x, reference = torch.randn(5, WIDTH), torch.randn(5, WIDTH, dtype=torch.float64)
    value = eq.interpolated_gradient_penalty(half_square, x, reference, epsilon=0.25)
    assert value.dtype == torch.float32
    wanted = eq.gradient_penalty(half_square, 0.25 * x + 0.75 * reference.float())
    # Two float32 routes to one point: a few roundings of 6e-8.
    assert_close(value, wanted, within=1e-5)


def test_both_batches_learn() -> None:
    """The penalty may be differentiated by x (ε of it) and by the reference (1−ε of it)."""
    x, reference = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    assert_same_function(
        lambda x, y: eq.interpolated_gradient_penalty(half_square, x, y, epsilon=0.25),
        lambda x, y: ((0.25 * x + 0.75 * y).norm(dim=1) - 1).square().mean(),
        x,
        reference,
    )


def test_a_seeded_epsilon_can_be_repeated() -> None:
    """The same generator state gives the same epsilons, another one others, each call anew."""
    ones, generators = torch.ones(5, 1), [torch.Generator().manual_seed(s) for s in (1, 1, 2)]
    first, again, other = (shown(ones, 0 * ones, generator=g) for g in generators)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, shown(ones, 0 * ones, generator=generators[0]))


def test_a_given_generator_leaves_the_global_one_alone() -> None:
    """Only where no generator and no epsilon is given does a call advance torch's own."""
    ones, before = torch.ones(5, 1), torch.get_rng_state()
    shown(ones, 0 * ones, generator=torch.Generator())
    shown(ones, 0 * ones, epsilon=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    shown(ones, 0 * ones)
    assert not torch.equal(torch.get_rng_state(), before)


# Operations without a second derivative ----------------------------------------------------------


class SquareOnce(torch.autograd.Function):
    """x², whose derivative may not be differentiated."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, slope: Tensor) -> Tensor:
        """Two times x."""
        return 2 * slope * ctx.saved_tensors[0]


def fused_attention(x: Tensor) -> Tensor:
    """Attention of a sequence to itself; torch fuses it, and its derivative is final."""
    heads = x.unsqueeze(1)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).sum((1, 2, 3))


def test_fused_attention_is_refused_by_name() -> None:
    """The message names the attention and the way out, before any backward pass."""
    named = r"got ScaledDotProduct\w*Attention\w*\. Use `torch\.nn\.attention\.sdpa_kernel"
    with pytest.raises(eq.GradientError, match=named):
        eq.gradient_penalty(fused_attention, torch.randn(2, 3, 4))


def test_plain_attention_is_welcome() -> None:
    """The way out works: with the MATH backend the penalty learns."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        eq.gradient_penalty(fused_attention, x).backward()
    assert x.grad.abs().sum() > 0


def test_fused_attention_is_fine_where_nothing_learns() -> None:
    """Under `torch.no_grad` one derivative is enough, and fused attention has that."""
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        value = eq.gradient_penalty(fused_attention, x)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            # Two float32 kernels for one function agree to a few roundings of 6e-8.
            assert_close(value, eq.gradient_penalty(fused_attention, x), within=1e-5)


def test_a_compiled_model_is_refused_by_name() -> None:
    """A model compiled on its own has one derivative only; the message says what to compile."""
    model = torch.compile(nn.Linear(4, 1), backend="aot_eager")
    with pytest.raises(eq.GradientError, match=r"got CompiledFunction.* compile the step"):
        eq.gradient_penalty(model, torch.randn(2, 4))


def test_one_derivative_is_enough_where_nothing_learns() -> None:
    """Under `torch.no_grad` a function that is differentiable once has its penalty."""
    x = torch.tensor([[0.5, 0.0], [0.0, 2.0]])
    with torch.no_grad():
        value = eq.gradient_penalty(lambda x: SquareOnce.apply(x).sum(-1), x)
    assert_equal(value, (0.0 + 9.0) / 2)


W = torch.full((4,), 1.5, requires_grad=True)


def test_one_derivative_is_enough_beside_the_way_to_the_input() -> None:
    """A function of parameters alone is differentiated once, and so may be one that has no more."""
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0], requires_grad=True)
    value = eq.gradient_penalty(lambda x: half_square(x) * SquareOnce.apply(w).sum(), x)
    # The gradient is x·Σw², of length 25; the penalty (5·Σw² − 1)², with slope 2·24·5·2·w.
    assert_equal(value, 576.0)
    assert_equal(torch.autograd.grad(value, w)[0], 480 * w)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: SquareOnce.apply(x).sum(-1),
        lambda x: (W * SquareOnce.apply(x)).sum(-1),
        lambda x: SquareOnce.apply(W * x).sum(-1),
        lambda x: SquareOnce.apply(x).sum(-1) + (W * x.square()).sum(-1),
    ],
    ids=["alone", "before a parameter", "after a parameter", "beside a parameter"],
)
def test_a_function_that_is_differentiable_once_is_refused_by_name(
    function: Callable[[Tensor], Tensor],
) -> None:
    """Wherever it stands, its derivative would be lost or wrong in the backward pass."""
    with pytest.raises(eq.GradientError, match="differentiated twice, got SquareOnce"):
        eq.gradient_penalty(function, torch.randn(2, 4))
