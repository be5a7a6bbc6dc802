"""Measuring in a chain: a link that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise._context import whole
from equipoise._errors import InputError, OptionError, names_its_options
from equipoise.transforms._leaves import Gradient, Leaves
from equipoise.transforms._lists import wide
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
    no_figure,
)

Measure = Callable[[list[Gradient]], Tensor | float]


@names_its_options
def snapshot(name: str, fn: Measure | None = None) -> GradientTransform:
    """Record a figure of the gradients between two links, and change nothing.

    ``fn`` takes the list of gradients, with ``None`` where there is none, and returns a scalar;
    without it the figure is the norm of all of them, which costs nothing where a neighbour clips by
    norm. ``handle.metrics()`` has it under ``name``.

    *At the edge:* figures stay on the device until they are read. Of sharded gradients ``fn`` gets
    the DTensors, the norm is that of the whole.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> measured = transforms.chain(
        ...     transforms.snapshot("before"),
        ...     transforms.clip_by_value(-1.0, 1.0),
        ...     transforms.snapshot("after"),
        ... )
        >>> weight = torch.zeros(2)
        >>> _, state = measured.update(
        ...     [torch.tensor([3.0, 4.0])], measured.init([weight]), [weight]
        ... )
        >>> {name: round(figure.item(), 4) for name, figure in transforms.recorded(state).items()}
        {'before': 5.0, 'after': 1.4142}
    """
    if not name:
        raise OptionError(f"`name` must be a word, got {name!r}. Use 'before_clipping', say.")

    def init(params: Sequence[Tensor]) -> State:
        return {RECORDED: {"": no_figure(params)}}

    def apply(leaves: Leaves, _state: State) -> State:
        if fn is None:
            return {RECORDED: {"": leaves.norms.together()}}
        return {RECORDED: {"": _scalar(name, fn(leaves.finished()), leaves.device)}}

    shown = "" if fn is None else f", {getattr(fn, '__name__', type(fn).__name__)}"
    return in_place(f"snapshot({name!r}{shown})", init, apply, label=name)


def _scalar(name: str, figure: object, device: torch.device) -> Tensor:
    if isinstance(figure, int | float):
        return torch.full((), figure, dtype=wide(device), device=device)
    if not isinstance(figure, Tensor) or figure.is_complex() or figure.numel() != 1:
        got = type(figure).__name__
        if isinstance(figure, Tensor):
            got = f"{figure.dtype} of shape {tuple(figure.shape)}"
        raise InputError(
            f"the figure {name!r} must be a real scalar, got {got}. Use `.norm()` or `.max()`, say."
        )
    return whole(figure.detach()).reshape(()).to(wide(figure.device))
