"""Numbers that may follow a schedule: whatever a transform takes as a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import OptionError, check_number

Amount = float | Callable[[int], float]
"""A number, or a function of the step, counted from 0 by the transform itself."""

STEP = "step"

Bounds = tuple[float, float]
"""The least and the most that a number may be."""

AT_LEAST_0: Bounds = (0.0, math.inf)


class Amounts:
    """The numbers of one transform, checked when it is built, and again at every step."""

    def __init__(self, bounds: Mapping[str, Bounds] | None = None, /, **amounts: Amount) -> None:
        self.bounds = bounds or {}
        self.amounts = amounts
        for name, amount in amounts.items():
            if not callable(amount):
                self._check(name, amount)

    @property
    def scheduled(self) -> bool:
        """Whether any of them changes."""
        return any(callable(amount) for amount in self.amounts.values())

    def init(self, _params: Sequence[Tensor]) -> dict[str, Any]:
        """The state: which step comes next, if that matters."""
        return {STEP: torch.zeros((), dtype=torch.int64)} if self.scheduled else {}

    def at(self, state: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        """Every number at this step, and the state of the next."""
        if not self.scheduled:
            return list(self.amounts.values()), {}  # type: ignore[arg-type]
        step = int(state[STEP])
        now = [self._value(n, a, step) for n, a in self.amounts.items()]
        return now, {STEP: state[STEP] + 1}

    def _value(self, name: str, amount: Amount, step: int) -> float:
        value = amount(step) if callable(amount) else amount
        try:
            self._check(name, value)
        except OptionError as error:
            error.add_note(f"from the schedule {_written(amount)} at step {step}")
            raise
        return value

    def _check(self, name: str, value: object) -> None:
        low, high = self.bounds.get(name, (-math.inf, math.inf))
        check_number(name, value, low=low, high=high)

    def __str__(self) -> str:
        return ", ".join(_written(amount) for amount in self.amounts.values())


def _written(amount: Amount) -> str:
    if callable(amount) and not hasattr(amount, "to_config"):
        return getattr(amount, "__name__", type(amount).__name__)
    return repr(amount)
