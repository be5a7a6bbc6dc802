"""`grad_norm`: how long a gradient is, how exactly, and what has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import equipoise as eq
from equipoise._numerics import total_norm
from tests.penalties.assertions import assert_close, assert_equal
from tests.penalties.inputs import nonzero, tensors

SHAPES = [(), (5,), (2, 3), (2, 1, 3), (0,), (0, 3)]


# Closed forms ------------------------------------------------------------------------------------


@given(x=tensors(3, 4))
def test_the_gradient_of_a_sum_of_squares_is_twice_the_vector(x: Tensor) -> None:
    """‖∇Σx²‖ = 2‖x‖."""
    assert_close(eq.grad_norm(eq.l2, x), 2 * torch.linalg.vector_norm(x))


@given(x=nonzero(7))
def test_the_gradient_of_l1_counts_the_entries(x: Tensor) -> None:
    """‖∇Σ|x|‖ = √n where no entry is 0."""
    assert_close(eq.grad_norm(eq.l1, x), math.sqrt(7))


@given(x=tensors(3, 4), c=st.floats(-4, 4, allow_subnormal=False))
def test_scaling_the_function_scales_the_norm(x: Tensor, c: float) -> None:
    """‖∇(c·f)‖ = |c|·‖∇f‖."""
    assert_close(
        eq.grad_norm(partial(eq.entropy, from_logits=True, denominator=1 / 3), x) * abs(c),
        eq.grad_norm(lambda x: c * eq.entropy(x, from_logits=True, denominator=1 / 3), x),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_has_a_norm(shape: tuple[int, ...]) -> None:
    """The sum of all entries has gradient 1 everywhere: norm √n, also for a number and for none."""
    x = torch.zeros(shape)
    assert_close(eq.grad_norm(lambda x: x.sum(), x), math.sqrt(x.numel()), within=1e-7)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_result_of_one_entry_is_a_scalar(shape: tuple[int, ...]) -> None:
    """A function may return one number in any shape."""
    assert_equal(eq.grad_norm(lambda x: 3 * x.sum().reshape(shape), torch.ones(4)), 6.0)


@given(x=tensors(5, size=2.0))
def test_it_is_the_norm_of_finite_differences(x: Tensor) -> None:
    """The norm is that of the difference quotients along every axis."""

    def function(x: Tensor) -> Tensor:
        return (x.sin() * x.roll(1)).sum()

    step = 1e-5
    axes = step * torch.eye(5, dtype=x.dtype)
    quotients = torch.stack([(function(x + a) - function(x - a)) / (2 * step) for a in axes])
    # Central quotients are off by step²·f‴/6 ≤ 1e-10 and by roundings of 1e-15/step.
    assert_close(eq.grad_norm(function, x), quotients.norm(), within=1e-8)


def test_a_flat_function_has_norm_zero() -> None:
    """A gradient that exists and is 0 has norm 0."""
    assert_equal(eq.grad_norm(lambda x: (0 * x).sum() + 5, torch.ones(3)), 0.0)


def test_a_gradient_with_nan_has_norm_nan() -> None:
    """Neither NaN nor infinity becomes a number."""
    x = torch.tensor([1.0, 0.0])
    assert eq.grad_norm(lambda x: (x * math.nan).sum(), x).isnan()
    assert_equal(eq.grad_norm(lambda x: x.sqrt().sum(), x), math.inf)


# Surroundings ------------------------------------------------------------------------------------


def test_it_works_without_gradients() -> None:
    """Under `torch.no_grad` the norm is the same; the result never has a graph."""
    x = torch.tensor([3.0, 4.0])
    with torch.no_grad():
        norm = eq.grad_norm(eq.l2, x)
        assert not torch.is_grad_enabled()
    assert_equal(norm, 10.0)
    assert not norm.requires_grad
    assert not x.requires_grad
    assert not eq.grad_norm(eq.l2, x.requires_grad_()).requires_grad


def test_it_touches_nothing() -> None:
    """Neither the input nor a parameter has a `.grad` afterwards, and one there was stays."""
    model = nn.Linear(3, 1)
    model.weight.grad = torch.full((1, 3), 7.0)
    x = torch.ones(2, 3, requires_grad=True)
    before = x.detach().clone()
    norm = eq.grad_norm(lambda x: model(x).sum(), x)
    assert_close(norm, math.sqrt(2) * model.weight.norm(), within=1e-6)  # float32
    assert x.grad is None
    assert model.bias.grad is None
    assert_equal(model.weight.grad, torch.full((1, 3), 7.0))
    assert_equal(x, before)


def test_a_value_inside_a_graph_is_taken_as_it_is() -> None:
    """The norm is by the argument, not by what the argument was computed from."""
    w = torch.tensor([2.0], requires_grad=True)
    assert_equal(eq.grad_norm(lambda x: 5 * x.sum(), 3 * w), 5.0)
    assert w.grad is None


@pytest.mark.parametrize("rows", [6, 40_000], ids=["few", "more than a chunk"])
def test_a_sparse_gradient_has_the_norm_of_the_dense_one(rows: int) -> None:
    """Rows looked up twice add before they are squared: √(3·(2² + 1)) for rows 1, 1 and 4."""
    seen = torch.tensor([1, 1, 4])

    def looked_up(x: Tensor, *, sparse: bool) -> Tensor:
        return nn.functional.embedding(seen, x, sparse=sparse).sum()

    x = torch.zeros(rows, 3)
    for sparse in (True, False):
        assert_close(eq.grad_norm(partial(looked_up, sparse=sparse), x), 15**0.5, within=1e-6)


# Precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_half_precision_is_returned_in_single(dtype: torch.dtype, result: torch.dtype) -> None:
    """1024 slopes of 512 have norm 2¹⁴ exactly, though float16 ends below the square of one."""
    norm = eq.grad_norm(lambda x: (512 * x).sum(), torch.ones(1024, dtype=dtype))
    assert norm.dtype == result
    assert_equal(norm, 512.0 * 32.0)


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-100, 2.0**100, 2.0**120])
def test_squares_of_single_precision_neither_overflow_nor_vanish(size: float) -> None:
    """Gradients whose squares do not exist in float32 have their norm."""
    slopes = torch.tensor([3.0, 4.0]) * size
    assert_equal(eq.grad_norm(lambda x: (slopes * x).sum(), torch.ones(2)), 5 * size)


MANY = 2**24 + 3
"""Beyond the numbers that float32 can count; no multiple of any chunk."""


def exact_norm(x: Tensor) -> float:
    """‖x‖ of float32: squares are exact in float64, and `fsum` rounds their sums once each."""
    return math.sqrt(math.fsum(float(c.double().square().sum()) for c in x.split(4096)))


def slope_is(slopes: Tensor) -> Callable[[Tensor], Tensor]:
    """A function whose gradient is exactly these numbers."""
    return lambda x: (slopes * x).sum()


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_millions_of_entries_have_an_exact_norm(kind: str) -> None:
    """The relative error stays below 1e-6, where adding up in float32 loses much more."""
    slopes = torch.full((MANY,), 0.1) if kind == "equal" else torch.randn(MANY)
    # Sums of 4096 squares in float64 are off by 4096·2⁻⁵³ = 5e-13 at most.
    wanted = exact_norm(slopes)
    norm = eq.grad_norm(slope_is(slopes), torch.zeros(MANY))
    assert abs(norm.double() - wanted) <= 1e-6 * wanted


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-70, 2.0**70, 2.0**110])
def test_many_squares_neither_overflow_nor_vanish(size: float) -> None:
    """Also where float32 would be added in rows: squares it does not hold are added otherwise."""
    entries = size * torch.randint(1, 8, (2**17 + 3,)).float()
    wanted = exact_norm(entries)
    assert abs(total_norm([entries]).double() - wanted) <= 1e-6 * wanted


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_a_hundred_million_entries_have_an_exact_norm(kind: str) -> None:
    """The promised 1e-6 at the promised size, by the function that every report is made with."""
    entries = torch.full((10**8,), 0.1)
    if kind == "random":
        entries.normal_()
    # Sums of 2²⁰ squares in float64, pairwise, are off by 20·2⁻⁵³, and 96 of them by no more.
    squares = math.fsum(float(c.double().square().sum()) for c in entries.split(1 << 20))
    norm = total_norm([entries]).double()
    assert abs(norm - math.sqrt(squares)) <= 1e-6 * math.sqrt(squares)


# Refusals ----------------------------------------------------------------------------------------

OTHER = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda _: 3.0,
            eq.InputTypeError,
            r"must return a tensor, got float\. Use the loss itself",
        ),
        (
            lambda x: (x.sum(), {}),
            eq.InputTypeError,
            r"must return a tensor, got tuple\. Use the loss itself",
        ),
        (
            lambda x: 2 * x,
            eq.InputError,
            r"must return a scalar, got shape \(2,\)\. Use `\.sum\(\)` or `\.mean\(\)`\.",
        ),
        (
            lambda x: x[:0],
            eq.InputError,
            r"must return a scalar, got shape \(0,\)\. Use `\.sum\(\)`",
        ),
        (
            lambda x: x.argmax(),
            eq.GradientError,
            r"differentiated, got a torch\.int64 result .* Use",
        ),
        (
            lambda x: x.detach().sum(),
            eq.GradientError,
            r"got a torch\.float32 result without a graph",
        ),
        (lambda _: torch.ones(()), eq.GradientError, r"without a graph\. Use no `argmax`"),
        (
            lambda _: OTHER.sum(),
            eq.GradientError,
            r"must depend on its argument .* other tensors\. Use",
        ),
    ],
    ids=["number", "pair", "vector", "empty", "argmax", "detached", "constant", "elsewhere"],
)
def test_what_has_no_gradient_is_refused(
    function: Callable[[Tensor], object], error: type[Exception], message: str
) -> None:
    """Every function without a scalar result or a gradient is refused with the reason."""
    with pytest.raises(error, match=message):
        eq.grad_norm(function, torch.ones(2))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.ones(2, dtype=torch.int64),
            r"`x` must hold real floating-point .* got torch\.int64",
        ),
        (torch.ones(2, dtype=torch.complex64), r"got torch\.complex64\. Use `\.abs\(\)` or"),
        ([1.0], r"`x` must be a tensor, got list\. Use `torch\.as_tensor`"),
    ],
    ids=["integers", "complex", "list"],
)
def test_what_cannot_require_a_gradient_is_refused(x: object, message: str) -> None:
    """Only tensors of real floating-point numbers have gradients here."""
    with pytest.raises(eq.InputTypeError, match=message):
        eq.grad_norm(eq.l1, x)


def test_what_is_no_function_is_refused() -> None:
    """A loss in place of the function that makes it."""
    with pytest.raises(eq.InputTypeError, match=r"a function of one tensor, got Tensor\. Use `lam"):
        eq.grad_norm(torch.ones(()), torch.ones(2))  # type: ignore[arg-type]


def test_it_works_in_inference_mode() -> None:
    """Also of a tensor that was made there, and could not be recorded."""
    with torch.inference_mode():
        for x in (torch.ones(2), OTHER):
            assert eq.grad_norm(eq.l2, x).item() == 2 * torch.linalg.vector_norm(x).item()
