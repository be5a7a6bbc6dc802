"""What tests of transforms claim about lists of gradients and about states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.transforms import GradientTransform
from tests.transforms.members import Gradient


def assert_same_bits(got: Any, expected: Any, path: str = "") -> None:
    """Equal tensors of equal type in equal structures; NaN equals NaN."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), path
        assert got.dtype == expected.dtype, path
        assert got.layout == expected.layout, path
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=path or None)
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_same_bits(got[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), path
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same_bits(one, other, f"{path}[{i}]")
    else:
        assert got == expected, path


def kinds(state: Any) -> Any:
    """The structure of a state: keys, shapes and types."""
    if isinstance(state, Tensor):
        return state.dtype, tuple(state.shape), state.device
    if isinstance(state, Mapping):
        return {key: kinds(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [kinds(value) for value in state]
    return type(state)


def copies(tensors: Sequence[Gradient]) -> list[Gradient]:
    """The same numbers in memory of their own, laid out as before."""
    return [None if t is None else t.clone() for t in tensors]


def once(
    transform: GradientTransform, grads: Sequence[Gradient], params: Sequence[Tensor] | None = None
) -> list[Gradient]:
    """The gradients after one update; parameters are zeros unless given."""
    if params is None:
        params = [torch.zeros(()) if g is None else torch.zeros_like(g) for g in grads]
    return list(transform.update(grads, transform.init(params), params)[0])


def length(*tensors: Gradient) -> float:
    """The norm of all of them together, in float64."""
    parts = [
        torch.linalg.vector_norm(g.to_dense().to(torch.float64)) for g in tensors if g is not None
    ]
    return float(torch.linalg.vector_norm(torch.stack(parts)))
