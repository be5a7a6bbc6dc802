"""What each of four processes does, which share gradients two by two; tests compare it with one."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.transforms.sharded import SHARDED, batch, fully_sharded, three_steps, trained

MEASURING = [
    m
    for m in SHARDED
    if m.factory in ("adaptive_clip", "clip_by_percentile", "centralize")
    or m.id in ("clip_by_norm-propagate", "clip_by_global_norm-propagate")
]
"""One for each figure that is added up over processes."""

TWICE = {
    "rows, then columns": [Shard(0), Shard(1)],
    "rows of rows": [Shard(0), Shard(0)],
}


def spread_twice(tensors: list[Tensor], mesh: DeviceMesh, how: str) -> list[Tensor]:
    """Over both dimensions of a mesh, where a tensor has what is to be cut; the last is plain."""
    placed: list[Tensor] = [
        distribute_tensor(
            x.clone(),
            mesh,
            [p if p.is_replicate() or p.dim < x.dim() else Replicate() for p in cut],
        )
        for x in tensors[:-1]
        for cut in [TWICE[how]]
    ]
    return [*placed, tensors[-1].clone()]


def wider() -> nn.Module:
    """Six rows, which two processes share by three, and those are cut again."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def process_of_four(rank: int, folder: str) -> None:
    """All that one of four processes does, in a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(wider(), mesh["tensor"], plan)
    half = batch()[4 * (rank // 2) : 4 * (rank // 2) + 4]
    steps = {
        how: {
            m.id: three_steps(m, lambda xs, how=how: spread_twice(xs, mesh, how)) for m in MEASURING
        }
        for how in TWICE
    }
    found = {"steps": steps, "fsdp": trained(fully_sharded(model, mesh["data"]), half)}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
