"""Random inputs: small float64 tensors, distributions, masks, and the values that spoil a sum."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

SPOILERS = (math.nan, math.inf, -math.inf)
"""What may lie under a mask without changing anything."""


def tensors(*shape: int, size: float = 8.0) -> st.SearchStrategy[Tensor]:
    """Float64 tensors of one shape with entries of at most `size`; zeros are likely."""
    entries = st.floats(-size, size, allow_subnormal=False)
    return arrays(np.float64, shape, elements=entries).map(torch.from_numpy)


def nonzero(*shape: int) -> st.SearchStrategy[Tensor]:
    """Float64 tensors with entries from 0.1 to 8 in size, of both signs."""
    entries = st.floats(0.1, 8) | st.floats(-8, -0.1)
    return arrays(np.float64, shape, elements=entries).map(torch.from_numpy)


def singles(length: int, *, size: float) -> st.SearchStrategy[Tensor]:
    """Float32 vectors, for laws about rounding."""
    entries = st.floats(-size, size, width=32, allow_subnormal=False)
    return arrays(np.float32, length, elements=entries).map(torch.from_numpy)


def bools(*shape: int) -> st.SearchStrategy[Tensor]:
    """Bool masks, empty and full ones among them."""
    return arrays(np.bool_, shape).map(torch.from_numpy)


def repeats(*shape: int) -> st.SearchStrategy[Tensor]:
    """Whole numbers from 0 to 3, as float64 weights."""
    return arrays(np.int64, shape, elements=st.integers(0, 3)).map(
        lambda a: torch.from_numpy(a).double()
    )


def supports(rows: int, vocabulary: int) -> st.SearchStrategy[Tensor]:
    """Which entries exist, at least one a row."""
    return bools(rows, vocabulary).map(_with_one_entry)


def _with_one_entry(keep: Tensor) -> Tensor:
    keep[:, 0] |= ~keep.any(-1)
    return keep


def spoiled(x: Tensor, keep: Tensor) -> Tensor:
    """A copy of `x` with NaN, inf and −inf in turn wherever `keep` is False."""
    spoilers = torch.tensor(SPOILERS, dtype=x.dtype).repeat(math.ceil(x.numel() / 3))
    return torch.where(keep.expand(x.shape), x, spoilers[: x.numel()].reshape(x.shape))


def log_softmax(*logits: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities of each."""
    return tuple(x.log_softmax(-1) for x in logits)
