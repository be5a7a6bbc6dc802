"""A term: a penalty in its place, with its inputs, weight and options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

from equipoise._context import compiling
from equipoise._errors import (
    InputTypeError,
    OptionError,
    check_choice,
    check_flag,
    check_number,
    nearest,
)

NanPolicy = Literal["propagate", "raise", "skip"]
"""What a value that is NaN or inf does."""

Weight = float | Tensor | Callable[[int], float]
"""A number, a 0-d tensor, or a function of the step."""

RESERVED_INPUTS = ("base", "options", "step", "track")


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Term:
    """A penalty, the inputs it reads, its weight and its options.

    ``inputs`` names one input or several, in the order of the penalty's arguments; without it the
    term reads the one tensor that the pipeline is called with. ``weight`` is a finite number, a 0-d
    tensor (differentiated only if it requires grad) or a function of the step. ``penalty`` is any
    callable that returns a scalar tensor, or that and a mapping of metrics.

    ``every=n`` evaluates the term at steps 0, n, 2n, … only, with n times its weight, so that its
    mean gradient stays the same (lazy regularization; Karras et al. 2020); ``rescale=False``
    leaves the weight alone. ``differentiable=False`` evaluates it without a graph.
    ``enabled=False`` leaves it out, where a weight of 0 evaluates and reports it.

    ``nan_policy`` says what a value that is NaN or inf does: ``"propagate"`` it into the total,
    ``"raise"`` (waits for the device), or ``"skip"`` the term for this step: it then contributes 0
    and sends gradient 0 to its inputs, and is still reported as it is.

    *At the edge:* options, the number of inputs and the weight are checked here, not at the first
    step. A `functools.partial` is a penalty with options. A negative weight means what it says.

    Examples:
        >>> import equipoise as eq
        >>> eq.Term(eq.l1, inputs="hidden", weight=1e-3)
        Term(l1, inputs=('hidden',), weight=0.001)
        >>> eq.Term(eq.entropy, options={"mod": "bonus"})
        Traceback (most recent call last):
            ...
        equipoise._errors.OptionError: `entropy` takes the options ... Did you mean 'mode'?
    """

    penalty: Callable[..., Any]
    inputs: tuple[str, ...] | None
    weight: Weight
    options: Mapping[str, Any]
    enabled: bool
    differentiable: bool
    every: int
    rescale: bool
    nan_policy: NanPolicy

    def __init__(
        self,
        penalty: Callable[..., Any],
        *,
        inputs: str | Sequence[str] | None = None,
        weight: Weight = 1.0,
        options: Mapping[str, Any] | None = None,
        enabled: bool = True,
        differentiable: bool = True,
        every: int = 1,
        rescale: bool = True,
        nan_policy: NanPolicy = "propagate",
    ) -> None:
        if not callable(penalty):
            raise InputTypeError(
                f"`penalty` must be callable, got {type(penalty).__name__}. "
                "Use a function such as `eq.l1`, or a lambda."
            )
        if isinstance(penalty, type) and issubclass(penalty, nn.Module):
            raise InputTypeError(
                f"`penalty` must be a module, got its class {penalty.__name__}. "
                f"Use `{penalty.__name__}()`."
            )
        check_mapping(options)
        function, given = _unwrapped(penalty, dict(options or {}))
        read = names_of(inputs)
        check_weight(weight)
        for name, flag in ("enabled", enabled), ("differentiable", differentiable):
            check_flag(name, flag)
        check_flag("rescale", rescale)
        check_choice("nan_policy", nan_policy, ("propagate", "raise", "skip"))
        check_every(every)
        check_options(function, given, 1 if read is None else len(read))
        values = {
            "penalty": function,
            "inputs": read,
            "weight": weight,
            "options": MappingProxyType(given),
            "enabled": enabled,
            "differentiable": differentiable,
            "every": every,
            "rescale": rescale,
            "nan_policy": nan_policy,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        changed = {
            name: value
            for name, default in DEFAULTS.items()
            if (value := getattr(self, name)) is not default
            and (isinstance(value, Tensor) or value != default)
        }
        words = [penalty_name(self.penalty)]
        words += [f"{name}={_show(value)}" for name, value in changed.items()]
        return f"Term({', '.join(words)})"

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {name: getattr(self, name) for name in ("penalty", *DEFAULTS)}
        return _rebuilt, ({**settings, "options": dict(self.options)},)

    def with_changes(self, **changes: Any) -> Term:  # noqa: ANN401
        """A copy with other settings, checked again."""
        settings = {name: getattr(self, name) for name in ("penalty", *DEFAULTS)}
        return _rebuilt({**settings, **changes})


DEFAULTS: dict[str, Any] = {
    "inputs": None,
    "weight": 1.0,
    "options": {},
    "enabled": True,
    "differentiable": True,
    "every": 1,
    "rescale": True,
    "nan_policy": "propagate",
}


def _rebuilt(settings: dict[str, Any]) -> Term:
    settings = dict(settings)
    return Term(settings.pop("penalty"), **settings)


def _show(value: object) -> str:
    if isinstance(value, Tensor):
        return "<tensor>"
    return repr(dict(value) if isinstance(value, Mapping) else value)


def _unwrapped(
    penalty: Callable[..., Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A partial's keywords are options; positional ones belong to the function."""
    if isinstance(penalty, functools.partial) and not penalty.args:
        return _unwrapped(penalty.func, {**penalty.keywords, **options})
    return penalty, options


