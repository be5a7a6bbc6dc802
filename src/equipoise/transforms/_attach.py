"""Putting a transform on an optimizer, whichever it is, and taking it off again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise._errors import InputError, InputTypeError, names_its_options
from equipoise._host import on_host
from equipoise.transforms._leaves import Gradient, Leaves, Rate
from equipoise.transforms._lists import by_kind, looking_is_free
from equipoise.transforms._saved import chosen_by, copied, keys_of, loaded
from equipoise.transforms._transform import (
    GradientTransform,
    State,
    apply_to,
    chain,
    check_transform,
    recorded,
)
from equipoise.transforms._verdict import guilty

KEY = "gradient_transforms"
"""Where the states stand in the optimizer's `state_dict`: a list, in the order of attaching."""

logger = logging.getLogger("equipoise")


@names_its_options
def attach(
    transform: GradientTransform,
    optimizer: Optimizer,
    *,
    names: nn.Module | Mapping[str, Tensor] | None = None,
) -> Handle:
    """Let gradients pass through a transform in every ``step`` of an optimizer, from now on.

    The optimizer stays what it is: with its schedulers, parameter groups, closures, scalers and
    compiled or fused steps. The transform sees the gradients that the step would use: accumulated,
    reduced over processes, and unscaled; with a closure those that the closure has computed. It
    works in place, between ``backward`` and the update. Attached twice, the first runs first; a
    step that the second skips has been a step for the first, so what belongs together is a `chain`.

    ``names`` (the model, or a mapping from names) says what parameters are called in errors and in
    `Handle.nonfinite`; an optimizer made from ``model.named_parameters()`` knows already.

    *At the edge:* a wrapped optimizer (Accelerate, Lightning) is unwrapped. Hooks do not survive
    pickling or copying an optimizer: attach again, and load the state. A fused optimizer that
    unscales inside its step gets unscaled gradients, as if ``scaler.unscale_`` had been called. An
    optimizer that calls its closure several times a step (LBFGS) has the transform run in each;
    decoupled decay happens in the first. A distributed checkpoint of an optimizer without a state
    makes it step at rate 0 with gradients of 0: such a step is left alone and not counted.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> weight = torch.tensor([0.0, 0.0], requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> with transforms.attach(transforms.clip_by_global_norm(1.0), optimizer) as handle:
        ...     weight.grad = torch.tensor([3.0, 4.0])
        ...     optimizer.step()
        >>> weight
        tensor([-0.6000, -0.8000], requires_grad=True)
    """
    check_transform("transform", transform)
    return Handle(transform, _unwrapped(optimizer), _names(names))


