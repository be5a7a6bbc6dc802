"""Decay: coupled, decoupled and in the loss, and where the three are one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import GradientTransform
from tests.transforms.assertions import assert_same_bits, once

WEIGHTS = [2.0, -1.0, 0.0, 0.3]


def weight() -> nn.Parameter:
    """A few numbers in float64."""
    return nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float64))


COUPLED: dict[str, tuple[GradientTransform, Callable[[Tensor], Tensor]]] = {
    "l2": (transforms.add_l2_decay(0.3), lambda w: 0.3 * w),
    "l1": (transforms.add_l1_decay(0.3), lambda w: 0.3 * w.sign()),
    "elastic": (
        transforms.add_elastic_net_decay(0.3, 0.25),
        lambda w: 0.3 * (0.25 * w.sign() + 0.75 * w),
    ),
    "all l1": (transforms.add_elastic_net_decay(0.3, 1.0), lambda w: 0.3 * w.sign()),
    "all l2": (transforms.add_elastic_net_decay(0.3, 0.0), lambda w: 0.3 * w),
    "negative": (transforms.add_l2_decay(-0.3), lambda w: -0.3 * w),
}


@pytest.mark.parametrize("name", COUPLED)
def test_closed_forms(name: str) -> None:
    """The gradient plus the rate times the derivative, for each kind."""
    decay, expected = COUPLED[name]
    w, g = weight().detach(), torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(once(decay, [g], [w])[0], g + expected(w), rtol=1e-15, atol=1e-16)


DECOUPLED: dict[str, tuple[GradientTransform, Callable[[Tensor, float], Tensor]]] = {
    "l2": (transforms.add_l2_decay(0.3, decoupled=True), lambda w, lr: w * (1 - lr * 0.3)),
    "l1": (transforms.add_l1_decay(0.3, decoupled=True), lambda w, lr: w - lr * 0.3 * w.sign()),
    "elastic": (
        transforms.add_elastic_net_decay(0.3, 0.25, decoupled=True),
        lambda w, lr: w - lr * 0.3 * (0.25 * w.sign() + 0.75 * w),
    ),
}


@pytest.mark.parametrize("name", DECOUPLED)
def test_decoupled_closed_forms(name: str) -> None:
    """Beside the step, with the rate of each group, and not through Adam's second moment."""
    decay, expected = DECOUPLED[name]
    first, second = weight(), weight()
    optimizer = Adam([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    transforms.attach(decay, optimizer)
    for param in (first, second):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    start = weight().detach()
    torch.testing.assert_close(first.detach(), expected(start, 0.1), rtol=1e-15, atol=1e-16)
    torch.testing.assert_close(second.detach(), expected(start, 0.5), rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_one_step_is_adamw_to_the_last_bit(options: dict[str, Any]) -> None:
    """Adam with a gradient of zero and decoupled decay is AdamW, bit by bit in float64."""
    start = torch.randn(1000, dtype=torch.float64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    adam = Adam([ours], lr=0.1, **options)
    transforms.attach(transforms.add_l2_decay(0.3, decoupled=True), adam)
    adamw = AdamW([theirs], lr=0.1, weight_decay=0.3, **options)
    for param, optimizer in ((ours, adam), (theirs, adamw)):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert_same_bits(ours.detach(), theirs.detach())
    assert not torch.equal(ours.detach(), start)


def test_twenty_steps_with_a_schedule_are_adamw() -> None:
    """Real gradients and a falling learning rate: 20 steps are AdamW's."""
    ours, theirs = weight(), weight()
    adam = Adam([ours], lr=0.1)
    transforms.attach(transforms.add_l2_decay(0.3, decoupled=True), adam)
    adamw = AdamW([theirs], lr=0.1, weight_decay=0.3)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (adam, adamw)]
    for param, optimizer, scheduler in zip((ours, theirs), (adam, adamw), schedulers, strict=True):
        for _ in range(20):
            optimizer.zero_grad()
            (param.cos() + 0.1 * param.square()).sum().backward()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)


def test_coupled_decay_is_not_adamw() -> None:
    """Coupled, Adam normalises decay away: its first step is lr · sign(w), whatever the rate."""
    param = weight()
    optimizer = Adam([param], lr=0.1)
    transforms.attach(transforms.add_l2_decay(0.3), optimizer)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    start = weight().detach()
    torch.testing.assert_close(param.detach(), start - 0.1 * start.sign(), rtol=0, atol=1e-7)


def test_on_sgd_all_three_are_one() -> None:
    """A penalty of weight rate/2, coupled and decoupled decay are the same step of plain SGD."""
    rate, ends = 0.3, []
    for kind in ("loss", "coupled", "decoupled"):
        param = weight()
        optimizer = SGD([param], lr=0.1)
        if kind != "loss":
            decay = transforms.add_l2_decay(rate, decoupled=kind == "decoupled")
            transforms.attach(decay, optimizer)
        loss = param.exp().sum()
        if kind == "loss":
            loss = loss + eq.Pipeline(decay=eq.Term(eq.l2, weight=rate / 2))(param).total
        loss.backward()
        optimizer.step()
        ends.append(param.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-15, atol=1e-16)
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-15, atol=1e-16)


def test_half_precision_adds_in_float32() -> None:
    """A bfloat16 gradient plus decay is rounded once."""
    g, w = torch.tensor([1.0]).bfloat16(), torch.tensor([3.0]).bfloat16()
    out = once(transforms.add_l2_decay(0.01), [g], [w])[0]
    assert_same_bits(out, torch.tensor([1.03]).bfloat16())


def test_complex_signs() -> None:
    """The sign of a complex weight is w/|w|, and 0 at 0."""
    w, g = torch.tensor([3 + 4j, 0j]), torch.zeros(2, dtype=torch.complex64)
    out = once(transforms.add_l1_decay(1.0), [g], [w])[0]
    torch.testing.assert_close(out, torch.tensor([0.6 + 0.8j, 0j]))


def test_absent_gradients_are_left_alone() -> None:
    """A parameter without a gradient decays neither way."""
    for decoupled in (False, True):
        absent, present = weight(), weight()
        optimizer = SGD([absent, present], lr=0.1)
        transforms.attach(transforms.add_l2_decay(0.3, decoupled=decoupled), optimizer)
        present.grad = torch.zeros_like(present)
        optimizer.step()
        assert_same_bits(absent.detach(), weight().detach())
        assert not torch.equal(present.detach(), weight().detach())


@pytest.mark.parametrize("place", ["alone", "masked"])
def test_decoupled_happens_once_a_step(place: str) -> None:
    """However often LBFGS asks for the gradient, the weights shrink once."""
    param = weight()
    # It goes on though the gradient is nearly zero.
    optimizer = torch.optim.LBFGS(
        [param], lr=0.1, max_iter=4, tolerance_grad=0.0, tolerance_change=-1.0
    )
    decay = transforms.add_l2_decay(0.5, decoupled=True)
    transforms.attach(decay if place == "alone" else transforms.masked(decay, [True]), optimizer)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (param * torch.tensor([1e-12], dtype=torch.float64)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    torch.testing.assert_close(param.detach(), weight().detach() * 0.95, rtol=1e-6, atol=1e-6)


def test_decoupled_for_some_parameters() -> None:
    """Those that are chosen decay, each at the rate of its own group, and no others."""
    bias, first, second = weight(), weight(), weight()
    groups = [{"params": [bias]}, {"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}]
    optimizer = SGD(groups, lr=0.1)
    decay = transforms.add_l2_decay(0.5, decoupled=True)
    transforms.attach(transforms.masked(decay, lambda p: p is not bias), optimizer)
    for param in (bias, first, second):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    start = weight().detach()
    assert_same_bits(bias.detach(), start)
    assert_same_bits(first.detach(), start * 0.75)
    assert_same_bits(second.detach(), start * 0.875)


def test_decoupled_for_sparse_gradients() -> None:
    """Beside the step a whole table decays, though its gradient holds a few rows."""
    table = nn.Embedding(4, 2, sparse=True)
    start = table.weight.detach().clone()
    optimizer = SGD(table.parameters(), lr=0.1)
    transforms.attach(transforms.add_l2_decay(0.5, decoupled=True), optimizer)
    (0 * table(torch.tensor([1]))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.weight.detach(), start * 0.95)


def test_a_rate_that_follows_a_schedule() -> None:
    """The rate of a step is the schedule's at that step, counted from 0."""
    for decoupled in (False, True):
        param = nn.Parameter(torch.tensor([1.0]))
        optimizer = SGD([param], lr=1.0)
        rate = eq.schedules.linear(0.5, 0.0, 3)
        transforms.attach(transforms.add_l2_decay(rate, decoupled=decoupled), optimizer)
        seen = []
        for _ in range(4):
            param.grad = torch.zeros(1)
            optimizer.step()
            seen.append(param.item())
        assert seen == [0.5, 0.375, 0.375, 0.375]


def test_a_ratio_that_follows_a_schedule() -> None:
    """From all squares to all signs in two steps: −0.5·w, then −0.5·sign(w)."""
    for decoupled in (False, True):
        param = nn.Parameter(torch.tensor([4.0]))
        optimizer = SGD([param], lr=1.0)
        ratio = eq.schedules.linear(0.0, 1.0, 2)
        decay = transforms.add_elastic_net_decay(0.5, ratio, decoupled=decoupled)
        transforms.attach(decay, optimizer)
        seen = []
        for _ in range(3):
            param.grad = torch.zeros(1)
            optimizer.step()
            seen.append(param.item())
        assert seen == [2.0, 1.5, 1.0]


@pytest.mark.parametrize("name", DECOUPLED)
def test_decoupled_needs_an_optimizer(name: str) -> None:
    """The pure update refuses it and says where it belongs."""
    decay, _ = DECOUPLED[name]
    with pytest.raises(
        eq.GradientError, match=r"changes weights at the learning rate of an optimizer, got no"
    ):
        once(decay, [torch.zeros(2)])


def test_decoupled_needs_a_learning_rate() -> None:
    """An optimizer without 'lr' in its groups is refused by name."""

    class Plain(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            del closure

    param = weight()
    optimizer = Plain([param], {})
    transforms.attach(transforms.add_l2_decay(decoupled=True), optimizer)
    param.grad = torch.zeros_like(param)
    with pytest.raises(eq.GradientError, match="got a group without 'lr'"):
        optimizer.step()


def test_refusals() -> None:
    """Ratios outside [0, 1] and rates that are no numbers are refused where they are given."""
    with pytest.raises(eq.OptionError, match="`l1_ratio` must be a finite number at least 0"):
        transforms.add_elastic_net_decay(0.1, 1.5)
    with pytest.raises(eq.OptionError, match="`rate` must be a finite number, got nan"):
        transforms.add_l2_decay(float("nan"))
    with pytest.raises(eq.OptionError, match="`rate` must be a Python number, got a tensor"):
        transforms.add_l1_decay(torch.tensor(0.1))  # type: ignore[arg-type]
