"""When to track."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equipoise._errors import OptionError, check_choice, check_count, check_number
from equipoise._recorder import Level


@dataclass(frozen=True)
class Every:
    """Track at steps 0, n, 2n, …"""

    steps: int
    level: Level

    def __repr__(self) -> str:
        return f"every({self.steps}, level={self.level!r})"

    def __call__(self, step: int | None) -> Level | Literal[False]:
        """The level at this step."""
        if step is None:
            raise OptionError(
                f"tracking every {self.steps} steps needs the step, got step=None. "
                "Use `pipeline(..., step=step)`."
            )
        check_number("step", step, low=0)
        return self.level if step % self.steps == 0 else False


def every(steps: int, *, level: Level = "norms") -> Every:
    """Track at every so many steps, beginning with step 0.

    *At the edge:* a call without ``step`` is an error.

    Examples:
        >>> from equipoise import tracking
        >>> when = tracking.every(100)
        >>> when(0), when(50), when(200)
        ('norms', False, 'norms')
    """
    check_count("steps", steps)
    check_choice("level", level, ("norms", "gram"))
    return Every(steps, level)


def always(_step: int | None = None, /) -> Level:
    """Track norms at every step: what a debugging session wants.

    *At the edge:* needs no step. ``track="gram"`` does the same with inner products.

    Examples:
        >>> from equipoise import tracking
        >>> tracking.always(7)
        'norms'
    """
    return "norms"


class OnSpike:
    """Track the step after the total rose by a factor; see `on_spike`."""

    def __init__(self, factor: float, level: Level) -> None:
        self.factor = factor
        self.level = level
        self._previous: float | None = None
        self._spiked = False
        self._arriving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, _step: int | None = None, /) -> Level | Literal[False]:
        """The level now: a spike is answered once."""
        while self._arriving and _is_here(self._arriving[0][1]):
            self._take(float(self._arriving.popleft()[0]))
        spiked, self._spiked = self._spiked, False
        return self.level if spiked else False

    def __repr__(self) -> str:
        return f"on_spike(factor={self.factor:g}, level={self.level!r})"

    def observe(self, total: Tensor) -> None:
        """Send the total on its way to the host; the pipeline calls this."""
        total = total.detach()
        if total.device.type != "cuda":
            self._arriving.append((total.clone(), None))
            return
        there = torch.empty((), dtype=total.dtype, pin_memory=True)
        there.copy_(total, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(total.device))
        self._arriving.append((there, arrived))

    def state_dict(self) -> dict[str, float | bool | None]:
        """What the next step depends on; waits for the totals that are still on their way."""
        while self._arriving:
            total, arrived = self._arriving.popleft()
            if arrived is not None:
                arrived.synchronize()
            self._take(float(total))
        return {"previous": self._previous, "spiked": self._spiked}

    def load_state_dict(self, state: dict[str, float | bool | None]) -> None:
        """Go on from where `state_dict` was taken."""
        self._previous = state["previous"]
        self._spiked = bool(state["spiked"])

    def _take(self, total: float) -> None:
        # Written so that NaN, which is never below a limit, counts as a spike.
        before = self._previous
        if before is not None and not total - before <= (self.factor - 1) * abs(before):
            self._spiked = True
        if total - total == 0:  # finite
            self._previous = total


def _is_here(arrived: torch.cuda.Event | None) -> bool:
    return arrived is None or bool(arrived.query())  # type: ignore[no-untyped-call]


def on_spike(factor: float = 2.0, *, level: Level = "norms") -> OnSpike:
    """Track the step after the total rose by a factor over the step before, or became NaN.

    Keeps the last total, so make one for each training run; it has a ``state_dict``. The total
    travels to the host by itself and is looked at when it has arrived: on a GPU that may be a step
    later, and nothing ever waits.

    *At the edge:* a rise is measured against the size of the last finite total, whatever its sign.

    Examples:
        >>> import torch
        >>> from equipoise import tracking
        >>> when = tracking.on_spike(factor=2.0)
        >>> for total in (1.0, 1.5, 4.0):
        ...     when.observe(torch.tensor(total))
        >>> when(), when()
        ('norms', False)
    """
    check_number("factor", factor, above=1.0)
    check_choice("level", level, ("norms", "gram"))
    return OnSpike(factor, level)
