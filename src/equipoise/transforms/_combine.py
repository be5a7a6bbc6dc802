"""Transforms for some parameters: all others pass, or each gets one of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from equipoise._errors import InputError, InputTypeError, OptionError, in_words, names_its_options
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._selection import Selection
from equipoise.transforms._transform import (
    GradientTransform,
    State,
    apply_to,
    check_state,
    check_transform,
    in_place,
)

Where = Selection | Callable[[Tensor], bool] | Sequence[bool]
"""Which parameters: a selection, a question about each, or the answers in their order."""

Labels = Mapping[str, Selection] | Callable[[Tensor], str] | Sequence[str]
"""Which group each parameter belongs to: selections by label, a function, or the labels."""


@names_its_options
def masked(transform: GradientTransform, where: Where) -> GradientTransform:
    """The transform for some parameters; the gradients of the others pass unchanged.

    ``where`` is a selection (`equipoise.transforms.select`), a function of a parameter, or a list
    of bools in the order of the parameters.

    *At the edge:* a global norm inside is that of the chosen gradients alone. A parameter that is
    not of the model that was selected from is an error.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> decay = transforms.masked(transforms.add_l2_decay(0.1), lambda p: p.dim() > 1)
        >>> params = [torch.ones(1, 2), torch.ones(2)]
        >>> grads, _ = decay.update([torch.zeros(1, 2), torch.zeros(2)], decay.init(params), params)
        >>> grads
        [tensor([[0.1000, 0.1000]]), tensor([0., 0.])]
    """
    check_transform("transform", transform)

    def init(params: Sequence[Tensor]) -> State:
        state: State = transform.init([params[i] for i in _chosen(where, params)])
        return state

    def apply(leaves: Leaves, state: State) -> State:
        return _on_part(transform, leaves, _chosen(where, leaves.all_params), state)

    return in_place(f"masked({transform}, {_named(where)})", init, apply, label=_label(transform))


@names_its_options
def partition(transforms: Mapping[str, GradientTransform], labels: Labels) -> GradientTransform:
    """One transform for each group of parameters.

    ``labels`` says which group each is in: a mapping from labels to selections, a function of a
    parameter, or a list of labels in the order of the parameters.

    *At the edge:* a parameter without a label, or with one that has no transform, is an error; so
    is one in two selections. Use `identity` for a group that is to pass.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> groups = transforms.partition(
        ...     {
        ...         "matrix": transforms.clip_by_norm(1.0),
        ...         "other": transforms.identity(),
        ...     },
        ...     lambda p: "matrix" if p.dim() > 1 else "other",
        ... )
        >>> params = [torch.ones(1, 2), torch.ones(1)]
        >>> grads = [torch.tensor([[3.0, 4.0]]), torch.tensor([9.0])]
        >>> groups.update(grads, groups.init(params), params)[0]
        [tensor([[0.6000, 0.8000]]), tensor([9.])]
    """
    if not isinstance(transforms, Mapping):
        raise InputTypeError(
            "`transforms` must be a mapping from labels to gradient transforms, got "
            f"{type(transforms).__name__}. Use `chain` for one after another."
        )
    for transform in transforms.values():
        check_transform("transforms", transform)
    _check_labels(labels)
    if isinstance(labels, Mapping) and set(labels) != set(transforms):
        raise OptionError(
            f"`labels` must be selections for {in_words(transforms)}, got {in_words(labels)}. "
            "Use one selection for each transform."
        )

    def init(params: Sequence[Tensor]) -> State:
        groups = _groups(labels, params, transforms)
        return {n: t.init([params[i] for i in groups[n]]) for n, t in transforms.items()}

    def apply(leaves: Leaves, state: State) -> State:
        check_state(state, [*transforms])
        groups = _groups(labels, leaves.all_params, transforms)
        return {
            n: _on_part(transform, leaves, groups[n], state[n])
            for n, transform in transforms.items()
        }

    text = ", ".join(f"{name}: {transform}" for name, transform in transforms.items())
    return in_place(f"partition({text})", init, apply)


def _on_part(
    transform: GradientTransform,
    leaves: Leaves,
    chosen: Sequence[int],
    state: State,
) -> State:
    part = leaves.part(chosen)
    state = apply_to(transform, part, state)
    leaves.put_back(part, chosen)
    return state


def _chosen(where: object, params: Sequence[Tensor]) -> list[int]:
    """The places of the parameters that are chosen."""
    if isinstance(where, Selection):
        return [i for i, param in enumerate(params) if where.covers(param)]
    if callable(where):
        return [i for i, param in enumerate(params) if where(param)]
    if isinstance(where, str | Tensor) or not isinstance(where, Sequence):
        raise InputTypeError(
            "`where` must be a selection, a function of a parameter or a list of bools, got "
            f"{type(where).__name__}. Use `select.by_dim(model, at_least=2)`, say."
        )
    if len(where) != len(params):
        raise InputError(
            f"`where` must say yes or no to each of the {len(params)} parameters, got "
            f"{len(where)} answers. Use a function or a selection."
        )
    return [i for i, answer in enumerate(where) if answer]


def _groups(
    labels: Labels, params: Sequence[Tensor], known: Mapping[str, GradientTransform]
) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {name: [] for name in known}
    for i, label in enumerate(_labelled(labels, params)):
        if label not in groups:
            raise OptionError(
                f"every parameter must have a label among {in_words(known)}, got {label!r} for "
                f"parameter {i} of shape {tuple(params[i].shape)}. Use `identity()` for those "
                "that pass."
            )
        groups[label].append(i)
    return groups


def _check_labels(labels: object) -> None:
    found = list(labels.values()) if isinstance(labels, Mapping) else []
    wrong = [value for value in found if not isinstance(value, Selection)]
    listed = isinstance(labels, Sequence) and not isinstance(labels, str)
    if wrong or not (listed or callable(labels) or isinstance(labels, Mapping)):
        raise InputTypeError(
            "`labels` must be selections by label, a function of a parameter or a list of labels, "
            f"got {type([*wrong, labels][0]).__name__}. "
            "Use `{'matrix': select.by_dim(model, at_least=2), …}`, say."
        )


def _labelled(labels: Labels, params: Sequence[Tensor]) -> list[str | None]:
    if isinstance(labels, Mapping):
        return [_only([n for n, s in labels.items() if s.covers(p)], p) for p in params]
    if callable(labels):
        return [labels(param) for param in params]
    if len(labels) != len(params):
        raise InputError(
            f"`labels` must hold one label for each of the {len(params)} parameters, got "
            f"{len(labels)}. Use a function or selections."
        )
    return list(labels)


def _only(found: list[str], param: Tensor) -> str | None:
    if len(found) > 1:
        raise OptionError(
            f"every parameter must be in one selection, got {in_words(found)} for one of shape "
            f"{tuple(param.shape)}. Use `a & ~b` to take a part out."
        )
    return found[0] if found else None


def _named(where: Where) -> str:
    if isinstance(where, Selection):
        return where.text
    return getattr(where, "__name__", "list") if callable(where) else "list"


def _label(transform: GradientTransform) -> str:
    return transform.label or str(transform).partition("(")[0]
