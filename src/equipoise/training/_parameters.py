"""Parameters of a model, by name, for penalties on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from equipoise._errors import InputError, OptionError
from equipoise.transforms import _selection, select

Selector = str | type[nn.Module] | _selection.Selection
"""A pattern of names (``*.weight``), a type of module, or what `transforms.select` gives."""


class NamedParameters(list[Tensor]):
    """A list of parameters that knows their names; a penalty or a pipeline reads it as a list.

    *At the edge:* it is what was chosen when it was made, and does not follow the model.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise.training import parameters
        >>> weights = parameters(torch.nn.Linear(2, 3), include="weight")
        >>> weights.names, len(weights), bool(eq.l2(weights) > 0)
        (('weight',), 1, True)
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__(named.values())
        self.names = tuple(named)

    def __repr__(self) -> str:
        shapes = [f"{n}: {tuple(p.shape)}" for n, p in zip(self.names, self, strict=True)]
        return f"NamedParameters({', '.join(shapes)})"


# So that a pipeline finds the tensors inside; a term then reads a plain list.
register_pytree_node(
    NamedParameters,
    lambda parameters: (list(parameters), None),
    lambda tensors, _: list(tensors),
    serialized_type_name="equipoise.training.NamedParameters",
)


def parameters(
    model: nn.Module,
    /,
    *,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
) -> NamedParameters:
    """The parameters of a model that require grad, as input for penalties on weights.

    ``include`` and ``exclude`` are patterns of names, types of modules, selections of
    `transforms.select`, or several of these; without ``include`` all are taken.

    *At the edge:* a parameter that is used twice counts once, and those that are frozen now are
    left out. A pattern that matches nothing is an error, and so is a choice of nothing.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise import training
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> weights = training.parameters(model, exclude=["*bias", torch.nn.LayerNorm])
        >>> weights
        NamedParameters(0.weight: (3, 2))
        >>> pipeline = eq.Pipeline(decay=eq.Term(eq.l2, inputs="weights", weight=0.01))
        >>> pipeline(weights=weights).total.requires_grad
        True
    """
    chosen = select.everything(model) if include is None else _joined(model, "include", include)
    if exclude is not None:
        chosen = chosen & ~_joined(model, "exclude", exclude)
    if not chosen:
        raise InputError(
            "`parameters` must choose at least one parameter that requires grad, got none with "
            f"include={include!r}, exclude={exclude!r}. Use wider patterns, or thaw some first."
        )
    return NamedParameters(chosen.named)


def _joined(
    model: nn.Module, option: str, wanted: Selector | Sequence[Selector]
) -> _selection.Selection:
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    selectors = list(wanted) if several else [wanted]  # type: ignore[arg-type]
    if not selectors:
        raise OptionError(f"`{option}` must name something, got an empty list. Use None instead.")
    return reduce(or_, [_selected(model, option, s) for s in selectors])


def _selected(model: nn.Module, option: str, wanted: object) -> _selection.Selection:
    if isinstance(wanted, _selection.Selection):
        return wanted
    if isinstance(wanted, str):
        return select.by_name(model, wanted)
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        return select.by_type(model, wanted)
    raise OptionError(
        f"`{option}` must be a pattern of names, a type of module or a selection, got {wanted!r}. "
        "Use '*.weight', torch.nn.Linear or `transforms.select.no_bias_or_norm(model)`, say."
    )
