"""Both derivatives are those of the value, and agree with the functional transforms."""

import pytest
import torch

from tests.contracts.members import MEMBERS, Member

TRUE = [m for m in MEMBERS if m.true_gradient]
every = pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
true = pytest.mark.parametrize("member", TRUE, ids=lambda m: m.id)


@true
def test_gradient_is_the_derivative_of_the_value(member: Member) -> None:
    """Autograd's gradient equals finite differences in float64."""
    assert torch.autograd.gradcheck(member.call, member.inputs())


@true
def test_second_derivative_is_the_derivative_of_the_gradient(member: Member) -> None:
    """Autograd's second derivative equals finite differences of its first."""
    assert torch.autograd.gradgradcheck(member.call, member.inputs())


def _gradients(member: Member, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(
        member.call(*inputs).sum(), inputs, allow_unused=True, materialize_grads=True
    )


@every
def test_func_grad_equals_autograd(member: Member) -> None:
    """`torch.func.grad` gives what `torch.autograd.grad` gives."""
    inputs = member.inputs()
    argnums = tuple(range(len(inputs)))
    functional = torch.func.grad(lambda *x: member.call(*x).sum(), argnums)(*inputs)
    for ours, expected in zip(functional, _gradients(member, inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


@every
def test_vmap_equals_a_loop(member: Member) -> None:
    """`torch.func.vmap` over a batch of inputs gives what a loop gives, gradients included."""
    batches = [tuple(scale * x.detach() for x in member.inputs()) for scale in (1.0, 0.5, 2.0)]
    stacked = tuple(torch.stack(xs) for xs in zip(*batches, strict=True))
    torch.testing.assert_close(
        torch.func.vmap(member.call)(*stacked),
        torch.stack([member.call(*inputs).detach() for inputs in batches]),
        rtol=1e-12,
        atol=1e-14,
    )
    gradient = torch.func.grad(lambda *x: member.call(*x).sum())
    torch.testing.assert_close(
        torch.func.vmap(gradient)(*stacked),
        torch.stack([gradient(*inputs) for inputs in batches]),
        rtol=1e-12,
        atol=1e-14,
    )


@true
def test_jvp_is_the_gradient_along_a_direction(member: Member) -> None:
    """`torch.func.jvp` gives the inner product of gradient and direction."""
    inputs = tuple(x.detach() for x in member.inputs())
    directions = tuple(torch.randn_like(x) for x in inputs)
    _, along = torch.func.jvp(lambda *x: member.call(*x).sum(), inputs, directions)
    gradients = _gradients(member, member.inputs())
    expected = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    torch.testing.assert_close(along, expected, rtol=1e-10, atol=1e-12)
