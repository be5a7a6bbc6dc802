"""Pipelines in Lightning's ``Trainer``, in any precision, with automatic or manual optimization.

Examples:
    >>> import torch, equipoise as eq, lightning
    >>> from equipoise.integrations.lightning import PipelineCallback
    >>> regularize = PipelineCallback(eq.Pipeline(l1=eq.Term(eq.l1, inputs="hidden", weight=0.1)))
    >>> class Model(lightning.LightningModule):
    ...     def training_step(self, batch, batch_idx):
    ...         hidden = self.layer(batch)
    ...         return regularize(base=hidden.square().mean(), hidden=hidden).total
    >>> trainer = lightning.Trainer(callbacks=[regularize], ...)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from equipoise._errors import InputError
from equipoise._evaluation import Evaluation
from equipoise._pipeline import Pipeline
from equipoise._track import Track
from equipoise.tracking._window import Window, check_given
from equipoise.transforms._attach import Handle, attach
from equipoise.transforms._transform import GradientTransform

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "`equipoise.integrations.lightning` needs Lightning 2.6, got an environment without it. "
        "Use `pip install 'equipoise[lightning]'`."
    ) from error

__all__ = ["PipelineCallback"]


class PipelineCallback(Callback):
    """A pipeline as a callback: call it in ``training_step``, and give it to the ``Trainer``.

    The call is the pipeline's own, with ``step`` set to the trainer's ``global_step`` and gradients
    tracked as ``track`` says; give ``step=self.current_epoch`` for schedules over epochs. Where
    Lightning logs, it logs the mean of every figure over all micro-batches since it last did, under
    ``prefix``; those named in ``prog_bar`` stand in the progress bar too.

    ``transform`` acts once in every optimizer step, on gradients that are accumulated, reduced over
    processes and unscaled. *Before* the module's ``configure_gradient_clipping`` and the trainer's
    ``gradient_clip_val``, which act on what it returns. `handles` has one for each optimizer.

    *At the edge:* called in validation, it evaluates the pipeline and neither tracks nor logs. A
    step that a gradient scaler skips leaves transform and state alone. With a fused optimizer under
    a gradient scaler, for which Lightning itself refuses to clip, the transform acts within the
    optimizer. The checkpoint holds the transform's state, and that of ``track`` if it has one.
    Figures are those of this process.

    Examples:
        >>> import equipoise as eq
        >>> from equipoise import tracking, transforms
        >>> from equipoise.integrations.lightning import PipelineCallback
        >>> PipelineCallback(
        ...     eq.Pipeline(l1=eq.Term(eq.l1, inputs="hidden", weight=0.1)),
        ...     track=tracking.every(50),
        ...     transform=transforms.centralize(),
        ...     prog_bar=("l1", "total_grad_norm"),
        ... )
        PipelineCallback(0.1·l1(hidden))
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        track: Track = False,
        transform: GradientTransform | None = None,
        prefix: str = "equipoise/",
        prog_bar: Sequence[str] = (),
    ) -> None:
        check_given(pipeline, transform)
        self.pipeline = pipeline
        self.track = track
        self.transform = transform
        self.prefix = prefix
        self.prog_bar = tuple(prog_bar)
        self.handles: list[Handle] = []
        self._early: set[int] = set()
        self._saved: list[dict[str, Any]] = []
        self._stepped: set[int] = set()
        self._trainer: Trainer | None = None
        self._window = Window()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pipeline})"

    def __call__(self, x: Any = None, /, **inputs: Any) -> Evaluation:  # noqa: ANN401
        """Evaluate the pipeline at the trainer's step; ``inputs`` are as in the pipeline's call."""
        if self._trainer is None:
            raise InputError(
                "the callback must be called by a model in training, for it asks the trainer for "
                "the step, got no trainer. Use `Trainer(callbacks=[...])` with it, or "
                "`callback.pipeline(...)` elsewhere."
            )
        step = self._trainer.global_step
        if not self._trainer.training:
            return self.pipeline(x, **{"step": step, **inputs})
        return self._window.evaluate(self.pipeline, x, inputs, track=self.track, at=step)

    # State

    @property
    def state_key(self) -> str:
        """Where the state stands in a checkpoint: one place for each prefix."""
        return str(self._generate_state_key(prefix=self.prefix))

    def state_dict(self) -> dict[str, Any]:
        """The state of the transforms, and of ``track`` if it has one."""
        return {
            "transforms": [handle.state_dict() for handle in self.handles],
            "track": getattr(self.track, "state_dict", dict)(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; the transforms do so when there are optimizers."""
        self._saved = state_dict["transforms"]
        if state_dict["track"]:
            self.track.load_state_dict(state_dict["track"])  # type: ignore[union-attr]

    # What Lightning calls, in this order

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Learn who trains."""
        self._trainer = trainer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the transform on every optimizer."""
        if self.transform is None:
            return
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self.handles = [attach(self.transform, o, names=pl_module) for o in trainer.optimizers]
        saved, self._saved = self._saved, []
        for handle, state in zip(self.handles, saved, strict=False):
            handle.load_state_dict(state)
        for handle in self.handles:
            # Fused optimizers unscale in their own step, and no earlier; the handle knows of that.
            fused = getattr(handle.optimizer, "_step_supports_amp_scaling", False)
            if not (scaled and fused):
                self._early.add(id(handle.optimizer))
                handle._hooks.pop(0).remove()  # noqa: SLF001

    def on_train_batch_start(self, *_: object) -> None:
        """Forget a batch that was given up."""
        self._window.drop()

    def on_after_backward(self, *_: object) -> None:
        """Take note of figures whose gradients have passed."""
        self._window.settle()

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        optimizer: Optimizer,
    ) -> None:
        """Transform the gradients: complete by now, unscaled, and not yet clipped."""
        first = id(optimizer) not in self._stepped
        self._stepped.add(id(optimizer))
        if id(optimizer) not in self._early or _overflown(trainer, optimizer):
            return
        handle = next(h for h in self.handles if h.optimizer is optimizer)
        handle._give_back()  # noqa: SLF001
        handle._run(first_of_step=first)  # noqa: SLF001

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log, if the batch ended in an optimizer step and Lightning logs this one."""
        stepped, self._stepped = self._stepped, set()
        for handle in self.handles:
            handle._give_back()  # noqa: SLF001
        if not stepped or not trainer._logger_connector.should_update_logs:  # noqa: SLF001
            return
        figures = self._window.means()
        for number, handle in enumerate(self.handles):
            place = f"{number}/" if len(self.handles) > 1 else ""
            figures.update({f"{place}{name}": f for name, f in handle.metrics().items()})
        named = {f"{self.prefix}{name}": figure for name, figure in figures.items()}
        for name, figure in figures.items():
            shown = name in self.prog_bar
            pl_module.log(f"{self.prefix}{name}", figure, prog_bar=shown, logger=False)
        # To the loggers directly: what is not measured at a step, Lightning would repeat there.
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001

    def teardown(self, *_: object, **__: object) -> None:
        """Take the transforms off; their figures and states can still be read."""
        for handle in self.handles:
            handle.remove()
        self._early, self._trainer = set(), None


def _overflown(trainer: Trainer, optimizer: Optimizer) -> bool:
    """Whether the gradient scaler is going to skip this step, as it will ask itself."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return False
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())  # noqa: SLF001
