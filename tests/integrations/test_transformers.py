"""Pipelines in real runs of the trainer of Transformers: a tiny Llama, random and on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import equipoise as eq
from equipoise import Pipeline, Term, schedules, tracking, transforms
from equipoise.integrations.transformers import PipelineCallback, PipelineTrainer
from tests.integrations.loops import assert_same, clip
from tests.integrations.processes import in_two_processes

STEPS = 20
LR = 0.1
Batch = dict[str, Tensor]

PIPELINE = Pipeline(
    certain=Term(
        eq.entropy,
        inputs="logits",
        weight=schedules.linear(0.0, 0.5, steps=STEPS),
        options={"from_logits": True},
    ),
    decay=Term(eq.l2, inputs="weights", weight=0.02),
)


def llama() -> LlamaForCausalLM:
    """The model as it is before every training here."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.3,
        )
    )


class Plain(nn.Module):
    """A model whose loss is a mean: it takes no keywords, so that the trainer divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean over the tokens of this micro-batch."""
        logits = self.inner(input_ids=input_ids).logits
        return {"loss": token_loss(logits, labels) / tokens(labels), "logits": logits}


def samples(number: int = 80) -> list[Batch]:
    """Sequences of tokens, of which a different number counts in each."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(24, (number, 6), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[:, -1] = ids[:, -1]
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over tokens, each predicted from those before it."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )


def tokens(labels: Tensor) -> Tensor:
    """How many tokens count."""
    return labels[..., 1:].ne(-100).sum()


def penalties(model: nn.Module, logits: Tensor, step: int) -> Tensor:
    """Both penalties, weighted, in plain torch."""
    logp = logits.log_softmax(-1)
    certain = -(logp.exp() * logp).sum(-1).mean()
    decay = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    return 0.5 * min(step / (STEPS - 1), 1.0) * certain + 0.02 * decay


def by_hand(
    size: int,
    accumulate: int,
    *,
    model: nn.Module | None = None,
    change: Callable[[list[Tensor]], None] = lambda _: None,
    means: bool = False,
) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, norms of whole gradients and weights at the end of SGD in plain torch."""
    model = llama() if model is None else model
    losses, norms = [], []
    data = [stacked(samples()[i : i + size]) for i in range(0, 80, size)]
    for step in range(len(data) // accumulate):
        batches = data[step * accumulate : (step + 1) * accumulate]
        loss, norm = by_hand_from(model, batches, step, change=change, means=means)
        losses.append(loss)
        norms.append(norm)
    return losses, norms, [p.detach() for p in model.parameters()]


def by_hand_from(
    model: nn.Module,
    batches: list[Batch],
    step: int,
    *,
    change: Callable[[list[Tensor]], None] = lambda _: None,
    means: bool = False,
) -> tuple[float, float]:
    """One step of SGD in plain torch: its loss, and the norm of the whole gradient."""
    params, loss = list(model.parameters()), torch.zeros(())
    number = sum(tokens(b["labels"]) for b in batches)
    for batch in batches:
        logits = inner(model)(input_ids=batch["input_ids"]).logits
        summed = token_loss(logits, batch["labels"])
        base = summed / (tokens(batch["labels"]) * len(batches) if means else number)
        loss = loss + base + penalties(model, logits, step) / len(batches)
    grads = list(torch.autograd.grad(loss, params))
    norm = torch.cat([g.flatten() for g in grads]).norm().item()
    change(grads)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param.sub_(grad, alpha=LR)
    return loss.item(), norm


def inner(model: nn.Module) -> nn.Module:
    """The Llama in either model."""
    return model.inner if isinstance(model, Plain) else model


def stacked(rows: Sequence[Batch]) -> Batch:
    """Samples as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arguments(folder: Path, *, size: int = 4, accumulate: int = 1, **options: Any) -> Any:
    """SGD on the CPU in the order of the samples, nothing on the screen."""
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulate,
        **{
            "optim": "sgd",
            "learning_rate": LR,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "num_train_epochs": 1,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )


class Outputs(PipelineTrainer):
    """The trainer for a pipeline on logits and weights."""

    def pipeline_inputs(self, model: nn.Module, _batch: Any, outputs: Any) -> dict[str, Any]:
        return {"logits": outputs["logits"], "weights": list(model.parameters())}


def with_outputs(
    regularize: PipelineCallback, args: Any, *, model: nn.Module | None = None, **options: Any
) -> Trainer:
    """A `PipelineTrainer`: the loss is the model's own."""
    options = {"train_dataset": samples(), **options}
    trainer = Outputs(model=llama() if model is None else model, args=args, **options)
    regularize.add_to(trainer)
    return trainer


def with_function(regularize: PipelineCallback, args: Any, **options: Any) -> Trainer:
    """A plain trainer with `compute_loss_func`."""
    model = llama()

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        base = token_loss(outputs.logits, labels) / num_items_in_batch
        inputs = {"logits": outputs.logits, "weights": list(model.parameters())}
        return regularize.loss(base, num_items_in_batch, **inputs)

    options = {"train_dataset": samples(), **options}
    trainer = Trainer(model=model, args=args, compute_loss_func=loss, **options)
    regularize.add_to(trainer)
    return trainer


WAYS = {"compute_loss_func": with_function, "compute_loss": with_outputs}


def history(trainer: Trainer, name: str) -> list[float]:
    """One figure of every entry that has the loss."""
    return [row[name] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_that_of_a_loop_by_hand(tmp_path: Path, way: str, accumulate: int) -> None:
    """Token-weighted loss, a ramp and two penalties: losses and weights are the loop's."""
    size = 4 // accumulate
    losses, _, weights = by_hand(size, accumulate)
    args = arguments(tmp_path, size=size, accumulate=accumulate)
    trainer = WAYS[way](PipelineCallback(PIPELINE), args)
    trainer.train()
    assert len(losses) == STEPS
    assert history(trainer, "loss") == pytest.approx(losses, rel=1e-6)
    assert history(trainer, "equipoise/total") == pytest.approx(losses, rel=1e-6)
    assert_same(list(trainer.model.parameters()), weights)


@pytest.mark.parametrize("way", WAYS)
def test_accumulating_changes_nothing(tmp_path: Path, way: str) -> None:
    """Eight micro-batches of one sequence train as two of four."""
    trained = []
    for size, accumulate in ((1, 8), (4, 2)):
        args = arguments(tmp_path, size=size, accumulate=accumulate)
        trainer = WAYS[way](PipelineCallback(PIPELINE), args)
        trainer.train()
        trained.append([p.detach() for p in trainer.model.parameters()])
    assert_same(*trained)


def test_a_model_whose_loss_is_a_mean(tmp_path: Path) -> None:
    """Where the trainer divides by the micro-batches itself, the penalties have scale 1 too."""
    losses, _, weights = by_hand(2, 2, model=Plain(), means=True)
    args = arguments(tmp_path, size=2, accumulate=2)
    trainer = with_outputs(PipelineCallback(PIPELINE), args, model=Plain())
    trainer.train()
    assert history(trainer, "loss") == pytest.approx(losses, rel=1e-6)
    assert_same(list(trainer.model.parameters()), weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_fewer_micro_batches(tmp_path: Path, way: str) -> None:
    """The last step of an epoch, with one micro-batch where the others have three, has scale 1."""
    only = Pipeline(decay=Term(eq.l2, inputs="weights"))
    args = arguments(tmp_path, size=1, accumulate=3, learning_rate=0.0)
    trainer = WAYS[way](PipelineCallback(PIPELINE), args, train_dataset=samples()[:7])
    trainer.train()
    model = llama()
    decay = only(weights=list(model.parameters())).total.item()
    assert history(trainer, "equipoise/decay") == pytest.approx([decay] * 3, rel=1e-6)
    totals = zip(
        history(trainer, "loss"),
        history(trainer, "equipoise/base"),
        history(trainer, "equipoise/penalty"),
        strict=True,
    )
    for loss, base, penalty in totals:
        assert loss == pytest.approx(base + penalty, rel=1e-6)


def test_naive_penalties_are_too_large(tmp_path: Path) -> None:
    """Why `loss` exists: added as it is, a penalty counts once for each micro-batch."""
    model = llama()

    def naive(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        base = token_loss(outputs.logits, labels) / num_items_in_batch
        return (
            base
            + PIPELINE(logits=outputs.logits, weights=list(model.parameters()), step=STEPS).penalty
        )

    args = arguments(tmp_path, size=1, accumulate=4, max_steps=1)
    trainer = Trainer(model=model, args=args, compute_loss_func=naive, train_dataset=samples())
    trainer.train()
    regularize = PipelineCallback(PIPELINE)
    right = with_function(regularize, args)
    right.train()
    start = llama()
    batch = stacked(samples()[:4])
    base = token_loss(start(**batch).logits, batch["labels"]) / tokens(batch["labels"])
    logits = start(input_ids=batch["input_ids"]).logits
    by_hand_now = penalties(start, logits, STEPS).item()
    assert history(trainer, "loss")[0] - base.item() == pytest.approx(4 * by_hand_now, rel=1e-5)
    now = penalties(start, logits, 0).item()
    assert history(right, "loss")[0] - base.item() == pytest.approx(now, rel=1e-5)


def norms_by_autograd(model: nn.Module, batches: list[Batch], step: int) -> dict[str, float]:
    """Means over the micro-batches of a step: of norms at the logits, and at the weights."""
    number, means = (
        sum(tokens(b["labels"]) for b in batches),
        dict.fromkeys(("base", "certain"), 0.0),
    )
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits.detach().requires_grad_()
        logp = logits.log_softmax(-1)
        values = {
            # As large as a mean over micro-batches needs it.
            "base": token_loss(logits, batch["labels"]) * len(batches) / number,
            "certain": -(logp.exp() * logp).sum(-1).mean() * 0.5 * step / (STEPS - 1),
        }
        for name, value in values.items():
            (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
            means[name] += grad.double().norm().item() / len(batches)
    size = torch.cat([p.double().flatten() for p in model.parameters()]).norm().item()
    return {**means, "decay": 0.04 * size}


@pytest.mark.parametrize("way", WAYS)
def test_logged_norms_are_those_of_autograd(tmp_path: Path, way: str) -> None:
    """The norm of each term at logits and weights is what differentiating it gives, every step."""
    args = arguments(tmp_path, size=2, accumulate=2)
    trainer = WAYS[way](PipelineCallback(PIPELINE, track=True), args)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    model = llama()
    for step, row in enumerate(logged):
        batches = [stacked(samples()[i : i + 2]) for i in (4 * step, 4 * step + 2)]
        wanted = norms_by_autograd(model, batches, step)
        assert row["equipoise/base_grad_norm"] == pytest.approx(wanted["base"], rel=1e-6)
        decay = row["equipoise/decay_grad_norm_weighted"]
        assert decay == pytest.approx(wanted["decay"], rel=1e-6)
        if step:  # where its weight is 0 there is no gradient
            certain = row["equipoise/certain_grad_norm_weighted"]
            assert certain == pytest.approx(wanted["certain"], rel=1e-6)
        by_hand_from(model, batches, step)
    assert len(logged) == STEPS
    assert logged[0]["equipoise/certain_grad_norm_error"] == 1.0


class Reporter(TrainerCallback):
    """Stands for W&B or TensorBoard: a callback that the trainer calls with what it logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        self.rows.append(dict(logs))


class Late(TrainerCallback):
    """Writes to the logs as a user's callback does."""

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        logs["late"] = 1.0


def test_figures_reach_reporters_and_history_as_floats(tmp_path: Path) -> None:
    """Each logged entry has all figures, in Python numbers; a plain callback's never arrive."""
    reporter = Reporter()
    args = arguments(tmp_path, logging_steps=5)
    regularize = PipelineCallback(PIPELINE, track=tracking.every(5), prefix="reg/")
    trainer = with_outputs(regularize, args, callbacks=[reporter, Late()])
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert all("late" not in row for row in rows)
    named = {"reg/total", "reg/base", "reg/penalty", "reg/certain", "reg/certain_weighted"}
    for row, reported in zip(rows, reporter.rows, strict=False):
        assert named | {"reg/decay_grad_norm", "reg/total_grad_norm", "grad_norm"} <= set(row)
        assert named <= set(reported)
        assert all(type(figure) in {int, float} for figure in row.values())
        assert row["loss"] == pytest.approx(row["reg/total"], rel=1e-6)
    losses, _, _ = by_hand(4, 1)
    assert rows[1]["reg/total"] == pytest.approx(sum(losses[5:10]) / 5, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_an_evaluation_is_the_base(tmp_path: Path, way: str) -> None:
    """Before and after training, and in it, no penalty is in `eval_loss`, nor in the logs of it."""
    data = samples()[:8]
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=4, accumulate=2)
    args.per_device_eval_batch_size = 8
    regularize = PipelineCallback(PIPELINE, track=True)
    trainer = WAYS[way](regularize, args, eval_dataset=data)
    batch = stacked(data)
    for when in ("before", "after"):
        found = trainer.evaluate()["eval_loss"]
        with torch.no_grad():
            logits = trainer.model(input_ids=batch["input_ids"]).logits
            wanted = token_loss(logits, batch["labels"]) / tokens(batch["labels"])
        assert found == pytest.approx(wanted.item(), rel=1e-6), when
        if when == "before":
            trainer.train()
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 3  # `train` begins the history anew
    assert not any(name.startswith("equipoise/") for row in evaluated for name in row)


def test_an_evaluation_between_two_entries(tmp_path: Path) -> None:
    """Its entry takes nothing from the window of the loss."""
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, logging_steps=3)
    trainer = with_outputs(PipelineCallback(PIPELINE), args, eval_dataset=samples()[:4])
    trainer.train()
    totals = history(trainer, "equipoise/total")
    assert totals == pytest.approx(history(trainer, "loss"), rel=1e-6)


def test_a_batch_keeps_its_labels(tmp_path: Path) -> None:
    """A trainer with `compute_loss_func` takes them out of the batch; the pipeline has them."""
    seen: list[int] = []

    class Labels(Outputs):
        def pipeline_inputs(self, model: nn.Module, batch: Any, outputs: Any) -> dict[str, Any]:
            seen.append(int(tokens(batch["labels"])))
            return super().pipeline_inputs(model, batch, outputs)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return token_loss(outputs.logits, labels) / num_items_in_batch

    args = arguments(tmp_path, size=2, accumulate=2)
    options = {"compute_loss_func": loss, "train_dataset": samples()}
    trainer = Labels(model=llama(), args=args, **options)
    PipelineCallback(PIPELINE).add_to(trainer)
    trainer.train()
    losses, _, weights = by_hand(2, 2)
    assert seen[0] == int(tokens(stacked(samples()[:2])["labels"]))
    assert history(trainer, "loss") == pytest.approx(losses, rel=1e-6)
    assert_same(list(trainer.model.parameters()), weights)


def test_in_front_of_another_trainer(tmp_path: Path) -> None:
    """What another trainer makes of the loss is the base, and the penalties keep their scale."""

    class Other(Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss, outputs = super().compute_loss(*args, **{**options, "return_outputs": True})
            return 3.0 * loss, outputs

    class Mine(Outputs, Other):
        pass

    args = arguments(tmp_path, size=2, accumulate=2, learning_rate=0.0, max_steps=2)
    alone = with_outputs(PipelineCallback(PIPELINE), args)
    together = Mine(model=llama(), args=args, train_dataset=samples())
    PipelineCallback(PIPELINE).add_to(together)
    for trainer in (alone, together):
        trainer.train()
    base = torch.tensor(history(alone, "equipoise/base"))
    assert history(together, "equipoise/base") == pytest.approx((3 * base).tolist(), rel=1e-6)
    for name in ("equipoise/penalty", "equipoise/decay"):
        assert history(together, name) == pytest.approx(history(alone, name), rel=1e-6)
    added = torch.tensor(history(together, "loss")) - torch.tensor(history(alone, "loss"))
    assert added.tolist() == pytest.approx((2 * base).tolist(), rel=1e-5)


def test_a_base_with_smoothed_labels(tmp_path: Path) -> None:
    """The loss of the trainer's own is the base, whichever it computes; the batch has labels."""
    args = arguments(tmp_path, label_smoothing_factor=0.2, learning_rate=0.0, max_steps=1)
    plain = Trainer(model=llama(), args=args, train_dataset=samples())
    trainer = with_outputs(PipelineCallback(PIPELINE), args)
    for each in (plain, trainer):
        each.train()
    assert history(trainer, "equipoise/base") == pytest.approx(history(plain, "loss"), rel=1e-6)
    decay = history(trainer, "equipoise/decay_weighted")[0]
    assert history(trainer, "loss")[0] == pytest.approx(history(plain, "loss")[0] + decay, rel=1e-6)


def test_a_nan_is_shown(tmp_path: Path) -> None:
    """The trainer leaves what is not finite out of the loss it logs; the figures show it."""
    broken = PIPELINE.with_term("broken", Term(lambda w: torch.nan * w[0].sum(), inputs="weights"))
    args = arguments(tmp_path, max_steps=1, learning_rate=0.0)
    trainer = with_outputs(PipelineCallback(broken), args)
    trainer.train()
    assert math.isfinite(history(trainer, "loss")[0])
    assert math.isnan(history(trainer, "equipoise/broken")[0])


def test_a_base_of_the_pipelines_own(tmp_path: Path) -> None:
    """Without a base at the call the pipeline's term is it, in training and in an evaluation."""
    model = llama()
    own = PIPELINE.without("certain").with_term(
        "base",
        Term(lambda logits, y: token_loss(logits, y) / tokens(y), inputs=("logits", "labels")),
    )
    regularize = PipelineCallback(own)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        inputs = {"logits": outputs.logits, "labels": labels, "weights": list(model.parameters())}
        return regularize.loss(None, num_items_in_batch, **inputs)

    args = arguments(tmp_path, size=1, accumulate=2, max_steps=1, per_device_eval_batch_size=8)
    data = {"train_dataset": samples(), "eval_dataset": samples()[:1]}
    trainer = Trainer(model=model, args=args, compute_loss_func=loss, **data)
    regularize.add_to(trainer)
    first = stacked(samples()[:1])
    with torch.no_grad():
        mean = token_loss(model(**first).logits, first["labels"]) / tokens(first["labels"])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean.item(), rel=1e-6)
    trainer.train()
    row = trainer.state.log_history[-2]
    assert row["loss"] == pytest.approx(row["equipoise/total"], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_transform_sees_whole_gradients_once_a_step(tmp_path: Path, precision: str) -> None:
    """It runs after accumulation, on gradients that nothing has clipped; the chain clips last."""
    seen: list[float] = []

    def norm(grads: list[Tensor | None]) -> float:
        seen.append(torch.cat([g.flatten() for g in grads if g is not None]).norm().item())
        return seen[-1]

    _, norms, weights = by_hand(2, 2, change=lambda grads: clip(grads, 0.5))
    chain = transforms.chain(transforms.snapshot("norm", norm), transforms.clip_by_global_norm(0.5))
    args = arguments(tmp_path, size=2, accumulate=2, bf16=precision == "bf16")
    trainer = with_outputs(PipelineCallback(PIPELINE, transform=chain), args)
    trainer.train()
    # bfloat16 rounds activations to 2⁻⁸, and the weights drift apart with them.
    rel = 1e-5 if precision == "fp32" else 5e-2
    assert seen == pytest.approx(norms, rel=rel)
    assert history(trainer, "equipoise/norm") == pytest.approx(seen, rel=1e-6)
    assert history(trainer, "grad_norm") == pytest.approx(seen, rel=1e-5)
    assert max(history(trainer, "equipoise/clip_by_global_norm/norm_clipped")) <= 0.5
    if precision == "fp32":
        assert_same(list(trainer.model.parameters()), weights)


def test_the_trainers_own_clip_is_kept_without_a_transform(tmp_path: Path) -> None:
    """`max_grad_norm` works as ever where there is no transform."""
    _, _, weights = by_hand(4, 1, change=lambda grads: clip(grads, 0.5))
    trainer = with_outputs(PipelineCallback(PIPELINE), arguments(tmp_path, max_grad_norm=0.5))
    trainer.train()
    assert_same(list(trainer.model.parameters()), weights)


def test_a_clip_before_the_transform_is_refused(tmp_path: Path) -> None:
    """The trainer's own limit, 1.0 unless set, would come first: the error says what to write."""
    regularize = PipelineCallback(PIPELINE, transform=transforms.centralize())
    with pytest.raises(
        eq.OptionError,
        match=r"`transform` must see the gradients before they are clipped, got max_grad_norm=1, "
        r"which clips before it\. Use `TrainingArguments\(max_grad_norm=0\.0\)`, and "
        r"`transforms\.chain\(\.\.\., transforms\.clip_by_global_norm\(1\)\)`",
    ):
        with_outputs(regularize, arguments(tmp_path, max_grad_norm=1.0))


def in_each_process(rank: int, folder: str) -> None:
    """Train in each way, as one of two processes."""
    for way, make in WAYS.items():
        args = arguments(Path(folder), size=1, accumulate=2, ddp_backend="gloo")
        trainer = make(PipelineCallback(PIPELINE), args)
        trainer.train()
        if rank == 0:
            weights = [p.detach() for p in trainer.model.parameters()]
            torch.save((history(trainer, "loss"), weights), Path(folder) / f"{way}.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """With two micro-batches in each of two processes, base and penalties have scale 1."""
    in_two_processes(in_each_process, str(tmp_path))
    losses, _, weights = by_hand(1, 4)
    for way in WAYS:
        found, trained = torch.load(tmp_path / f"{way}.pt")
        assert found == pytest.approx(losses, rel=1e-6), way
        assert_same(trained, weights)


STATEFUL = transforms.chain(
    transforms.clip_by_norm_history(50, 4), transforms.add_noise(0.01, 0.55, seed=3)
)


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_goes_on_exactly(tmp_path: Path, way: str) -> None:
    """Noise and norm history go on from the checkpoint: weights are equal to the last bit."""

    def trainer(folder: Path) -> Trainer:
        options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 4}
        args = arguments(folder, max_steps=8, **options)
        return WAYS[way](PipelineCallback(PIPELINE, transform=STATEFUL), args)

    whole = trainer(tmp_path)
    whole.train()
    resumed = trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert history(resumed, "equipoise/total") == history(whole, "equipoise/total")


def test_a_spike_across_a_checkpoint_is_not_seen(tmp_path: Path) -> None:
    """What was before the checkpoint is not known to the policy of a resumed run."""
    jump = schedules.piecewise({0: 0.0, 4: 100.0})

    def tracked(folder: Path, resume: str | None = None) -> list[int]:
        pipeline = PIPELINE.reweighted(decay=jump)
        options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 4}
        regularize = PipelineCallback(pipeline, track=tracking.on_spike())
        trainer = with_outputs(regularize, arguments(folder, max_steps=7, **options))
        trainer.train(resume_from_checkpoint=resume)
        rows = trainer.state.log_history
        return [row["step"] for row in rows if "equipoise/decay_grad_norm" in row]

    assert tracked(tmp_path) == [6]  # the step after the first one with the larger weight
    assert tracked(tmp_path / "again", str(tmp_path / "checkpoint-4")) == []


def test_an_optimizer_made_anew_is_followed(tmp_path: Path) -> None:
    """With `model_init` each training has another optimizer; the transform acts on that one."""
    regularize = PipelineCallback(PIPELINE, transform=transforms.clip_by_value(0.0, 0.0))
    args = arguments(tmp_path, max_steps=2)
    trainer = Outputs(model_init=llama, args=args, train_dataset=samples())
    regularize.add_to(trainer)
    for _ in range(2):
        trainer.train()
        assert_same(list(trainer.model.parameters()), list(llama().parameters()), atol=0.0)


def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path: Path) -> None:
    """Weights stay as they are; which tensor it was, the trainer's own norm has blurred."""

    class Poisoned(Outputs):
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss = super().training_step(*args, **options)
            self.model.lm_head.weight.grad[0, 0] = float("inf")
            return loss

    regularize = PipelineCallback(PIPELINE, transform=transforms.skip_nonfinite())
    trainer = Poisoned(
        model=llama(), args=arguments(tmp_path, max_steps=2), train_dataset=samples()
    )
    regularize.add_to(trainer)
    trainer.train()
    assert_same(list(trainer.model.parameters()), list(llama().parameters()), atol=0.0)
    # All that the gradients' common norm has reached, which is every parameter.
    names = [name for name, _ in trainer.model.named_parameters()]
    assert regularize.handle.nonfinite() == dict.fromkeys(names, 2)


def test_schedules_run_over_epochs_where_the_loss_says_so(tmp_path: Path) -> None:
    """`step=` in the call is for the schedules; what is tracked goes by global steps."""
    epochs: list[float] = []
    pipeline = Pipeline(decay=Term(eq.l2, inputs="weights", weight=lambda epoch: 1.0 + epoch))

    class Epochs(PipelineTrainer):
        def pipeline_inputs(self, model: nn.Module, *_: Any) -> dict[str, Any]:
            epochs.append(int(self.state.epoch))
            return {"weights": list(model.parameters()), "step": int(self.state.epoch)}

    args = arguments(tmp_path, size=4, num_train_epochs=2, learning_rate=0.0)
    trainer = Epochs(model=llama(), args=args, train_dataset=samples()[:12])
    PipelineCallback(pipeline, track=tracking.every(4)).add_to(trainer)
    trainer.train()
    assert epochs == [0, 0, 0, 1, 1, 1]
    values = history(trainer, "equipoise/decay_weighted")
    assert values[3] == pytest.approx(2 * values[0])
    tracked = ["equipoise/decay_grad_norm" in row for row in trainer.state.log_history[:-1]]
    assert tracked == [True, False, False, False, True, False]


def test_refusals(tmp_path: Path) -> None:
    """What is missing is named, with what to write."""
    with pytest.raises(
        eq.InputTypeError,
        match=r"`pipeline` must be a Pipeline, got Term\. Use `Pipeline\(sparsity=Term\(",
    ):
        PipelineCallback(Term(eq.l1))
    with pytest.raises(
        eq.InputTypeError,
        match=r"`transform` must be gradient transforms, got str\. Use `clip_by_global_norm",
    ):
        PipelineCallback(PIPELINE, transform="clip")
    with pytest.raises(
        eq.InputError,
        match=r"must know how the trainer divides a step, got no trainer\. "
        r"Use `callback\.add_to\(trainer\)`, and not `callbacks=\[callback\]`",
    ):
        PipelineCallback(PIPELINE).loss(torch.zeros(()))
    with pytest.raises(
        eq.OptionError,
        match=r"`called_in` must be 'compute_loss_func' or 'compute_loss', got 'loss'",
    ):
        PipelineCallback(PIPELINE).loss(torch.zeros(()), called_in="loss")
    bare = Outputs(model=llama(), args=arguments(tmp_path), train_dataset=samples())
    with pytest.raises(
        eq.InputError,
        match=r"must have a pipeline, got none\. Use `PipelineCallback\(pipeline\)\.add_to",
    ):
        bare.train()
    silent = PipelineTrainer(model=llama(), args=arguments(tmp_path), train_dataset=samples())
    PipelineCallback(PIPELINE).add_to(silent)
    with pytest.raises(
        NotImplementedError,
        match=r"must say what the pipeline reads, got a trainer without it\. Use a subclass",
    ):
        silent.train()
    regularize = PipelineCallback(PIPELINE)
    with_outputs(regularize, arguments(tmp_path))
    with (
        torch.no_grad(),
        pytest.raises(
            eq.InputError,
            match=r"`base` must be the task loss, got None and a pipeline without a base\. Use",
        ),
    ):
        regularize.loss(None, logits=torch.zeros(1, 2), weights=[torch.zeros(1)])


def test_it_prints_as_mathematics() -> None:
    """The callback shows its pipeline."""
    shown = "PipelineCallback(linear(0→0.5)·certain(logits) + 0.02·decay(weights))"
    assert repr(PipelineCallback(PIPELINE)) == shown
