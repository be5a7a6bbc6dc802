"""Pipelines in real runs of Lightning's trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

import equipoise as eq
from equipoise import Pipeline, Term, tracking, transforms
from equipoise.integrations.lightning import PipelineCallback
from tests.integrations.loops import (
    PIPELINE,
    STEPS,
    assert_same,
    batches,
    by_hand,
    clip,
    net,
    norms_by_autograd,
    terms,
    weights,
)
from tests.integrations.processes import in_two_processes


class Memory(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(-1 if step is None else step, {}).update(metrics)


class Module(lightning.LightningModule):
    """The small model, with the pipeline as its loss."""

    def __init__(self, regularize: PipelineCallback, **options: Any) -> None:
        super().__init__()
        self.net, self.regularize, self.options = net(), regularize, options
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        x, y = batch
        hidden, logits = self.net(x)
        inputs = {"hidden": hidden, "logits": logits, "labels": y, "weights": [*self.parameters()]}
        result = self.regularize(**inputs)
        self.losses.append(result.total.item())
        return result.total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), **{"lr": 0.1, **self.options})


def fit(
    module: lightning.LightningModule,
    data: list[tuple[Tensor, Tensor]] | DataLoader[Any],
    *,
    ckpt_path: str | None = None,
    **options: Any,
) -> lightning.Trainer:
    """Train on the CPU, with nothing on the screen and nothing in a folder."""
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": Memory(),
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [module.regularize],
    }
    trainer = lightning.Trainer(**{**settings, **options})
    loader = DataLoader(data, batch_size=None) if isinstance(data, list) else data
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def rows(trainer: lightning.Trainer) -> list[dict[str, float]]:
    """What was logged, by step, without the prefix."""
    return [
        {name.removeprefix("equipoise/"): figure for name, figure in row.items()}
        for _, row in sorted(trainer.logger.rows.items())
    ]


def by_step(losses: list[float], accumulate: int) -> list[float]:
    """Means over the micro-batches of a step."""
    return torch.tensor(losses).view(-1, accumulate).mean(1).tolist()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_is_that_of_a_loop_by_hand(accumulate: int) -> None:
    """Twenty steps with a ramp, penalties and a base: losses and weights are the loop's."""
    data = batches(8, STEPS * accumulate)
    wanted = by_hand(data, accumulate=accumulate)
    module = Module(PipelineCallback(PIPELINE))
    fit(module, data, accumulate_grad_batches=accumulate)
    assert by_step(module.losses, accumulate) == pytest.approx(wanted.losses, rel=1e-6)
    assert_same(list(module.parameters()), wanted.weights)


def test_accumulating_changes_nothing() -> None:
    """Eight micro-batches of one sample train as two of four."""
    trained = []
    for size, accumulate in ((1, 8), (4, 2)):
        module = Module(PipelineCallback(PIPELINE))
        fit(module, batches(size, STEPS * accumulate), accumulate_grad_batches=accumulate)
        trained.append([p.detach() for p in module.parameters()])
    assert_same(*trained)


def test_logged_norms_are_those_of_autograd() -> None:
    """The norm of each term at the inputs, in every row, is what differentiating it gives."""
    data = batches(8, STEPS)
    regularize = PipelineCallback(PIPELINE, track=True)
    logged = rows(fit(Module(regularize), data))
    model = net()
    for step, (row, (x, y)) in enumerate(zip(logged, data, strict=True)):
        wanted = norms_by_autograd(model, x, y, step=step)
        assert row["base_grad_norm"] == pytest.approx(wanted["base"], rel=1e-6)
        assert row["certain_grad_norm_weighted"] == pytest.approx(wanted["certain"], rel=1e-6)
        if step:  # where its weight is 0 there is no gradient
            assert row["sparsity_grad_norm_weighted"] == pytest.approx(wanted["sparsity"], rel=1e-6)
        by_hand_from(model, x, y, step)
    assert len(logged) == STEPS


