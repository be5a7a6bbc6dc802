"""The same numbers from others: Optax, and torch's own clipping, up to what they do otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import Tensor, nn

from equipoise import transforms
from tests.transforms.assertions import length, once

SHAPES = [(3, 4), (4,), (), (5, 2)]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """JAX computes in float64 here, as torch does."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def drawn(seed: int, size: float = 1.0) -> list[Tensor]:
    """Tensors of the shapes above."""
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(s, dtype=torch.float64, generator=generator) for s in SHAPES]


def there(tensors: list[Tensor], *, transposed: bool = False) -> list[Any]:
    """In JAX; matrices transposed where its layers keep outputs last."""
    return [jax.numpy.asarray((t.T if transposed and t.dim() == 2 else t).numpy()) for t in tensors]


def back(arrays: Any, *, transposed: bool = False) -> list[Tensor]:
    """In torch again."""
    found = [torch.from_numpy(np.array(a)) for a in arrays]
    return [t.T if transposed and t.dim() == 2 else t for t in found]


def by_optax(
    transform: Any, grads: list[Tensor], params: list[Tensor], *, transposed: bool = False
) -> list[Tensor]:
    """One update."""
    weights = there(params, transposed=transposed)
    state = transform.init(weights)
    updates, _ = transform.update(there(grads, transposed=transposed), state, weights)
    return back(updates, transposed=transposed)


def is_matrix(param: Any) -> bool:
    """In either library."""
    return bool(param.ndim > 1)


