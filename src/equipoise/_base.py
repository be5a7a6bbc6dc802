"""The base: the task loss, a term of that name, or given at the call as a tensor or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from equipoise._context import compiling
from equipoise._errors import InputError, InputTypeError, OptionError
from equipoise._term import Term

Base = Tensor | Callable[..., Any]


def check_base_term(term: Term) -> None:
    """Refuse a weight of its own, and steps without it."""
    if isinstance(term.weight, Tensor) or term.weight != 1.0:
        raise OptionError(
            f"the base must have weight 1, got {term.weight!r}. "
            "Use weights on the other terms, or another name."
        )
    if term.every != 1:
        raise OptionError(
            f"the base must be evaluated at every step, got every={term.every}. "
            "Use `every` on the other terms, or another name."
        )


def check_base(base: object, *, again: bool, alone: bool) -> None:
    """Refuse none at all, two of them, and what is no scalar and no function."""
    if base is None:
        if alone:
            raise InputError(
                "a pipeline must have a term or a base to evaluate, got neither. "
                "Use `Pipeline(l1=Term(eq.l1))`, say."
            )
        return
    if again:
        raise InputError(
            "the base must be given once, got a term and an argument. "
            "Use `pipeline.without('base')` to give it at the call."
        )
    if isinstance(base, Tensor) and base.numel() != 1:
        raise InputError(f"`base` must be a scalar, got shape {tuple(base.shape)}. Use `.mean()`.")
    if isinstance(base, Tensor) and base.is_complex():
        raise InputTypeError(
            f"`base` must be a real number, got {base.dtype}. Use `.abs()` or `.real`."
        )
    if not isinstance(base, Tensor) and not callable(base):
        raise InputTypeError(
            f"`base` must be a scalar tensor or a function, got {type(base).__name__}. "
            "Use the task loss."
        )


def base_term(base: Callable[..., Any], inputs: Mapping[str, Any]) -> Term:
    """The term of a function whose parameters are named like inputs.

    Those that are no input must have a default and come last: it stays as it is.
    """
    names = []
    for name, optional in _parameters(base):
        if optional and name not in inputs:
            break
        names.append(name)
    if not names or any(name not in inputs for name in names):
        raise InputError(
            f"a base function's parameters must be named like inputs ({', '.join(inputs)}), got "
            f"{', '.join(names) or 'none'}. Use `lambda {', '.join(inputs) or 'x'}: ...`, say."
        )
    return Term(base, inputs=names)


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, bool]]:
    """Each parameter's name, and whether it has a default."""
    if isinstance(function, nn.Module):
        yield from _parameters(function.forward)
    elif compiling() and isinstance(function, FunctionType):
        # The compiler cannot trace `inspect.signature` of a function that is made inside, nor look
        # at its defaults: a call that misses an argument has to say so itself.
        for name in function.__code__.co_varnames[: function.__code__.co_argcount]:
            yield name, True
    else:
        for name, parameter in inspect.signature(function).parameters.items():
            yield name, parameter.default is not parameter.empty
