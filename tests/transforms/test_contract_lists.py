"""Every transform takes a list of gradients and gives one of the same make."""

import inspect
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import GradientTransform
from tests.transforms.assertions import assert_same_bits, copies, kinds
from tests.transforms.members import (
    FUNCTIONAL,
    MEMBERS,
    Gradient,
    Member,
    gradients,
    parameters,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def test_no_transform_is_missing() -> None:
    """Whatever public function gives a transform has an entry in the table."""
    factories = {
        name
        for name in transforms.__all__
        if inspect.isfunction(made := getattr(transforms, name))
        and get_type_hints(made).get("return") is GradientTransform
    }
    assert {member.factory for member in MEMBERS} == factories


OPTIONLESS = {"chain", "identity"}


@pytest.mark.parametrize("factory", sorted({member.factory for member in MEMBERS} - OPTIONLESS))
def test_an_unknown_option_is_refused(factory: str) -> None:
    """Whatever takes options names them where another is given."""
    options = ", ".join(inspect.signature(getattr(transforms, factory)).parameters)
    with pytest.raises(
        eq.UnknownOptionError, match=f"`{factory}` takes the options {options}; got"
    ):
        getattr(transforms, factory)(nothing=1)


@pytest.mark.parametrize("factory", sorted({member.factory for member in MEMBERS}))
def test_any_number_may_follow_a_schedule(factory: str) -> None:
    """No transform has a number, but for counts, that a function of the step cannot stand for."""
    hints = get_type_hints(getattr(transforms, factory))
    assert float not in hints.values()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_gradients_keep_their_make(member: Member, dtype: torch.dtype) -> None:
    """Type, device, shape and every `None` are what they were."""
    transform, params, grads = member.make(), parameters(dtype), gradients(dtype=dtype)
    out, _ = transform.update(grads, transform.init(params), params)
    assert kinds(list(out)) == kinds(grads)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_low_precision_agrees_with_high(member: Member) -> None:
    """What half precision gives is, up to its rounding, what float64 gives for the same numbers."""
    for dtype, rtol in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 2e-6)):
        transform, params = member.make(), parameters(dtype)
        grads = gradients(dtype=dtype)
        exact_params = [p.double() for p in params]
        exact = [None if g is None else g.double() for g in grads]
        if member.factory == "add_noise":  # draws in the precision of the gradient
            continue
        out, _ = transform.update(grads, transform.init(params), params)
        wide, _ = transform.update(exact, transform.init(exact_params), exact_params)
        for got, expected in zip(out, wide, strict=True):
            if got is not None and expected is not None:
                torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_an_update_is_pure(member: Member) -> None:
    """Neither gradients, nor parameters, nor the state that went in have changed, ever."""
    transform, params = member.make(), parameters()
    state = transform.init(params)
    for step in range(3):
        grads = gradients(step)
        before = copies(grads), copies(params), _deep(state)
        _, new = transform.update(grads, state, params)
        assert_same_bits(grads, before[0])
        assert_same_bits(params, before[1])
        assert_same_bits(state, before[2])
        state = new


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_an_update_can_be_repeated(member: Member) -> None:
    """The same gradients and the same state give the same result, to the last bit."""
    transform, params = member.make(), parameters()
    state = transform.init(params)
    for step in range(2):
        first = transform.update(gradients(step), state, params)
        again = transform.update(gradients(step), state, params)
        assert_same_bits(list(again[0]), list(first[0]))
        assert_same_bits(again[1], first[1])
        state = first[1]


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_a_state_keeps_its_make(member: Member) -> None:
    """Keys, shapes, types and devices of the state are those of the first, at every step."""
    transform, params = member.make(), parameters(torch.float32)
    state = transform.init(params)
    make = kinds(state)
    steps: list[list[Gradient]] = [gradients(step, torch.float32) for step in range(4)]
    steps.insert(2, [None] * len(params))
    for grads in steps:
        _, state = transform.update(grads, state, params)
        assert kinds(state) == make


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_zero_gradients_give_finite_ones(member: Member, dtype: torch.dtype) -> None:
    """Zeros in, finite out; and zeros wherever a transform only rescales or clips."""
    transform, params = member.make(), [torch.zeros_like(p) for p in parameters(dtype)]
    grads = [None if g is None else torch.zeros_like(g) for g in gradients(dtype=dtype)]
    state = transform.init(params)
    for _ in range(3):
        out, state = transform.update(grads, state, params)
        for got in out:
            assert got is None or got.isfinite().all()
            if member.factory != "add_noise":  # and nothing else, for the weights are zeros too
                assert got is None or not got.any()
    for figure in transforms.recorded(state).values():
        assert torch.isfinite(figure)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_nothing_but_missing_gradients(member: Member) -> None:
    """A step in which no parameter has a gradient is no error, nor are no parameters at all."""
    transform, params = member.make(), parameters()
    out, _ = transform.update([None] * len(params), transform.init(params), params)
    assert list(out) == [None] * len(params)
    assert list(transform.update([], transform.init([]), [])[0]) == []


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_only_empty_gradients(member: Member) -> None:
    """Gradients without entries come back as they are."""
    transform = member.make()
    grads = [torch.zeros(0), torch.zeros(0, 3), torch.zeros(3, 0)]
    out, _ = transform.update(grads, transform.init(grads), grads)
    assert kinds(list(out)) == kinds(grads)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_mixed_types_in_one_list(member: Member) -> None:
    """One list may hold every type, and each gradient keeps its own."""
    transform = member.make()
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in DTYPES]
    grads = [x.to(dtype) for x, dtype in zip(drawn, DTYPES, strict=True)]
    params = [torch.ones_like(g) for g in grads]
    out, _ = transform.update(grads, transform.init(params), params)
    assert kinds(list(out)) == kinds(grads)
    if member.factory == "add_noise":  # draws in the type of each gradient
        return
    wide = [g.to(torch.complex128 if g.is_complex() else torch.float64) for g in grads]
    ones = [torch.ones_like(g) for g in wide]
    exact, _ = transform.update(wide, transform.init(ones), ones)
    for got, expected in zip(out, exact, strict=True):
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got.to(expected.dtype), expected, rtol=1.6e-2, atol=1e-2)


