"""Pipelines in real loops with Accelerate."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, tracking, transforms
from equipoise.integrations.accelerate import AcceleratedPipeline
from tests.integrations.loops import (
    PIPELINE,
    STEPS,
    Net,
    assert_same,
    batches,
    by_hand,
    clip,
    net,
    norms_by_autograd,
)
from tests.integrations.processes import in_two_processes

Data = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerate keeps what an accelerator is for the whole process; every test has its own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Memory(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    @property
    def tracker(self) -> dict[int, dict[str, float]]:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.rows[-1 if step is None else step] = values


class Run:
    """A loop of one's own, with everything that Accelerate has to say about it."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        momentum: float = 0.0,
        clip: float | None = None,
        pipeline: Pipeline = PIPELINE,
        **options: Any,
    ) -> None:
        tracker = Memory()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, log_with=tracker
        )
        self.accelerator.init_trackers("run")
        self.accelerator.scaler = scaler
        optimizer = torch.optim.SGD((model := net()).parameters(), lr=0.1, momentum=momentum)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        options = {"log_every": 1, **options}
        self.regularize = AcceleratedPipeline(pipeline, self.accelerator, self.optimizer, **options)
        self.rows, self.clip, self.losses = tracker.rows, clip, []

    def train(self, data: Data, factor: Callable[[int], float] = lambda _: 1.0) -> Run:
        """One pass over the data; ``factor`` spoils the loss of a batch."""
        for index, (x, y) in enumerate(data):
            with self.accelerator.accumulate(self.model):
                hidden, logits = self.model(x)
                weights = list(self.model.parameters())
                result = self.regularize(hidden=hidden, logits=logits, labels=y, weights=weights)
                self.losses.append(result.total.item())
                self.accelerator.backward(result.total * factor(index))
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    @property
    def weights(self) -> list[Tensor]:
        """As they are now."""
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_is_that_of_a_loop_by_hand(accumulate: int) -> None:
    """Twenty steps with a ramp, penalties and a base: losses and weights are the loop's."""
    data = batches(8, STEPS * accumulate)
    wanted = by_hand(data, accumulate=accumulate)
    run = Run(accumulate=accumulate).train(data)
    found = torch.tensor(run.losses).view(-1, accumulate).mean(1).tolist()
    assert found == pytest.approx(wanted.losses, rel=1e-6)
    assert_same(run.weights, wanted.weights)
    assert run.regularize.step == STEPS
    assert sorted(run.rows) == list(range(1, STEPS + 1))
    logged = [row["equipoise/total"] for row in run.rows.values()]
    assert logged == pytest.approx(wanted.losses, rel=1e-6)


def test_accumulating_changes_nothing() -> None:
    """Eight micro-batches of one sample train as two of four."""
    trained = [
        Run(accumulate=accumulate).train(batches(size, STEPS * accumulate)).weights
        for size, accumulate in ((1, 8), (4, 2))
    ]
    assert_same(*trained)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_logged_norms_are_those_of_autograd(scale: float | None) -> None:
    """The norm of each term at the inputs is what differentiating it gives, scaled loss or not."""
    data = batches(8, STEPS)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    run, model = Run(track=True, scaler=scaler), net()
    for step, (x, y) in enumerate(data):
        model.load_state_dict(run.accelerator.unwrap_model(run.model).state_dict())
        run.train([(x, y)])
        row, wanted = run.rows[step + 1], norms_by_autograd(model, x, y, step=step)
        assert row["equipoise/base_grad_norm"] == pytest.approx(wanted["base"], rel=1e-6)
        certain = row["equipoise/certain_grad_norm_weighted"]
        assert certain == pytest.approx(wanted["certain"], rel=1e-6)
        if step:  # where its weight is 0 there is no gradient
            sparsity = row["equipoise/sparsity_grad_norm_weighted"]
            assert sparsity == pytest.approx(wanted["sparsity"], rel=1e-6)
        assert all(type(figure) is float for figure in row.values())


