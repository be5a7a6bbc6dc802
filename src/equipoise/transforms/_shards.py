"""Sharded tensors: the part that lies here, and sums over all parts.

A DTensor is worked on as the local tensor it wraps. What has to be known of the whole parameter
(norms, means, counts) is added up over the mesh dimensions that it is sharded on: everything that
one pass needs in one packed all-reduce for each such dimension, however many tensors there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise._context import distributed, whole

Split = tuple[Any, int]
"""A mesh and one of its dimensions, over which a tensor is cut to pieces."""


@dataclass(frozen=True, eq=False)
class Shard:
    """How a tensor is spread: over which mesh dimensions, and which of its own each cuts."""

    whole: torch.Size
    splits: tuple[tuple[Split, int], ...]
    like: Any

    def across(self, dims: Sequence[int]) -> tuple[Split, ...]:
        """The splits that cut one of these dimensions of the tensor."""
        return tuple(split for split, dim in self.splits if dim in dims)

    @property
    def everywhere(self) -> tuple[Split, ...]:
        """All splits."""
        return tuple(split for split, _ in self.splits)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Which piece lies here."""
        return tuple(mesh.get_local_rank(dim) for (mesh, dim), _ in self.splits)

    @property
    def here(self) -> Tensor:
        """The tensor that it wraps, itself and not a view of it."""
        return self.like._local_tensor  # type: ignore[no-any-return]  # noqa: SLF001

    def wrapped(self, local: Tensor) -> Tensor:
        """A local tensor as the DTensor it is a part of."""
        distributed = _dtensor()
        return distributed.from_local(  # type: ignore[no-any-return]
            local,
            self.like.device_mesh,
            self.like.placements,
            run_check=False,
            shape=self.whole,
            stride=self.like.stride(),
        )


def _dtensor() -> Any:  # noqa: ANN401
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor


def local(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, Shard | None]:
    """The part of a tensor that lies here, and how the whole is spread.

    ``like`` is a tensor to be spread like: a parameter is brought to where its gradient is.
    """
    target: Any = x if like is None else like
    if not distributed(target):
        return whole(x), None
    # A sum that nobody has added up yet becomes one first.
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    placements = [Replicate() if p.is_partial() else p for p in target.placements]
    spread: Any = x
    if not distributed(x):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

        spread = distribute_tensor(x, target.device_mesh, placements)
    elif list(spread.placements) != placements:
        spread = spread.redistribute(placements=placements)
    # What is not replicated is cut: the strided shards of FSDP2 over tensor parallelism say no to
    # `is_shard`.
    splits = tuple(
        ((spread.device_mesh, mesh_dim), placement.dim)
        for mesh_dim, placement in enumerate(spread.placements)
        if not placement.is_replicate() and spread.device_mesh.size(mesh_dim) > 1
    )
    shard = Shard(spread.shape, splits, spread)
    return shard.here, shard


def add_over_splits(
    tensors: Sequence[Tensor], splits: Sequence[tuple[Split, ...]], *, largest: bool = False
) -> list[Tensor]:
    """Each tensor added up over its own splits; one packed all-reduce for each mesh dimension."""
    out = list(tensors)
    groups: dict[tuple[int, int], tuple[Split, list[int]]] = {}
    for i, of_tensor in enumerate(splits):
        for split in of_tensor:
            groups.setdefault((id(split[0]), split[1]), (split, []))[1].append(i)
    for (mesh, mesh_dim), places in groups.values():
        packed = torch.cat([out[i].reshape(-1) for i in places])
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(packed, op=operation, group=mesh.get_group(mesh_dim))
        parts = torch.split(packed, [out[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            out[i] = part.view_as(out[i])
    return out
