"""Named activations of a model, through forward hooks, for a pipeline to read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from equipoise._context import compiling
from equipoise._errors import GradientError, InputError, InputTypeError, OptionError, nearest
from equipoise._probes import backward_pass

Place = str | tuple[str | int, ...]
"""A module's name; or that, and which part of what it returns: ``("lstm", 0)``."""

FEW = 12
"""So many module names fit into a message."""


def capture(model: nn.Module, /, **places: Place) -> Captures:
    """Take note of what modules of a model return, as inputs for a pipeline.

    ``hidden="encoder.layers.3"`` captures the output of that module under the name ``hidden``; of a
    tuple, mapping or dataclass choose a part: ``hidden=("encoder", "last_hidden_state")``,
    ``memory=("lstm", 1, 0)``, or ``("encoder", "hidden_states", -1)``. The tensors are those of the
    graph, so penalties on them train the model. A module that is called several times gives a list.

    In a ``with`` block everything is captured that happens inside, and forgotten at its end.
    Without one, the handle holds what the last call of the model returned, until the next call,
    `Captures.take` or `Captures.remove`. Where only parts of the model are called
    (``model.encode(x)``) that is never the next one: use a block, or `Captures.take` at every step.

    *At the edge:* an unknown module is an error that suggests the near one. Checkpointed models run
    their layers again in the backward pass, which is not captured again; with
    ``use_reentrant=True`` activations have no graph, and capturing there is refused. A compiled
    model calls only hooks that were there before its first call, and may share its code with others
    of its class: capture first. What was changed in place after it was captured (by
    ``ReLU(inplace=True)``) is refused when it is read. Copies of the model are not captured.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise.training import capture
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> pipeline = eq.Pipeline(activity=eq.Term(eq.l2, inputs="hidden", weight=0.1))
        >>> with capture(model, hidden="0") as seen:
        ...     out = model(torch.ones(4, 2))
        ...     result = pipeline(**seen, base=out.sum())
        >>> result.total.backward()
        >>> model[0].weight.grad is not None
        True
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"`model` must be a torch.nn.Module, got {type(model).__name__}. Use the model itself."
        )
    if not places:
        raise OptionError(
            "`capture` needs at least one name, got none. Use `capture(model, hidden='0')`, say."
        )
    return Captures(getattr(model, "_orig_mod", model), places)


class Captures:
    """What was captured, by name: give it to a pipeline as ``**seen``.

    *At the edge:* reading what no module has computed yet is an error, and so is reading after
    `remove`. ``remove`` may be called twice; the handle is a context manager that calls it.

    Examples:
        >>> import torch
        >>> from equipoise.training import capture
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> seen = capture(model, hidden="0")
        >>> _ = model(torch.ones(4, 2))
        >>> {name: x.shape for name, x in seen.take().items()}
        {'hidden': torch.Size([4, 3])}
        >>> seen.remove()
        >>> seen
        Captures(hidden='0', removed)
    """

    def __init__(self, model: nn.Module, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        # Each tensor with its version, which tells whether it was changed in place since.
        self._found: dict[str, list[tuple[Tensor, int | None]]] = {}
        self._forget()
        self._all_calls = False
        self._with_grad = True
        modules = dict(model.named_modules())
        targets = {name: (_path(p), _module(modules, _path(p))) for name, p in places.items()}
        self._hooks = [model.register_forward_pre_hook(self._beginning(model))]
        for name, (path, module) in targets.items():
            place = places[name]
            parts = () if isinstance(place, str) else place[1:]
            self._hooks.append(module.register_forward_hook(self._note(name, path, module, parts)))

    def __repr__(self) -> str:
        words = [f"{name}={place!r}" for name, place in self._places.items()]
        return f"Captures({', '.join(words)}{'' if self._hooks else ', removed'})"

    # Reading

    def keys(self) -> list[str]:
        """The names: with `__getitem__` what ``**seen`` needs."""
        return list(self._found)

    def __getitem__(self, name: str) -> Tensor | list[Tensor]:
        """What was captured under this name: a tensor, or a list where there were several calls."""
        if name not in self._found:
            raise InputError(
                f"captures have the names {', '.join(self._found)}, got {name!r}. "
                f"{nearest(name, self._found)}"
            )
        found = self._found[name]
        if not found:
            raise self._nothing(name)
        for tensor, version in found:
            if version is not None and tensor._version != version:  # noqa: SLF001
                raise InputError(
                    f"`{name}` must stay as {self._places[name]!r} returned it, got a tensor that "
                    "was changed in place since. Use `inplace=False` in the module that follows, "
                    "or capture that one."
                )
        tensors = [tensor for tensor, _ in found]
        return tensors[0] if len(tensors) == 1 else tensors

    def take(self) -> dict[str, Tensor | list[Tensor]]:
        """Everything by name, handed over: the handle keeps none of it."""
        taken = {name: self[name] for name in self._found}
        self._forget()
        return taken

    def remove(self) -> None:
        """Take the hooks off and forget what was captured; the model is what it was before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()

    def __enter__(self) -> Captures:
        self._all_calls = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _forget(self) -> None:
        # New lists: to empty the old ones a compiled model would have to look into them.
        self._found = {name: [] for name in self._places}

    def _nothing(self, name: str) -> InputError:
        if not self._hooks:
            return InputError(
                f"`{name}` must be read before `remove` or the end of the `with` block, got a "
                "handle that is removed. Use it inside."
            )
        return InputError(
            f"`{name}` must be computed before it is read, got no call of "
            f"{_path(self._places[name])!r}. Use the model first; where it is compiled, `capture` "
            "before the first call of any like it, or `torch.compiler.reset()`."
        )

    # In the forward pass: plain functions, which copies of the model share and do nothing in

    def _beginning(self, model: nn.Module) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, _args: object) -> None:
            if module is not model or _again():
                return
            self._with_grad = torch.is_grad_enabled()
            if not self._all_calls:
                self._forget()

        return begin

    def _note(
        self, name: str, path: str, target: nn.Module, parts: tuple[str | int, ...]
    ) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            if module is not target or _again():
                return
            x = _chosen(output, parts, name, path)
            if compiling():
                self._found[name].append((x, None))
                return
            if self._with_grad and not torch.is_grad_enabled() and _in_reentrant_checkpoint():
                raise GradientError(
                    f"`{name}` must be captured with its graph, got {path!r} inside a reentrant "
                    "checkpoint, where gradients would be silently wrong. "
                    "Use `checkpoint(..., use_reentrant=False)`."
                )
            self._found[name].append((x, None if x.is_inference() else x._version))  # noqa: SLF001

        return note


