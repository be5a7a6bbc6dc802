"""Typed examples of the public API: checked by mypy, never run.

A wrong call carries the error it must give, so that a call which stops being wrong is an unused
ignore, which is an error too.
"""

from typing import assert_type

from torch import Tensor

import equipoise as eq


def penalties(x: Tensor) -> None:
    """A penalty takes a tensor and gives one; choices are literals."""
    assert_type(eq.l1(x), Tensor)
    assert_type(eq.l1(x, reduction="mean", scale=0.5, mask=x > 0), Tensor)
    assert_type(eq.l1([x, x]), Tensor)
    eq.l1(x, reduction="avg")  # type: ignore[arg-type]
