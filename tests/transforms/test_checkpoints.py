"""Distributed checkpoints: what they drop of an optimizer, and the step that they take with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Optimizer

from equipoise import transforms
from tests.transforms.assertions import assert_same_bits

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "fused AdamW": lambda ps: AdamW(ps, lr=0.1, fused=True),
    "rate in a tensor": lambda ps: AdamW(ps, lr=torch.tensor(0.1)),
    "SGD": lambda ps: SGD(ps, lr=0.1),  # has no state, ever
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def shaping() -> transforms.GradientTransform:
    """Links with every kind of state, and one without any."""
    return transforms.chain(
        transforms.centralize(),
        transforms.skip_nonfinite(),
        transforms.clip_by_norm_history(50, window=3),
        transforms.add_noise(0.01),
        transforms.snapshot("norm"),
    )


class Training:
    """A small model whose optimizer is asked for its state before the first step."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = make(self.model.parameters())
        self.handle = transforms.attach(shaping(), self.optimizer, names=self.model)
        self.states()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those that go into a checkpoint."""
        return get_state_dict(self.model, self.optimizer)

    def steps(self, *numbers: int) -> None:
        """Steps of which the second has a gradient that is not finite."""
        for number in numbers:
            x = torch.full((4, 3), math.nan if number == 1 else 1.0 + number)
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@each_optimizer
def test_the_step_that_makes_a_state_is_none_of_training(name: str) -> None:
    """Asked for a state before there is any, torch steps with zeros: no link counts that.

    Else a history would begin with a norm of 0, by which the next were clipped to nothing.
    """
    run = Training(OPTIMIZERS[name])
    fresh = transforms.chain(shaping()).init(list(run.model.parameters()))
    assert_same_bits({"chain": run.handle.state}, fresh)
    run.steps(0)
    assert run.handle.metrics()["clip_by_norm_history/norm_clipped"] > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@each_optimizer
@pytest.mark.parametrize("order", ["handle first", "optimizer first"])
def test_resuming_from_a_distributed_checkpoint(name: str, order: str, tmp_path: Path) -> None:
    """The optimizer's part lacks our key; with the handle beside it steps go on bit by bit."""
    straight, first = Training(OPTIMIZERS[name]), Training(OPTIMIZERS[name])
    straight.steps(0, 1, 2, 3)
    first.steps(0, 1)
    model, optimizer = first.states()
    assert "gradient_transforms" not in optimizer
    saved = {"model": model, "optimizer": optimizer, "handle": first.handle}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)

    second = Training(OPTIMIZERS[name])
    model, optimizer = second.states()
    if order == "handle first":
        dcp.load({"handle": second.handle}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    if order != "handle first":
        dcp.load({"handle": second.handle}, checkpoint_id=tmp_path, no_dist=True)
    assert second.handle.nonfinite() == {"weight": 1, "bias": 1}
    second.steps(2, 3)
    assert_same_bits(second.handle.state_dict(), straight.handle.state_dict())
    assert_same_bits(second.model.state_dict(), straight.model.state_dict())


@each_optimizer
def test_a_first_step_at_rate_zero_counts(name: str) -> None:
    """A warmup that begins at 0 has gradients, and its first step is seen as any other."""
    run = Training(OPTIMIZERS[name])
    run.optimizer = OPTIMIZERS[name](run.model.parameters())
    handle = transforms.attach(shaping(), run.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    run.steps(0)
    assert handle.metrics()["norm"] > 0
    assert handle.state["add_noise"]["step"] == 1