def _again() -> bool:
    """Whether a checkpoint is running a module once more, in the backward pass."""
    return not compiling() and backward_pass() != -1


def _in_reentrant_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _path(place: object) -> str:
    path, *parts = place if isinstance(place, tuple) and place else (place,)
    if not isinstance(path, str) or not all(isinstance(part, str | int) for part in parts):
        raise OptionError(
            "`capture` takes a module's name, or a tuple of that and which part of its output, "
            f"got {place!r}. Use 'encoder.layers.3' or ('lstm', 0), say."
        )
    return path


def _module(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    if path not in modules:
        names = [name for name in modules if name]
        hint = nearest(path, names) if names else "Use '' for the model itself."
        if len(names) > FEW and hint.startswith("Use "):
            hint = "Use a name of `model.named_modules()`."
        raise InputError(
            f"`capture` needs the name of a module, got {path!r}, which is none of "
            f"{len(modules)}. {hint}"
        )
    return modules[path]


def _chosen(output: Any, parts: tuple[str | int, ...], name: str, path: str) -> Tensor:  # noqa: ANN401
    """The part of an output that was asked for."""
    x = output
    for part in parts:
        from_end = isinstance(x, tuple | list) and part in range(-len(x), 0)
        if not from_end and part not in _parts(x):
            raise InputError(
                f"{path!r} returns {_described(x)}, got the choice {part!r}. Use one of these."
            )
        x = x[part] if from_end else _parts(x)[part]
    if not isinstance(x, Tensor):
        first = next(iter(_parts(x)), 0)
        raise InputTypeError(
            f"`{name}` must be a tensor, got {_described(x)} from {path!r}. "
            f"Use {(path, *parts, first)!r} to choose a part."
        )
    return x


def _parts(x: Any) -> dict[str | int, Any]:  # noqa: ANN401
    """What can be chosen from an output, by name and by index."""
    named: dict[str | int, Any] = {}
    if isinstance(x, Mapping):
        named = dict(x)
    elif isinstance(x, tuple | list):
        named = dict(zip(getattr(x, "_fields", ()), x, strict=False))
    elif is_dataclass(x):
        named = {field.name: getattr(x, field.name) for field in fields(x)}
    else:
        return {}
    values = x if isinstance(x, tuple | list) else named.values()
    return {**named, **dict(enumerate(values))}


def _described(x: object) -> str:
    names = [repr(part) for part in _parts(x)]
    return f"{type(x).__name__}({', '.join(names)})" if names else type(x).__name__
