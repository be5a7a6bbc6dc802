"""No penalty waits for the device, and none makes a tensor larger than it must."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise as eq
from tests.contracts.members import MEMBERS, Member

aten = torch.ops.aten
# `.item()`, `bool()`, `float()`, `int()` and `if tensor:` all end in the first of these.
WAITS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    # A number of Python made into a tensor: on a GPU it is copied there, and the host waits.
    aten.lift_fresh.default,
}


class NoWaiting(TorchDispatchMode):
    """Fails at every operation whose result the host must know."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def _differentiate(member: Member, inputs: tuple[Tensor, ...]) -> None:
    value = member.call(*inputs)
    torch.autograd.grad(value.sum(), inputs, allow_unused=True)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_no_waiting(member: Member) -> None:
    """Neither value nor gradient asks for a number on the host."""
    inputs = member.inputs()
    with NoWaiting():
        _differentiate(member, inputs)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_no_values_needed(member: Member) -> None:
    """Value and gradient have a shape where tensors have no values at all, on the meta device."""
    inputs = tuple(x.detach().to("meta").requires_grad_() for x in member.inputs())
    if "tensor" in member.label:
        # Masks, supports and centers of the table lie on the CPU; the test above covers them.
        assert any(t in member.label for t in ("mask", "support", "center"))
        return
    value = member.call(*inputs)
    assert value.device.type == "meta"
    for x, gradient in zip(
        inputs, torch.autograd.grad(value.sum(), inputs, allow_unused=True), strict=True
    ):
        assert gradient is None or gradient.shape == x.shape


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.item(), bool, lambda x: x if x > 0 else -x, torch.nonzero],
    ids=["item", "bool", "if", "nonzero"],
)
def test_waiting_would_be_noticed(wait: Callable[[Tensor], object]) -> None:
    """Each way of asking for a value fails the two tests above."""
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        wait(torch.ones(()))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        wait(torch.ones((), device="meta"))


def test_copying_would_be_noticed() -> None:
    """A number copied to the device is an operation; `tolist` is none, and fails without memory."""
    for copied in (lambda x: x.new_tensor(0.5), lambda _: torch.tensor(0.5)):
        with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
            copied(torch.ones(()))
    with pytest.raises(NotImplementedError, match="meta"):
        torch.ones((), device="meta").tolist()


class Largest(TorchDispatchMode):
    """Remembers the size in bytes of the largest tensor made, and of the largest float32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0
        self.float32_entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.entries = max(self.entries, made.numel())
                if made.dtype == torch.float32:
                    self.float32_entries = max(self.float32_entries, made.numel())
        return result


@pytest.mark.parametrize("mode", ["soft", "hard", "spectral", "srip"])
@pytest.mark.parametrize("per_sample", [True, False])
def test_orthogonality_forms_the_smaller_gram_matrix(mode: str, per_sample: bool) -> None:
    """For 8×2048 rows of 16 features no tensor is larger than the input, backward included."""
    x = torch.randn(8, 2048, 16, requires_grad=True)
    with Largest() as largest:
        eq.orthogonality(x, mode=mode, per_sample=per_sample).backward()
    assert largest.entries == x.numel()


def test_orthogonality_of_wide_samples_forms_one_gram_matrix_each() -> None:
    """For samples with fewer rows than features the Gram matrices are 8·64², not (8·64)²."""
    x = torch.randn(8, 64, 96, requires_grad=True)
    with Largest() as largest:
        eq.orthogonality(x, per_sample=True).backward()
    assert largest.entries == max(x.numel(), 8 * 64 * 64)
    assert largest.entries < (8 * 64) ** 2


@pytest.mark.parametrize("penalty", ["kl_divergence", "js_divergence", "entropy"])
def test_chunks_never_hold_the_whole_in_float32(penalty: str) -> None:
    """With `chunk=8` of 64 rows in bfloat16 no float32 tensor is larger than eight rows."""
    inputs = [
        torch.randn(64, 32, dtype=torch.bfloat16).requires_grad_()
        for _ in range(1 if penalty == "entropy" else 2)
    ]
    for chunk, most in ((8, 8 * 32), (None, 64 * 32)):
        with Largest() as largest:
            getattr(eq, penalty)(*inputs, from_logits=True, chunk=chunk).backward()
        assert largest.float32_entries == most