def test_each_row_is_the_mean_since_the_last() -> None:
    """With a row every five updates, values are means over all micro-batches of them."""
    data = batches(4, 2 * STEPS)
    run = Run(accumulate=2, log_every=5, track=tracking.every(5), prefix="reg/").train(data)
    assert sorted(run.rows) == [5, 10, 15, 20]
    means = torch.tensor(run.losses).view(-1, 10).mean(1).tolist()
    assert [row["reg/total"] for row in run.rows.values()] == pytest.approx(means, rel=1e-6)
    assert all("reg/certain_grad_norm" in row for row in run.rows.values())


def test_no_evaluation_is_kept() -> None:
    """After an update nothing of it is alive but its figures, also long before they are logged."""
    run = Run(log_every=100, accumulate=2, track=True)
    kept = []
    for x, y in batches(8, 4):
        with run.accelerator.accumulate(run.model):
            hidden, logits = run.model(x)
            inputs = {"hidden": hidden, "logits": logits, "labels": y}
            result = run.regularize(**inputs, weights=list(run.model.parameters()))
            kept.append(weakref.ref(result))
            run.accelerator.backward(result.total)
            del result, hidden, logits, inputs
            run.optimizer.step()
            run.optimizer.zero_grad()
            gc.collect()
        assert [ref() is None for ref in kept[:-1]] == [True] * (len(kept) - 1)
    assert kept[-1]() is None


def test_figures_can_be_read_at_any_time() -> None:
    """`figures` reads what has come since the last row, and begins anew."""
    run = Run(log_every=100).train(batches(8, 3))
    figures = run.regularize.figures()
    assert figures["equipoise/total"] == pytest.approx(sum(run.losses) / 3, rel=1e-6)
    assert run.regularize.figures() == {}


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_transform_sees_whole_unscaled_gradients_once_an_update(scale: float | None) -> None:
    """It runs after accumulation and unscaling, and after the clip that the loop asks for."""
    seen: list[float] = []

    def norm(grads: list[Tensor | None]) -> float:
        seen.append(torch.cat([g.flatten() for g in grads if g is not None]).norm().item())
        return seen[-1]

    data = batches(8, 2 * STEPS)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    chain = transforms.chain(transforms.snapshot("norm", norm), transforms.clip_by_global_norm(0.5))
    wanted = by_hand(data, accumulate=2, change=lambda grads: clip(grads, 0.5))
    run = Run(accumulate=2, scaler=scaler, transform=chain).train(data)
    assert seen == pytest.approx(wanted.norms, rel=1e-5)
    assert max(wanted.norms) > 0.5  # there is something to clip
    assert_same(run.weights, wanted.weights)
    assert [row["equipoise/norm"] for row in run.rows.values()] == pytest.approx(seen, rel=1e-6)
    seen.clear()
    Run(accumulate=2, transform=chain, clip=0.25).train(data)
    assert len(seen) == STEPS
    assert max(seen) <= 0.25 + 1e-6


def test_an_update_that_the_scaler_skips_is_none() -> None:
    """After an overflow the step, the transform and the weights are where they were."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    counted: list[int] = []

    def count(grads: list[Tensor | None]) -> float:
        counted.append(len(grads))
        return 0.0

    run = Run(scaler=scaler, transform=transforms.snapshot("count", count))
    run.train(batches(8, 3), lambda index: float("inf") if index == 1 else 1.0)
    assert run.accelerator.optimizer_step_was_skipped is False
    assert (run.regularize.step, len(counted), sorted(run.rows)) == (2, 2, [1, 2])


def in_each_process(rank: int, folder: str) -> None:
    """Train as one of two processes, each with every second micro-batch."""
    chain = transforms.chain(transforms.snapshot("norm"), transforms.clip_by_global_norm(0.5))
    run = Run(accumulate=2, transform=chain).train(batches(4, 4 * STEPS)[rank::2])
    if rank == 0:
        norms = [row["equipoise/norm"] for row in run.rows.values()]
        torch.save((norms, run.weights), Path(folder) / "0.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Losses are averaged over processes, and the transform sees the reduced gradients."""
    in_two_processes(in_each_process, str(tmp_path))
    norms, trained = torch.load(tmp_path / "0.pt")
    wanted = by_hand(batches(4, 4 * STEPS), accumulate=4, change=lambda grads: clip(grads, 0.5))
    assert norms == pytest.approx(wanted.norms, rel=1e-5)
    assert_same(trained, wanted.weights)


