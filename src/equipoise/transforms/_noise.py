"""Gradient noise that fades, the same in every run and on every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import check_count, names_its_options
from equipoise.transforms._amounts import AT_LEAST_0, STEP, Amount, Amounts
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._transform import GradientTransform, State, in_place


@names_its_options
def add_noise(variance: Amount = 0.01, decay: Amount = 0.55, *, seed: int = 0) -> GradientTransform:
    """``g + N(0, variance/(1+t)^decay)`` at step t = 0, 1, … (Neelakantan et al. 2015).

    The noise of a step is a function of seed and step alone: it leaves torch's generator as it is,
    and the state holds all there is to go on from. Processes that hold the same parameter draw the
    same noise, so that replicas stay equal; parts of a sharded one draw different noise.

    *At the edge:* for half precision it is drawn in float32. Of a complex gradient the real and
    the imaginary part have half the variance each. Sparse gradients are refused, for they would
    become dense.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> noise = transforms.add_noise(0.04, 0.0, seed=1)
        >>> weight = torch.zeros(10_000)
        >>> grads, state = noise.update([torch.zeros(10_000)], noise.init([weight]), [weight])
        >>> round(grads[0].std().item(), 2), state["step"].item()
        (0.2, 1)
    """
    amounts = Amounts({"variance": AT_LEAST_0}, variance=variance, decay=decay)
    check_count("seed", seed, low=0)

    def init(_params: Sequence[Tensor]) -> State:
        return {STEP: torch.zeros((), dtype=torch.int64)}

    def apply(leaves: Leaves, state: State) -> State:
        leaves.params("add_noise")  # refuses sparse gradients
        step = int(state[STEP])
        (now, fading), _ = amounts.at(state)
        deviation = (now / (1 + step) ** fading) ** 0.5
        _draw(leaves, seed, step, deviation)
        return {STEP: state[STEP] + 1}

    text = f"add_noise({amounts}{f', seed={seed}' if seed else ''})"
    return in_place(text, init, apply)


def _draw(leaves: Leaves, seed: int, step: int, deviation: float) -> None:
    generators: dict[Any, torch.Generator] = {}
    for tensor, shard in zip(leaves.write(), leaves.shards, strict=True):
        piece = () if shard is None else shard.coordinate
        key = (tensor.device, piece)
        if key not in generators:
            generator = torch.Generator(tensor.device)
            generator.manual_seed(_mixed(seed, step, *piece))
            generators[key] = generator
        dtype = tensor.dtype if tensor.dtype.itemsize > 2 else torch.float32
        noise = torch.randn(
            tensor.shape, dtype=dtype, device=tensor.device, generator=generators[key]
        )
        tensor.add_(noise, alpha=deviation)


def _mixed(*numbers: int) -> int:
    """One seed from several numbers, so that neighbours have nothing in common (SplitMix64)."""
    state, mask = 0, (1 << 64) - 1
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
