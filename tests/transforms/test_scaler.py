"""Gradient scalers: a transform sees unscaled gradients, and a skipped step leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from equipoise import transforms
from tests.transforms.assertions import assert_same_bits

SCALE = 1024.0
OPTIMIZERS = {
    "Adam": lambda ps: Adam(ps, lr=0.1, foreach=False),
    "foreach Adam": lambda ps: Adam(ps, lr=0.1, foreach=True),
    "fused Adam": lambda ps: Adam(ps, lr=0.1, fused=True),
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "fused SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def remember(
    grads: list[Tensor | None], state: dict[str, Any], _params: list[Tensor]
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """A user's transform with every kind of state: a tensor, a list, a number."""
    return grads, {
        "sum": state["sum"] + sum(g.sum() for g in grads if g is not None),
        "last": [g.clone() for g in grads if g is not None],
        "calls": state["calls"] + 1,
    }


def shaping() -> transforms.GradientTransform:
    """Everything that has a state, a clip, and a decay beside the step."""
    mine = transforms.GradientTransform(
        lambda ps: {"sum": torch.zeros(()), "last": [torch.zeros_like(p) for p in ps], "calls": 0},
        remember,
        "remember()",
    )
    return transforms.chain(
        transforms.snapshot("seen"),
        transforms.clip_by_norm_history(50, 3),
        transforms.skip_nonfinite(),
        transforms.masked(transforms.skip_nonfinite(), [True]),
        transforms.clip_by_global_norm(2.0, nonfinite="raise"),
        mine,
        transforms.add_noise(0.01, seed=2),
        transforms.add_l2_decay(0.1, decoupled=True),
    )


class Training:
    """Losses with gradients (3, 4)·size on one weight of two entries."""

    def __init__(self, name: str, *, scaled: bool) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, -1.0]))
        self.optimizer: Optimizer = OPTIMIZERS[name]([self.weight])
        self.handle = transforms.attach(shaping(), self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)

    def step(self, size: float, *, unscale: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = (self.weight * torch.tensor([3.0, 4.0]) * size).sum()
        self.scaler.scale(loss).backward()
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@each_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_are_unscaled(name: str, unscale: bool) -> None:
    """With a scaler, fused optimizers included, weights and states are those without one."""
    scaled, plain = Training(name, scaled=True), Training(name, scaled=False)
    for size in (1.0, 0.25, 2.0):
        scaled.step(size, unscale=unscale)
        plain.step(size)
        assert scaled.handle.metrics()["seen"] == pytest.approx(5 * size, rel=1e-6)
    assert_same_bits(scaled.weight.detach(), plain.weight.detach())
    assert_same_bits(scaled.handle.state, plain.handle.state)


@each_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_leaves_no_trace(name: str, unscale: bool) -> None:
    """A step that the scaler skips changes no weight, no moment, no state, and raises nothing.

    Also where a link would raise or skip at NaN by itself: the scaler's search for a scale is no
    reason to complain, and is not counted.
    """
    run = Training(name, scaled=True)
    run.step(1.0)
    before = run.weight.detach().clone(), run.handle.state_dict()
    moments = transforms._saved.copied(run.optimizer.state_dict()["state"])
    run.step(1e38, unscale=unscale)
    assert run.scaler.get_scale() == SCALE / 2
    assert_same_bits(run.weight.detach(), before[0])
    assert_same_bits(run.handle.state_dict(), before[1])
    assert_same_bits(run.optimizer.state_dict()["state"], moments)
    assert run.handle.nonfinite() == {}
    run.step(0.5)
    assert run.handle.metrics()["seen"] == pytest.approx(2.5, rel=1e-6)
    assert run.handle.state["remember"]["calls"] == 2


def test_a_transform_may_skip_where_the_scaler_does_not() -> None:
    """A NaN that a link makes itself, after the scaler has looked, is skipped and counted."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = Adam([weight], lr=0.1, fused=True)
    spoil = transforms.GradientTransform(
        lambda _ps: {}, lambda gs, s, _ps: ([None if g is None else g / 0 for g in gs], s)
    )
    handle = transforms.attach(transforms.chain(spoil, transforms.skip_nonfinite()), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.item() == 1.0
    assert list(handle.nonfinite().values()) == [1]


def test_two_handles_unscale_once() -> None:
    """The second of two transforms on a fused optimizer sees gradients unscaled once."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0, fused=True)
    first = transforms.attach(transforms.snapshot("one"), optimizer)
    second = transforms.attach(transforms.snapshot("two"), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.step(optimizer)
    assert (first.metrics(), second.metrics()) == ({"one": 5.0}, {"two": 5.0})
    assert_same_bits(weight.detach(), torch.tensor([-3.0, -4.0]))
