"""One step of training, with everything in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from equipoise._errors import InputError, InputTypeError, OptionError, check_count
from equipoise._evaluation import Evaluation
from equipoise._pipeline import Pipeline
from equipoise._probes import map_tensors
from equipoise._track import Track
from equipoise.balance._balancer import Balancer
from equipoise.training._loss import Inputs, wrap_loss
from equipoise.training._parallel import synchronize, unsynchronized
from equipoise.training._random import random_state, set_random_state
from equipoise.transforms._attach import Handle, attach
from equipoise.transforms._transform import GradientTransform

KINDS: dict[str, tuple[type | UnionType, str, str]] = {
    "model": (nn.Module, "torch.nn.Module", "the model itself"),
    "optimizer": (Optimizer, "torch.optim.Optimizer", "`torch.optim.AdamW(model.parameters())`"),
    "balancer": (Balancer | None, "Balancer", "`balance.GradientShare({'kl': 0.1})`, say"),
    "autocast": (torch.dtype | None, "torch.dtype", "`torch.bfloat16`"),
    "scaler": (GradScaler | None, "torch.amp.GradScaler", "`torch.amp.GradScaler()`"),
}
"""Of each argument: what it is, in words, and what to use."""


class TrainStep:
    """One honest step: ``step(x, target)`` trains the model on a batch and returns the evaluation.

    In order: train mode, the model and the loss under ``autocast``, backward, and after every
    ``accumulate`` calls the gradient ``transform``, the optimizer and the learning-rate
    ``scheduler``. The total is divided by ``accumulate``; with a ``scaler`` (by default there is
    one for float16) it is scaled, and the transform sees gradients without the scale. ``x`` is the
    model's argument, a tuple of its arguments, or a mapping of its keywords; batches are brought to
    the model's device.

    ``inputs`` is for further inputs of the pipeline, as in `wrap_loss`; ``track`` as in a
    pipeline's call. A ``balancer`` updates the weights after every tracked backward pass.
    ``step.number`` counts the updates, and is what schedules are given.

    *At the edge:* an update that a scaler skips counts as one. `update` makes one with fewer calls
    than ``accumulate``, as at the end of an epoch, and divides by their number. A model in
    ``DistributedDataParallel`` reduces gradients once an update, that one too. A state is taken
    between updates only; it holds model, loss, optimizer with transform, scaler, scheduler,
    balancer, tracking policy, the number of updates and the random generators of torch and Python,
    and loads with ``weights_only=True``: training goes on with the same bits.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise import training, transforms
        >>> model = torch.nn.Linear(4, 2)
        >>> step = training.TrainStep(
        ...     model,
        ...     torch.nn.functional.cross_entropy,
        ...     eq.Pipeline(decay=eq.Term(eq.l2, inputs="weights", weight=1e-3)),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     inputs={"weights": training.parameters(model)},
        ...     transform=transforms.clip_by_global_norm(1.0),
        ...     track=True,
        ... )
        >>> result = step(torch.randn(8, 4), torch.randint(2, (8,)))
        >>> result.gradients.dominant(), step.number, model.weight.grad
        ('base', 1, None)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        pipeline: Pipeline,
        optimizer: Optimizer,
        *,
        inputs: Inputs | None = None,
        track: Track = False,
        transform: GradientTransform | None = None,
        balancer: Balancer | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        _check(
            scheduler,
            model=model,
            optimizer=optimizer,
            balancer=balancer,
            autocast=autocast,
            scaler=scaler,
        )
        if balancer is not None and track is False:
            raise OptionError(
                "`track` must say when gradients are measured for the `balancer`, got False. "
                "Use `tracking.every(10)`, say."
            )
        check_count("accumulate", accumulate)
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.criterion = wrap_loss(loss_fn, pipeline, inputs=inputs, track=track)
        self.criterion.to(self.device)
        self.criterion.step = 0
        self._given = pipeline
        self.optimizer = optimizer
        self.handle: Handle | None = None
        if transform is not None:
            self.handle = attach(transform, optimizer, names=model)
        self.balancer = balancer
        self.accumulate = accumulate
        self.autocast = autocast
        if scaler is None and autocast is torch.float16:
            scaler = GradScaler(self.device.type)
        self.scaler = scaler
        self.scheduler = scheduler
        self.pending = 0

    @property
    def number(self) -> int:
        """How many updates there were: the step that schedules are given."""
        return self.criterion.step or 0

    @property
    def pipeline(self) -> Pipeline:
        """The terms, with the weights of the next step."""
        return self.criterion.pipeline

    def __repr__(self) -> str:
        return f"TrainStep({self.pipeline}, number={self.number})"

    def __call__(self, x: Any, target: Any) -> Evaluation:  # noqa: ANN401
        """Train on one batch; with ``accumulate`` the update comes with the last of so many."""
        self.model.train()
        self.criterion.train()
        x, target = self._moved(x), self._moved(target)
        if not self.pending:
            self.optimizer.zero_grad()
        last = self.pending + 1 == self.accumulate
        with nullcontext() if last else unsynchronized(self.model):
            with self._precision():
                loss = self.criterion(_called(self.model, x), target)
            loss = loss if self.accumulate == 1 else loss / self.accumulate
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        result = self.criterion.take_last()
        if self.balancer is not None:
            self.criterion.pipeline = self.balancer.update(result, self.pipeline)
        self.pending += 1
        if last:
            self.update()
        return result

    def update(self) -> None:
        """Let the optimizer use the gradients there are; without any there is nothing to do."""
        if not self.pending:
            return
        if self.pending < self.accumulate:
            synchronize(self.model)
            self._enlarge(self.accumulate / self.pending)
        skipped = False
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale() if self.scheduler is not None else 0.0
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped = self.scheduler is not None and self.scaler.get_scale() < before
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.pending = 0
        self.criterion.step = self.number + 1

    def _enlarge(self, factor: float) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def _moved(self, x: Any) -> Any:  # noqa: ANN401
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), x, where=_is_tensor)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    # Saving

    def _parts(self) -> dict[str, Any]:
        parts = {
            "model": self.model,
            "criterion": self.criterion,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "scheduler": self.scheduler,
            "balancer": self.balancer,
            "track": self.criterion.track,
        }
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, but the data: for `torch.save`."""
        if self.pending:
            raise InputError(
                f"a state must be taken between updates, got {self.pending} of {self.accumulate} "
                "calls since the last. Use `step.update()` first."
            )
        states = {name: part.state_dict() for name, part in self._parts().items()}
        return {**states, "number": self.number, "random": random_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from where `state_dict` was taken, with the same bits."""
        parts = self._parts()
        wanted, got = {*parts, "number", "random"}, set(state_dict)
        if wanted != got:
            raise InputError(
                f"a state must hold {', '.join(sorted(wanted))}, got "
                f"{', '.join(sorted(got)) or 'nothing'}. Use a TrainStep made as the one that was "
                "saved."
            )
        for name, part in parts.items():
            part.load_state_dict(state_dict[name])
        self.optimizer.zero_grad()
        self.pending = 0
        self.criterion.step = int(state_dict["number"])
        if self.balancer is not None:
            # Not to the present one: what was balanced since the state was taken is undone.
            self.criterion.pipeline = self.balancer.apply(self._given)
        set_random_state(state_dict["random"])


def _check(scheduler: object, **given: object) -> None:
    for name, value in given.items():
        kind, words, use = KINDS[name]
        if not isinstance(value, kind):
            raise InputTypeError(
                f"`{name}` must be a {words}, got {type(value).__name__}. Use {use}."
            )
    if isinstance(given["optimizer"], LBFGS):
        raise InputTypeError(
            "`optimizer` must need no closure, got LBFGS, which computes the loss several times a "
            "step. Use `torch.optim.AdamW(model.parameters())`, or LBFGS in a loop of your own."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputTypeError(
            "`scheduler` must go by the number of updates, got a ReduceLROnPlateau, which waits "
            "for a loss of your choice. Use `plateau.step(loss)` yourself, after an evaluation."
        )


def _called(model: nn.Module, x: Any) -> Any:  # noqa: ANN401
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)
