"""The one function that the compiler is given: every term with its gradient, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from equipoise._recorder import BASE, Level, Number, Place
from equipoise.fast._ahead import Gap, refilled

if TYPE_CHECKING:
    from equipoise._run import Call

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Piece:
    """What is known of a term beforehand; all else comes as tensors."""

    call: Call
    keys: tuple[str, ...]
    options: Mapping[str, Any]
    weight: Gap | int
    """Which of the tensors, or which of the numbers."""


class Found(NamedTuple):
    """What the function returns; lists have an entry a term, or a place."""

    total: Tensor
    penalty: Tensor
    values: list[Tensor]
    contributions: list[Tensor]
    metrics: list[dict[str, Number]]
    errors: list[str | None]
    gradients: list[Tensor | None]
    measured: list[list[str]]
    squares: list[Tensor]
    grams: list[Tensor | None]


class Pulled(NamedTuple):
    """One term: its value, and its weighted gradient at each place it reads."""

    value: Tensor
    contribution: Tensor
    metrics: dict[str, Number]
    error: str | None
    gradients: dict[int, Tensor]


def compiled(
    pieces: Sequence[Piece],
    data: Any,  # noqa: ANN401
    places: Sequence[Place],
    level: Level | None,
) -> Callable[..., Found]:
    """The function of all tensors and of the weights that are numbers, to be compiled when called.

    The first tensors are those at the places.
    """

    def evaluate(tensors: list[Tensor], numbers: Tensor) -> Found:
        pulled = [_pulled(piece, data, tensors, numbers, places) for piece in pieces]
        return _together(pieces, pulled, tensors[: len(places)], level)

    return alone(evaluate)


def alone(function: Callable[P, T]) -> Callable[P, T]:
    """The function compiled, with a code object of its own.

    The compiler counts recompilations by it, over all functions that share it.
    """
    code: FunctionType = function  # type: ignore[assignment]
    own = FunctionType(
        code.__code__.replace(), code.__globals__, code.__name__, None, code.__closure__
    )
    compiled_alone: Callable[P, T] = torch.compile(own, fullgraph=True)
    return compiled_alone


def _pulled(
    piece: Piece,
    data: Any,  # noqa: ANN401
    tensors: list[Tensor],
    numbers: Tensor,
    places: Sequence[Place],
) -> Pulled:
    """One term's value, with its gradient taken along."""
    call = piece.call
    mine = [i for i, (key, _) in enumerate(places) if key in piece.keys]
    options = refilled(piece.options, tensors)
    errors: list[str | None] = []
    plain: dict[str, Number] = {}

    def value_of(*moved: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        given = list(tensors)
        for i, x in zip(mine, moved, strict=True):
            given[i] = x
        arguments = [refilled(data[key], given) for key in piece.keys]
        value, metrics = replaced(call, options).value(arguments)
        errors.append(call.reading(value, {}, some_input=bool(mine)).error)
        plain.update({k: m for k, m in metrics.items() if not isinstance(m, Tensor)})
        if not value.is_floating_point():  # as it will be once it is weighted
            value = value.to(torch.get_default_dtype())
        return value, {k: m for k, m in metrics.items() if isinstance(m, Tensor)}

    gradients: dict[int, Tensor] = {}
    inputs = [tensors[i] for i in mine]
    if mine and call.term.differentiable:
        value, pull, measured = torch.func.vjp(value_of, *inputs, has_aux=True)  # type: ignore[misc]
    else:
        value, measured = value_of(*inputs)
    weight = _weight(piece, tensors, numbers, value)
    # Weight 0 as a number leaves the term out, where 0 · inf would be NaN.
    left_out = weight == 0 if isinstance(piece.weight, int) else None
    if mine and call.term.differentiable:
        for i, gradient in zip(mine, pull(weight.to(value.dtype).expand(())), strict=True):
            gradients[i] = _unless(left_out, gradient)
    contribution = value if call.name == BASE else _unless(left_out, weight * value)
    return Pulled(value, contribution, {**plain, **measured}, errors[0], gradients)


def replaced(call: Call, options: Mapping[str, Any]) -> Call:
    """The call with tensors in its options again."""
    return type(call)(call.name, call.term, call.weight, options)


def _weight(piece: Piece, tensors: list[Tensor], numbers: Tensor, value: Tensor) -> Tensor:
    if isinstance(piece.weight, int):
        return numbers[piece.weight].to(value.dtype)
    return tensors[piece.weight.number]


def _unless(left_out: Tensor | None, x: Tensor) -> Tensor:
    return x if left_out is None else torch.where(left_out, 0.0, x)


def _together(
    pieces: Sequence[Piece], pulled: Sequence[Pulled], moving: Sequence[Tensor], level: Level | None
) -> Found:
    """The sums over all terms, and the figures of their gradients."""
    penalty, base = None, None
    gradients: list[Tensor | None] = [None] * len(moving)
    by_place: list[dict[str, Tensor]] = [{} for _ in moving]
    for piece, term in zip(pieces, pulled, strict=True):
        if piece.call.name == BASE:
            base = term.contribution
        else:
            penalty = term.contribution if penalty is None else penalty + term.contribution
        for i, gradient in term.gradients.items():
            before = gradients[i]
            gradients[i] = gradient if before is None else before + gradient
            if term.error is None:
                by_place[i][piece.call.name] = gradient
    rest = torch.zeros_like(pulled[0].value) if penalty is None else penalty
    total = rest if base is None else base if penalty is None else base + penalty
    return Found(
        total=total,
        penalty=rest,
        values=[term.value for term in pulled],
        contributions=[term.contribution for term in pulled],
        metrics=[term.metrics for term in pulled],
        errors=[term.error for term in pulled],
        gradients=gradients,
        measured=[list(at) for at in by_place],
        squares=[_squares(at, g) for at, g in zip(by_place, gradients, strict=True)]
        if level is not None
        else [],
        grams=[_gram(at) if level == "gram" else None for at in by_place],
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cpu":
        return (a.double() * b.double()).sum()
    # Rows in float32, as a tree, and only then in float64, where there is any.
    wide = torch.float32 if a.device.type == "mps" else torch.float64
    rows = (a.float() * b.float()) if a.dtype != torch.float64 else a * b
    return rows.sum(-1, dtype=rows.dtype).sum(dtype=wide) if rows.dim() else rows.to(wide)


def _squares(gradients: Mapping[str, Tensor], together: Tensor | None) -> Tensor:
    """Squared norms of every gradient, and last that of their sum."""
    last = [] if together is None else [together]
    return torch.stack([_product(g, g) for g in (*gradients.values(), *last)] or [torch.zeros(())])


def _gram(gradients: Mapping[str, Tensor]) -> Tensor | None:
    """All inner products; none of a place that no term reads."""
    rows = list(gradients.values())
    if not rows:
        return None
    upper = [[_product(a, b) for b in rows[i:]] for i, a in enumerate(rows)]
    lines = [[upper[min(i, j)][abs(i - j)] for j in range(len(rows))] for i in range(len(rows))]
    return torch.stack([torch.stack(line) for line in lines])
