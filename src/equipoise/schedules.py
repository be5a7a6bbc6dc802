"""Schedules: a weight as a function of the step, or of the epoch, or of anything that counts up.

Examples:
    >>> from equipoise import schedules
    >>> ramp = schedules.linear(0.0, 0.01, steps=11)
    >>> ramp, ramp(0), ramp(5), ramp(100)
    (linear(0→0.01), 0.0, 0.005, 0.01)

Any function from a number to a number is a schedule too. Those made here also print themselves and
go to and from plain data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from equipoise._errors import OptionError, check_number, nearest

__all__ = [
    "Schedule",
    "chained",
    "constant",
    "cosine",
    "decay",
    "from_config",
    "linear",
    "piecewise",
    "warmup",
]

Number = int | float


@dataclass(frozen=True)
class Schedule:
    """A named rule with its arguments: call it with the step.

    *At the edge:* negative steps are refused.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.constant(0.1)(step=7)
        0.1
    """

    kind: str
    arguments: Mapping[str, Any]

    def __call__(self, step: Number) -> float:
        """The value at this step."""
        check_number("step", step, low=0)
        return _RULES[self.kind](step, **self.arguments)

    def __repr__(self) -> str:
        return _WORDS[self.kind].format(**{k: _plain(v) for k, v in self.arguments.items()})

    def to_config(self) -> dict[str, Any]:
        """As plain data: ``{"linear": {"start": 0.0, "end": 0.01, "steps": 11}}``."""
        return {self.kind: {name: _to_plain(value) for name, value in self.arguments.items()}}


def constant(value: float) -> Schedule:
    """``value`` at every step.

    *At the edge:* must be finite.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.constant(0.5)(3)
        0.5
    """
    check_number("value", value)
    return Schedule("constant", {"value": value})


def linear(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` at step 0 to ``end`` at step ``steps − 1``, and there it stays.

    *At the edge:* with one step it is ``start`` at step 0 and ``end`` after it.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.linear(0.0, 1.0, steps=11)(5)
        0.5
    """
    return _between("linear", start, end, steps)


