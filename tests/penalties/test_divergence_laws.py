"""Laws of `kl_divergence` and `js_divergence` beyond those of all rows of distributions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given
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
    assert_same_curvature,
    assert_same_function,
    assert_zero_gradients,
    value_and_gradients,
)
from tests.penalties.inputs import log_softmax, singles, spoiled, supports, tensors

DIRECTIONS = ("forward", "reverse", "symmetric")
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
betas = st.floats(0.01, 0.99)
logits = tensors(2, 3, 5, size=6.0)


# Never negative ----------------------------------------------------------------------------------


@every_direction
@every_dtype
@given(both=tensors(2, 8, 6, size=30.0))
def test_kl_is_never_negative(direction: str, dtype: torch.dtype, both: Tensor) -> None:
    """Where it normalises itself, no row is below 0, not even by a rounding."""
    p, q = both.to(dtype)
    rows = eq.kl_divergence(p, q, direction=direction, from_logits=True, reduction="none")
    assert (rows >= 0.0).all()


@every_direction
@every_dtype
@pytest.mark.parametrize("options", [{"from_logits": True}, {"temperature": 2.0}], ids=str)
@pytest.mark.parametrize("eps", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
def test_kl_of_near_distributions_is_never_negative(
    direction: str, dtype: torch.dtype, options: dict[str, float], eps: float
) -> None:
    """For p ≈ q, where the plain sum is negative about half of the time, no row is below 0."""
    p = torch.randn(1000, 50, dtype=dtype)
    q = p + eps * torch.randn(1000, 50, dtype=dtype)
    rows = eq.kl_divergence(p, q, direction=direction, reduction="none", **options)
    assert (rows >= 0.0).all()


@pytest.mark.parametrize("eps", [1e-3, 1e-4, 1e-5])
def test_kl_of_near_distributions_is_accurate(eps: float) -> None:
    """For p ≈ q the float32 value is right within rounding, where the plain sum has no digit."""
    p = torch.randn(200, 50)
    q = p + eps * torch.randn(200, 50)
    single = eq.kl_divergence(p, q, from_logits=True, reduction="none")
    double = eq.kl_divergence(p.double(), q.double(), from_logits=True, reduction="none")
    # A term is p·d²/2 with d ≈ eps, known within the rounding of log p ≈ 4, which is 2⁻²² = 2.4e-7:
    # relative 2·2.4e-7/eps a term, with either sign, and 0.1 of that in a sum over 50.
    within = 5e-7 / eps
    torch.testing.assert_close(single.double(), double, rtol=within, atol=0)


@every_direction
@given(p=tensors(3, 5, size=30.0))
def test_kl_is_zero_at_equality(direction: str, p: Tensor) -> None:
    """KL(P‖P) is exactly 0, and flat there: its gradient is exactly 0 from logits."""
    directed = partial(eq.kl_divergence, direction=direction)
    assert_equal(directed(p, p.clone(), from_logits=True), 0.0)
    assert_equal(directed(*log_softmax(p, p)), 0.0)
    assert_zero_gradients(partial(directed, from_logits=True), p, p)


@every_direction
@given(both=logits)
def test_kl_is_zero_only_at_equality(direction: str, both: Tensor) -> None:
    """KL(P‖Q) ≥ ½·‖p − q‖₁² (Pinsker), so nothing but P = Q has 0."""
    p, q = both
    rows = eq.kl_divergence(p, q, direction=direction, from_logits=True, reduction="none")
    distance = (p.softmax(-1) - q.softmax(-1)).abs().sum(-1)
    assert (rows >= 0.5 * distance.square() - EXACT).all()


# Directions --------------------------------------------------------------------------------------


@given(both=logits, from_logits=st.booleans())
def test_reverse_is_the_forward_divergence_of_the_swapped(both: Tensor, from_logits: bool) -> None:
    """`direction="reverse"` of (p, q) is KL(Q‖P), to the last bit."""
    p, q = both if from_logits else both.log_softmax(-1)
    options = {"from_logits": from_logits}
    assert_same_function(
        partial(eq.kl_divergence, direction="reverse", **options),
        lambda p, q: eq.kl_divergence(q, p, **options),
        p,
        q,
        within=0.0,
    )


@given(both=logits, from_logits=st.booleans(), floor=st.sampled_from([None, -3.21]))
def test_symmetric_is_the_mean_of_both_directions(
    both: Tensor, from_logits: bool, floor: float | None
) -> None:
    """`direction="symmetric"` is (KL(P‖Q) + KL(Q‖P))/2, with and without a floor."""
    p, q = both if from_logits else both.log_softmax(-1)
    kl = partial(eq.kl_divergence, from_logits=from_logits, floor=floor)
    assert_same_function(
        partial(kl, direction="symmetric"), lambda p, q: 0.5 * (kl(p, q) + kl(q, p)), p, q
    )


@given(both=logits)
def test_the_gradient_of_kl_by_q_pulls_q_towards_p(both: Tensor) -> None:
    """By the logits of Q the gradient of the forward divergence is softmax(q) − softmax(p)."""
    p, q = both
    slope = (q.softmax(-1) - p.softmax(-1)) / len(p)
    assert_gradients(lambda q: eq.kl_divergence(p, q, from_logits=True), [q], [slope])


@given(both=logits)
def test_the_gradient_of_kl_by_p_weighs_the_log_ratio(both: Tensor) -> None:
    """By the logits of P the gradient is p·(log p − log q − KL)."""
    p, q = both
    log_p, log_q = log_softmax(p, q)
    gap = log_p - log_q
    kl = (log_p.exp() * gap).sum(-1, keepdim=True)
    slope = log_p.exp() * (gap - kl) / len(p)
    assert_gradients(lambda p: eq.kl_divergence(p, q, from_logits=True), [p], [slope])


@given(both=logits, temperature=st.floats(0.5, 4.0))
def test_temperature_squared_is_a_factor(both: Tensor, temperature: float) -> None:
    """`temperature_squared` multiplies value and gradient by T²."""
    kl = partial(eq.kl_divergence, from_logits=True, temperature=temperature)
    assert_same_function(
        partial(kl, temperature_squared=True), lambda p, q: temperature**2 * kl(p, q), *both
    )


# Infinite and floored ----------------------------------------------------------------------------

HALF = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
FIRST = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).log()
LAST = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).log()


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("chunk", [None, 1])
def test_an_infinite_divergence_is_infinite(from_logits: bool, chunk: int | None) -> None:
    """P where Q has nothing costs infinity; the other way round it is finite."""
    kl = partial(eq.kl_divergence, from_logits=from_logits, chunk=chunk)
    assert_equal(kl(HALF, FIRST), math.inf)
    assert_close(kl(FIRST, HALF), math.log(2))
    assert_equal(kl(FIRST, HALF, direction="reverse"), math.inf)
    for pair in ((HALF, FIRST), (FIRST, HALF)):
        assert_equal(kl(*pair, direction="symmetric"), math.inf)


@pytest.mark.parametrize("log_q", [-90.0, -800.0, -1e10])
def test_what_is_very_unlikely_is_not_impossible(log_q: float) -> None:
    """A probability that rounds to 0 has a logarithm all the same, and a finite divergence."""
    p, q = HALF[:2], torch.tensor([log_q, 0.0], dtype=torch.float64)
    wanted = math.log(0.5) - 0.5 * log_q
    assert_close(eq.kl_divergence(p, q), wanted)
    assert_close(eq.kl_divergence(p, q, from_logits=True), wanted)
    assert_gradients(lambda q: eq.kl_divergence(p, q), [q], [-0.5])


@every_direction
def test_an_infinite_divergence_has_no_nan_in_its_gradient(direction: str) -> None:
    """The entry that is infinite has gradient 0, and the others have their own."""
    kl = partial(eq.kl_divergence, direction=direction)
    p, q = (FIRST, HALF) if direction == "reverse" else (HALF, FIRST)
    finite = torch.tensor([True, False, True])
    _, slopes = value_and_gradients(kl, p, q)
    _, wanted = value_and_gradients(lambda p, q: kl(p[finite], q[finite]), p, q)
    for slope, wanted_slope in zip(slopes, wanted, strict=True):
        assert_close(slope, wanted_slope)


@every_direction
@given(both=tensors(2, 3, 5, size=30.0), floor=st.floats(-12.0, -0.1))
def test_a_floor_is_q_held_up(direction: str, both: Tensor, floor: float) -> None:
    """A floor gives the divergence from max(log q, floor), and its gradients on both sides."""
    p, q = both.log_softmax(-1)
    # Not on the kink itself, where a slope is a choice.
    assume(min((p - floor).abs().min(), (q - floor).abs().min()) > 0)

    def held(p: Tensor, q: Tensor) -> Tensor:
        forward = (p.exp() * (p - q.clamp(min=floor))).sum(-1).mean()
        reverse = (q.exp() * (q - p.clamp(min=floor))).sum(-1).mean()
        return {"forward": forward, "reverse": reverse}.get(direction, (forward + reverse) / 2)

    floored = partial(eq.kl_divergence, direction=direction, floor=floor)
    assert_same_function(floored, held, p, q)
    assert_same_function(
        partial(floored, from_logits=True), lambda p, q: held(*log_softmax(p, q)), p, q
    )


@pytest.mark.parametrize("from_logits", [False, True])
def test_a_floor_makes_an_infinite_divergence_finite(from_logits: bool) -> None:
    """½·log ½ − ½·(0 − 2) is what KL([½, ½, 0]‖[1, 0, 0]) is with a floor of −2."""
    kl = partial(eq.kl_divergence, from_logits=from_logits, floor=-2.0)
    assert_close(kl(HALF, FIRST), 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) + 2.0))


def test_a_floor_holds_up_a_row_in_which_nothing_is_possible() -> None:
    """Of logits that are all −inf only the floor is left: Σ p·(log p + 2), which is 2 − ln 2."""
    nothing = torch.full((3,), -math.inf, dtype=torch.float64)
    kl = partial(eq.kl_divergence, from_logits=True, floor=-2.0)
    assert_close(kl(HALF, nothing), 2.0 - math.log(2))
    assert_zero_gradients(lambda q: kl(HALF, q), nothing)


def test_a_floor_does_not_touch_what_lies_above() -> None:
    """A floor below every log-probability changes nothing, so neither value nor gradient differ."""
    p, q = torch.randn(2, 4, 5, dtype=torch.float64)
    kl = partial(eq.kl_divergence, from_logits=True)
    assert_same_function(partial(kl, floor=-50.0), kl, p, q, within=0.0)


@given(both=logits, keep=supports(3, 5))
def test_what_is_infinite_outside_the_support_is_not_there(both: Tensor, keep: Tensor) -> None:
    """An entry where only Q is 0 costs nothing when it is not supported."""
    p, q = both
    inside = eq.kl_divergence(p, q.masked_fill(~keep, -torch.inf), from_logits=True, support=keep)
    assert_close(inside, eq.kl_divergence(p, spoiled(q, keep), from_logits=True, support=keep))
    assert inside.isfinite()


# Jensen-Shannon ----------------------------------------------------------------------------------


def mixture_entropy(beta: float) -> float:
    """Entropy of the coin that chooses between P and Q: what JS can reach at most."""
    return -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)


@every_dtype
@given(both=tensors(2, 8, 6, size=30.0), beta=betas)
def test_js_lies_between_zero_and_its_bound(dtype: torch.dtype, both: Tensor, beta: float) -> None:
    """0 ≤ JS ≤ H(β), which is ln 2 at β = ½; and at most 1 in bits."""
    p, q = both.to(dtype)
    js = partial(eq.js_divergence, from_logits=True, reduction="none")
    slack = 40 * torch.finfo(dtype).eps  # six terms of at most 5 roundings of at most 1 each
    for rows, bound in (
        (js(p, q, beta=beta), mixture_entropy(beta)),
        (js(p, q), math.log(2)),
        (js(p, q, base=2), 1.0),
    ):
        assert (rows >= 0.0).all()
        assert (rows <= bound + slack).all()


@given(beta=betas)
def test_js_reaches_its_bound_on_disjoint_distributions(beta: float) -> None:
    """Distributions that share nothing are H(β) apart: finite, where KL is infinite."""
    assert_close(eq.js_divergence(HALF, LAST, beta=beta), mixture_entropy(beta))
    assert_close(eq.js_divergence(HALF, LAST, base=2), 1.0)


@given(both=logits, beta=betas)
def test_js_swaps_its_sides_with_beta(both: Tensor, beta: float) -> None:
    """JS_β(P, Q) = JS_{1−β}(Q, P): symmetric at β = ½."""
    js = partial(eq.js_divergence, from_logits=True)
    assert_same_function(partial(js, beta=beta), lambda p, q: js(q, p, beta=1 - beta), *both)
    assert_same_function(js, lambda p, q: js(q, p), *both)


@given(both=logits, beta=betas, from_logits=st.booleans())
def test_js_is_two_divergences_from_the_mixture(
    both: Tensor, beta: float, from_logits: bool
) -> None:
    """JS is β·KL(P‖M) + (1−β)·KL(Q‖M), in value, gradient and second derivative."""
    p, q = both if from_logits else both.log_softmax(-1)

    def by_definition(p: Tensor, q: Tensor) -> Tensor:
        p, q = log_softmax(p, q) if from_logits else (p, q)
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        return beta * eq.kl_divergence(p, m) + (1 - beta) * eq.kl_divergence(q, m)

    js = partial(eq.js_divergence, beta=beta, from_logits=from_logits)
    assert_same_function(js, by_definition, p, q)
    assert_same_curvature(js, by_definition, p, q)


@given(p=tensors(3, 5, size=8.0), beta=betas)
def test_js_of_equals_is_nothing(p: Tensor, beta: float) -> None:
    """JS(P, P) is 0 to the square of a rounding."""
    # d = log p − log m is off by a few roundings of log p, at most 16·2⁻⁵² each: d²/2 < 1e-28.
    assert 0 <= eq.js_divergence(p, p.clone(), beta=beta, from_logits=True) < 1e-28


@given(both=logits, beta=betas)
def test_the_base_is_a_unit(both: Tensor, beta: float) -> None:
    """Bits are nats by ln 2; the normalised value is the plain one by β(1−β)."""
    js = partial(eq.js_divergence, from_logits=True, beta=beta)
    nats = js(*both)
    assert_close(js(*both, base=2), nats / math.log(2))
    assert_close(js(*both, normalized=True), nats / (beta * (1 - beta)))


near_logits = tensors(2, 3, 5, size=1.0)


@pytest.mark.parametrize("beta", [1e-2, 1e-4, 1e-6])
@given(both=near_logits)
def test_normalized_js_tends_to_the_divergences(beta: float, both: Tensor) -> None:
    """As β → 0 it tends to KL(P‖Q), as β → 1 to KL(Q‖P), with an error of order β."""
    js = partial(eq.js_divergence, from_logits=True, normalized=True)
    kl = partial(eq.kl_divergence, from_logits=True)
    # Logits of at most 1 have p/q ≤ e⁴, χ² ≤ e⁴: the error is below β·(χ² + χ²/2 + KL + …) < 100β.
    # Dividing by β magnifies roundings: a few of 2⁻⁵² by 1e-6 is 1e-9.
    within = 100 * beta + 1e-9
    assert (js(*both, beta=beta) - kl(*both)).abs() <= within
    assert (js(*both, beta=1 - beta) - kl(*both, direction="reverse")).abs() <= within


@pytest.mark.parametrize("from_logits", [False, True])
@given(both=near_logits)
def test_normalized_js_at_its_ends_is_the_divergence(from_logits: bool, both: Tensor) -> None:
    """At β = 0 and β = 1 it is KL(P‖Q) and KL(Q‖P) itself."""
    p, q = both if from_logits else both.log_softmax(-1)
    js = partial(eq.js_divergence, from_logits=from_logits, normalized=True)
    kl = partial(eq.kl_divergence, from_logits=from_logits)
    assert_same_function(partial(js, beta=0.0), kl, p, q, within=0.0)
    assert_same_function(partial(js, beta=1), partial(kl, direction="reverse"), p, q, within=0.0)


def test_normalized_js_in_bits_at_its_end_is_in_bits() -> None:
    """`base=2` is in force at the ends as well."""
    bits = eq.js_divergence(FIRST, HALF, beta=0.0, normalized=True, base=2)
    assert_close(bits, 1.0)


# Zeros on one side -------------------------------------------------------------------------------

P_HAS = torch.tensor([True, True, True, False, False, False])
Q_HAS = torch.tensor([True, True, False, True, False, True])
partly_zero = tensors(2, 3, 6, size=4.0)


def probabilities(x: Tensor, exist: Tensor, *, from_logits: bool) -> Tensor:
    """Probabilities of the entries that exist, and 0 for the others, without any −inf."""
    inside = x[:, exist].softmax(-1) if from_logits else x[:, exist].exp()
    return torch.zeros_like(x).index_put((torch.arange(3)[:, None], exist.nonzero().T), inside)


def zeroed(both: Tensor, exist: tuple[Tensor, Tensor], *, from_logits: bool) -> list[Tensor]:
    """Logits or log-probabilities that are −inf where an entry does not exist."""
    filled = [x.masked_fill(~e, -torch.inf) for x, e in zip(both, exist, strict=True)]
    return filled if from_logits else [x.log_softmax(-1) for x in filled]


@given(both=partly_zero, from_logits=st.booleans())
def test_what_p_excludes_adds_nothing(both: Tensor, from_logits: bool) -> None:
    """Where only P is 0, KL(P‖Q) is a sum over the others, in all derivatives."""
    inputs = zeroed(both, (P_HAS, torch.ones(6).bool()), from_logits=from_logits)

    def by_definition(p: Tensor, q: Tensor) -> Tensor:
        p = probabilities(p, P_HAS, from_logits=from_logits)[:, P_HAS]
        q = q.log_softmax(-1) if from_logits else q
        return (p * (p.log() - q[:, P_HAS])).sum(-1).mean()

    kl = partial(eq.kl_divergence, from_logits=from_logits)
    assert_same_function(kl, by_definition, *inputs)
    assert_same_curvature(kl, by_definition, *inputs)


@given(both=partly_zero, from_logits=st.booleans(), beta=betas)
def test_js_takes_zeros_on_either_side(both: Tensor, from_logits: bool, beta: float) -> None:
    """Where only P is 0, only Q, or both, JS is finite in all derivatives."""
    inputs = zeroed(both, (P_HAS, Q_HAS), from_logits=from_logits)

    def by_definition(p: Tensor, q: Tensor) -> Tensor:
        p = probabilities(p, P_HAS, from_logits=from_logits)
        q = probabilities(q, Q_HAS, from_logits=from_logits)
        m = beta * p + (1 - beta) * q
        from_p = p[:, P_HAS] * (p / m)[:, P_HAS].log()
        from_q = q[:, Q_HAS] * (q / m)[:, Q_HAS].log()
        return (beta * from_p.sum(-1) + (1 - beta) * from_q.sum(-1)).mean()

    js = partial(eq.js_divergence, beta=beta, from_logits=from_logits)
    assert_same_function(js, by_definition, *inputs)
    assert_same_curvature(js, by_definition, *inputs)


# Rounding ----------------------------------------------------------------------------------------

K_EXP = 2
"""The float32 exponential is off by at most 1.07 roundings (measured over all its inputs)."""


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@given(data=st.data())
def test_kl_rounds_as_its_sum_may(length: int, data: st.DataObject) -> None:
    """Float32 KL is within ((n−1) + k_exp + 2)·u·Σ p·|log p − log q| of the exact sum."""
    p, q = (data.draw(singles(length, size=30.0)).log_softmax(-1) for _ in range(2))
    # The exponential, the difference and the product of a term round, then n−1 additions. Second
    # order: (1 + 70u)⁷⁰ < 1.001. Below 2⁻¹²⁶ a product is off by half a subnormal, 2⁻¹⁵⁰.
    terms = (p.double().exp() * (p.double() - q.double()).abs()).sum()
    bound = 1.001 * (length - 1 + K_EXP + 2) * U * terms + length * 2.0**-149
    double = eq.kl_divergence(p.double(), q.double())
    assert_rounded_within(eq.kl_divergence(p, q), double, bound)