class Handle:
    """A transform on an optimizer: its figures, its state, and how to take it off.

    *At the edge:* `metrics` and `nonfinite` are what waits for the device. `remove` may be called
    twice; the handle is a context manager that calls it.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> handle = transforms.attach(transforms.snapshot("norm"), optimizer)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> handle.metrics()
        {'norm': 5.0}
    """

    def __init__(
        self, transform: GradientTransform, optimizer: Optimizer, names: Mapping[int, str]
    ) -> None:
        self.transform = transform
        self.optimizer = optimizer
        # A chain, so that figures have the same names whether there is one link or more.
        self._chain = transform if transform.label == "chain" else chain(transform)
        self._names = dict(names)
        self._nonfinite: Counter[str] = Counter()
        self._held: list[tuple[Tensor, Tensor]] = []
        self.state: State = self._chain.init(self._params())
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    def __repr__(self) -> str:
        state = "" if self._hooks else ", removed"
        return f"Handle({self.transform} on {type(self.optimizer).__name__}{state})"

    def metrics(self) -> dict[str, float]:
        """What snapshots and clips recorded in the last step, in one transfer from the device."""
        return on_host(recorded(self.state))

    def nonfinite(self) -> dict[str, int]:
        """How often which gradient was the reason for skipping a step."""
        return dict(self._nonfinite)

    def remove(self) -> None:
        """Take the transform off; the optimizer is what it was before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The state, for those who save it themselves: tensors and plain data."""
        # Counts as a list, which a distributed checkpoint keeps whole whatever names are in it.
        counts = [[name, count] for name, count in self._nonfinite.items()]
        return {"state": copied(self.state), "nonfinite": counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; a state of another transform is refused."""
        given: object = state_dict
        if not (isinstance(given, Mapping) and {"state", "nonfinite"} <= set(given)):
            raise InputError(
                "a handle's state must hold 'state' and 'nonfinite', got "
                f"{keys_of(given)}. Use what `handle.state_dict()` returned."
            )
        self.state = loaded(state_dict["state"], self.state)
        self._nonfinite = Counter(dict(state_dict["nonfinite"]))

    def _save(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[KEY] = [*state_dict.get(KEY, []), self.state_dict()]

    def _load(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        mine, *others = state_dict.get(KEY) or [None]
        if mine is None:
            return None
        self.load_state_dict(mine)
        return {**state_dict, KEY: others}

    # In a step

    def _before_step(
        self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._run(first_of_step=True)
            return None
        # The gradients are there only when the closure has run, which happens inside the step.
        wrapped = self._followed(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _followed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def wrapped() -> Any:  # noqa: ANN401
            nonlocal calls
            self._give_back()  # so that the closure finds what it left: to zero it, or to add to it
            with torch.enable_grad():
                loss = closure()
            self._run(first_of_step=calls == 0)
            calls += 1
            return loss

        return wrapped

    def _after_step(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """The gradients of a skipped step, which were hidden from the optimizer."""
        for param, grad in self._held:
            if param.grad is None:
                param.grad = grad
        self._held = []

    @torch.no_grad()
    def _run(self, *, first_of_step: bool) -> None:
        params = self._params()
        found_inf = self._unscaled(params)
        grads = [param.grad for param in params]
        leaves = Leaves.of(grads, params, owned=True, names=self._name)
        if self._rehearsed(leaves):
            return
        leaves.rate = self._rate
        leaves.first_of_step, leaves.excused = first_of_step, found_inf
        state = apply_to(self._chain, leaves, self.state)
        names = guilty(leaves.checks)
        _put(params, grads, leaves.finished())
        self.state = state if found_inf is None else chosen_by(found_inf == 0, state, self.state)
        if names:
            self._skip(params, names)
        elif leaves.weight_changes and (found_inf is None or not found_inf.item()):
            for change in leaves.weight_changes:
                change()

    def _skip(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        # A parameter without a gradient is left alone by every optimizer: no decay, no moment.
        self._nonfinite.update(names)
        self._held = [(param, param.grad) for param in params if param.grad is not None]
        for param in params:
            param.grad = None
        logger.warning("skipped a step: gradients are not finite in %s", ", ".join(names))

    def _rehearsed(self, leaves: Leaves) -> bool:
        """Whether this only makes the optimizer's state: its first step, with nothing but zeros.

        So do distributed checkpoints where there is no state yet: they set all rates and gradients
        to 0 and step. That is no step of training, to be counted or remembered.
        """
        if self.optimizer.state or not all(map(_is_zero, self._rates())):
            return False
        return not leaves.norms.total().item()

    def _rates(self) -> list[Rate | None]:
        return [group.get("lr") for group in self.optimizer.param_groups]

    def _unscaled(self, params: Sequence[Tensor]) -> Tensor | None:
        """Do what a fused optimizer would do inside; whether it is going to skip the step."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            grads = [param.grad for param in params if param.grad is not None]
            for (device, _), places in by_kind(grads).items():
                inverse = scale.to(device).double().reciprocal().float()
                torch._foreach_mul_([grads[i] for i in places], inverse)
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        return getattr(self.optimizer, "found_inf", None)

    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _rate(self, place: int) -> Rate | None:
        number, _ = self._found(place)
        return self.optimizer.param_groups[number].get("lr")

    def _found(self, place: int) -> tuple[int, int]:
        """In which group a parameter is, and where in it."""
        for number, group in enumerate(self.optimizer.param_groups):
            if place < len(group["params"]):
                return number, place
            place -= len(group["params"])
        raise IndexError(place)

    def _name(self, place: int) -> str:
        number, place = self._found(place)
        group = self.optimizer.param_groups[number]
        param = group["params"][place]
        if id(param) in self._names:
            return self._names[id(param)]
        if "param_names" in group:
            return str(group["param_names"][place])
        return f"parameter {place} of group {number}, {tuple(param.shape)}"


def _is_zero(rate: Rate | None) -> bool:
    """Whether this is seen to be 0 without waiting for a device."""
    if isinstance(rate, Tensor) and not looking_is_free(rate.device):
        return False
    return rate is not None and not rate


def _put(params: Sequence[Tensor], before: Sequence[Gradient], after: Sequence[Gradient]) -> None:
    for param, old, new in zip(params, before, after, strict=True):
        if new is not old:
            param.grad = new


def _unwrapped(optimizer: Any) -> Optimizer:  # noqa: ANN401
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) or hasattr(inner, "optimizer"):
        return _unwrapped(inner)
    if not isinstance(optimizer, Optimizer):
        raise InputTypeError(
            f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}. "
            "Use the optimizer itself."
        )
    return optimizer


def _names(names: nn.Module | Mapping[str, Tensor] | None) -> dict[int, str]:
    if names is None:
        return {}
    if isinstance(names, nn.Module):
        names = dict(names.named_parameters())
    if not isinstance(names, Mapping):
        raise InputError(
            f"`names` must be a model or a mapping from names to parameters, got "
            f"{type(names).__name__}. Use `names=model`."
        )
    return {id(param): name for name, param in names.items()}
