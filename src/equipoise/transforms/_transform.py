"""A gradient transform is a pair of pure functions, and a chain of them is one again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import InputError, InputTypeError, in_words
from equipoise.transforms._leaves import Gradient, Leaves
from equipoise.transforms._lists import wide

State = dict[str, Any]
"""What a transform remembers: tensors and plain data in dictionaries, so that it can be saved."""

Init = Callable[[Sequence[Tensor]], Any]
Update = Callable[[Sequence[Gradient], Any, Sequence[Tensor]], tuple[Sequence[Gradient], Any]]
Apply = Callable[[Leaves, State], State]

RECORDED = "recorded"
"""The key of a state under which figures for people are found."""


@dataclass(frozen=True)
class GradientTransform:
    """Gradients in, gradients out: ``init(params) -> state`` and ``update``.

    ``update(grads, state, params) -> (grads, state)`` has ``None`` in the list where a parameter
    has no gradient. Both functions are pure: neither changes what it is given. Yours are as good
    as the library's; those may also work in place where `attach` lets them.

    *At the edge:* nothing is differentiated through, and parameters never change here. What a
    state holds must be tensors and plain data in dictionaries and lists.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import GradientTransform, chain, clip_by_value
        >>> def flip(grads, state, params):
        ...     return [None if g is None else -g for g in grads], state
        >>> both = chain(clip_by_value(-1.0, 1.0), GradientTransform(lambda params: {}, flip))
        >>> print(both)
        clip_by_value(-1.0, 1.0) → flip
        >>> weight = torch.zeros(2)
        >>> grads, state = both.update([torch.tensor([3.0, -0.5])], both.init([weight]), [weight])
        >>> grads
        [tensor([-1.0000,  0.5000])]
    """

    init: Init
    update: Update
    text: str = ""
    """How it prints; by default the name of its update."""
    label: str = ""
    """What its figures are called in a chain; by default the word that it prints first."""

    def __str__(self) -> str:
        return self.text or getattr(self.update, "__name__", type(self.update).__name__)

    __repr__ = __str__


@dataclass(frozen=True)
class InPlace:
    """The update of a library's transform: pure for users, and in place for `attach`."""

    apply: Apply

    @torch.no_grad()
    def __call__(
        self, grads: Sequence[Gradient], state: State, params: Sequence[Tensor]
    ) -> tuple[list[Gradient], State]:
        """New gradients and a new state."""
        check_lists(grads, params)
        check_state(state, ())
        leaves = Leaves.of(grads, params, owned=False)
        state = self.apply(leaves, state)
        leaves.zero_where_skipped()
        return leaves.finished(), state


def in_place(text: str, init: Init, apply: Apply, *, label: str = "") -> GradientTransform:
    """A transform from what it does to leaves."""
    return GradientTransform(lambda params: init(list(params)), InPlace(apply), text, label)


def apply_to(transform: GradientTransform, leaves: Leaves, state: State) -> State:
    """Let any transform work on leaves: the library's in place, another by its pure update."""
    if isinstance(transform.update, InPlace):
        return transform.update.apply(leaves, state)
    grads, new = transform.update(leaves.finished(), state, leaves.all_params)
    check_lists(grads, leaves.all_params)
    leaves.take(grads)
    return new  # type: ignore[no-any-return]


def nothing(_params: Sequence[Tensor]) -> State:
    """The state of what remembers nothing."""
    return {}


def no_figure(tensors: Sequence[Tensor]) -> Tensor:
    """A figure before there is anything to measure: 0, where the tensors are."""
    device = tensors[0].device if len(tensors) else torch.device("cpu")
    return torch.zeros((), dtype=wide(device), device=device)


def identity() -> GradientTransform:
    """Changes nothing: the chain without links.

    *At the edge:* also NaN and ``None`` pass as they are.

    Examples:
        >>> from equipoise import transforms
        >>> print(transforms.identity())
        identity()
    """
    return in_place("identity()", nothing, lambda _leaves, state: state)