PAIRS = {
    "value": (transforms.clip_by_value(-0.5, 0.5), optax.clip(0.5)),
    "global norm, clipped": (transforms.clip_by_global_norm(0.7), optax.clip_by_global_norm(0.7)),
    "global norm, not": (transforms.clip_by_global_norm(99.0), optax.clip_by_global_norm(99.0)),
    "centralize": (transforms.centralize(), optax.centralize()),
    "decay": (transforms.add_l2_decay(0.3), optax.add_decayed_weights(0.3)),
    "chain": (
        transforms.chain(transforms.add_l2_decay(0.3), transforms.clip_by_global_norm(0.7)),
        optax.chain(optax.add_decayed_weights(0.3), optax.clip_by_global_norm(0.7)),
    ),
    "the other way round": (
        transforms.chain(transforms.clip_by_global_norm(0.7), transforms.add_l2_decay(0.3)),
        optax.chain(optax.clip_by_global_norm(0.7), optax.add_decayed_weights(0.3)),
    ),
    "masked": (
        transforms.masked(transforms.add_l2_decay(0.3), is_matrix),
        optax.masked(optax.add_decayed_weights(0.3), lambda ps: [is_matrix(p) for p in ps]),
    ),
    "partition": (
        transforms.partition(
            {"m": transforms.clip_by_global_norm(0.7), "o": transforms.clip_by_value(-0.1, 0.1)},
            lambda p: "m" if is_matrix(p) else "o",
        ),
        optax.partition(
            {"m": optax.clip_by_global_norm(0.7), "o": optax.clip(0.1)},
            lambda ps: ["m" if is_matrix(p) else "o" for p in ps],
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_optax_agrees(name: str) -> None:
    """One update of the same gradients and weights, to the rounding of float64."""
    ours, theirs = PAIRS[name]
    for seed in range(5):
        grads, params = drawn(seed), drawn(100 + seed)
        got = once(ours, grads, params)
        for one, expected in zip(got, by_optax(theirs, grads, params), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_optax_agrees_on_adaptive_clipping(size: float) -> None:
    """Unit-wise, where its units are columns: its layers keep outputs last."""
    grads, params = drawn(1, size), drawn(2)
    params[1] = torch.zeros(4, dtype=torch.float64)
    got = once(transforms.adaptive_clip(0.1, 1e-3), grads, params)
    expected = by_optax(optax.adaptive_grad_clip(0.1, 1e-3), grads, params, transposed=True)
    for one, other in zip(got, expected, strict=True):
        # Its quotient has a floor of 1e-6 under the norm.
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


def test_optax_agrees_on_skipping() -> None:
    """`apply_if_finite` makes all updates 0 where one is not finite, as the pure update does."""
    for bad in (float("nan"), float("inf"), 1.0):
        grads, params = drawn(3), drawn(4)
        grads[1][2] = bad
        theirs = optax.apply_if_finite(optax.identity(), max_consecutive_errors=9)
        got = once(transforms.skip_nonfinite(), grads, params)
        for one, other in zip(got, by_optax(theirs, grads, params), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_optax_agrees_on_the_noise_of_each_step() -> None:
    """The variances of five steps are those of Optax, whose first step is also t = 0."""
    n = 100_000
    zeros = torch.zeros(n, dtype=torch.float64)
    ours, theirs = transforms.add_noise(0.3, 0.7), optax.add_noise(0.3, 0.7, key=1)
    state, other = ours.init([zeros]), theirs.init(there([zeros]))
    for _ in range(5):
        (mine,), state = ours.update([zeros], state, [zeros])
        updates, other = theirs.update(there([zeros]), other)
        # Each estimate is off by √(2/n) of it; five deviations of the difference of two.
        assert mine.var().item() == pytest.approx(back(updates)[0].var().item(), rel=5 * 2 / n**0.5)


def test_optax_agrees_on_adamw() -> None:
    """20 steps of Adam with clipping and decoupled decay are Optax's chain with AdamW."""
    params = [nn.Parameter(p) for p in drawn(5)]
    optimizer = torch.optim.Adam(params, lr=0.05)
    decay = transforms.add_l2_decay(0.2, decoupled=True)
    transforms.attach(transforms.chain(transforms.clip_by_global_norm(0.5), decay), optimizer)
    theirs = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05, weight_decay=0.2))
    weights = there(drawn(5))
    state = theirs.init(weights)
    for step in range(20):
        grads = drawn(50 + step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        updates, state = theirs.update(there(grads), state, weights)
        weights = optax.apply_updates(weights, updates)
    for param, expected in zip(params, back(weights), strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("limit", [0.5, 3.0, 100.0])
def test_torch_agrees_on_the_global_norm(limit: float) -> None:
    """`clip_grad_norm_` is ours times ‖g‖/(‖g‖ + 1e-6), and its norm is ours."""
    grads = drawn(6)
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    total = nn.utils.clip_grad_norm_(params, limit)
    clip = transforms.clip_by_global_norm(limit)
    out, state = clip.update(grads, clip.init(params), params)
    assert state["recorded"]["norm"].item() == pytest.approx(total.item(), rel=1e-14)
    short = total / (total + 1e-6) if total > limit else 1.0
    for param, got in zip(params, out, strict=True):
        assert got is not None
        torch.testing.assert_close(param.grad, got * short, rtol=1e-12, atol=0)


def test_torch_agrees_on_values() -> None:
    """`clip_grad_value_` is `clip_by_value` with the limit on both sides."""
    grads = drawn(7)
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    nn.utils.clip_grad_value_(params, 0.4)
    for param, got in zip(params, once(transforms.clip_by_value(-0.4, 0.4), grads), strict=True):
        torch.testing.assert_close(param.grad, got, rtol=0, atol=0)


def test_at_the_limit_we_are_exact_and_torch_is_not() -> None:
    """(3, 4) by 5 is unchanged here; torch's 1e-6 makes it shorter."""
    grad = torch.tensor([3.0, 4.0])
    assert length(once(transforms.clip_by_global_norm(5.0), [grad])[0]) == 5.0
    param = nn.Parameter(torch.zeros(2))
    param.grad = grad.clone()
    nn.utils.clip_grad_norm_([param], 5.0)
    assert length(param.grad) < 5.0
