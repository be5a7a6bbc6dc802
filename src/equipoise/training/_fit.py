"""Many steps, over epochs, with checkpoints to go on from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import InputError, InputTypeError, OptionError, check_count
from equipoise._evaluation import Evaluation
from equipoise.tracking._window import Window
from equipoise.training._progress import Progress
from equipoise.training._random import random_state, set_random_state
from equipoise.training._step import TrainStep

Sink = Callable[[dict[str, float], int], object]
"""What loggers have in common: ``sink(metrics, step)``."""

logger = logging.getLogger("equipoise")


class _Rows(Window):
    """The means of all figures since the last row, of steps that have run already."""

    def add(self, result: Evaluation) -> None:
        """Count a call, whose backward pass has run."""
        self._pending.append(result)
        self.settle()


@dataclass(eq=False)
class _Place:
    """Where in the data training is: so many batches into an epoch that began so."""

    epoch: int = 0
    batch: int = 0
    begun: dict[str, Any] = field(default_factory=dict)
    # The loader's own generators as they are now: what the next epoch is drawn from.
    drawn: list[Tensor] = field(default_factory=list)


def fit(
    step: TrainStep,
    loader: Iterable[Any],
    /,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    sink: Sink | None = None,
    log_every: int = 50,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool = True,
) -> None:
    """Train on the batches of a loader, which are pairs ``(x, target)``.

    Training ends after so many ``epochs`` in all, or when ``step.number`` is ``steps``, whichever
    comes first; with neither there is one epoch. Every ``log_every`` updates ``sink(metrics,
    number)`` is given the mean of every figure over all calls since the last row, of gradient norms
    over those that were tracked, and what the transform recorded last: ``wandb.log``, a Lightning
    logger's ``log_metrics`` and MLflow's ``log_metrics`` fit as they are.

    ``checkpoint`` is a file that is written after every epoch and every ``checkpoint_every``
    updates; ``resume=True`` goes on from it if it is there. Also in the middle of an epoch the
    order of the data is that of the interrupted run: the epoch's batches so far are drawn again and
    passed over, from the same random state, also that of the loader's and its samplers' own
    generators. A sampler that counts epochs (``set_epoch``) is told which one it is.

    *At the edge:* at the end of an epoch an update is made with the calls there are, fewer than
    ``accumulate`` or not. What a sink raises is logged and does not stop training. The bar needs
    tqdm (the extra ``progress``); without it there are lines of text. NumPy's generators and those
    of persistent workers are not saved, and neither is a row that is not full. In several processes
    each needs a file of its own.

    Examples:
        >>> import torch, equipoise as eq
        >>> from equipoise import training
        >>> model = torch.nn.Linear(1, 1)
        >>> x = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
        >>> data = torch.utils.data.TensorDataset(x, 3.0 * x)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        >>> step = training.TrainStep(
        ...     model,
        ...     torch.nn.functional.mse_loss,
        ...     eq.Pipeline(),
        ...     torch.optim.SGD(model.parameters(), lr=0.5),
        ... )
        >>> training.fit(step, loader, epochs=20, progress=False)
        >>> step.number, round(model.weight.item(), 2)
        (80, 3.0)
    """
    if not isinstance(step, TrainStep):
        raise InputTypeError(
            f"`step` must be a TrainStep, got {type(step).__name__}. "
            "Use `training.TrainStep(model, loss_fn, pipeline, optimizer)`."
        )
    _check_counts(epochs=epochs, steps=steps, checkpoint_every=checkpoint_every)
    check_count("log_every", log_every)
    if checkpoint is None and (resume or checkpoint_every is not None):
        raise OptionError(
            "`checkpoint` must name a file to write to or to go on from, got None. "
            "Use `checkpoint='run.pt'`."
        )
    if epochs is None and steps is None:
        epochs = 1
    _check_folder(checkpoint)
    if getattr(loader, "persistent_workers", False):
        iter(loader)  # makes the workers now: their seed is part of no epoch, resumed or not
    place = _place(step, loader, checkpoint if resume else None)
    total = _total(step, loader, place, epochs, steps)
    bar = Progress(shown=progress, done=step.number, total=total)
    rows = _Rows() if sink is not None or progress else None
    try:
        while (epochs is None or place.epoch < epochs) and (steps is None or step.number < steps):
            for _ in _epoch(step, loader, place, steps, rows):
                bar.advance()
                if rows is not None and step.number % log_every == 0:
                    bar.loss(_log(step, rows, sink))
                if checkpoint_every is not None and step.number % checkpoint_every == 0:
                    _save(step, loader, place, checkpoint)
            _save(step, loader, place, checkpoint)
    finally:
        bar.close()


def _epoch(
    step: TrainStep,
    loader: Iterable[Any],
    place: _Place,
    steps: int | None,
    rows: _Rows | None,
) -> Iterator[None]:
    """Train over the rest of an epoch, and stop after every update."""
    for x, target in _pairs(_batches(loader, place)):
        place.batch += 1
        before = step.number
        result = step(x, target)
        if rows is not None:
            rows.add(result)
        if step.number > before:
            yield
            if step.number == steps:
                return
    if not place.batch:
        raise InputError("`loader` must have batches to train on, got none. Use more data.")
    place.epoch, place.batch = place.epoch + 1, 0
    if step.pending:
        step.update()
        yield


def _batches(loader: Iterable[Any], place: _Place) -> Iterator[Any]:
    """The rest of an epoch; what was trained on already is drawn again as it was then."""
    for part in _parts(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(place.epoch)
    generators = _generators(loader)
    now = random_state()
    if place.batch:
        set_random_state(place.begun["random"])
        _set(generators, place.begun["loader"])
    else:
        place.begun = {"random": now, "loader": [g.get_state() for g in generators]}
    batches = iter(loader)
    if place.batch:
        for _ in islice(batches, place.batch):
            pass
        set_random_state(now)
    return batches


def _parts(loader: Iterable[Any]) -> list[Any]:
    """What may know of epochs, or draw from a generator of its own: the loader and its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    found = [getattr(part, "generator", None) for part in _parts(loader)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _set(generators: Iterable[torch.Generator], states: Iterable[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.cpu())


def _pairs(batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputTypeError(
                f"a batch must be a pair (x, target), got {type(batch).__name__}"
                f"{f' of {len(batch)}' if isinstance(batch, tuple | list) else ''}. "
                "Use a `collate_fn`, or call the step yourself."
            )
        yield batch[0], batch[1]


def _log(step: TrainStep, rows: _Rows, sink: Sink | None) -> float:
    """Give the figures to the sink, whose failures are its own."""
    metrics = rows.means()
    if step.handle is not None:
        metrics.update(step.handle.metrics())
    if sink is not None:
        try:
            sink(metrics, step.number)
        except Exception:
            logger.exception("the sink failed at step %d; training goes on", step.number)
    return metrics["total"]


def _total(
    step: TrainStep,
    loader: Iterable[Any],
    place: _Place,
    epochs: int | None,
    steps: int | None,
) -> int | None:
    """How many updates there will have been, if that can be told."""
    ends = [] if steps is None else [steps]
    if epochs is not None and isinstance(loader, Sized):
        left = (epochs - place.epoch) * -(-len(loader) // step.accumulate)
        ends.append(step.number - place.batch // step.accumulate + left)
    return min(ends, default=None)


# Files


def _save(
    step: TrainStep, loader: Iterable[Any], place: _Place, checkpoint: str | Path | None
) -> None:
    """Write the file as a whole or not at all."""
    if checkpoint is None:
        return
    place.drawn = [generator.get_state() for generator in _generators(loader)]
    path = Path(checkpoint)
    half = path.with_name(f"{path.name}.half")
    torch.save({"step": step.state_dict(), "place": vars(place)}, half)
    half.replace(path)


def _place(step: TrainStep, loader: Iterable[Any], checkpoint: str | Path | None) -> _Place:
    """Where to begin: at the beginning, or where the file says."""
    if checkpoint is None or not Path(checkpoint).exists():
        return _Place()
    saved = torch.load(checkpoint, map_location=step.device, weights_only=True)
    place = _Place(**saved["place"])
    generators = _generators(loader)
    if len(generators) != len(place.drawn):
        raise InputError(
            "a run must go on with the loader it had, whose own generators (with those of its "
            f"samplers) were {len(place.drawn)}, got one with {len(generators)}. Use the same one."
        )
    step.load_state_dict(saved["step"])
    _set(generators, place.drawn)
    return place


def _check_folder(checkpoint: str | Path | None) -> None:
    folder = None if checkpoint is None else Path(checkpoint).parent
    if folder is not None and not folder.is_dir():
        raise InputError(
            f"`checkpoint` must be in a folder that is there, got {str(checkpoint)!r}. "
            f"Use `pathlib.Path({str(folder)!r}).mkdir(parents=True)` first."
        )


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None:
            check_count(name, count)
