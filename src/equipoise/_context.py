"""What surrounds a call: the compiler, a functional transform, autocast."""

from __future__ import annotations

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
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