def chain(*transforms: GradientTransform) -> GradientTransform:
    """One after another: the first written runs first.

    Neighbours share what they measure: the norms that one link needs are not taken again by the
    next, and a rescaling waits until somebody needs its result.

    *At the edge:* without links it is the identity.

    Examples:
        >>> from equipoise import transforms
        >>> print(transforms.chain(transforms.centralize(), transforms.clip_by_global_norm(1.0)))
        centralize() → clip_by_global_norm(1.0)
    """
    for transform in transforms:
        check_transform("transforms", transform)
    labels = list(_labels(transforms))

    def init(params: Sequence[Tensor]) -> State:
        return {label: t.init(params) for label, t in zip(labels, transforms, strict=True)}

    def apply(leaves: Leaves, state: State) -> State:
        check_state(state, labels)
        return {
            label: apply_to(transform, leaves, state[label])
            for label, transform in zip(labels, transforms, strict=True)
        }

    text = " → ".join(map(str, transforms))
    return in_place(text or "identity()", init, apply, label="chain")


def _labels(transforms: Sequence[GradientTransform]) -> Iterator[str]:
    """A short name for each link, unique in the chain: what its figures are called."""
    used: set[str] = set()
    for transform in transforms:
        word = label = transform.label or str(transform).partition("(")[0]
        number = 1
        while label in used:
            number += 1
            label = f"{word}_{number}"
        used.add(label)
        yield label


def recorded(state: Mapping[str, Any], path: str = "") -> dict[str, Tensor]:
    """The figures that a state holds, each by the way that leads to it: ``clip_by_norm/norm``.

    *At the edge:* empty where nothing is recorded. The figures are tensors: to read them waits for
    the device.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> clip = transforms.clip_by_global_norm(1.0)
        >>> weight = torch.zeros(2)
        >>> _, state = clip.update([torch.tensor([3.0, 4.0])], clip.init([weight]), [weight])
        >>> transforms.recorded(state)["norm"]
        tensor(5., dtype=torch.float64)
    """
    figures: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == RECORDED and all(isinstance(figure, Tensor) for figure in value.values()):
            figures.update({f"{path}/{name}".strip("/"): f for name, f in value.items()})
        elif isinstance(value, Mapping):
            figures.update(recorded(value, f"{path}/{key}"))
    return figures


def check_transform(name: str, value: object) -> None:
    """Refuse what is no gradient transform."""
    if not isinstance(value, GradientTransform):
        raise InputTypeError(
            f"`{name}` must be gradient transforms, got {type(value).__name__}. "
            "Use `clip_by_global_norm(1.0)`, say, or `GradientTransform(init, update)`."
        )


def check_lists(grads: Sequence[Gradient] | Tensor, params: Sequence[Tensor] | Tensor) -> None:
    """Refuse gradients that are not those of the parameters."""
    for given in (grads, params):
        if isinstance(given, Tensor) or not hasattr(given, "__len__"):
            got = "a tensor" if isinstance(given, Tensor) else type(given).__name__
            raise InputTypeError(
                f"`grads` and `params` must be lists of tensors, got {got}. "
                "Use `[tensor]`, or `list(model.parameters())`."
            )
    if len(grads) != len(params):
        raise InputError(
            f"`grads` must hold one gradient or None for each of the {len(params)} parameters, "
            f"got {len(grads)}. Use `[p.grad for p in params]`."
        )
    for i, (grad, param) in enumerate(zip(grads, params, strict=True)):
        if grad is not None and not (grad.is_floating_point() or grad.is_complex()):
            raise InputTypeError(
                f"`grads[{i}]` must be floating-point or complex, got {grad.dtype}. Use `.float()`."
            )
        if grad is not None and grad.shape != param.shape:
            raise InputError(
                f"`grads[{i}]` must have the shape {tuple(param.shape)} of its parameter, got "
                f"{tuple(grad.shape)}. Use the gradients in the order of `params`."
            )


def check_state(state: object, links: Sequence[str]) -> None:
    """Refuse what cannot be the state of these links, or groups, together."""
    if not isinstance(state, Mapping):
        raise InputTypeError(
            f"`state` must be a dictionary, got {type(state).__name__}. "
            "Use `transform.init(params)`, and then what the last `update` returned."
        )
    missing = [label for label in links if label not in state]
    if missing:
        raise InputError(
            f"`state` must hold that of every transform, got none for {in_words(missing)}. "
            "Use `transform.init(params)`, and then what the last `update` returned."
        )