STATEFUL = transforms.chain(
    transforms.clip_by_norm_history(50, 4), transforms.add_noise(0.01, 0.55, seed=3)
)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Step, momentum, noise and norm history go on: weights are equal to the last bit."""
    data = batches(8, 8)

    def begun() -> Run:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Run(transform=STATEFUL, momentum=0.9, track=tracking.on_spike(3.0))

    whole = begun().train(data).weights
    half = begun().train(data[:4])
    half.accelerator.save_state(str(tmp_path))
    resumed = begun()
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.regularize.step == 4
    assert resumed.regularize.track.state_dict() == half.regularize.track.state_dict()
    assert_same(resumed.train(data[4:]).weights, whole, atol=0.0)
    for a, b in zip(resumed.weights, whole, strict=True):
        assert torch.equal(a, b)


def test_its_own_state_holds_the_transforms() -> None:
    """Distributed checkpoints drop what an optimizer's state has beside the usual: it goes on."""
    data = batches(8, 8)
    whole = Run(transform=STATEFUL).train(data).weights
    half = Run(transform=STATEFUL).train(data[:4])
    resumed = Run(transform=STATEFUL)
    resumed.model.load_state_dict(half.model.state_dict())
    usual = half.optimizer.state_dict()
    resumed.optimizer.load_state_dict({key: usual[key] for key in ("state", "param_groups")})
    resumed.regularize.load_state_dict(half.regularize.state_dict())
    for a, b in zip(resumed.train(data[4:]).weights, whole, strict=True):
        assert torch.equal(a, b)


def test_an_evaluation_is_neither_tracked_nor_logged() -> None:
    """Without gradients it evaluates, at the step where training is."""
    run = Run(track=True)
    x, y = batches(8, 1)[0]
    with torch.no_grad():
        hidden, logits = run.model(x)
        inputs = {"hidden": hidden, "logits": logits, "labels": y}
        result = run.regularize(**inputs, weights=list(run.model.parameters()))
    assert result.total.item() == pytest.approx(by_hand([(x, y)]).losses[0], rel=1e-6)
    assert not result.tracked
    assert run.regularize.figures() == {}


def test_schedules_run_over_epochs_where_the_loop_says_so() -> None:
    """`step=` in the call is for the schedules; what is tracked goes by updates."""
    pipeline = Pipeline(l1=Term(eq.l1, weight=lambda epoch: 10.0 + epoch))
    run = Run(pipeline=pipeline, track=tracking.every(2))
    weights = []
    for epoch in range(2):
        for x, _ in batches(8, 3):
            hidden, _ = run.model(x)
            result = run.regularize(hidden, base=hidden.sum(), step=epoch)
            weights.append(result.terms["l1"].weight)
            run.accelerator.backward(result.total)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert weights == [10.0] * 3 + [11.0] * 3
    tracked = ["equipoise/l1_grad_norm" in row for row in run.rows.values()]
    assert tracked == [True, False, True, False, True, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pipeline",
            r"`pipeline` must be a Pipeline, got Net\. Use `Pipeline\(sparsity=Term\(\.\.\.\)\)`",
        ),
        ("accelerator", r"`accelerator` must be of type Accelerator, got Net\. Use `Accelerator"),
        (
            "optimizer",
            r"`optimizer` must be of type AcceleratedOptimizer, got Net\. Use `accelerator\.pre",
        ),
        ("transform", r"`transform` must be gradient transforms, got Net\. Use `clip_by_"),
        ("log_every", r"`log_every` must be a whole number, got 2\.5\. Use `int"),
    ],
)
def test_wrong_arguments_are_refused(name: str, message: str) -> None:
    """Each argument of a wrong kind is named, with what to use."""
    run = Run()
    given = {
        "pipeline": PIPELINE,
        "accelerator": run.accelerator,
        "optimizer": run.optimizer,
        name: 2.5 if name == "log_every" else Net(),
    }
    with pytest.raises(eq.EquipoiseError, match=message):
        AcceleratedPipeline(**given)


def test_it_prints_as_mathematics() -> None:
    """It shows its pipeline, and where it is."""
    run = Run(pipeline=Pipeline(l1=Term(eq.l1, weight=0.5)))
    assert repr(run.regularize) == "AcceleratedPipeline(0.5·l1(x) at step 0)"
