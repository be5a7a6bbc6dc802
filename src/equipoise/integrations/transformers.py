"""Pipelines in the ``Trainer`` of Transformers, and in those made from it.

Examples:
    >>> import equipoise as eq, transformers
    >>> from equipoise.integrations.transformers import PipelineCallback
    >>> regularize = PipelineCallback(
    ...     eq.Pipeline(certain=eq.Term(eq.entropy, inputs="logits", weight=0.01))
    ... )
    >>> def loss(outputs, labels, num_items_in_batch=None):
    ...     base = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    ...     return regularize.loss(
    ...         base / num_items_in_batch, num_items_in_batch, logits=outputs.logits
    ...     )
    >>> trainer = transformers.Trainer(..., compute_loss_func=loss)  # doctest: +SKIP
    >>> regularize.add_to(trainer)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise._errors import InputError, OptionError, check_choice
from equipoise._pipeline import Pipeline
from equipoise._track import Track
from equipoise.tracking._window import Window, check_given
from equipoise.transforms._attach import Handle, attach
from equipoise.transforms._transform import GradientTransform

try:
    from transformers import Trainer, TrainerCallback, TrainerState
except ImportError as error:
    raise ImportError(
        "`equipoise.integrations.transformers` needs Transformers 5 and Accelerate, got an "
        "environment without them. Use `pip install 'equipoise[transformers]'`."
    ) from error

__all__ = ["PipelineCallback", "PipelineTrainer"]

Where = Literal["compute_loss_func", "compute_loss"]


class PipelineCallback(TrainerCallback):
    """A pipeline as a callback: `add_to` a trainer, and let `loss` be what it trains with.

    Every penalty has scale exactly 1 in an optimizer step, however many micro-batches and processes
    share it. Each entry of ``trainer.state.log_history`` that has the loss, and so whatever the
    trainer reports to, has the mean of every figure since the last one, under ``prefix``. The loss
    of an evaluation is the base alone.

    ``transform`` acts once in every optimizer step, on gradients that are accumulated, reduced over
    processes and unscaled, as the last thing before the update. `handle` has its figures.

    *At the edge:* the trainer clips *before* the optimizer steps, so that a transform beside a
    ``max_grad_norm`` is refused: write the clip into a chain, where you see the order. The
    ``grad_norm`` that the trainer logs is then that before the transform; where a gradient is not
    finite, the trainer spreads NaN to all while it takes that norm. The transform's state is in the
    optimizer's, and so in every checkpoint. Figures are those of this process.

    Examples:
        >>> import equipoise as eq
        >>> from equipoise import tracking
        >>> from equipoise.integrations.transformers import PipelineCallback
        >>> PipelineCallback(
        ...     eq.Pipeline(certain=eq.Term(eq.entropy, inputs="logits", weight=0.01)),
        ...     track=tracking.every(50),
        ... )
        PipelineCallback(0.01·certain(logits))
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        track: Track = False,
        transform: GradientTransform | None = None,
        prefix: str = "equipoise/",
    ) -> None:
        check_given(pipeline, transform)
        self.pipeline = pipeline
        self.track = track
        self.transform = transform
        self.prefix = prefix
        self.handle: Handle | None = None
        self._trainer: Trainer | None = None
        self._window = Window()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pipeline})"

    def add_to(self, trainer: Trainer) -> None:
        """Take part in this trainer, which makes its optimizer now if there is a transform."""
        limit = trainer.args.max_grad_norm
        if self.transform is not None and limit:
            raise OptionError(
                "`transform` must see the gradients before they are clipped, got "
                f"max_grad_norm={limit:g}, which clips before it. Use "
                "`TrainingArguments(max_grad_norm=0.0)`, and "
                f"`transforms.chain(..., transforms.clip_by_global_norm({limit:g}))`."
            )
        self._trainer = trainer
        if isinstance(trainer, PipelineTrainer):
            trainer.regularize = self
        # First, so that those who report find every figure in the logs.
        trainer.callback_handler.callbacks.insert(0, self)
        if self.transform is not None:
            # A checkpoint's state is loaded before training begins, into what is attached by then.
            self._attach(trainer.create_optimizer(), trainer.model)

    def loss(
        self,
        base: Tensor | None,
        num_items_in_batch: Tensor | int | None = None,
        /,
        *,
        called_in: Where = "compute_loss_func",
        **inputs: Any,  # noqa: ANN401
    ) -> Tensor:
        """The base and every penalty, each as large as the trainer wants it of this micro-batch.

        ``base`` is the task loss as the trainer wants it without any penalty: usually a sum over
        tokens divided by ``num_items_in_batch``, which is passed on. None is for a pipeline that
        has a base of its own, a mean over the micro-batch. ``inputs`` are as in the pipeline's
        call; its ``step`` is the trainer's ``global_step``, unless given.

        *At the edge:* without gradients, as in an evaluation, the base alone. In an override of
        ``compute_loss``, where the trainer has scaled the loss already, say so with ``called_in``.
        """
        check_choice("called_in", called_in, ("compute_loss_func", "compute_loss"))
        if self._trainer is None:
            raise InputError(
                "`loss` must know how the trainer divides a step, got no trainer. "
                "Use `callback.add_to(trainer)`, and not `callbacks=[callback]`."
            )
        step = self._trainer.state.global_step
        if not torch.is_grad_enabled():
            return self._base(**{"step": step, **inputs}) if base is None else base
        parts = _micro_batches(self._trainer, num_items_in_batch)
        if called_in == "compute_loss_func":
            parts *= _copies(self._trainer, num_items_in_batch)
        if base is not None:
            inputs["base"] = base * parts
        self._window.drop()
        result = self._window.evaluate(self.pipeline, None, inputs, track=self.track, at=step)
        return result.total / parts

    def _base(self, **inputs: Any) -> Tensor:  # noqa: ANN401
        base = self.pipeline(**inputs).base
        if base is None:
            raise InputError(
                "`base` must be the task loss, got None and a pipeline without a base. "
                "Use `callback.loss(base, ...)`, or a term named 'base'."
            )
        return base

    # What the trainer calls, in this order

    def on_train_begin(self, *_: object, model: nn.Module, optimizer: Any, **__: object) -> None:  # noqa: ANN401
        """Follow a trainer that has made its optimizer anew."""
        if self.transform is not None:
            self._attach(optimizer, model)

    def on_substep_end(self, *_: object, **__: object) -> None:
        """Take note of figures whose gradients have passed."""
        self._window.settle()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Take note of the last micro-batch of the step."""
        self._window.settle()

    def on_log(
        self,
        _args: object,
        state: TrainerState,
        _control: object,
        logs: dict[str, float],
        **__: object,
    ) -> None:
        """Put the figures where everybody finds them: into the logs, and into the history."""
        if "loss" not in logs:
            return
        figures = self._window.means(self.prefix)
        if self.handle is not None:
            found = self.handle.metrics().items()
            figures.update({f"{self.prefix}{name}": figure for name, figure in found})
        logs.update(figures)
        state.log_history[-1].update(figures)

    def _attach(self, optimizer: Any, model: nn.Module) -> None:  # noqa: ANN401
        if self.handle is not None and self.handle.optimizer is _innermost(optimizer):
            return
        if self.transform is not None:
            self.handle = attach(self.transform, optimizer, names=model)


class PipelineTrainer(Trainer):
    """A trainer with penalties on what the model put out, beside the loss it computes anyway.

    A subclass says in `pipeline_inputs` what the pipeline reads, and a `PipelineCallback` is added
    to the trainer. The base is the loss of the trainer's own: the model's, that with smoothed
    labels, or that of ``compute_loss_func``. In front of another trainer's class it works as well:
    ``class Mine(PipelineTrainer, Other)``.

    *At the edge:* in an evaluation the pipeline is not asked. The other trainer must return the
    model's outputs with its loss.

    Examples:
        >>> from equipoise.integrations.transformers import PipelineTrainer
        >>> class RegularizedTrainer(PipelineTrainer):
        ...     def pipeline_inputs(self, model, batch, outputs):
        ...         return {"logits": outputs.logits, "weights": list(model.parameters())}
        >>> trainer = RegularizedTrainer(...)  # doctest: +SKIP
        >>> regularize.add_to(trainer)  # doctest: +SKIP
    """

    regularize: PipelineCallback | None = None

    def pipeline_inputs(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        outputs: Any,  # noqa: ANN401
    ) -> Mapping[str, Any]:
        """What the pipeline reads, by name, of the model, its batch and its outputs."""
        raise NotImplementedError(
            "`pipeline_inputs` must say what the pipeline reads, got a trainer without it. "
            "Use a subclass that returns {'logits': outputs.logits}, say."
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # noqa: ANN401
        """The trainer's own loss; in training with the penalties."""
        batch = dict(inputs)  # labels are taken out of it on the way
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if torch.is_grad_enabled():
            if self.regularize is None:
                raise InputError(
                    "a `PipelineTrainer` must have a pipeline, got none. "
                    "Use `PipelineCallback(pipeline).add_to(trainer)` before `train()`."
                )
            loss = self.regularize.loss(
                loss,
                num_items_in_batch,
                called_in="compute_loss",
                **self.pipeline_inputs(model, batch, outputs),
            )
        return (loss, outputs) if return_outputs else loss


def _micro_batches(trainer: Trainer, num_items: Tensor | int | None) -> int:
    """Of how many losses the step's gradient is the sum; 1 where the trainer takes their mean."""
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:  # then the trainer asks itself so, after the loss is computed
        scaled = trainer.compute_loss_func is not None or (
            trainer.model_accepts_loss_kwargs and num_items is not None
        )
    return int(trainer.current_gradient_accumulation_steps) if scaled else 1


def _copies(trainer: Trainer, num_items: Tensor | int | None) -> int:
    """What the trainer multiplies the result of ``compute_loss_func`` with, for processes."""
    if num_items is None or not trainer.args.average_tokens_across_devices:
        return 1
    if trainer.args.n_gpu > 1:
        return int(trainer.args.n_gpu)
    return int(trainer.accelerator.num_processes // trainer.get_tp_size())


def _innermost(optimizer: Any) -> Any:  # noqa: ANN401
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else _innermost(inner)
