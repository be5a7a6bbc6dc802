"""A pipeline in somebody else's loop: it is given the step, and its figures wait to be logged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise._context import whole
from equipoise._errors import InputTypeError
from equipoise._evaluation import Evaluation
from equipoise._host import on_host
from equipoise._pipeline import Pipeline
from equipoise._track import Observer, Track
from equipoise.transforms._transform import check_transform


def check_given(pipeline: object, transform: object) -> None:
    """Refuse what is no pipeline, or no transform where there is one."""
    if not isinstance(pipeline, Pipeline):
        raise InputTypeError(
            f"`pipeline` must be a Pipeline, got {type(pipeline).__name__}. "
            "Use `Pipeline(sparsity=Term(...))`, say."
        )
    if transform is not None:
        check_transform("transform", transform)


class Window:
    """The means of all figures since they were last read, kept on the device until then.

    An evaluation counts once its backward pass has run, which the host knows: `settle`.
    """

    def __init__(self) -> None:
        self._pending: list[Evaluation] = []
        self._sums: dict[str, float | Tensor] = {}
        self._counts: dict[str, int] = {}

    def evaluate(
        self,
        pipeline: Pipeline,
        x: Any,  # noqa: ANN401
        inputs: dict[str, Any],
        *,
        track: Track,
        at: int,
    ) -> Evaluation:
        """Call the pipeline at a step of the host; a ``step`` among the inputs is for schedules."""
        level = track(at) if callable(track) else track
        result = pipeline(x, **{"step": at, "track": level, **inputs})
        if isinstance(track, Observer):
            track.observe(result.total)
        self._pending.append(result)
        return result

    def settle(self) -> None:
        """Add up what was evaluated, now that its gradients have passed."""
        pending, self._pending = self._pending, []
        for result in pending:
            for name, figure in result._figures().items():  # noqa: SLF001
                value = whole(figure.detach()) if isinstance(figure, Tensor) else figure
                if isinstance(value, Tensor) and value.device.type != "mps":
                    value = value.to(torch.float64)
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    def drop(self) -> None:
        """Forget what was evaluated and never differentiated."""
        self._pending = []

    def means(self, prefix: str = "") -> dict[str, float]:
        """Python numbers, in one transfer from the device; the next window begins."""
        sums, counts = on_host(self._sums), self._counts
        self._sums, self._counts = {}, {}
        return {f"{prefix}{name}": total / counts[name] for name, total in sums.items()}
