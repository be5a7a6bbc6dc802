"""What surrounds a call: the compiler, a functional transform, autocast, several processes."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def inside_transform() -> bool:
    """Whether `torch.func.grad`, `vmap`, `jvp` or another of them is at work.

    Checkpoints and `torch.autograd.grad` cannot be crossed by these, so code that uses one has to
    take another way. torch offers no public question for it; its own code asks this one.
    """
    return torch._C._are_functorch_transforms_active()  # noqa: SLF001


def compiling() -> bool:
    """Whether `torch.compile` is tracing this call."""
    return torch.compiler.is_compiling()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A region in which matrix products on the device of ``x`` keep their precision."""
    device = x.device.type
    # The compiler of torch 2.11 cannot ask, and meets no device that has none.
    if compiling() or torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def distributed(x: object) -> bool:
    """Whether this is a tensor whose parts lie on several processes (a `DTensor`)."""
    return isinstance(x, Tensor) and hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """A distributed tensor brought together on every process, which all must ask for; or ``x``."""
    together: Tensor = x.full_tensor() if distributed(x) else x  # type: ignore[attr-defined]
    return together


def as_distributed_as(x: Tensor, plain: Tensor) -> Tensor:
    """A plain tensor for use with ``x``: where that is distributed, the same on every process."""
    if not distributed(x):
        return plain
    # Only now: importing it takes long, and whoever has such a tensor has done so.
    module = importlib.import_module("torch.distributed.tensor")
    mesh = x.device_mesh  # type: ignore[attr-defined]
    spread: Tensor = module.distribute_tensor(plain, mesh, [module.Replicate()] * mesh.ndim)
    return spread
