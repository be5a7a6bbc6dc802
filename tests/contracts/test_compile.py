"""Every penalty compiles to one graph, once, and gives what it gives without the compiler."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from tests.contracts.members import MEMBERS, Member, first_of_each


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No graph of one test serves another."""
    torch.compiler.reset()


def _value_and_gradients(
    call: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    value = call(*inputs)
    gradients = torch.autograd.grad(value.sum(), inputs, allow_unused=True, materialize_grads=True)
    return value.detach(), *gradients


def assert_compiles_once(member: Member, backend: str, dtype: torch.dtype, rtol: float) -> None:
    """One graph without a break, the same numbers, and no second compilation for new values."""
    compiled = torch.compile(member.call, fullgraph=True, backend=backend)
    inputs = member.inputs(dtype)
    first = _value_and_gradients(compiled, inputs)
    torch.testing.assert_close(
        first, _value_and_gradients(member.call, inputs), rtol=rtol, atol=rtol
    )
    others = tuple(0.5 * x.detach() for x in inputs)
    with torch.compiler.set_stance("fail_on_recompile"):
        second = _value_and_gradients(compiled, others)
    torch.testing.assert_close(
        second, _value_and_gradients(member.call, others), rtol=rtol, atol=rtol
    )


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_one_graph_compiled_once(member: Member) -> None:
    """Each option traces to a single forward and a single backward graph, for good."""
    assert_compiles_once(member, "aot_eager", torch.float64, rtol=1e-12)


@pytest.mark.parametrize("member", first_of_each(), ids=lambda m: m.id)
def test_generated_code_agrees(member: Member) -> None:
    """The default backend's machine code gives the same numbers in float32."""
    # Vectorised exp and log differ from torch's by a few units: 2⁻²⁴ times a few, over few terms.
    assert_compiles_once(member, "inductor", torch.float32, rtol=1e-5)


CLOSE_TO_THE_EDGE: list[tuple[str, dict[str, Any]]] = [
    ("kl_divergence", {}),
    ("kl_divergence", {"from_logits": True}),
    ("js_divergence", {}),
    ("entropy", {}),
]


@pytest.mark.parametrize(("name", "options"), CLOSE_TO_THE_EDGE, ids=str)
def test_generated_code_at_the_edge(name: str, options: dict[str, Any]) -> None:
    """Compiled, a shared −inf still contributes 0 and an infinite divergence is still inf."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    q = torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]]).log()
    penalty = getattr(eq, name)

    def call(*inputs: Tensor) -> Tensor:
        return penalty(*inputs, reduction="none", **options)

    inputs = (p,) if name == "entropy" else (p, q)
    eager = _value_and_gradients(call, inputs)
    compiled = _value_and_gradients(torch.compile(call, fullgraph=True), inputs)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    apart = {"kl_divergence": torch.inf, "js_divergence": math.log(2), "entropy": 0.0}
    assert eager[0][1].item() == pytest.approx(apart[name], abs=1e-6)
    assert all(gradient.isfinite().all() for gradient in eager[1:])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("interpolated", [False, True])
def test_a_compiled_gradient_penalty_trains_the_same(backend: str, interpolated: bool) -> None:
    """Inside a compiled step the parameters get the gradients that they get without it."""
    torch.manual_seed(0)
    critic = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
    ).double()
    real, fake = torch.randn(2, 5, 6, dtype=torch.float64)
    epsilon = torch.rand(5, 1, dtype=torch.float64)

    def step(real: Tensor, fake: Tensor) -> Tensor:
        if interpolated:
            penalty = eq.interpolated_gradient_penalty(critic, fake, real, epsilon=epsilon)
        else:
            penalty = eq.gradient_penalty(critic, real)
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    def trained(step: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(step(real, fake), list(critic.parameters())[:-1]))

    expected = trained(step)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(trained(compiled), expected, rtol=1e-10, atol=1e-12)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(trained(compiled), expected, rtol=1e-10, atol=1e-12)


def test_compiled_epsilons_are_drawn_anew() -> None:
    """A compiled interpolated penalty without `epsilon` draws other points at every call."""
    x, reference = torch.randn(2, 64, 3)

    def penalty(x: Tensor, reference: Tensor) -> Tensor:
        return eq.interpolated_gradient_penalty(lambda z: z.pow(3).sum(-1), x, reference)

    compiled = torch.compile(penalty, fullgraph=True, backend="aot_eager")
    assert compiled(x, reference).item() != compiled(x, reference).item()
