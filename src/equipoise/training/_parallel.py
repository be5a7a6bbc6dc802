"""Data-parallel models reduce gradients over processes once an update, not at every call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unsynchronized(model: nn.Module) -> AbstractContextManager[object]:
    """Backward passes in here leave each process its own gradients."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    waiting: AbstractContextManager[object] = model.no_sync()
    return waiting


def synchronize(model: nn.Module) -> None:
    """The mean over processes of gradients that no backward pass has reduced."""
    if not isinstance(model, DistributedDataParallel):
        return
    group = model.process_group
    params = [p for p in model.parameters() if p.requires_grad]
    there = torch.tensor([float(p.grad is not None) for p in params], device=model.device)
    torch.distributed.all_reduce(there, group=group)
    for param, processes in zip(params, there.tolist(), strict=True):
        if processes:  # otherwise no process has a gradient of it
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            torch.distributed.all_reduce(grad, group=group)
            param.grad = grad.div_(torch.distributed.get_world_size(group))
