"""Gradient centralization: every unit's gradient without its mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise._errors import InputError, OptionError, names_its_options
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._shards import Shard, add_over_splits
from equipoise.transforms._transform import GradientTransform, State, in_place, nothing


@names_its_options
def centralize(dims: int | Sequence[int] | None = None) -> GradientTransform:
    """``g − mean(g)`` over all dimensions but the first (Yong et al. 2020), or over ``dims``.

    *At the edge:* gradients of fewer than two dimensions (biases, norms) are unchanged; so are
    empty ones. The mean of half precision is taken in float32. One NaN spreads over its own unit
    and no further. Sparse gradients are those of the rows that they hold.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> central = transforms.centralize()
        >>> weight = torch.zeros(2, 3)
        >>> gradient = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> central.update([gradient], central.init([weight]), [weight])[0]
        [tensor([[-1.,  0.,  1.],
                [-1.,  0.,  1.]])]
    """
    chosen = (dims,) if isinstance(dims, int) else None if dims is None else tuple(dims)
    if chosen is not None and not (chosen and all(isinstance(dim, int) for dim in chosen)):
        raise OptionError(
            f"`dims` must be one dimension or several, got {dims!r}. "
            "Use None for all but the first."
        )

    def apply(leaves: Leaves, state: State) -> State:
        work = [i for i, tensor in enumerate(leaves.tensors) if tensor.dim() > 1]
        if not work:
            return state
        tensors = leaves.write()
        over = [_dims(tensors[i], chosen) for i in work]
        means = _means([tensors[i] for i in work], [leaves.shards[i] for i in work], over)
        torch._foreach_sub_([tensors[i] for i in work], means)
        return state

    return in_place(f"centralize({'' if dims is None else dims})", nothing, apply)


def _dims(x: Tensor, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    if chosen is None:
        return tuple(range(1, x.dim()))
    if any(not -x.dim() <= dim < x.dim() for dim in chosen):
        raise InputError(
            f"`dims` must be dimensions of every gradient of two or more, got {chosen} for the "
            f"shape {tuple(x.shape)}. Use `masked` to choose the gradients."
        )
    return tuple(dim % x.dim() for dim in chosen)


def _means(
    tensors: Sequence[Tensor], shards: Sequence[Shard | None], over: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    splits = [
        () if shard is None else shard.across(dims)
        for shard, dims in zip(shards, over, strict=True)
    ]
    means = []
    for tensor, dims, split in zip(tensors, over, splits, strict=True):
        dtype = tensor.dtype if tensor.dtype.itemsize > 2 else torch.float32
        if split:
            means.append(tensor.sum(dims, keepdim=True, dtype=dtype))
        else:
            means.append(tensor.mean(dims, keepdim=True, dtype=dtype))
    cut = [i for i, split in enumerate(splits) if split]
    sums = add_over_splits([means[i] for i in cut], [splits[i] for i in cut])
    for i, total in zip(cut, sums, strict=True):
        shard = shards[i]
        whole = tensors[i].shape if shard is None else shard.whole
        means[i] = total / math.prod(whole[dim] for dim in over[i])
    return means
