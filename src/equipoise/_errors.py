"""The exceptions of equipoise, and the guards that raise them.

::

    EquipoiseError
    ├── OptionError (ValueError)            an option has a value it cannot have
    │   └── UnknownOptionError (TypeError)  there is no such option
    ├── InputError (ValueError)             a tensor has the wrong shape or content
    │   ├── InputTypeError (TypeError)      ... or the wrong type
    │   └── NonFiniteError                  ... or holds NaN or infinities
    └── GradientError (RuntimeError)        a gradient was asked for that does not exist

Every message has three beats: what was asked, what came, what to do. No guard here looks at the
values of a tensor, so none waits for the device.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from torch import Generator, Size, Tensor

P = ParamSpec("P")
R = TypeVar("R")


class EquipoiseError(Exception):
    """Anything equipoise raises on purpose."""


class OptionError(EquipoiseError, ValueError):
    """An option has a value it cannot have."""


class UnknownOptionError(OptionError, TypeError):
    """There is no option of this name."""


class InputError(EquipoiseError, ValueError):
    """A tensor has a shape or content that cannot be worked with."""


class InputTypeError(InputError, TypeError):
    """An input is no tensor, or a tensor of a type that cannot be worked with."""


class NonFiniteError(InputError):
    """A tensor holds NaN or infinities; says which, how many and where first."""

    # Defaults, for pickle makes an exception anew from its message and only then adds the rest.
    def __init__(self, message: str, *, nan: int = 0, inf: int = 0) -> None:
        super().__init__(message)
        self.nan = nan
        self.inf = inf


class GradientError(EquipoiseError, RuntimeError):
    """A gradient was asked for that does not exist."""


def in_words(names: Iterable[object]) -> str:
    """Write a list as a person would: ``'a', 'b' or 'c'``."""
    quoted = [repr(name) for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def in_short(error: Exception) -> str:
    """The first line of what an exception says."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def nearest(name: str, names: Iterable[object]) -> str:
    """Suggest the name that was probably meant, or list all there are."""
    known = {str(each): each for each in names}
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {known[close[0]]!r}?" if close else f"Use {in_words(known.values())}."


def names_its_options(function: Callable[P, R]) -> Callable[P, R]:
    """Make an unknown keyword an error that names the function's options."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = [p.name for p in parameters if p.kind in named]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in options:
                raise UnknownOptionError(
                    f"`{function.__name__}` takes the options {', '.join(options)}; "
                    f"got {name!r}. {nearest(name, options)}"
                )
        return function(*args, **kwargs)

    return checked


def check_choice(option: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else "Use one of them."
        raise OptionError(f"`{option}` must be {in_words(choices)}, got {value!r}. {hint}")


def check_number(
    option: str,
    value: object,
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    high: float = math.inf,
) -> None:
    """Refuse what is not a finite Python number, or lies outside its range."""
    if isinstance(value, Tensor):
        raise OptionError(
            f"`{option}` must be a Python number, got a tensor. "
            "Use `.item()` where waiting for the device is acceptable."
        )
    number = isinstance(value, int | float)
    finite = number and -math.inf < value < math.inf  # type: ignore[operator]
    if not finite or not (value > above and low <= value <= high):  # type: ignore[operator]
        bounds = {"above": above, "at least": low, "at most": high}
        wanted = " and ".join(f"{word} {b:g}" for word, b in bounds.items() if math.isfinite(b))
        hint = "Use one in that range." if finite else "Use a finite one." if number else ""
        raise OptionError(
            f"`{option}` must be a finite number {wanted}".rstrip()
            + f", got {value!r}. {hint or 'Use a number of Python, such as 0.1.'}"
        )


def check_count(option: str, value: object, *, low: int = 1) -> None:
    """Refuse what is not a whole number, or too small a one."""
    check_number(option, value, low=low)
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"`{option}` must be a whole number, got {value!r}. Use `int(...)`.")


def check_flag(option: str, value: object) -> None:
    """Refuse what is neither True nor False: a text such as 'no' would count as True."""
    if not isinstance(value, bool):
        raise OptionError(
            f"`{option}` must be True or False, got {value!r}. Use one of them, without quotes."
        )


def check_generator(value: object) -> None:
    """Refuse a source of random numbers that is none, such as a seed."""
    if value is not None and not isinstance(value, Generator):
        raise OptionError(
            f"`generator` must be a torch.Generator, got {value!r}. "
            "Use `torch.Generator().manual_seed(...)`."
        )


def check_dim(option: str, dim: object, rank: int) -> None:
    """Refuse a dimension that a tensor of this rank does not have; a 0-d tensor has one."""
    size = max(rank, 1)
    if not isinstance(dim, int) or isinstance(dim, bool) or not -size <= dim < size:
        raise OptionError(
            f"`{option}` must be a dimension of the input, which has {rank}, got {dim!r}. "
            f"Use a number from {-size} to {size - 1}."
        )


def check_dims(option: str, dims: object, rank: int) -> None:
    """Refuse one or several dimensions that a tensor does not have, and one named twice."""
    several: list[Any] = list(dims) if isinstance(dims, tuple | list) else [dims]
    for dim in several:
        check_dim(option, dim, rank)
    if len({dim % max(rank, 1) for dim in several}) < len(several):
        raise OptionError(
            f"`{option}` must name each dimension once, got {dims!r}. "
            "Use each number once; negative ones count from the end."
        )


def check_tensor(name: str, value: object) -> None:
    """Refuse what is not a tensor of real floating-point numbers."""
    if not isinstance(value, Tensor):
        named = isinstance(value, tuple | str)
        hint = "`model.parameters()`, tensors without names" if named else "`torch.as_tensor`"
        raise InputTypeError(f"`{name}` must be a tensor, got {type(value).__name__}. Use {hint}.")
    if not value.is_floating_point():
        # Of a complex number `.float()` would drop a part.
        hint = "`.abs()` or `torch.view_as_real`" if value.is_complex() else "`.float()`"
        raise InputTypeError(
            f"`{name}` must hold real floating-point numbers, got {value.dtype}. Use {hint}."
        )


def check_same_shape(first: str, a: Tensor, second: str, b: Tensor) -> None:
    """Refuse two tensors of different shapes: what broadcasts here is nearly always a mistake."""
    check_tensor(first, a)
    check_tensor(second, b)
    if a.shape != b.shape:
        raise InputError(
            f"`{first}` and `{second}` must have one shape, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}. Use `.expand_as` if one of them should be repeated."
        )


def check_fits(name: str, value: Tensor, shape: Size) -> None:
    """Refuse a tensor that does not broadcast to a shape, or would enlarge it."""
    sizes = zip(reversed(value.shape), reversed(shape), strict=False)
    # Compared one by one: the compiler does not find a size that may vary in a tuple.
    if value.dim() > len(shape) or any(n != size and n != 1 for n, size in sizes):  # noqa: PLR1714
        raise InputError(
            f"`{name}` must broadcast to the shape {tuple(shape)}, got {tuple(value.shape)}. "
            "Use `.unsqueeze` to say which dimensions it is constant over."
        )
