"""States: the same attached and by hand, saved and loaded, and going on as if nothing was."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import equipoise as eq
from equipoise import transforms
from tests.transforms.assertions import assert_same_bits, kinds
from tests.transforms.members import FUNCTIONAL, MEMBERS, Member, gradients, parameters
from tests.transforms.steps import Run


def saved_and_loaded(state: Any) -> Any:
    """Through a file, as a checkpoint is read where its author is not trusted."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_attached_is_functional(member: Member) -> None:
    """In place on an optimizer, gradients and state are those of the pure update, bit by bit."""
    run, pure = Run(member.make()), transforms.chain(member.make())
    if member.factory == "chain":
        pure = member.make()
    params = run.params
    state = pure.init(params)
    for step in range(4):
        expected, state = pure.update(gradients(step), state, run.weights())
        run.step(step)
        assert_same_bits([p.grad for p in params], list(expected))
        assert_same_bits(run.handle.state, state)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_attached_it_works_in_place(member: Member) -> None:
    """The gradients of an optimizer keep their memory."""
    run = Run(member.make())
    grads = gradients()
    for param, grad in zip(run.params, grads, strict=True):
        param.grad = grad
    run.optimizer.step()
    for param, grad in zip(run.params, grads, strict=True):
        assert grad is None or param.grad is grad


LAID_OUT: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.tensor([[0.9 - 1j], [-2.0 + 3j]]).expand(2, 3),
    "conjugated": lambda: torch.tensor([[0.9 - 1j, 2.0, 1j], [-2.0 + 3j, 0.5, 1.0]]).conj(),
    "transposed": lambda: torch.tensor([[0.9 - 1j, 2.0], [-2.0 + 3j, 0.5], [1j, 1.0]]).T,
}


