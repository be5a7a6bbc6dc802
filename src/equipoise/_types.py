"""Names for the few types that signatures share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import Tensor

Reduction = Literal["sum", "mean", "none"]
"""How values are brought together: their sum, their mean, or not at all."""

Tensors = Tensor | Iterable[Tensor]
"""One tensor, or several that count as one long vector (the parameters of a model)."""

Dims = int | Sequence[int] | None
"""One dimension, several, or all of them."""

ScalarFunction = Callable[[Tensor], Tensor]
"""A function of one tensor whose result is a scalar, or one value a sample."""
