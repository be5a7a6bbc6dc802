"""Accelerate: a student learns from a teacher in a loop of one's own, carried to any device.

The loop is the one that Accelerate's users write; `regularize` counts its updates, logs to the
accelerator's trackers, and lets gradients pass through a transform before each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, tracking, transforms
from equipoise.integrations.accelerate import AcceleratedPipeline

PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("student", "labels")),
    distill=Term(
        eq.kl_divergence,
        inputs=("teacher", "student"),
        weight=2.0,
        options={"from_logits": True, "temperature": 2.0},
    ),
    sparsity=Term(eq.l1, inputs="hidden", weight=0.02, options={"reduction": "mean"}),
)


class Table(GeneralTracker):
    """Any tracker will do: W&B, TensorBoard, MLflow. This one prints."""

    name, requires_logging_directory, tracker = "table", False, None
    columns = ("base", "distill", "sparsity", "distill_grad_norm_weighted", "kept")

    def store_init_configuration(self, _values: dict[str, Any]) -> None:
        """The head of the table."""
        print("step".rjust(4), *(c.rjust(max(len(c), 8)) for c in self.columns), sep="  ")

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        """A row."""
        figures = [f"{values[f'equipoise/{c}']:.3g}" for c in self.columns]
        padded = [f.rjust(max(len(c), 8)) for f, c in zip(figures, self.columns, strict=True)]
        print(f"{step:>4}", *padded, sep="  ")


class Student(nn.Module):
    """Two layers, whose hidden activations are an output too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden activations and logits."""
        hidden = self.first(x).relu()
        return hidden, self.second(hidden)


def main() -> None:
    """Train, with the table as it grows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, log_with=Table())
    teacher = Student(256).requires_grad_(requires_grad=False)
    x = torch.randn(4096, 20)
    noisy = (4 * teacher(x)[1] + torch.randn(4096, 5)).argmax(1)
    data = torch.utils.data.TensorDataset(x, noisy)

    model = Student(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    regularize = AcceleratedPipeline(
        PIPELINE,
        accelerator,
        optimizer,
        track=tracking.every(5),
        transform=transforms.chain(
            transforms.clip_by_global_norm(0.5), transforms.snapshot("kept")
        ),
        log_every=64,
    )
    print(PIPELINE, end="\n\n")
    accelerator.init_trackers("distillation", config={"width": 32})
    for _epoch in range(10):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                hidden, student = model(batch)
                result = regularize(
                    hidden=hidden, student=student, teacher=4 * teacher(batch)[1], labels=labels
                )
                accelerator.backward(result.total)
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        agree = (model(x)[1].argmax(1) == teacher(x)[1].argmax(1)).double().mean()
    print(f"\nAfter {regularize.step} updates the student agrees with the teacher on {agree:.0%}.")


if __name__ == "__main__":
    main()
