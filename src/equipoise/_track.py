"""What a call is told of tracking: a level, or a policy that is asked at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from equipoise._errors import OptionError, check_choice
from equipoise._recorder import Level

Track = bool | Level | Callable[[int | None], bool | Level]
"""Whether gradients are tracked at a step, and what of them; or a function that says so."""


@runtime_checkable
class Observer(Protocol):
    """A tracking policy that wants to be shown every total."""

    def observe(self, total: Tensor, /) -> None:
        """Take note of a total."""


def level_at(track: Track, step: int | None) -> Level | None:
    """What is tracked at a step, None for nothing; refuse what is no answer to that."""
    decided = track(step) if callable(track) else track
    if isinstance(decided, bool) or decided is None:
        return "norms" if decided else None
    if callable(decided):
        raise OptionError(
            f"`track` must be a level or a function of the step, got one that returns {decided!r}. "
            "Use it with its arguments: `track=tracking.every(100)`."
        )
    if not isinstance(decided, str):  # 0 would be found among the choices, as it equals False
        raise OptionError(
            f"`track` must be False, True, 'norms' or 'gram', got {decided!r}. "
            "Use `bool(...)`, which for a tensor waits for the device."
        )
    check_choice("track", decided, (False, True, "norms", "gram"))
    return decided