def by_hand_from(model: torch.nn.Module, x: Tensor, y: Tensor, step: int) -> None:
    """One step of SGD in plain torch."""
    values, by = terms(model, x, y), weights(step)
    loss = sum((by[n] * v for n, v in values.items()), torch.zeros(()))
    params = list(model.parameters())
    with torch.no_grad():
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.sub_(grad, alpha=0.1)


def test_each_row_is_the_mean_since_the_last() -> None:
    """With a row every five steps, values are means over them; norms over the tracked ones."""
    data = batches(8, STEPS)
    every = rows(fit(Module(PipelineCallback(PIPELINE, track=True)), data))
    sparse = PipelineCallback(PIPELINE, track=tracking.every(5))
    logged = fit(Module(sparse), data, log_every_n_steps=5).logger.rows
    assert sorted(logged) == [4, 9, 14, 19]
    for last, row in logged.items():
        window = every[last - 4 : last + 1]
        mean = sum(r["certain"] for r in window) / 5
        assert row["equipoise/certain"] == pytest.approx(mean, rel=1e-6)
        first = window[0]["certain_grad_norm"]
        assert row["equipoise/certain_grad_norm"] == pytest.approx(first, rel=1e-6)


def test_figures_do_not_depend_on_accumulation() -> None:
    """A row is the mean over the step's micro-batches, and one row is written for a step."""
    data = batches(4, 8)
    alone = rows(fit(Module(PipelineCallback(PIPELINE, track=True), lr=0.0), data))
    module = Module(PipelineCallback(PIPELINE, track=True), lr=0.0)
    together = rows(fit(module, data, accumulate_grad_batches=4))
    assert len(together) == 2
    for name in ("base", "certain", "certain_grad_norm", "base_grad_norm"):
        mean = sum(row[name] for row in alone[:4]) / 4
        assert together[0][name] == pytest.approx(mean, rel=1e-6), name


def options_of(precision: str) -> dict[str, Any]:
    """How each precision is had on the CPU."""
    if precision != "scaled":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "scaled"])
def test_a_transform_sees_whole_unscaled_gradients_once_a_step(precision: str) -> None:
    """It runs after accumulation and before the trainer's clip, in every precision."""
    seen: list[float] = []

    def norm(grads: list[Tensor | None]) -> float:
        seen.append(torch.cat([g.flatten() for g in grads if g is not None]).norm().item())
        return seen[-1]

    data = batches(8, STEPS * 2)
    wanted = by_hand(data, accumulate=2, change=lambda grads: clip(grads, 0.5))
    regularize = PipelineCallback(PIPELINE, transform=transforms.snapshot("norm", norm))
    module = Module(regularize)
    options = options_of(precision)
    trainer = fit(module, data, accumulate_grad_batches=2, gradient_clip_val=0.5, **options)
    # Half precision rounds activations to 2⁻⁸ and 2⁻¹¹, and the weights drift apart with them.
    rel = {"32-true": 1e-5, "bf16-mixed": 3e-2, "scaled": 1e-2}[precision]
    assert seen == pytest.approx(wanted.norms, rel=rel)
    assert max(wanted.norms) > 0.5  # the trainer's clip has something to do
    assert [row["norm"] for row in rows(trainer)] == pytest.approx(seen, rel=1e-6)
    if precision == "32-true":
        assert_same(list(module.parameters()), wanted.weights)


