"""A loss function with a pipeline's terms added, for code that expects a loss function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from equipoise._errors import InputError, InputTypeError
from equipoise._evaluation import Evaluation
from equipoise._pipeline import Pipeline
from equipoise._recorder import BASE
from equipoise._track import Track
from equipoise.training._capture import Captures

Inputs = Mapping[str, Any] | Captures | Callable[[], Mapping[str, Any]]
"""Further inputs of a pipeline, read at every call: a mapping, captures, or a function."""

OWN = ("prediction", "target", "base", "step", "track", "options")
"""What the criterion itself gives the pipeline, or keeps from it."""


def wrap_loss(
    loss_fn: Callable[[Any, Any], Tensor],
    pipeline: Pipeline,
    /,
    *,
    inputs: Inputs | None = None,
    track: Track = False,
) -> WrappedLoss:
    """A loss function with the terms of a pipeline added, called as before.

    ``loss_fn(prediction, target)`` becomes the pipeline's base. Terms read ``prediction``,
    ``target`` and whatever ``inputs`` holds: a mapping, `capture`'s handle, or a function that
    returns a mapping. A term without names reads the prediction. The result is a module, used
    wherever a criterion is expected; ``last`` is the evaluation of its last call, ``step`` goes to
    schedules, and ``pipeline`` may be replaced between calls.

    *At the edge:* in ``eval()`` mode it returns the loss alone, so that no penalty gets into a
    validation loss; the terms are still evaluated and in ``last``. Under `torch.no_grad` nothing is
    tracked. A pipeline with a base of its own is refused. Copies and pickles leave ``last`` out.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise import training
        >>> pipeline = eq.Pipeline(small=eq.Term(eq.l2, inputs="prediction", weight=0.1))
        >>> criterion = training.wrap_loss(torch.nn.MSELoss(), pipeline)
        >>> criterion(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
        tensor(1.)
        >>> criterion.last.metrics()
        {'total': 1.0, 'base': 0.5, 'penalty': 0.5, 'small': 5.0, 'small_weighted': 0.5}
    """
    return WrappedLoss(loss_fn, pipeline, inputs, track)


class WrappedLoss(nn.Module):
    """What `wrap_loss` makes: a criterion whose last evaluation can be read.

    *At the edge:* a loss that is a module is a part of it, and moves and is saved with it.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise import training
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, weight=eq.schedules.linear(0.0, 1.0, 3)))
        >>> criterion = training.wrap_loss(torch.nn.functional.mse_loss, pipeline)
        >>> criterion.step = 1
        >>> criterion(torch.tensor([2.0]), torch.tensor([2.0]))
        tensor(1.)
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        pipeline: Pipeline,
        inputs: Inputs | None,
        track: Track,
    ) -> None:
        super().__init__()
        _check(loss_fn, inputs)
        self.loss_fn = loss_fn
        self.inputs = inputs
        self.track = track
        self.step: int | None = None
        self.last: Evaluation | None = None
        self.pipeline = pipeline

    @property
    def pipeline(self) -> Pipeline:
        """The terms that are added to the loss."""
        return self._pipeline

    @pipeline.setter
    def pipeline(self, pipeline: Pipeline) -> None:
        if not isinstance(pipeline, Pipeline):
            raise InputTypeError(
                f"`pipeline` must be a Pipeline, got {type(pipeline).__name__}. "
                "Use `Pipeline(l1=Term(eq.l1))`, say."
            )
        if BASE in pipeline.terms:
            raise InputError(
                "the wrapped loss is the base, got a pipeline that has one of its own. "
                "Use `pipeline.without('base')`."
            )
        self._pipeline = pipeline

    def forward(self, prediction: Any, target: Any) -> Tensor:  # noqa: ANN401
        """The loss with the penalties; in ``eval()`` mode without."""
        given = self._given()
        for name in OWN:
            if name in given:
                other = "`criterion.step`" if name == "step" else "another name"
                raise InputError(
                    f"`inputs` must not hold {name!r}, which is the criterion's own to give, got "
                    f"it again. Use {other}."
                )
        nameless = any(term.inputs is None for term in self.pipeline.terms.values())
        result = self.pipeline(
            prediction if nameless else None,
            base=_as_base(self.loss_fn),
            step=self.step,
            track=self.track,
            prediction=prediction,
            target=target,
            **given,
        )
        self.last = result
        return result.total if self.training else cast("Tensor", result.base)

    def take_last(self) -> Evaluation:
        """The last evaluation, handed over: the criterion keeps nothing of it."""
        last, self.last = self.last, None
        if last is None:
            raise InputError(
                "the criterion must have been called to have an evaluation, got no call or one "
                "that was taken. Use `criterion(prediction, target)` first."
            )
        return last

    def extra_repr(self) -> str:
        """The pipeline, as a formula."""
        return f"{self.pipeline}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last": None}

    def _given(self) -> Mapping[str, Any]:
        if self.inputs is None:
            return {}
        if isinstance(self.inputs, Captures):
            return self.inputs.take()
        return self.inputs() if callable(self.inputs) else self.inputs


def _as_base(loss_fn: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss under the names that a pipeline knows its arguments by."""

    def base(prediction: Any, target: Any) -> Tensor:  # noqa: ANN401
        return loss_fn(prediction, target)

    return base


def _check(loss_fn: object, inputs: object) -> None:
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise InputTypeError(
            f"`loss_fn` must be a function of prediction and target, got {loss_fn!r}. "
            "Use `torch.nn.functional.cross_entropy` or `torch.nn.CrossEntropyLoss()`, say."
        )
    if not (inputs is None or callable(inputs) or isinstance(inputs, Mapping | Captures)):
        raise InputTypeError(
            "`inputs` must be a mapping, captures, or a function that returns a mapping, got "
            f"{type(inputs).__name__}. Use `{{'weights': weights}}` or `capture(...)`, say."
        )
