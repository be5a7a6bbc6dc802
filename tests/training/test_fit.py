"""Runs over epochs: their steps, their figures, their files, and going on from these."""

import gc
import importlib.util
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import equipoise as eq
from equipoise import Pipeline, Term, balance, tracking, transforms
from equipoise.training import TrainStep, fit, parameters
from equipoise.training import _progress as progress_module

PIPELINE = Pipeline(
    decay=Term(eq.l2, inputs="weights", weight=1e-2),
    small=Term(eq.l2, inputs="prediction", weight=0.1, options={"reduction": "mean"}),
)


class Augmented(TensorDataset):
    """Adds noise to every sample it gives, from torch's generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


def data(kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    """Twenty samples."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20, 3, generator=generator)
    return kind(x, x.sum(1, keepdim=True))


def loader(own: str | None = None, kind: type[TensorDataset] = Augmented) -> DataLoader[Any]:
    """Seven batches of three, shuffled, by torch's generator or by that of one of its parts."""
    source = data(kind)
    if own is None:
        return DataLoader(source, batch_size=3, shuffle=True)
    generator = torch.Generator().manual_seed(8)
    if own == "loader":
        return DataLoader(source, batch_size=3, shuffle=True, generator=generator)
    sampler = RandomSampler(source, generator=generator)
    if own == "sampler":
        return DataLoader(source, batch_size=3, sampler=sampler)
    return DataLoader(source, batch_sampler=BatchSampler(sampler, 3, drop_last=False))


def made(**options: Any) -> TrainStep:
    """A step with dropout, transform and balancer."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    return TrainStep(
        model,
        F.mse_loss,
        PIPELINE,
        torch.optim.Adam(model.parameters(), lr=0.01),
        inputs={"weights": parameters(model)},
        transform=transforms.chain(transforms.add_noise(1e-4), transforms.clip_by_global_norm(1.0)),
        balancer=balance.GradientShare({"small": 0.1}),
        track=tracking.every(2),
        **options,
    )


def values(step: TrainStep) -> list[Tensor]:
    """The model's parameters."""
    return [p.detach() for p in step.model.parameters()]