@pytest.mark.parametrize("layout", LAID_OUT)
@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_attached_to_gradients_of_any_layout(member: Member, layout: str) -> None:
    """Entries that share memory, are conjugated or in another order are transformed as any."""
    param = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    optimizer = SGD([param], lr=0.1)
    transforms.attach(member.make(), optimizer)
    param.grad = LAID_OUT[layout]()
    optimizer.step()
    pure, grad = member.make(), LAID_OUT[layout]().resolve_conj().contiguous()
    (expected,), _ = pure.update([grad], pure.init([param]), [torch.ones_like(param)])
    assert expected is not None
    torch.testing.assert_close(param.grad.resolve_conj(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_a_state_goes_through_a_file(member: Member) -> None:
    """A state is tensors and plain data, and comes back from a file bit by bit."""
    transform, params = member.make(), parameters()
    state = transform.init(params)
    for step in range(2):
        _, state = transform.update(gradients(step), state, params)
    back = saved_and_loaded(state)
    assert_same_bits(back, state)
    assert kinds(back) == kinds(state)


@pytest.mark.parametrize("through", ["optimizer", "handle"])
@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_resuming_goes_on_bit_by_bit(member: Member, through: str) -> None:
    """Saved after two steps and loaded into a new run, the next two are those of one run of four.

    Through the optimizer's own state dict; and, for checkpoints that drop what they do not know,
    through the handle's.
    """
    straight = Run(member.make(), Adam)
    for step in range(4):
        straight.step(step)
    first, second = Run(member.make(), Adam), Run(member.make(), Adam)
    for step in range(2):
        first.step(step)
    saved = saved_and_loaded(
        {
            "weights": first.weights(),
            "optimizer": first.optimizer.state_dict(),
            "handle": first.handle.state_dict(),
        }
    )
    with torch.no_grad():
        for param, weight in zip(second.params, saved["weights"], strict=True):
            param.copy_(weight)
    if through == "handle":
        saved["optimizer"].pop("gradient_transforms")
        second.handle.load_state_dict(saved["handle"])
    second.optimizer.load_state_dict(saved["optimizer"])
    for step in range(2, 4):
        second.step(step)
    assert_same_bits(second.weights(), straight.weights())
    assert_same_bits(second.handle.state_dict(), straight.handle.state_dict())


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_a_saved_state_is_a_copy(member: Member) -> None:
    """What was saved does not change with the next step, nor with the run it was loaded into."""
    run = Run(member.make())
    run.step(0)
    saved, again = run.handle.state_dict(), run.handle.state_dict()
    run.step(1)
    assert_same_bits(saved, again)
    run.handle.load_state_dict(saved)
    run.step(1)
    assert_same_bits(saved, again)


def test_the_state_of_another_transform_is_refused() -> None:
    """A checkpoint of another chain is an error that says what differs, before anything changes."""
    run = Run(transforms.clip_by_norm_history(50, window=3))
    other = Run(transforms.chain(transforms.centralize(), transforms.add_noise()))
    run.step(0)
    before = run.handle.state_dict()
    with pytest.raises(
        eq.InputError,
        match=r"`state` should hold 'clip_by_norm_history', got 'centralize', 'add_noise'. "
        "Use the chain and the options it was saved with",
    ):
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    assert_same_bits(run.handle.state_dict(), before)


def test_the_state_of_another_window_is_refused() -> None:
    """A history of another length is an error that shows both shapes."""
    run = Run(transforms.clip_by_norm_history(50, window=3))
    other = Run(transforms.clip_by_norm_history(50, window=4))
    with pytest.raises(
        eq.InputError,
        match=r"`state.clip_by_norm_history.norms` should hold the shape \(3,\), got \(4,\)",
    ):
        run.handle.load_state_dict(other.handle.state_dict())


def test_what_is_no_state_of_a_handle_is_refused() -> None:
    """The state of a transform alone, or of an optimizer, is an error that says what to give."""
    run = Run(transforms.clip_by_norm_history(50, window=3))
    for wrong, got in (({}, "nothing"), (run.handle.state, "'clip_by_norm_history'"), (5, "int")):
        with pytest.raises(
            eq.InputError,
            match=rf"must hold 'state' and 'nonfinite', got {got}. Use what `handle.state_dict",
        ):
            run.handle.load_state_dict(wrong)  # type: ignore[arg-type]


def test_an_update_without_its_state() -> None:
    """No state, or that of fewer links, is an error that says where one comes from."""
    params, grads = parameters(), gradients()
    shaping = transforms.chain(transforms.centralize(), transforms.add_noise())
    with pytest.raises(eq.InputTypeError, match="`state` must be a dictionary, got NoneType"):
        shaping.update(grads, None, params)
    with pytest.raises(eq.InputError, match=r"got none for 'add_noise'. Use `transform.init\("):
        shaping.update(grads, {"centralize": {}}, params)
    with pytest.raises(eq.InputTypeError, match="`state` must be a dictionary, got NoneType"):
        transforms.clip_by_norm_history().update(grads, None, params)
    groups = transforms.partition({"all": transforms.add_noise()}, lambda _param: "all")
    with pytest.raises(eq.InputError, match=r"got none for 'all'. Use `transform.init\("):
        groups.update(grads, {}, params)


def test_a_checkpoint_from_before_the_transform() -> None:
    """An optimizer's state without a transform loads, and the transform keeps its own."""
    plain = Run(transforms.identity())
    plain.handle.remove()
    plain.step(0)
    run = Run(transforms.add_noise())
    run.step(0)
    before = run.handle.state_dict()
    run.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert_same_bits(run.handle.state_dict(), before)


def test_states_with_lists_come_back_where_they_are_used() -> None:
    """A user's state may hold lists of tensors, and numbers; they come back as they were."""

    def keep(grads: Any, state: Any, _params: Any) -> Any:
        return grads, {"last": [g.clone() for g in grads if g is not None], "n": state["n"] + 1}

    def make() -> Run:
        init = transforms.GradientTransform(
            lambda ps: {"last": [torch.zeros_like(p) for p in ps if p.dim() != 1], "n": 0}, keep
        )
        return Run(init)

    run, other = make(), make()
    run.step(0)
    saved = saved_and_loaded(run.optimizer.state_dict())
    other.optimizer.load_state_dict(saved)
    assert_same_bits(other.handle.state, run.handle.state)
    assert other.handle.state["keep"]["n"] == 1
