"""Differentiating a value down to edges of its graph, and no further; the graph stays."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

K = TypeVar("K", bound=Hashable)


def pulled(value: Tensor, edges: Mapping[K, GradientEdge]) -> dict[K, Tensor]:
    """The gradients of a value at these edges, where there are any."""
    if not edges:
        return {}
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        value, list(edges.values()), retain_graph=True, allow_unused=True
    )
    return {key: g for key, g in zip(edges, gradients, strict=True) if g is not None}


def pulled_directly(value: Tensor, edges: Mapping[K, GradientEdge]) -> dict[K, Tensor]:
    """As `pulled`, but no gradient passes through one of the edges on its way to another.

    What a base does to the logits is not counted again at the hidden layer they come from; a term
    reads each input by itself, and so does a base that is given as a function.
    """

    def stop(end: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # What arrives here has been taken already.
        return tuple(
            torch.zeros_like(g) if i == end and g is not None else g
            for i, g in enumerate(gradients)
        )

    ends = {(edge.node, edge.output_nr) for edge in edges.values()}
    handles = [node.register_prehook(partial(stop, end)) for node, end in ends]
    try:
        return pulled(value, edges)
    finally:
        for handle in handles:
            handle.remove()


def reached(value: Tensor, edges: Mapping[K, GradientEdge]) -> list[K]:
    """Those of the edges to which a value's graph leads first; it may have been differentiated."""
    ends = {edge.node for edge in edges.values()}
    left, known = [value.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node not in ends:
            left += [following for following, _ in node.next_functions]
    return [key for key, edge in edges.items() if edge.node in known]