def assert_same(first: TrainStep, second: TrainStep) -> None:
    """Both have trained to the same bits."""
    assert first.number == second.number
    for a, b in zip(values(first), values(second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("own", [None, "loader", "sampler", "batch sampler"])
@pytest.mark.parametrize("stop", [{"steps": 3}, {"steps": 7}, {"epochs": 1}, {"steps": 10}])
@pytest.mark.parametrize("every", [None, 1])
def test_an_interrupted_run_goes_on_exactly(
    tmp_path: Path, stop: dict[str, int], own: str | None, every: int | None
) -> None:
    """Stopped within an epoch or after it and resumed from the file: the run's own bits.

    Whoever has the generator that shuffles.
    """
    path = tmp_path / "run.pt"
    whole = made()
    fit(whole, loader(own), epochs=3, progress=False)

    part = made()
    options = {"epochs": 3, **stop}
    fit(part, loader(own), checkpoint=path, checkpoint_every=every, progress=False, **options)
    assert part.number == stop.get("steps", 7)
    rest = made()
    torch.manual_seed(99)
    fit(rest, loader(own), epochs=3, checkpoint=path, resume=True, progress=False)
    assert_same(rest, whole)


@pytest.mark.parametrize("stop", [{"epochs": 1}, {"steps": 10}])
def test_persistent_workers_give_the_same_batches(tmp_path: Path, stop: dict[str, int]) -> None:
    """Workers that stay draw a seed once in a run, and once more in a resumed one: no matter."""

    def lasting() -> DataLoader[Any]:
        options = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(data(), batch_size=3, shuffle=True, **options)

    path, whole, rest = tmp_path / "run.pt", made(), made()
    torch.manual_seed(0)
    fit(whole, lasting(), epochs=3, progress=False)
    part = made()
    torch.manual_seed(0)
    fit(part, lasting(), checkpoint=path, progress=False, **{"epochs": 3, **stop})
    fit(rest, lasting(), epochs=3, checkpoint=path, resume=True, progress=False)
    assert_same(rest, whole)


def test_a_file_in_the_middle_is_enough(tmp_path: Path) -> None:
    """A run that was killed between two files goes on from the last one."""
    path = tmp_path / "run.pt"
    whole = made()
    fit(whole, loader(), epochs=2, progress=False)

    def kill(_metrics: dict[str, float], number: int) -> None:
        if number == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(
            made(),
            loader(),
            epochs=2,
            sink=kill,
            log_every=1,
            checkpoint=path,
            checkpoint_every=4,
            progress=False,
        )
    rest = made()
    fit(rest, loader(), epochs=2, checkpoint=path, resume=True, progress=False)
    assert_same(rest, whole)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def test_resume_without_a_file_begins(tmp_path: Path) -> None:
    """The same command starts a run and goes on with it; a finished one does nothing more."""
    path = tmp_path / "run.pt"
    step, plain = made(), made()
    torch.manual_seed(0)
    fit(step, loader(), checkpoint=path, resume=True, progress=False)
    torch.manual_seed(0)
    fit(plain, loader(), progress=False)
    assert_same(step, plain)
    again = made()
    fit(again, loader(), checkpoint=path, resume=True, progress=False)
    assert_same(again, step)


def test_an_epoch_ends_with_an_update() -> None:
    """Seven batches in groups of three are three updates, the last of one batch."""
    step = made(accumulate=3)
    fit(step, loader(), epochs=2, progress=False)
    assert (step.number, step.pending) == (6, 0)


def test_steps_may_span_epochs() -> None:
    """With `steps` alone the loader begins again as often as needed."""
    step = made()
    fit(step, loader(), steps=17, progress=False)
    assert step.number == 17


def test_a_sink_is_given_the_figures() -> None:
    """Every so many updates: evaluation and transform, by name, with the number of the update."""
    rows: list[tuple[int, dict[str, float]]] = []
    fit(
        made(),
        loader(),
        epochs=2,
        sink=lambda m, n: rows.append((n, m)),
        log_every=4,
        progress=False,
    )
    assert [number for number, _ in rows] == [4, 8, 12]
    assert {"total", "base", "small_weighted", "clip_by_global_norm/norm"} <= rows[0][1].keys()
    assert all(isinstance(x, float) for _, metrics in rows for x in metrics.values())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_row_is_the_mean_since_the_last(accumulate: int) -> None:
    """Values are means over all calls, norms over the tracked ones: no row falls between them."""
    rows: list[dict[str, float]] = []
    step = made(accumulate=accumulate)
    fit(step, loader(), steps=8, sink=lambda m, _: rows.append(m), log_every=4, progress=False)

    step, calls, windows = made(accumulate=accumulate), [], []
    while step.number < 8:
        for x, y in loader():
            calls.append(step(x, y).metrics())
            if step.pending and len(calls) % 7 == 0:  # the last batch of an epoch
                step.update()
            if step.number % 4 == 0 and not step.pending:
                windows.append(calls[sum(map(len, windows)) :])
            if step.number == 8:
                break
    assert "base_grad_norm" not in windows[0][-1]  # tracked are the updates 0, 2, 4, 6
    for row, window in zip(rows, windows, strict=True):
        for name in ("total", "base", "small_weighted", "small_grad_norm", "base_grad_norm"):
            found = [call[name] for call in window if name in call]
            assert row[name] == pytest.approx(sum(found) / len(found), rel=1e-6), name


def test_no_call_is_kept_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before a row is full its calls are gone, but for their figures."""
    alive: list[weakref.ref[eq.Evaluation]] = []
    call = TrainStep.__call__

    def watched(step: TrainStep, x: Any, target: Any) -> eq.Evaluation:
        gc.collect()
        assert not any(ref() for ref in alive[:-1])  # the run itself has the last one in hand
        result = call(step, x, target)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(TrainStep, "__call__", watched)
    fit(made(), loader(), sink=lambda _m, _n: None, log_every=100, progress=False)
    assert len(alive) == 7


@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_is_told_the_epoch(tmp_path: Path, batched: bool) -> None:
    """Samplers that shuffle by the epoch do so anew in each, also in a resumed run.

    One inside a sampler of batches is told too.
    """

    class Counting(SequentialSampler):
        def __init__(self, source: TensorDataset) -> None:
            super().__init__(source)
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    samplers = [Counting(data()) for _ in range(2)]
    loaders = [
        DataLoader(data(), batch_sampler=BatchSampler(sampler, 10, drop_last=False))
        if batched
        else DataLoader(data(), batch_size=10, sampler=sampler)
        for sampler in samplers
    ]
    path = tmp_path / "run.pt"
    fit(made(), loaders[0], epochs=9, steps=3, checkpoint=path, progress=False)
    fit(made(), loaders[1], epochs=3, checkpoint=path, resume=True, progress=False)
    assert [sampler.told for sampler in samplers] == [[0, 1], [1, 2]]


def test_a_failing_sink_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    """What a logger raises is logged, and the run ends as without it."""

    def sink(_metrics: dict[str, float], _number: int) -> None:
        raise ConnectionError("no network")

    step, plain = made(), made()
    with caplog.at_level(logging.ERROR, "equipoise"):
        torch.manual_seed(0)
        fit(step, loader(), sink=sink, log_every=3, progress=False)
    torch.manual_seed(0)
    fit(plain, loader(), progress=False)
    assert_same(step, plain)
    assert [r.getMessage() for r in caplog.records] == [
        f"the sink failed at step {n}; training goes on" for n in (3, 6)
    ]


def test_text_without_tqdm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no tqdm, lines on standard error say how far training is."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "tqdm" else find(name, *a)
    )
    monkeypatch.setattr(progress_module, "SECONDS", 0.0)
    fit(made(), loader(), log_every=1)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"training: 2/7 steps, loss [\d.]+", lines[1])
    assert lines[-1].startswith("training: 7/7 steps, loss ")


def test_a_bar_with_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    """With tqdm there is a bar that ends full and shows the loss."""
    fit(made(), loader(), log_every=7)
    shown = capsys.readouterr().err
    assert "7/7" in shown
    assert "loss=" in shown


def test_a_second_run_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The end that is shown is that of this run, after however many updates before it."""
    step = made()
    fit(step, loader(), epochs=2, progress=False)
    fit(step, loader())
    assert "21/21" in capsys.readouterr().err


def test_no_progress_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """`progress=False` writes nothing."""
    fit(made(), loader(), progress=False)
    assert capsys.readouterr() == ("", "")


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no step": (
        lambda: fit(nn.Linear(1, 1), loader()),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`step` must be a TrainStep, got Linear. Use",
    ),
    "no file": (
        lambda: fit(made(), loader(), resume=True),
        eq.OptionError,
        "`checkpoint` must name a file to write to or to go on from, got None. Use",
    ),
    "no folder": (
        lambda: fit(made(), loader(), checkpoint="nowhere/run.pt", progress=False),
        eq.InputError,
        "`checkpoint` must be in a folder that is there, got 'nowhere/run.pt'. Use `pathlib.Path('",
    ),
    "no pair": (
        lambda: fit(made(), [torch.ones(2, 3)], progress=False),
        eq.InputTypeError,
        "a batch must be a pair (x, target), got Tensor. Use a `collate_fn`",
    ),
    "three": (
        lambda: fit(made(), [(1, 2, 3)], progress=False),
        eq.InputTypeError,
        "a batch must be a pair (x, target), got tuple of 3. Use",
    ),
    "no data": (
        lambda: fit(made(), [], steps=3, progress=False),
        eq.InputError,
        "`loader` must have batches to train on, got none. Use more data.",
    ),
    "epochs": (
        lambda: fit(made(), loader(), epochs=0),
        eq.OptionError,
        "`epochs` must be a finite number at least 1, got 0",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong use is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_another_loader_is_refused(tmp_path: Path) -> None:
    """A run with a generator of the loader's own cannot go on without it."""
    path = tmp_path / "run.pt"
    fit(made(), loader("loader"), steps=3, checkpoint=path, progress=False)
    with pytest.raises(eq.InputError, match=r"own generators .* were 1, got one with 0\."):
        fit(made(), loader(), checkpoint=path, resume=True, progress=False)