def cosine(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` to ``end`` along half a cosine wave, in the same time as `linear`.

    *At the edge:* as `linear`.

    Examples:
        >>> from equipoise import schedules
        >>> round(schedules.cosine(1.0, 0.0, steps=11)(5), 6)
        0.5
    """
    return _between("cosine", start, end, steps)


def _between(kind: str, start: float, end: float, steps: int) -> Schedule:
    check_number("start", start)
    check_number("end", end)
    check_number("steps", steps, low=1)
    return Schedule(kind, {"start": start, "end": end, "steps": steps})


def warmup(value: float, steps: int) -> Schedule:
    """``value · step/steps`` until it is ``value``.

    *At the edge:* with no steps it is ``value`` from the beginning.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.warmup(1.0, steps=4)(1)
        0.25
    """
    check_number("value", value)
    check_number("steps", steps, low=0)
    return Schedule("warmup", {"value": value, "steps": steps})


def decay(value: float, rate: float) -> Schedule:
    """``value · rate^step``.

    *At the edge:* ``rate`` must not be negative; above 1 it grows.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.decay(1.0, rate=0.5)(3)
        0.125
    """
    check_number("value", value)
    check_number("rate", rate, low=0)
    return Schedule("decay", {"value": value, "rate": rate})


def piecewise(values: Mapping[int, float]) -> Schedule:
    """The value of the latest step reached: ``{0: 0.0, 1000: 0.1}`` is 0.1 from step 1000 on.

    *At the edge:* must say what holds at step 0.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.piecewise({0: 0.0, 1000: 0.1})(1000)
        0.1
    """
    _check_stages("piecewise", values)
    for value in values.values():
        check_number("values", value)
    return Schedule("piecewise", {"values": _from_zero("piecewise", values)})


def chained(schedules: Mapping[int, Callable[[Number], float]]) -> Schedule:
    """One schedule after another, each counting from the step at which it begins.

    *At the edge:* must say what begins at step 0.

    Examples:
        >>> from equipoise import schedules
        >>> warm_then_fall = schedules.chained(
        ...     {0: schedules.warmup(1.0, steps=10), 10: schedules.decay(1.0, rate=0.5)}
        ... )
        >>> warm_then_fall(5), warm_then_fall(11)
        (0.5, 0.5)
    """
    _check_stages("chained", schedules)
    for schedule in schedules.values():
        if not callable(schedule):
            raise OptionError(
                f"`schedules` must be functions of the step, got {schedule!r}. "
                "Use `constant(...)` for a number."
            )
    return Schedule("chained", {"schedules": _from_zero("chained", schedules)})


def _check_stages(kind: str, stages: object) -> None:
    if not isinstance(stages, Mapping):
        raise OptionError(
            f"`{kind}` must be given a mapping from first steps, got {type(stages).__name__}. "
            f"Use {{0: ..., 1000: ...}}."
        )


def _from_zero(kind: str, stages: Mapping[int, Any]) -> dict[int, Any]:
    for step in stages:
        check_number("step", step, low=0)
    if 0 not in stages:
        raise OptionError(
            f"`{kind}` must say what holds from step 0 on, got steps {sorted(stages)}. "
            "Use a first entry 0."
        )
    return dict(sorted(stages.items()))


def from_config(config: Mapping[str, Mapping[str, Any]]) -> Schedule:
    """Read what `Schedule.to_config` wrote; also after a journey through JSON.

    *At the edge:* an unknown kind or argument is refused by name.

    Examples:
        >>> from equipoise import schedules
        >>> schedules.from_config({"decay": {"value": 1.0, "rate": 0.5}})
        decay(1·0.5^step)
    """
    if not isinstance(config, Mapping):
        raise OptionError(
            f"a schedule must be a mapping from its kind to arguments, got {config!r}. "
            "Use {'constant': {'value': 0.1}} for a number."
        )
    if len(config) != 1:
        raise OptionError(
            f"a schedule must have one kind, got {sorted(config)}. Use {{'linear': {{...}}}}."
        )
    ((kind, arguments),) = config.items()
    if kind not in _MAKERS:
        raise OptionError(
            f"a schedule's kind must be known, got {kind!r}. {nearest(kind, _MAKERS)}"
        )
    known = list(inspect.signature(_MAKERS[kind]).parameters)
    if not isinstance(arguments, Mapping):
        raise OptionError(
            f"`{kind}` takes the arguments {', '.join(known)} by name, got "
            f"{type(arguments).__name__}. Use {{{kind!r}: {{{known[0]!r}: ...}}}}."
        )
    for name in arguments:
        if name not in known:
            raise OptionError(
                f"`{kind}` takes the arguments {', '.join(known)}; got {name!r}. "
                f"{nearest(str(name), known)}"
            )
    try:
        read = {name: _from_plain(name, value) for name, value in arguments.items()}
        return _MAKERS[kind](**read)
    except (TypeError, AttributeError) as error:
        raise OptionError(f"{kind}: {error}. See `equipoise.schedules.{kind}`.") from error


def _progress(step: Number, steps: int) -> float:
    return min(step / max(steps - 1, 1), 1.0)


def _latest(step: Number, stages: Mapping[int, Any]) -> tuple[int, Any]:
    begin = max(start for start in stages if start <= step)
    return begin, stages[begin]


def _decayed(step: Number, value: float, rate: float) -> float:
    try:
        return value * float(rate) ** step if value else 0.0
    except OverflowError:
        return math.copysign(math.inf, value)


def _chained(step: Number, schedules: Mapping[int, Callable[[Number], float]]) -> float:
    begin, schedule = _latest(step, schedules)
    return cast("float", schedule(step - begin))


_RULES: dict[str, Callable[..., float]] = {
    "constant": lambda _step, value: value,
    "linear": lambda step, start, end, steps: start + (end - start) * _progress(step, steps),
    "cosine": lambda step, start, end, steps: (
        start + (end - start) * (1 - math.cos(math.pi * _progress(step, steps))) / 2
    ),
    "warmup": lambda step, value, steps: value * min(step / steps, 1.0) if steps else value,
    "decay": _decayed,
    "piecewise": lambda step, values: _latest(step, values)[1],
    "chained": _chained,
}
_WORDS = {
    "constant": "constant({value})",
    "linear": "linear({start}→{end})",
    "cosine": "cosine({start}→{end})",
    "warmup": "warmup(0→{value})",
    "decay": "decay({value}·{rate}^step)",
    "piecewise": "piecewise({values})",
    "chained": "chained({schedules})",
}
_MAKERS: dict[str, Callable[..., Schedule]] = {
    f.__name__: f for f in (chained, constant, cosine, decay, linear, piecewise, warmup)
}


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{step}: {_plain(v)}" for step, v in value.items())
    return f"{value:g}" if isinstance(value, int | float) else repr(value)


def _to_plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {step: _to_plain(v) for step, v in value.items()}
    if isinstance(value, Schedule):
        return value.to_config()
    if callable(value):
        raise OptionError(
            f"only schedules of `equipoise.schedules` go to plain data, got {value!r}. "
            "Use one of them, or keep this pipeline in code."
        )
    return float(value) if isinstance(value, float) else value  # numpy's is no plain one


def _from_plain(name: str, value: Any) -> object:  # noqa: ANN401
    if name == "values":
        return {_first_step(step): v for step, v in value.items()}
    if name == "schedules":
        return {_first_step(step): from_config(v) for step, v in value.items()}
    return value


def _first_step(step: object) -> object:
    """The number that JSON made a text of; what is no number is refused with the other steps."""
    if isinstance(step, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(step)
    return step
