"""Faults of the predecessors, each beaten by one test."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

import equipoise as eq
from equipoise import transforms
from tests.transforms.assertions import assert_same_bits, once


def test_coupled_decay_called_adamw() -> None:
    """A decay added to Adam's gradient was called AdamW; what is called decoupled here is AdamW."""
    ends = []
    for make, decay in (
        (lambda ps: Adam(ps, lr=0.1), transforms.add_l2_decay(0.3, decoupled=True)),
        (lambda ps: AdamW(ps, lr=0.1, weight_decay=0.3), transforms.identity()),
        (lambda ps: Adam(ps, lr=0.1), transforms.add_l2_decay(0.3)),
    ):
        weight = nn.Parameter(torch.tensor([2.0, -0.5], dtype=torch.float64))
        optimizer = make([weight])
        transforms.attach(decay, optimizer)
        for step in range(3):
            weight.grad = torch.tensor([0.1 * step, 1.0], dtype=torch.float64)
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-14, atol=0)
    assert (ends[0] - ends[2]).abs().max() > 1e-2


def test_transforms_in_reverse_order() -> None:
    """Chains ran last to first: a noise written after a clip was clipped with it."""
    seen: list[str] = []

    def told(name: str) -> transforms.GradientTransform:
        def update(grads: Any, state: Any, _params: Any) -> Any:
            seen.append(name)
            return grads, state

        return transforms.GradientTransform(lambda _params: {}, update, name)

    once(transforms.chain(told("a"), transforms.chain(told("b"), told("c")), told("d")), [])
    assert seen == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: transforms.clip_by_global_norm(max_norm=1.0),  # type: ignore[call-arg]
            "takes the options limit, nonfinite; got 'max_norm'",
        ),
        (
            lambda: transforms.add_l2_decay(0.1, decouple=True),  # type: ignore[call-arg]
            "got 'decouple'. Did you mean 'decoupled'",
        ),
        (lambda: transforms.add_noise(gamma=0.5), "takes the options variance, decay, seed; got"),  # type: ignore[call-arg]
        (lambda: transforms.clip_by_norm_history(windw=5), "Did you mean 'window'"),  # type: ignore[call-arg]
    ],
)
def test_unknown_options(call: Any, message: str) -> None:
    """Unknown options were dropped in silence; here they are errors that name those there are."""
    with pytest.raises(eq.UnknownOptionError, match=message):
        call()


def test_wrong_choices_name_the_right_ones() -> None:
    """An unknown choice counted as the default; here the error names those there are."""
    with pytest.raises(eq.OptionError, match="must be 'propagate', 'raise', 'zero' or 'skip', got"):
        transforms.clip_by_norm(1.0, nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(eq.OptionError, match="`scope` must be 'global' or 'tensor', got 'layer'"):
        transforms.clip_by_percentile(9, scope="layer")  # type: ignore[arg-type]


def test_a_limit_that_turned_the_gradient_round() -> None:
    """A negative limit reversed every gradient; here its magnitude counts."""
    assert_same_bits(
        once(transforms.clip_by_global_norm(-1.0), [torch.tensor([3.0, 4.0])]),
        [torch.tensor([0.6, 0.8])],
    )


def test_a_nan_that_spread_to_every_gradient() -> None:
    """One NaN made the common factor NaN, and every gradient with it; here it stays where it is."""
    good = torch.tensor([3.0, 4.0])
    out = once(transforms.clip_by_global_norm(1.0), [torch.tensor([math.nan]), good])
    assert_same_bits(out[1], good)


def test_an_index_off_by_one() -> None:
    """29 % of 101 entries was computed as the index 28.999…; here in whole numbers."""
    grad = torch.arange(101.0)
    out = once(transforms.clip_by_percentile(29), [grad])[0]
    assert out is not None
    assert out.max().item() == 29.0


def test_l1_gradient_at_zero() -> None:
    """The gradient of |w| at 0 was +1, so that zeros moved; here it is 0 and they stay."""
    zero = torch.zeros(3)
    assert_same_bits(once(transforms.add_l1_decay(1.0), [zero], [zero])[0], zero)


def test_noise_that_could_not_be_seeded() -> None:
    """Noise came from the global generator: no run could be repeated beside other draws."""
    first = once(transforms.add_noise(seed=1), [torch.zeros(4)])
    torch.randn(100)
    assert_same_bits(once(transforms.add_noise(seed=1), [torch.zeros(4)]), first)


def test_a_composition_that_never_reached_training() -> None:
    """Transforms were composed and then not used; attached, the weights show them."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    transforms.attach(transforms.chain(transforms.clip_by_value(-0.5, 0.5)), optimizer)
    weight.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    assert_same_bits(weight.detach(), torch.tensor([-0.5, 0.5]))


def test_a_clip_that_was_no_identity() -> None:
    """An ε under the norm shortened gradients that were within the limit."""

    def clipped(grad: Tensor) -> Tensor | None:
        return once(transforms.clip_by_global_norm(5.0), [grad])[0]

    for grad in (torch.tensor([3.0, 4.0]), torch.tensor([0.3, -0.4])):
        assert_same_bits(clipped(grad), grad)
