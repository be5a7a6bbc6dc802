"""At the bad points the value is finite, and so are the gradient and the second derivative."""

import pytest
import torch
from torch import Tensor

import equipoise as eq
from tests.contracts.members import MEMBERS, Member, critic, first_of_each, log_probability, real

ON_REALS = [m for m in MEMBERS if m.draw is real]
ON_DISTRIBUTIONS = [m for m in MEMBERS if m.draw is log_probability and "cosine" not in m.label]


def assert_finite_to_second_order(member: Member, inputs: tuple[Tensor, ...]) -> None:
    """Value, gradient and the gradient along a random direction hold no NaN and no inf."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    value = member.call(*inputs)
    assert value.isfinite().all(), f"value {value}"
    gradients = torch.autograd.grad(
        value.sum(), inputs, create_graph=True, allow_unused=True, materialize_grads=True
    )
    along = sum((g * torch.randn_like(g)).sum() for g in gradients)
    assert isinstance(along, Tensor)
    seconds: tuple[Tensor, ...] = ()
    if along.requires_grad:
        seconds = torch.autograd.grad(along, inputs, allow_unused=True, materialize_grads=True)
    for tensor in (*gradients, *seconds):
        assert tensor.isfinite().all(), f"derivative {tensor}"


@pytest.mark.parametrize("member", ON_REALS, ids=lambda m: m.id)
@pytest.mark.parametrize("number", [0.0, 1.0, -1.0, 1e-310, 1e-40, 1e-12, 1e-8, 1e8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constant_inputs(member: Member, number: float, dtype: torch.dtype) -> None:
    """Zero vectors, equal vectors, parallel rows, tiny and large entries: all finite."""
    inputs = tuple(torch.full(shape, number, dtype=dtype) for shape in member.shapes)
    if "srip" in member.label:
        assert_finite_gradient(member, inputs)
    else:
        assert_finite_to_second_order(member, inputs)


def assert_finite_gradient(member: Member, inputs: tuple[Tensor, ...]) -> None:
    """Value and gradient are finite; equal singular values have no second derivative."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    value = member.call(*inputs)
    assert value.isfinite().all()
    for gradient in torch.autograd.grad(value.sum(), inputs):
        assert gradient.isfinite().all()


def _with_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Log-probabilities whose last entry is impossible in every row."""
    logits = torch.randn(shape, dtype=dtype)
    logits[..., -1] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("member", ON_DISTRIBUTIONS, ids=lambda m: m.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_shared_impossible_entries(member: Member, dtype: torch.dtype) -> None:
    """Entries that are −inf in all inputs leave everything finite."""
    shapes = member.shapes
    assert_finite_to_second_order(member, tuple(_with_zeros(shape, dtype) for shape in shapes))


@pytest.mark.parametrize("member", ON_DISTRIBUTIONS, ids=lambda m: m.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_certain_distributions(member: Member, dtype: torch.dtype) -> None:
    """All probability on one and the same entry: finite, and the entropy and distances are 0."""
    certain = torch.full((3, 4), -torch.inf, dtype=dtype)
    certain[:, 1] = 0.0
    inputs = tuple(certain.clone() for _ in member.shapes)
    if "dim=0" in member.label:
        inputs = tuple(torch.zeros_like(x) for x in inputs)
    assert_finite_to_second_order(member, inputs)
    assert member.call(*inputs).abs().sum() == 0


@pytest.mark.parametrize(
    "member", [m for m in ON_DISTRIBUTIONS if "tensor" not in m.label], ids=lambda m: m.id
)
def test_one_class(member: Member) -> None:
    """A distribution over one entry has entropy and distance 0, with zero gradient."""
    inputs = tuple(torch.zeros(3, 1, requires_grad=True) for _ in member.shapes)
    if "dim=0" in member.label:
        return
    value = member.call(*inputs)
    assert torch.equal(value, torch.zeros_like(value))
    assert_finite_to_second_order(member, tuple(x.detach() for x in inputs))


ONE_INPUT = ("l1", "l2", "elastic_net", "entropy")
MASKED = [*ONE_INPUT, "consistency", "js_divergence", "kl_divergence", "sampled_kl"]


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("options", [{}, {"from_logits": True}], ids=str)
def test_nothing_escapes_from_under_the_mask(
    name: str, poison: float, options: dict[str, bool]
) -> None:
    """NaN and infinities under the mask change no bit of value, gradient or second derivative."""
    by_row = name in ("kl_divergence", "js_divergence", "entropy")
    if options and not by_row:
        options = {}
    mask = torch.tensor([True, False, True])
    if not by_row:
        mask = mask.unsqueeze(-1)
    clean = [log_probability((3, 4)) for _ in range(1 if name in ONE_INPUT else 2)]
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[1] = poison
    results = []
    for tensors in (clean, dirty):
        inputs = [x.requires_grad_() for x in tensors]
        value = getattr(eq, name)(*inputs, mask=mask, **options)
        slopes = torch.autograd.grad(value, inputs, create_graph=True)
        moved = sum((slope * slope).sum() for slope in slopes)
        bends = torch.autograd.grad(moved, inputs) if moved.requires_grad else ()
        results.append((value, *slopes, *bends))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(ours, expected)
    assert all(not gradient[1].any() for gradient in results[1][1:])


@pytest.mark.parametrize("name", MASKED)
def test_an_empty_mask_is_zero(name: str) -> None:
    """Nothing counts: the value is 0 and so is every gradient, for each reduction."""
    for reduction in ("sum", "mean"):
        inputs = [log_probability((3, 4)).requires_grad_() for _ in range(2)]
        inputs = inputs[: 1 if name in ONE_INPUT else 2]
        mask = torch.zeros(3 if name in ("kl_divergence", "js_divergence", "entropy") else (3, 1))
        value = getattr(eq, name)(*inputs, mask=mask, reduction=reduction)
        assert value.item() == 0
        for gradient in torch.autograd.grad(value, inputs):
            assert not gradient.any()


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_nan_that_counts_propagates(member: Member) -> None:
    """One NaN that no mask covers, in any input, makes the value NaN: nothing hides it as a 0."""
    for place, _ in enumerate(member.shapes):
        inputs = [x.detach() for x in member.inputs()]
        inputs[place].flatten()[0] = torch.nan
        assert member.call(*inputs).isnan().any()


def test_a_flat_function_has_a_finite_penalty() -> None:
    """Where the critic's gradient is 0 the penalty's first and second derivatives are finite."""
    (member,) = [m for m in first_of_each() if m.penalty == "gradient_penalty"]
    assert critic(torch.zeros(1, 4)).item() == 0
    assert_finite_to_second_order(member, (torch.zeros(3, 4, dtype=torch.float64),))


@pytest.mark.parametrize("name", ["kl_divergence", "js_divergence", "entropy"])
def test_a_row_where_nothing_is_possible(name: str) -> None:
    """Logits of nothing but −inf are no distribution: the row is finite, value and gradient."""
    empty = torch.full((1, 4), -torch.inf)
    other = torch.randn(1, 4)
    inputs = [x.requires_grad_() for x in ((empty,) if name == "entropy" else (empty, other))]
    value = getattr(eq, name)(*inputs, from_logits=True)
    # Half of Q against M = Q/2 is ln 2 · ½; the divergence of nothing from anything is 0.
    expected = {"js_divergence": 0.5 * torch.tensor(2.0).log().item()}.get(name, 0.0)
    assert value.item() == pytest.approx(expected, abs=1e-6)
    for gradient in torch.autograd.grad(value, inputs):
        assert gradient.isfinite().all()