def _laid_out(x: Tensor) -> dict[str, Tensor]:
    """The same matrix in memory of several kinds."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    return {"transposed": x.t().contiguous().t(), "sliced": wide[:, ::2]}


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_any_strides(member: Member, layout: str) -> None:
    """Where entries lie in memory does not matter to their values."""
    transform = member.make()
    plain = torch.randn(3, 4, dtype=torch.float64)
    params = [torch.ones_like(plain)]
    expected, _ = transform.update([plain], transform.init(params), params)
    strided = _laid_out(plain)[layout]
    got, _ = transform.update([strided], transform.init(params), params)
    # Sums in another order: 12 entries in float64.
    torch.testing.assert_close(got[0], expected[0], rtol=1e-14, atol=1e-14)
    if layout == "transposed":
        assert got[0] is not None
        assert got[0].stride() == strided.stride()


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_expanded_gradients(member: Member) -> None:
    """Entries that share their memory are transformed once each."""
    transform = member.make()
    expanded = torch.tensor([[0.9], [-2.0]], dtype=torch.float64).expand(2, 3)
    params = [torch.ones(2, 3, dtype=torch.float64)]
    expected, _ = transform.update([expanded.contiguous()], transform.init(params), params)
    got, _ = transform.update([expanded], transform.init(params), params)
    assert_same_bits(list(got), list(expected))


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_channels_last_stays(member: Member) -> None:
    """A gradient laid out for convolutions comes back laid out so."""
    transform = member.make()
    grad = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    out, _ = transform.update([grad], transform.init([grad]), [grad])
    assert out[0] is not None
    assert out[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_lazy_conjugates(member: Member) -> None:
    """A conjugated view counts with its own values, not with those of the memory below."""
    transform = member.make()
    below = torch.randn(3, 4, dtype=torch.complex64)
    params = [torch.ones_like(below)]
    expected, _ = transform.update([below.conj().resolve_conj()], transform.init(params), params)
    got, _ = transform.update([below.conj()], transform.init(params), params)
    assert got[0] is not None
    assert expected[0] is not None
    assert_same_bits(got[0].resolve_conj(), expected[0].resolve_conj())


def _deep(state: object) -> object:
    return transforms._saved.copied(state)
