"""Lightning: a sparse, confident classifier, with every term in the trainer's own logs.

Two spirals are told apart by a network whose hidden activations a ramped l1 term keeps sparse.
Gradients are centralized, then clipped by the trainer; the callback logs values and gradient norms.
"""

from __future__ import annotations

import logging
import math
import warnings

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import equipoise as eq
from equipoise import Pipeline, Term, schedules, tracking, transforms
from equipoise.integrations.lightning import PipelineCallback

EPOCHS = 30
PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("logits", "labels")),
    sparsity=Term(
        eq.l1,
        inputs="hidden",
        weight=schedules.linear(0.0, 0.1, steps=200),
        options={"reduction": "mean"},
    ),
    certain=Term(eq.entropy, inputs="logits", weight=0.05, options={"from_logits": True}),
)


class Classifier(lightning.LightningModule):
    """Two layers. `regularize` is called as the pipeline would be; it knows the step."""

    def __init__(self, regularize: PipelineCallback) -> None:
        super().__init__()
        self.regularize = regularize
        self.body = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        """The total of the pipeline is the loss."""
        x, labels = batch
        hidden = self.body(x)
        return self.regularize(hidden=hidden, logits=self.head(hidden), labels=labels).total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Rows(Logger):
    """Any logger will do: W&B, TensorBoard, CSV. This one keeps what it gets."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_hyperparams(self, *_: object) -> None:
        """Nothing to keep."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """A row for each step."""
        self.rows.setdefault(step or 0, {}).update(metrics)


def spirals(number: int = 1024) -> TensorDataset:
    """Points on two arms, and which arm it is."""
    labels = torch.arange(number) % 2
    turn = torch.rand(number).sqrt() * 2.5 * math.pi
    angle = turn + labels * math.pi
    x = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 8
    return TensorDataset(x + 0.02 * torch.randn_like(x), labels)


def main() -> None:
    """Train, and show what was logged."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    regularize = PipelineCallback(
        PIPELINE,
        track=tracking.every(10),
        transform=transforms.chain(transforms.centralize(), transforms.snapshot("centralized")),
    )
    model, rows = Classifier(regularize), Rows()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=rows,
        log_every_n_steps=48,
        callbacks=[regularize],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = spirals()
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    columns = ["base", "sparsity", "certain", "base_grad_norm", "sparsity_grad_norm_weighted"]
    print(PIPELINE, end="\n\n")
    print("step".rjust(4), *(name.rjust(max(len(name), 8)) for name in columns), sep="  ")
    for step, row in rows.rows.items():
        figures = [f"{row[f'equipoise/{c}']:.3g}".rjust(max(len(c), 8)) for c in columns]
        print(f"{step:>4}", *figures, sep="  ")
    with torch.no_grad():
        x, labels = data.tensors
        hidden = model.body(x)
        right = (model.head(hidden).argmax(1) == labels).double().mean()
        silent = (hidden.mean(0) < 1e-3).sum()
    print(f"\n{right:.0%} are told apart, with {silent} of 64 hidden units silent.")


if __name__ == "__main__":
    main()
