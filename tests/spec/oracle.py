"""What the definitions say a runtime result may be, and whether it is.

No bound is chosen by hand: a definition is run over balls that hold every result which
floating-point arithmetic of the format may give, in any order of summation, and a result agrees if
it lies inside its ball.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from equipoise import spec, transforms
from equipoise.spec.decay import decoupled

HALVES = (torch.float16, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name, which is the format's."""
    return str(dtype).removeprefix("torch.")


def computed_in(dtype: torch.dtype) -> str:
    """The format a penalty is computed in: half precision in float32."""
    return "float32" if dtype in HALVES else name_of(dtype)


def flatten(nested: Any) -> list[Any]:
    """The leaves of nested lists and tuples, in order."""
    if isinstance(nested, list | tuple):
        return [leaf for part in nested for leaf in flatten(part)]
    return [nested]


def entries(K: spec.Rounding, x: Tensor) -> list[spec.Enclosure]:
    """All entries, row-major, as they are."""
    return [K.exactly(v) for v in x.detach().flatten().tolist()]


def rows(K: spec.Rounding, x: Tensor) -> list[list[spec.Enclosure | None]]:
    """The vectors along the last dimension, with None for −inf."""
    matrix = x.detach().reshape(-1, x.shape[-1]).tolist()
    return [[None if v == -torch.inf else K.exactly(v) for v in row] for row in matrix]


Layout = Callable[[spec.Rounding, Tensor], list[Any]]


@dataclass(frozen=True)
class Case:
    """A penalty with options, and how its tensors become lists."""

    penalty: str
    options: dict[str, Any]
    layout: Layout
    steps: int
    """How many roundings the runtime may spend where the definition has one."""
    inputs: int = 1
    listed: dict[str, Any] = field(default_factory=dict)
    """The options that the definition writes differently."""

    @property
    def id(self) -> str:
        options = (
            f"{k}={'tensor' if isinstance(v, Tensor) else v}" for k, v in self.options.items()
        )
        return "-".join([self.penalty, *options])

    def runtime(self, *tensors: Tensor) -> Tensor:
        """What the fast code gives."""
        result: Tensor = getattr(eq, self.penalty)(*tensors, **self.options)
        return result

    def definition(self, name: str, K: spec.Rounding, tensors: Sequence[Tensor]) -> Any:
        """What the definition of that name says."""
        data = [self.layout(K, x) for x in tensors]
        options = {name: lists(value, tensors[0]) for name, value in self.options.items()}
        for absent in ("chunk", "dim"):
            options.pop(absent, None)
        return getattr(spec, name)(K, *data, **{**options, **self.listed})


def lists(value: Any, x: Tensor) -> Any:
    """An option with its tensors as lists: as many entries as the input has, or as rows."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 2:
        return value.expand(x.shape).tolist()
    return value.tolist()


def assert_agrees(
    runtime: Tensor, balls: Iterable[Any], dtype: torch.dtype | None = None, where: str = ""
) -> None:
    """Every entry lies in its ball, after one more rounding where it is kept in half precision."""
    numbers = runtime.detach().flatten().tolist()
    for i, (number, ball) in enumerate(zip(numbers, flatten(list(balls)), strict=True)):
        final = ball.once_more(name_of(dtype)) if dtype in HALVES else ball
        assert final.rounded.is_finite(), f"{where}[{i}]: no bound"
        assert final.contains(number), f"{where}[{i}]: {number!r} is not in {final.rounded.str(20)}"


def assert_value_agrees(
    case: Case, tensors: Sequence[Tensor], run: Callable[..., Tensor] | None = None
) -> None:
    """The value of the runtime is one that floating-point arithmetic may give."""
    value = (run or case.runtime)(*tensors)
    K = spec.Rounding(computed_in(tensors[0].dtype), steps=case.steps)

    def check() -> None:
        result = case.definition(case.penalty, K, tensors)
        assert_agrees(value, flatten([result]), where="value")

    spec.decided(check)


def assert_gradient_agrees(
    case: Case, tensors: Sequence[Tensor], run: Callable[..., Tensor] | None = None
) -> None:
    """So is its gradient with respect to each input."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    (run or case.runtime)(*leaves).sum().backward()
    K = spec.Rounding(computed_in(tensors[0].dtype), steps=case.steps)

    def check() -> None:
        slopes = case.definition(f"{case.penalty}_grad", K, tensors)
        if len(leaves) == 1:
            slopes = (slopes,)
        for i, (leaf, slope) in enumerate(zip(leaves, slopes, strict=True)):
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert_agrees(gradient, flatten(slope), leaf.dtype, where=f"gradient {i}")

    spec.decided(check)


Agreement = Callable[[Tensor, list[Any]], None]
# w·(1 − η·r·b) − η·r·a·sign: the factor of the decay is made of up to three products, and the
# difference from 1 is rounded at the size of w. The two parts are taken one after the other.
DECOUPLED = 3


def assert_decoupled(
    name: str, options: dict[str, Any], before: Tensor, agreement: Agreement
) -> None:
    """What an optimizer's step leaves of weights agrees with w − η·decay."""
    weight = torch.nn.Parameter(before.clone())
    optimizer = torch.optim.SGD([weight], lr=0.3)
    transforms.attach(getattr(transforms, name)(**options, decoupled=True), optimizer)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    K = spec.Rounding(name_of(weight.dtype), steps=DECOUPLED)

    def check() -> None:
        w = entries(K, before)
        decay = getattr(spec, name)(K, [K.const(0)] * len(w), w, **options)
        agreement(weight.detach(), decoupled(K, w, decay, 0.3))

    spec.decided(check)
