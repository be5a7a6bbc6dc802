"""No transform waits for the device, unless its entry in the table says why."""

import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import transforms
from tests.contracts import test_device
from tests.contracts.test_device import NoWaiting
from tests.transforms.members import FUNCTIONAL, MEMBERS, Member, gradients, parameters
from tests.transforms.steps import Run

MODULES = [
    import_module(found.name)
    for found in pkgutil.iter_modules(transforms.__path__, f"{transforms.__name__}.")
]

LOOKING_IS_FREE = transforms._lists.looking_is_free


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at values costs as much here as on a device, so that nobody does it for speed."""
    found = [module for module in MODULES if hasattr(module, "looking_is_free")]
    assert found
    for module in found:
        monkeypatch.setattr(module, "looking_is_free", lambda _device: False)
    # What is on the CPU may be made of numbers; `test_no_values_needed` is about elsewhere.
    there = test_device.WAITS - {torch.ops.aten.lift_fresh.default}
    monkeypatch.setattr(test_device, "WAITS", there)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that were brought to the host as a list, which is no operation."""
    sizes: list[int] = []
    plain = Tensor.tolist

    def counted(self: Tensor) -> Any:
        sizes.append(self.numel())
        return plain(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    return sizes


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("member", [m for m in FUNCTIONAL if not m.waits], ids=lambda m: m.id)
def test_no_waiting(member: Member, copied: list[int]) -> None:
    """No update asks for a number on the host, but for the step, which is there already."""
    transform, params = member.make(), parameters()
    state = transform.init(params)
    for step in range(2):
        grads = gradients(step)
        if member.breaks:  # counts its steps on the host, by a tensor that never leaves it
            transform.update(grads, state, params)
        else:
            with NoWaiting():
                _, state = transform.update(grads, state, params)
    assert copied == []


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("member", FUNCTIONAL, ids=lambda m: m.id)
def test_looking_changes_no_value(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found without looking is what is found with it, up to the order of float64 sums."""
    transform, params = member.make(), parameters()
    blind, seeing = transform.init(params), transform.init(params)
    for step in range(3):
        out, blind = transform.update(gradients(step), blind, params)
        with monkeypatch.context() as patch:
            for module in MODULES:
                if hasattr(module, "looking_is_free"):
                    patch.setattr(module, "looking_is_free", LOOKING_IS_FREE)
            expected, seeing = transform.update(gradients(step), seeing, params)
        torch.testing.assert_close(list(out), list(expected), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(blind, seeing, rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    "member",
    [m for m in FUNCTIONAL if not m.waits and m.factory != "add_noise"],
    ids=lambda m: m.id,
)
def test_no_values_needed(member: Member) -> None:
    """An update has a result where tensors have no values, and brings none from the host."""
    transform = member.make()
    params = [p.to("meta") for p in parameters()]
    grads = [None if g is None else g.to("meta") for g in gradients()]
    state = transform.init(params)
    if member.breaks:
        out, _ = transform.update(grads, state, params)
    else:
        with NoWaiting():
            out, _ = transform.update(grads, state, params)
    for got, grad in zip(out, grads, strict=True):
        assert (got is None) == (grad is None)
        assert got is None or grad is None or (got.is_meta and got.shape == grad.shape)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.waits], ids=lambda m: m.id)
def test_attached_it_looks_at_most_once(member: Member, copied: list[int]) -> None:
    """A step copies at most once to the host: the verdicts of those that may skip it."""
    run = Run(member.make())
    run.step(0)
    skips = "skip" in member.id
    present = sum(p.grad is not None for p in run.params)
    assert copied == ([present] if skips else [])


@pytest.mark.usefixtures("as_on_a_device")
def test_a_rate_on_a_device_is_not_looked_at() -> None:
    """A learning rate in a tensor stays where it is, in the first step and with decay beside it."""
    decay = transforms.add_l2_decay(0.1, decoupled=True)
    run = Run(transforms.chain(transforms.centralize(), decay), lr=torch.tensor(0.1))
    for param, grad in zip(run.params, gradients(), strict=True):
        param.grad = grad
    (hook,) = run.optimizer._optimizer_step_pre_hooks.values()
    with NoWaiting():
        hook(run.optimizer, (run.optimizer,), {})


@pytest.mark.usefixtures("as_on_a_device")
def test_all_verdicts_are_fetched_together(copied: list[int]) -> None:
    """Three links that may skip a step copy once, for all gradients of all three."""
    skip = transforms.skip_nonfinite()
    clip = transforms.clip_by_norm(1.0, nonfinite="skip")
    run = Run(transforms.chain(skip, clip, skip))
    run.step(0)
    assert len(copied) == 1


def test_metrics_are_fetched_together(copied: list[int]) -> None:
    """All figures of a chain come in one copy."""
    clip = transforms.clip_by_global_norm(1.0)
    run = Run(transforms.chain(transforms.snapshot("before"), clip, transforms.snapshot("after")))
    run.step(0)
    copied.clear()
    assert len(run.handle.metrics()) == 5
    assert copied == [5]
