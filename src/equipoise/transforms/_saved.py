"""States in and out of checkpoints: copied, checked, and brought to where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import InputError


def copied(state: Any) -> Any:  # noqa: ANN401
    """The same in memory of its own."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def loaded(saved: Any, like: Any, path: str = "state") -> Any:  # noqa: ANN401
    """A saved state in the place of another of the same make."""
    if isinstance(like, Tensor) and isinstance(saved, Tensor):
        if saved.shape != like.shape:
            raise _other(path, f"the shape {tuple(like.shape)}", str(tuple(saved.shape)))
        return saved.detach().to(like.device, copy=True)
    if isinstance(like, Mapping) and isinstance(saved, Mapping):
        if set(saved) != set(like):
            raise _other(path, keys_of(like), keys_of(saved))
        return {key: loaded(saved[key], like[key], f"{path}.{key}") for key in like}
    if isinstance(like, Tensor | Mapping) or isinstance(saved, Tensor | Mapping):
        raise _other(path, type(like).__name__, type(saved).__name__)
    return copied(saved)


def chosen_by(which: Tensor, yes: Any, no: Any) -> Any:  # noqa: ANN401
    """One state or the other, decided on the device where the tensors are."""
    if isinstance(yes, Tensor) and isinstance(no, Tensor):
        return torch.where(which.to(yes.device), yes, no.to(yes)).reshape(yes.shape)
    if isinstance(yes, Mapping) and isinstance(no, Mapping):
        return {key: chosen_by(which, yes[key], no[key]) for key in yes}
    if isinstance(yes, list | tuple) and len(yes) == len(no):
        return type(yes)(chosen_by(which, one, other) for one, other in zip(yes, no, strict=True))
    # Only plain data that has changed needs the answer now.
    return yes if yes is no or yes == no or which.item() else no


def keys_of(state: object) -> str:
    """What it holds, for an error."""
    if not isinstance(state, Mapping):
        return type(state).__name__
    return ", ".join(map(repr, state)) or "nothing"


def _other(path: str, wanted: str, got: str) -> InputError:
    return InputError(
        f"a state must be that of the same transform: `{path}` should hold {wanted}, got {got}. "
        "Use the chain and the options it was saved with."
    )