def test_a_plain_optimizer_hook_sees_stale_gradients() -> None:
    """Why the callback exists: a step hook of torch runs before Lightning's closure does."""
    seen: list[float | None] = []

    class Hooked(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            weight = self.net.first.weight
            optimizer.register_step_pre_hook(
                lambda *_: seen.append(None if weight.grad is None else weight.grad.norm().item())
            )
            return optimizer

    mine: list[float] = []

    def first(grads: list[Tensor | None]) -> float:
        mine.append(grads[0].norm().item())
        return mine[-1]

    transform = transforms.snapshot("first", first)
    fit(Hooked(PipelineCallback(PIPELINE, transform=transform)), batches(8, 4))
    assert seen[0] is None
    assert seen[1:] == mine[:-1]  # always those of the step before


def test_a_modules_own_clipping_comes_after_the_transform() -> None:
    """`configure_gradient_clipping` gets what the transform returns, and has the last word."""
    seen: list[float] = []

    class Clips(Module):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            seen.extend(p.grad.abs().max().item() for p in self.parameters())
            for p in self.parameters():
                p.grad.zero_()

    module = Clips(PipelineCallback(PIPELINE, transform=transforms.clip_by_value(-1e-3, 1e-3)))
    fit(module, batches(8, 3))
    assert max(seen) == pytest.approx(1e-3)
    assert_same(list(module.parameters()), list(net().parameters()), atol=0.0)


def test_a_step_the_scaler_skips_leaves_the_transform_alone() -> None:
    """An overflow is no gradient: the history of norms has one entry for each real step."""

    class Overflows(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            return loss * float("inf") if index == 2 else loss

    history = transforms.chain(transforms.clip_by_norm_history(90, 10), transforms.skip_nonfinite())
    module = Overflows(PipelineCallback(PIPELINE, transform=history))
    before = net()
    fit(module, batches(8, 3), **options_of("scaled"))
    handle = module.regularize.handles[0]
    assert handle.nonfinite() == {}
    norms = [t for t in flattened(handle.state_dict()["state"]) if t.numel() == 10]
    assert [int(t.isfinite().sum() - (t == 0).sum()) for t in norms[:1]] == [2]
    assert not torch.equal(module.net.first.weight, before.first.weight)


def flattened(state: Any) -> list[Tensor]:
    """Every tensor in a nested state."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for part in parts for tensor in flattened(part)]


def test_a_skipped_step_names_the_guilty_tensor_alone() -> None:
    """The transform looks before the trainer's clip, which would spread NaN to all."""

    class Poisoned(Module):
        def on_after_backward(self) -> None:
            self.net.second.bias.grad[0] = float("nan")

    module = Poisoned(PipelineCallback(PIPELINE, transform=transforms.skip_nonfinite()))
    fit(module, batches(8, 3), gradient_clip_val=0.5)
    assert module.regularize.handles[0].nonfinite() == {"net.second.bias": 3}
    assert_same(list(module.parameters()), list(net().parameters()), atol=0.0)


STATEFUL = transforms.chain(
    transforms.clip_by_norm_history(50, 4), transforms.add_noise(0.01, 0.55, seed=3)
)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Noise and norm history go on from the checkpoint: weights are equal to the last bit."""

    def train(epochs: int, ckpt_path: str | None = None) -> lightning.Trainer:
        module = Module(PipelineCallback(PIPELINE, transform=STATEFUL), momentum=0.9)
        return fit(module, batches(8, 5), max_epochs=epochs, ckpt_path=ckpt_path)

    whole = train(2)
    train(1).save_checkpoint(tmp_path / "half.ckpt")
    resumed = train(2, ckpt_path=str(tmp_path / "half.ckpt"))
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["callbacks"]
    assert [key for key in state if key.startswith("PipelineCallback")] == [
        "PipelineCallback{'prefix': 'equipoise/'}"
    ]


class Stateful(DataLoader[Any]):
    """A loader that goes on behind the batches it gave before it was saved."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        begun = self.at
        for number, batch in enumerate(super().__iter__(), 1):
            if number > begun:
                self.at = number % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_run_resumed_within_an_epoch_goes_on_where_the_loader_does(tmp_path: Path) -> None:
    """From any update, of accumulated batches too: weights and rows to the last bit."""

    def train(*others: lightning.Callback, **options: Any) -> lightning.Trainer:
        regularize = PipelineCallback(PIPELINE, transform=STATEFUL, track=tracking.every(2))
        module = Module(regularize, momentum=0.9)
        loader = Stateful(batches(8, 10), batch_size=None)
        settings = {"max_steps": 6, "max_epochs": -1, "accumulate_grad_batches": 3}
        return fit(module, loader, callbacks=[regularize, *others], **settings, **options)

    class Keep(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            path = tmp_path / f"{trainer.global_step}.ckpt"
            if not path.exists():  # gradients that wait for an update are in no checkpoint
                trainer.save_checkpoint(path)

    whole = train(Keep())
    resumed = train(ckpt_path=str(tmp_path / "2.ckpt"))
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.logger.rows == {n: row for n, row in whole.logger.rows.items() if n >= 2}


def test_a_tracking_policy_goes_on_too() -> None:
    """What `on_spike` remembers is in the callback's state."""
    regularize = PipelineCallback(PIPELINE, track=tracking.on_spike(3.0))
    fit(Module(regularize), batches(8, 3))
    regularize.track()
    state = regularize.state_dict()
    other = PipelineCallback(PIPELINE, track=tracking.on_spike(3.0))
    other.load_state_dict(state)
    assert other.track.state_dict() == regularize.track.state_dict()
    assert state["track"]["previous"] == pytest.approx(by_hand(batches(8, 3)).losses[-1])


def test_schedules_run_over_epochs_where_the_model_says_so() -> None:
    """`step=` in the call is for the schedules; what is tracked goes by global steps."""
    steps: list[float] = []

    class Epochs(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            hidden, _ = self.net(batch[0])
            result = self.regularize(hidden, base=hidden.sum(), step=self.current_epoch)
            steps.append(result.terms["l1"].weight)
            return result.total

    pipeline = Pipeline(l1=Term(eq.l1, weight=lambda epoch: 10.0 + epoch))
    module = Epochs(PipelineCallback(pipeline, track=tracking.every(3)))
    logged = rows(fit(module, batches(8, 2), max_epochs=3))
    assert steps == [10.0, 10.0, 11.0, 11.0, 12.0, 12.0]
    tracked = ["l1_grad_norm" in row for row in logged]
    assert tracked == [True, False, False, True, False, False]


def test_the_progress_bar_has_what_is_named() -> None:
    """Named figures stand there, and no others of ours."""
    regularize = PipelineCallback(PIPELINE, prog_bar=("base", "norm"), prefix="reg/")
    regularize.transform = transforms.snapshot("norm")
    trainer = fit(Module(regularize), batches(8, 2))
    shown = trainer.progress_bar_metrics
    assert sorted(shown) == ["reg/base", "reg/norm"]
    assert shown["reg/base"] == pytest.approx(trainer.logger.rows[1]["reg/base"])


class Validates(Module):
    """Evaluates the pipeline in validation too."""

    def validation_step(self, batch: tuple[Tensor, Tensor], _index: int) -> None:
        hidden, logits = self.net(batch[0])
        inputs = {"hidden": hidden, "logits": logits, "labels": batch[1]}
        result = self.regularize(**inputs, weights=[*self.parameters()])
        self.log("val_loss", result.base, batch_size=len(batch[0]))
        assert not result.tracked


def test_validation_is_neither_tracked_nor_logged() -> None:
    """Before, in and after training it evaluates; rows of training are as without it."""
    data = batches(8, 4)
    loader = DataLoader(data[:1], batch_size=None)
    module = Validates(PipelineCallback(PIPELINE, track=True))
    quiet = lightning.Trainer(
        accelerator="cpu", logger=False, callbacks=[module.regularize], enable_progress_bar=False
    )
    before = quiet.validate(module, loader, verbose=False)[0]["val_loss"]
    assert before == pytest.approx(terms(net(), *data[0])["base"].item(), rel=1e-6)

    class Both(Validates):
        def val_dataloader(self) -> DataLoader[Any]:
            return loader

    both = fit(Both(PipelineCallback(PIPELINE, track=True)), data, val_check_interval=1)
    alone = fit(Module(PipelineCallback(PIPELINE, track=True)), data)
    ours = [{n: f for n, f in row.items() if n != "val_loss"} for row in rows(both)]
    ours = [row for row in ours if "base" in row]
    assert [row["base"] for row in ours] == [row["base"] for row in rows(alone)]


def test_manual_optimization_has_a_transform_for_each_optimizer() -> None:
    """Two optimizers step in turn; each has its own state, and its figures their number."""

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> None:
            for optimizer in self.optimizers():
                hidden, logits = self.net(batch[0])
                inputs = {"hidden": hidden, "logits": logits, "labels": batch[1]}
                result = self.regularize(**inputs, weights=[*self.parameters()])
                optimizer.zero_grad()
                self.manual_backward(result.total)
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            parts = (self.net.first, self.net.second)
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    module = Manual(PipelineCallback(PIPELINE, transform=transforms.clip_by_norm(1e-4)))
    module.regularize.transform = transforms.chain(
        transforms.snapshot("norm"), transforms.clip_by_norm(1e-4)
    )
    start = net()
    logged = rows(fit(module, batches(8, 1)))
    moved = (module.net.second.weight - start.second.weight).norm()
    assert moved.item() == pytest.approx(1e-5, rel=1e-3)  # the limit times the learning rate
    assert {"0/norm", "1/norm", "base"} <= set(logged[0])


def test_decoupled_decay_happens_once_a_step() -> None:
    """Weights shrink by the learning rate times the rate, untouched by clipping."""
    decay = transforms.chain(
        transforms.clip_by_value(0.0, 0.0), transforms.add_l2_decay(0.5, decoupled=True)
    )
    module = Module(PipelineCallback(PIPELINE, transform=decay))
    fit(module, batches(8, 3), gradient_clip_val=1e-9)
    wanted = [p.detach() * (1 - 0.1 * 0.5) ** 3 for p in net().parameters()]
    assert_same(list(module.parameters()), wanted)


def test_a_second_training_starts_anew() -> None:
    """The state of a transform belongs to one training, as that of the optimizer does."""
    regularize = PipelineCallback(PIPELINE, transform=STATEFUL)
    module = Module(regularize)
    trained = []
    for _ in range(2):
        module.net.load_state_dict(net().state_dict())
        fit(module, batches(8, 3))
        trained.append([p.detach().clone() for p in module.parameters()])
    assert_same(*trained, atol=0.0)


def test_the_pipeline_may_be_exchanged_in_training() -> None:
    """A callback's pipeline is an attribute: edits hold from the next step on."""

    class Edits(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                self.regularize.pipeline = self.regularize.pipeline.disable("decay")

    logged = rows(fit(Edits(PipelineCallback(PIPELINE)), batches(8, 4)))
    assert ["decay" in row for row in logged] == [True, True, False, False]


def test_outside_a_trainer_it_says_so() -> None:
    """A callback that no trainer has is an error at its first call."""
    regularize = PipelineCallback(PIPELINE)
    with pytest.raises(
        eq.InputError,
        match=r"must be called by a model in training.*got no trainer\. Use `Trainer\(callbacks=",
    ):
        regularize(hidden=torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((eq.l1,), {}, r"`pipeline` must be a Pipeline, got function\. Use `Pipeline\(sparsity="),
        (
            (PIPELINE,),
            {"transform": eq.l1},
            r"`transform` must be gradient transforms, got function\. Use `clip_by_global_norm",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """What is no pipeline and no transform is an error when the callback is made."""
    with pytest.raises(eq.InputTypeError, match=message):
        PipelineCallback(*arguments, **options)


def test_it_prints_as_mathematics() -> None:
    """The callback shows its pipeline."""
    pipeline = Pipeline(l1=Term(eq.l1, weight=0.5))
    assert repr(PipelineCallback(pipeline)) == "PipelineCallback(0.5·l1(x))"


def in_each_process(rank: int, folder: str) -> None:
    """Train as one of two processes, each with every second micro-batch."""
    warnings.simplefilter("ignore")
    chain = transforms.chain(transforms.snapshot("norm"), transforms.clip_by_global_norm(0.5))
    module = Module(PipelineCallback(PIPELINE, transform=chain))
    data = batches(4, 4 * STEPS)[rank::2]
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    trainer = fit(module, data, accumulate_grad_batches=2, **options)
    if rank == 0:
        norms = [row["norm"] for row in rows(trainer)]
        torch.save((norms, [p.detach() for p in module.parameters()]), Path(folder) / "0.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Losses are averaged over processes, and the transform sees the reduced gradients."""
    in_two_processes(in_each_process, str(tmp_path))
    norms, trained = torch.load(tmp_path / "0.pt")
    wanted = by_hand(batches(4, 4 * STEPS), accumulate=4, change=lambda grads: clip(grads, 0.5))
    assert norms == pytest.approx(wanted.norms, rel=1e-5)
    assert_same(trained, wanted.weights)


def test_a_fused_optimizer_under_a_scaler() -> None:
    """It unscales within its step, and the transform acts there, on the same gradients."""
    seen: list[float] = []

    def norm(grads: list[Tensor | None]) -> float:
        seen.append(torch.cat([g.flatten() for g in grads if g is not None]).norm().item())
        return seen[-1]

    trained = []
    for fused in (False, True):
        seen.clear()
        chain = transforms.chain(
            transforms.snapshot("norm", norm), transforms.clip_by_global_norm(0.5)
        )
        module = Module(PipelineCallback(PIPELINE, transform=chain), fused=fused)
        fit(module, batches(8, 8), accumulate_grad_batches=2, **options_of("scaled"))
        assert len(seen) == 4
        trained.append((list(seen), [p.detach() for p in module.parameters()]))
    assert trained[1][0] == pytest.approx(trained[0][0], rel=1e-5)
    assert_same(trained[1][1], trained[0][1])


def test_a_closure_called_several_times_a_step() -> None:
    """LBFGS asks for gradients again and again: each are transformed, weights decay once."""
    calls: list[int] = []

    def count(grads: list[Tensor | None]) -> float:
        calls.append(len(grads))
        return 0.0

    class Searches(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            never = {"tolerance_grad": -1.0, "tolerance_change": -1.0}  # stop before the third
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, **never)

    chain = transforms.chain(
        transforms.snapshot("count", count),
        transforms.clip_by_value(0.0, 0.0),
        transforms.add_l2_decay(0.5, decoupled=True),
    )
    module = Searches(PipelineCallback(PIPELINE, transform=chain))
    fit(module, batches(8, 2))
    wanted = [p.detach() * (1 - 0.1 * 0.5) ** 2 for p in net().parameters()]
    assert_same(list(module.parameters()), wanted)
    assert len(calls) == 2 * 3


def test_two_pipelines_have_a_prefix_each(tmp_path: Path) -> None:
    """Figures and states of two callbacks stand apart, and a monitor finds both."""
    second = PipelineCallback(
        Pipeline(l1=Term(eq.l1)), prefix="other/", transform=transforms.add_noise(0.0)
    )

    class Two(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            return loss + 0.0 * second(self.net.first.weight).total

    module = Two(PipelineCallback(PIPELINE, transform=transforms.add_noise(0.0)))
    keep = ModelCheckpoint(tmp_path, monitor="other/l1", every_n_train_steps=1, save_top_k=1)
    trainer = fit(
        module,
        batches(8, 2),
        callbacks=[module.regularize, second, keep],
        enable_checkpointing=True,
    )
    assert {"equipoise/base", "other/l1"} <= set(trainer.logger.rows[0])
    assert keep.best_model_score == pytest.approx(
        min(row["other/l1"] for row in trainer.logger.rows.values())
    )
    states = torch.load(keep.best_model_path, weights_only=True)["callbacks"]
    assert len([key for key in states if key.startswith("PipelineCallback")]) == 2
