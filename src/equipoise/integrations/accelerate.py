"""Pipelines in a loop of your own that Accelerate carries to its devices.

Examples:
    >>> import torch, accelerate, equipoise as eq
    >>> from equipoise.integrations.accelerate import AcceleratedPipeline
    >>> accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = accelerator.prepare(model, optimizer)
    >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, inputs="y", weight=0.1))
    >>> regularize = AcceleratedPipeline(pipeline, accelerator, optimizer)
    >>> for batch in torch.ones(4, 3, 2):
    ...     with accelerator.accumulate(model):
    ...         y = model(batch)
    ...         accelerator.backward(regularize(base=y.square().mean(), y=y).total)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> regularize.step
    2
"""

from __future__ import annotations

from typing import Any

import torch

from equipoise._errors import InputTypeError, check_count
from equipoise._evaluation import Evaluation
from equipoise._pipeline import Pipeline
from equipoise._track import Track
from equipoise.tracking._window import Window, check_given
from equipoise.transforms._attach import Handle, attach
from equipoise.transforms._transform import GradientTransform

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(
        "`equipoise.integrations.accelerate` needs Accelerate 1, got an environment without it. "
        "Use `pip install 'equipoise[accelerate]'`."
    ) from error

__all__ = ["AcceleratedPipeline"]


class AcceleratedPipeline:
    """A pipeline that counts the steps of a prepared optimizer, logs, and transforms gradients.

    The call is the pipeline's own, with ``step`` set to the number of updates so far and gradients
    tracked as ``track`` says. After every ``log_every`` updates ``accelerator.log`` gets the mean
    of every figure since the last time, under ``prefix``.

    ``transform`` acts once in every update, on gradients that are accumulated, reduced over
    processes and unscaled, as the last thing before the update: after ``clip_grad_norm_`` where you
    call it. `handle` has its figures.

    *At the edge:* ``optimizer`` must be the prepared one. An update that a gradient scaler skips is
    none: step, transform and its state stay. Called without gradients, as in an evaluation, it
    evaluates the pipeline and neither tracks nor logs. ``save_state`` holds the step, the state of
    the transform, and that of ``track`` if it has one. Figures are those of this process.

    Examples:
        >>> import torch, accelerate, equipoise as eq
        >>> from equipoise.integrations.accelerate import AcceleratedPipeline
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> optimizer = accelerator.prepare(torch.optim.SGD([torch.ones(1, requires_grad=True)]))
        >>> AcceleratedPipeline(
        ...     eq.Pipeline(l1=eq.Term(eq.l1, inputs="y")), accelerator, optimizer, track=True
        ... )
        AcceleratedPipeline(l1(y) at step 0)
    """

    def __init__(
        self,
        pipeline: Pipeline,
        accelerator: Accelerator,
        optimizer: AcceleratedOptimizer,
        *,
        track: Track = False,
        transform: GradientTransform | None = None,
        log_every: int = 10,
        prefix: str = "equipoise/",
    ) -> None:
        check_given(pipeline, transform)
        for name, value, kind, use in (
            ("accelerator", accelerator, Accelerator, "Accelerator()"),
            ("optimizer", optimizer, AcceleratedOptimizer, "accelerator.prepare(optimizer)"),
        ):
            if not isinstance(value, kind):
                raise InputTypeError(
                    f"`{name}` must be of type {kind.__name__}, got {type(value).__name__}. "
                    f"Use `{use}`."
                )
        check_count("log_every", log_every)
        self.pipeline = pipeline
        self.accelerator = accelerator
        self.track = track
        self.log_every = log_every
        self.prefix = prefix
        self.step = 0
        self.handle: Handle | None = None if transform is None else attach(transform, optimizer)
        self._window = Window()
        optimizer.optimizer.register_step_post_hook(self._updated)
        accelerator.register_for_checkpointing(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pipeline} at step {self.step})"

    def __call__(self, x: Any = None, /, **inputs: Any) -> Evaluation:  # noqa: ANN401
        """Evaluate the pipeline at this step; ``inputs`` are as in the pipeline's call."""
        if not torch.is_grad_enabled():
            return self.pipeline(x, **{"step": self.step, **inputs})
        self._window.settle()
        return self._window.evaluate(self.pipeline, x, inputs, track=self.track, at=self.step)

    def figures(self) -> dict[str, float]:
        """The mean of every figure since they were last read or logged, as Python numbers."""
        self._window.settle()
        figures = self._window.means(self.prefix)
        if self.handle is not None:
            found = self.handle.metrics().items()
            figures.update({f"{self.prefix}{name}": figure for name, figure in found})
        return figures

    def state_dict(self) -> dict[str, Any]:
        """The step, the transform's state, and that of ``track`` if it has one."""
        return {
            "step": self.step,
            "transform": {} if self.handle is None else self.handle.state_dict(),
            "track": getattr(self.track, "state_dict", dict)(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.step = state_dict["step"]
        if self.handle is not None:
            self.handle.load_state_dict(state_dict["transform"])
        if state_dict["track"]:
            self.track.load_state_dict(state_dict["track"])  # type: ignore[union-attr]

    def _updated(self, *_: object) -> None:
        self.step += 1
        if self.step % self.log_every == 0:
            self.accelerator.log(self.figures(), step=self.step)
        else:
            self._window.settle()