def penalty_name(penalty: Callable[..., Any]) -> str:
    """What to call a penalty in print."""
    if isinstance(penalty, functools.partial):
        return penalty_name(penalty.func)
    return getattr(penalty, "__name__", type(penalty).__name__)


def check_weight(weight: object) -> None:
    """Refuse a weight that is no finite number, no 0-d tensor and no function."""
    if isinstance(weight, Tensor):
        if weight.dim():
            raise OptionError(
                f"`weight` must be a scalar, got a tensor of shape {tuple(weight.shape)}. "
                "Use one term for each weight."
            )
        if weight.is_complex():
            raise OptionError(
                f"`weight` must be a real number, got {weight.dtype}. Use `.abs()` or `.real`."
            )
    elif not callable(weight):
        check_number("weight", weight)


def check_every(every: object) -> None:
    """Refuse what is no number of steps."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(
            f"`every` must be a whole number of steps, at least 1, got {every!r}. Use 4, say."
        )


def check_mapping(options: object) -> None:
    """Refuse options that have no names."""
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(
            f"`options` must be a mapping from names to values, got {type(options).__name__}. "
            "Use {'scale': 2.0}, say."
        )


def in_term(name: str) -> AbstractContextManager[None]:
    """A region whose errors say which term they come from; the compiler shows where by itself."""
    return nullcontext() if compiling() else _noted(name)


@contextmanager
def _noted(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in the term {name!r}")
        raise


def names_of(inputs: object) -> tuple[str, ...] | None:
    """The names of a term's inputs; refuse those a call could not tell from its own arguments."""
    if inputs is None:
        return None
    names = (inputs,) if isinstance(inputs, str) else inputs
    if not isinstance(names, Sequence):
        raise OptionError(
            f"`inputs` must be a name or a sequence of names, in the order of the arguments, got "
            f"{type(inputs).__name__}. Use ('teacher', 'student'), say."
        )
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(
                f"`inputs` must be names that can be keywords, got {name!r}. Use 'hidden', say."
            )
        if name in RESERVED_INPUTS:
            raise OptionError(
                f"`inputs` must not be {', '.join(RESERVED_INPUTS)}, which the call itself takes, "
                f"got {name!r}. Use another name."
            )
    if not names:
        raise OptionError(
            "`inputs` must name at least one input, got none. Use None for the only one."
        )
    return tuple(names)


def check_options(penalty: Callable[..., Any], options: Mapping[str, Any], inputs: int) -> None:
    """Refuse options the penalty does not take, and a number of inputs it cannot take."""
    # Some functions written in C have no signature, and the compiler traces any of them wrongly.
    signature = None if compiling() else _signature(penalty)
    if signature is None:
        return
    parameters = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for name in options:
            if name not in known:
                raise OptionError(
                    f"`{penalty_name(penalty)}` takes the options {', '.join(known)}; "
                    f"got {name!r}. {nearest(name, known)}"
                )
    try:
        signature.bind(*range(inputs), **options)
    except TypeError as error:
        raise OptionError(
            f"`{penalty_name(penalty)}` must be callable with {inputs} input(s) and the options "
            f"{sorted(options)}, got: {error}. Use `inputs` to name one input an argument."
        ) from error


def _signature(penalty: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(penalty.forward if isinstance(penalty, nn.Module) else penalty)
    except (TypeError, ValueError):  # some functions written in C have none
        return None


def weight_at(name: str, term: Term, step: int | None) -> float | Tensor:
    """The weight at a step, lazy rescaling included; that of a base is 1."""
    if name == "base":
        return 1.0
    weight = term.weight
    if callable(weight) and not isinstance(weight, Tensor):
        if step is None:
            raise OptionError(
                f"the weight of {name!r} is a function of the step and needs one, got step=None. "
                "Use `pipeline(..., step=step)`."
            )
        weight = weight(step)
        check_weight(weight)
    return weight * term.every if term.rescale and term.every > 1 else weight


def is_due(name: str, term: Term, step: int | None) -> bool:
    """Whether a lazily evaluated term has its turn."""
    if term.every == 1:
        return True
    if step is None:
        raise OptionError(
            f"the term {name!r} with every={term.every} needs the step, got step=None. "
            "Use `pipeline(..., step=step)`."
        )
    check_number("step", step, low=0)
    return step % term.every == 0


def in_formula(name: str, term: Term) -> str:
    """The term as it stands in the pipeline's formula."""
    call = f"{name}({', '.join(term.inputs or ('x',))})"
    if name == "base":
        return call
    weight = term.weight
    if isinstance(weight, Tensor):
        written = "w"
    elif callable(weight):
        written = repr(weight) if hasattr(weight, "to_config") else penalty_name(weight)
    else:
        written = f"{weight:g}"
    lazily = f" every {term.every} steps" if term.every > 1 else ""
    call = call if written == "1" else f"{written}·{call}"
    return f"[{call}{lazily}]" if lazily else call
