"""A pipeline as one compiled function: values, figures and the summed gradient in one pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves

from equipoise._figures import Figures
from equipoise._probes import tensors_in
from equipoise._recorder import BASE, Level, Place
from equipoise.fast._ahead import Ahead, emptied, handed_over, is_tensor, multiplied
from equipoise.fast._one_pass import Found, Piece, alone, compiled

if TYPE_CHECKING:
    from equipoise._run import Call

MOST = 32
"""So many functions one pipeline compiles. One that needs more has options that always change."""
TRIES = 2
"""So often a function may fail: the first time it may have been the user's mistake."""
SIMPLE = (bool, int, float, str, type(None))
"""What options and inputs may hold beside tensors."""
LABELLED = (F.cross_entropy, F.nll_loss, torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
"""The losses whose labels are looked at before compiled code sees them."""


@dataclass(eq=False)
class Compiler:
    """The functions compiled for a pipeline and its edited copies, by what tells them apart."""

    functions: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    failures: dict[Hashable, int] = field(default_factory=dict)
    # The penalties compiled, and what a key names of them by its identity: nothing else takes its
    # place in memory.
    held: dict[Hashable, list[tuple[Callable[..., Any], tuple[object, ...]]]] = field(
        default_factory=dict
    )
    numbers: tuple[Hashable, Tensor] | None = None

    def take(
        self, calls: Mapping[str, Call], inputs: Mapping[str, Any], level: Level | None
    ) -> Ahead | None:
        """Evaluate all terms at once; or say why not, and leave them to the plain definition."""
        moving = {
            (name, i): x for name, given in inputs.items() for i, x in enumerate(tensors_in(given))
        }
        reason = _refusal(calls, inputs, moving)
        if reason is None:
            found = self._by_formulas(calls, inputs, moving, level)
            if found is not None:
                return found
            key = _key(calls, inputs, moving, level)
            reason = self._unwilling(key)
        if reason is not None:
            handed_over(reason)
            return None
        return self._evaluated(key, calls, inputs, moving, level)

    def _unwilling(self, key: Hashable) -> str | None:
        """Why this function is not compiled, or not called again."""
        if self.failures.get(key, 0) >= TRIES:
            return "an earlier attempt failed"
        if key not in self.functions and len(self.functions) >= MOST:
            return f"{MOST} variants of this pipeline have been compiled already"
        for penalty, parts in self.held.get(key, []):
            if not _same(_parts(penalty), parts):
                return "what a compiled function closes over has been bound to something else"
        return None

    def _by_formulas(
        self,
        calls: Mapping[str, Call],
        inputs: Mapping[str, Any],
        moving: Mapping[Place, Tensor],
        level: Level | None,
    ) -> Ahead | None:
        """All terms, where their gradients have formulas: faster than to differentiate them."""
        try:
            from equipoise.fast._formulas import Formulas  # noqa: PLC0415 -- only if there are any
        except ImportError:
            return None
        ready = Formulas.of(calls, inputs, list(moving), level)
        if ready is None or self._unwilling(ready.key) is not None:
            return None
        if ready.key not in self.functions:
            self.functions[ready.key] = alone(ready.function())
            self.failures[ready.key] = 0
        try:
            return ready.evaluated(self.functions[ready.key], _scaled)
        except Exception as error:  # noqa: BLE001 -- the general way raises it, or succeeds
            self.failures[ready.key] += 1
            handed_over(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
            return None

    def _evaluated(
        self,
        key: Hashable,
        calls: Mapping[str, Call],
        inputs: Mapping[str, Any],
        moving: Mapping[Place, Tensor],
        level: Level | None,
    ) -> Ahead | None:
        tensors: list[Tensor] = []
        numbers: list[float] = []
        emptied(list(moving.values()), tensors)  # first, so that a place's number is its own
        data = emptied(dict(inputs), tensors)
        pieces = [_piece(call, tensors, numbers) for call in calls.values()]
        if key not in self.functions:
            penalties = [call.term.penalty for call in calls.values()]
            self.held[key] = [(penalty, _parts(penalty)) for penalty in penalties]
            self.functions[key] = compiled(pieces, data, list(moving), level)
            self.failures[key] = 0
        device = tensors[0].device
        states = _random_states(device)
        try:
            found = self.functions[key]([x.detach() for x in tensors], self._on(device, numbers))
            reason = _unfit(found, device, states)
        except Exception as error:  # noqa: BLE001 -- the plain definition raises it, or succeeds
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        if reason is not None:
            self.failures[key] += 1
            handed_over(reason)
            return None
        return _ahead(_owned(found, tensors), list(calls), list(moving), level)

    def _on(self, device: torch.device, numbers: list[float]) -> Tensor:
        """The weights that are numbers as one tensor; constant ones are sent only once."""
        key = (device, *numbers)
        if self.numbers is None or self.numbers[0] != key:
            wide = torch.float32 if device.type == "mps" else torch.float64
            host = torch.tensor(numbers, dtype=wide, pin_memory=device.type == "cuda")
            self.numbers = (key, host.to(device, non_blocking=True))
        return self.numbers[1]


def _refusal(
    calls: Mapping[str, Call], inputs: Mapping[str, Any], moving: Mapping[Place, Tensor]
) -> str | None:
    """Why these terms cannot be compiled, if that can be told at once."""
    if not moving:
        return "no input requires grad"
    if all(not call.term.differentiable for call in calls.values()):
        return "no term is differentiable"
    refused = [*map(_of_call, calls.values()), *map(_of_input, moving.values())]
    refused += [_of_labels(call, [inputs[key] for key in call.keys]) for call in calls.values()]
    strange = _leaves([dict(inputs), *(dict(c.options) for c in calls.values())], _is_strange)
    refused += [f"an input or option is of the type {type(x).__name__}" for x in strange]
    return next((reason for reason in refused if reason is not None), None)


def _of_call(call: Call) -> str | None:
    if call.term.nan_policy != "propagate":
        return f"{call.name!r} has a nan_policy"
    if isinstance(call.weight, Tensor) and call.weight.requires_grad:
        return f"the weight of {call.name!r} is differentiable"
    if _leaves(call.options, lambda x: isinstance(x, Tensor) and x.requires_grad):
        return f"an option of {call.name!r} is differentiable"
    return None


def _of_labels(call: Call, given: list[Any]) -> str | None:
    """A class that does not exist: compiled code ends the process where torch raises an error."""
    penalty = call.term.penalty
    if penalty not in LABELLED and type(penalty) not in LABELLED:
        return None
    x, labels = (*given, call.options.get("target"))[:2]
    if not is_tensor(x) or not is_tensor(labels):
        return None
    if labels.is_floating_point() or labels.device.type != "cpu":
        return None
    ignored = getattr(penalty, "ignore_index", call.options.get("ignore_index", -100))
    classes = x.shape[1] if x.dim() > 1 else x.numel()
    if ((labels == ignored) | ((labels >= 0) & (labels < classes))).all():
        return None
    return f"a label of {call.name!r} does not exist"


def _of_input(x: Tensor) -> str | None:
    if x.dtype == torch.float16:
        return "a float16 gradient can be scaled only before it is rounded"
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return "an input has a forward derivative"
    return None


def _leaves(data: Any, where: Callable[[object], bool]) -> list[Tensor]:  # noqa: ANN401
    return tensors_in(data if not isinstance(data, Mapping) else dict(data), where=where)


def _is_strange(x: object) -> bool:
    if type(x) not in (Tensor, torch.nn.Parameter):
        return not isinstance(x, SIMPLE)
    tensor: Tensor = x  # type: ignore[assignment]
    return tensor.is_complex() or tensor.layout != torch.strided or tensor.is_nested


def _key(
    calls: Mapping[str, Call],
    inputs: Mapping[str, Any],
    moving: Mapping[Place, Tensor],
    level: Level | None,
) -> Hashable:
    """All that a compiled function takes for constant, but for what the compiler itself guards."""
    places: list[Tensor] = []
    emptied(list(moving.values()), places)
    terms = tuple(
        (
            name,
            *map(id, _parts(call.term.penalty)),
            call.keys,
            call.term.differentiable,
            *_form(call),
        )
        for name, call in calls.items()
    )
    return terms, _written(emptied(dict(inputs), places)), tuple(moving), level


def _form(call: Call) -> tuple[Hashable, ...]:
    kind = "tensor" if isinstance(call.weight, Tensor) else "number"
    return kind, _written(emptied(dict(call.options), []))


def _written(data: Any) -> str:  # noqa: ANN401
    """What data without its tensors is made of: a container of its own may not say it by itself."""
    return repr(tree_flatten(data))


def _parts(function: Callable[..., Any]) -> tuple[object, ...]:
    """The same things for a lambda or a bound method that is made anew in every step."""
    if isinstance(function, MethodType):
        return (*_parts(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return (function,)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    cells = function.__closure__ or ()
    bound = (cell.cell_contents for cell in cells if cell != CellType())  # not what is unbound yet
    return (function.__code__, function.__globals__, *defaults, *bound)


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _piece(call: Call, tensors: list[Tensor], numbers: list[float]) -> Piece:
    weight: Any = call.weight
    if isinstance(weight, Tensor):
        weight = emptied(weight, tensors)
    else:
        numbers.append(float(weight))
        weight = len(numbers) - 1
    return Piece(call, call.keys, emptied(dict(call.options), tensors), weight)


def _random_states(device: torch.device) -> list[Tensor]:
    """Those of the generators that a term could draw from; they are kept on the host."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _unfit(found: Found, device: torch.device, states: list[Tensor]) -> str | None:
    """Why what was found must not be used."""
    if any(x.requires_grad for x in (found.total, *found.values)):
        return "a term reads a tensor that requires grad and is no input of the pipeline"
    if not all(map(torch.equal, states, _random_states(device))):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        return "a term draws random numbers"
    if all(found.errors):
        return "no term has a gradient"
    return None


def _owned(found: Found, given: Sequence[Tensor]) -> Found:
    """The same, with gradients in memory of their own: they are scaled in place, and given away.

    Compiled code returns one tensor for two places where it can, a weight itself where that is the
    gradient, and a number repeated where all entries are the same.
    """
    others = tree_leaves((given, found._replace(gradients=[])))
    taken = {x.untyped_storage().data_ptr() for x in others if is_tensor(x)}
    own: list[Tensor | None] = []
    for gradient in found.gradients:
        if gradient is None:
            own.append(None)
            continue
        memory = gradient.untyped_storage().data_ptr()
        repeated = any(
            n > 1 and step == 0 for n, step in zip(gradient.shape, gradient.stride(), strict=True)
        )
        shared = repeated or memory in taken
        own.append(gradient.clone(memory_format=torch.contiguous_format) if shared else gradient)
        taken.add(memory)
    return found._replace(gradients=own)


def _ahead(
    found: Found, names: Sequence[str], places: Sequence[Place], level: Level | None
) -> Ahead:
    measured: dict[Place, Figures] = {}
    if level is not None:
        for place, named, squares, gram in zip(
            places, found.measured, found.squares, found.grams, strict=True
        ):
            measured[place] = Figures(tuple(named), squares, gram)
    return Ahead(
        total=found.total,
        penalty=None if names == [BASE] else found.penalty,
        values=dict(zip(names, found.values, strict=True)),
        contributions=dict(zip(names, found.contributions, strict=True)),
        gradients={p: g for p, g in zip(places, found.gradients, strict=True) if g is not None},
        metrics=dict(zip(names, found.metrics, strict=True)),
        errors=dict(zip(names, found.errors, strict=True)),
        figures=measured,
        scale=_scaled,
    )


def _scaled(gradient: Tensor, by: Tensor) -> Tensor:
    # On the CPU a look at the number costs nothing, and nearly always it is 1.
    if by.device.type == "cpu" and by.item() == 1:
        return gradient
    return multiplied(gradient, by)
