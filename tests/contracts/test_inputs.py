"""Every layout, type and size of input is understood or refused, and none is modified."""

import pytest
import torch
from torch import Tensor

import equipoise as eq
from tests.contracts.members import MEMBERS, Member

every = pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
own = pytest.mark.parametrize("member", [m for m in MEMBERS if not m.foreign], ids=lambda m: m.id)
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def test_every_penalty_is_a_member() -> None:
    """No public penalty is missing from the contract, and nothing else is in it."""
    assert {m.penalty for m in MEMBERS} == set(eq.penalties.__all__)


def assert_same(member: Member, ours: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> None:
    """Same value and same gradients for two layouts of the same numbers."""
    ours = tuple(x.detach().requires_grad_() for x in ours)
    value, expected = member.call(*ours), member.call(*plain)
    # Another layout may add in another order: a few units of float64.
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-14)
    for mine, theirs in zip(_grads(value, ours), _grads(expected, plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def _grads(value: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value.sum(), inputs, allow_unused=True, materialize_grads=True)


@every
def test_non_contiguous_input(member: Member) -> None:
    """Every second entry of a larger tensor counts like a tensor of its own."""
    inputs = member.inputs()
    strided = tuple(x.detach().repeat_interleave(2, dim=-1)[..., ::2] for x in inputs)
    assert not strided[0].is_contiguous()
    assert_same(member, strided, inputs)


@every
def test_expanded_input(member: Member) -> None:
    """A row repeated by `expand` counts like copies of it."""
    inputs = member.inputs()
    expanded = tuple(x.detach()[:1].expand_as(x) for x in inputs)
    copies = tuple(x.clone().requires_grad_() for x in expanded)
    assert_same(member, expanded, copies)


@own
@HALF
def test_half_precision_is_computed_in_float32(member: Member, dtype: torch.dtype) -> None:
    """Half precision gives exactly what its float32 copy gives, and gradients in its own type."""
    halves = tuple(x.detach().to(dtype).requires_grad_() for x in member.inputs())
    singles = tuple(x.detach().float().requires_grad_() for x in halves)
    value, expected = member.call(*halves), member.call(*singles)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    for mine, theirs in zip(_grads(value, halves), _grads(expected, singles), strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, theirs.to(dtype))


@pytest.mark.parametrize("member", [m for m in MEMBERS if m.foreign], ids=lambda m: m.id)
@HALF
def test_half_precision_gradient_is_measured_in_float32(member: Member, dtype: torch.dtype) -> None:
    """A function computed in half precision has its gradient's norm taken in float32."""
    value = member.call(*member.inputs(dtype))
    assert value.dtype == torch.float32
    # The function itself rounds: a few units of its own precision in each gradient entry.
    tolerance = 16 * torch.finfo(dtype).eps
    expected = member.call(*member.inputs()).float()
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_full_precision_is_kept(member: Member, dtype: torch.dtype) -> None:
    """Float32 stays float32, float64 stays float64, and both agree to float32's precision."""
    value = member.call(*member.inputs(dtype))
    assert value.dtype == dtype
    torch.testing.assert_close(
        value.double(), member.call(*member.inputs()).double(), rtol=1e-4, atol=1e-5
    )


@every
def test_integers_are_refused(member: Member) -> None:
    """Integer tensors are refused, with their type and the way out."""
    integers = tuple(torch.ones(shape, dtype=torch.int64) for shape in member.shapes)
    with pytest.raises(eq.InputTypeError, match=r"floating-point.*torch.int64.*\.float\(\)"):
        member.call(*integers)


@every
def test_inputs_are_not_modified(member: Member) -> None:
    """Forward and backward leave every input as it was."""
    inputs = member.inputs()
    before = [(x.detach().clone(), x._version) for x in inputs]
    member.call(*inputs).sum().backward()
    for x, (values, version) in zip(inputs, before, strict=True):
        assert x._version == version
        assert torch.equal(x.detach(), values)


PLAIN = [
    m for m in MEMBERS if not m.label or m.label in ("metric=l1", "estimator=k3", "epsilon=0.25")
]


@pytest.mark.parametrize("member", [m for m in PLAIN if m.elementwise], ids=lambda m: m.id)
def test_a_0d_tensor_counts_as_one_entry(member: Member) -> None:
    """A 0-d tensor gives what a tensor of one entry gives."""
    zero_d = tuple(torch.tensor(-0.75, dtype=torch.float64) for _ in member.shapes)
    one = tuple(x.reshape(1) for x in zero_d)
    assert member.call(*zero_d).item() == member.call(*one).item()


@pytest.mark.parametrize("penalty", ["kl_divergence", "js_divergence", "entropy", "orthogonality"])
def test_a_0d_tensor_has_no_rows(penalty: str) -> None:
    """Where rows are needed a 0-d tensor is refused."""
    inputs = [torch.tensor(-1.0)] * (1 if penalty in ("entropy", "orthogonality") else 2)
    with pytest.raises(eq.InputError, match="0-d tensor"):
        getattr(eq, penalty)(*inputs)


UNMASKED = [m for m in MEMBERS if "tensor" not in m.label]


@pytest.mark.parametrize("member", UNMASKED, ids=lambda m: m.id)
def test_empty_input(member: Member) -> None:
    """No entries: the value is that of nothing, the gradient is empty, and neither is NaN."""
    inputs = tuple(
        torch.empty((0, *shape[1:]), dtype=torch.float64, requires_grad=True)
        for shape in member.shapes
    )
    value = member.call(*inputs)
    assert torch.equal(value, torch.full_like(value, member.empty))
    for x, gradient in zip(inputs, _grads(value, inputs), strict=True):
        assert gradient.shape == x.shape


@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.foreign], ids=lambda m: m.id)
def test_autocast_changes_nothing(member: Member) -> None:
    """Under autocast to bfloat16 the value is the same float32 value, bit for bit."""
    inputs = member.inputs(torch.float32)
    expected = member.call(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(member.call(*inputs), expected)


def test_autocast_would_change_a_plain_product() -> None:
    """What the test above looks for exists: a plain matrix product loses precision."""
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ x.mT
    assert not torch.equal(product.float(), x @ x.mT)
