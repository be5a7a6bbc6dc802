"""Train a small classifier with five terms, and see which of them moved it.

A student learns to read noisy seven-segment digits. Beside the labels it has a teacher to imitate,
activations to keep sparse, an entropy to keep up, and first-layer weights to keep orthogonal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import equipoise as eq
from equipoise import Pipeline, Term, schedules, tracking

STEPS = 400

PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("student", "labels")),
    distill=Term(
        eq.kl_divergence,
        inputs=("teacher", "student"),
        weight=2.0,
        options={"from_logits": True, "temperature": 2.0},
    ),
    sparsity=Term(
        eq.l1,
        inputs="hidden",
        weight=schedules.linear(0.0, 0.3, steps=STEPS // 2),
        options={"reduction": "mean"},
    ),
    explore=Term(
        eq.entropy,
        inputs="student",
        weight=0.05,
        options={"mode": "bonus", "from_logits": True},
    ),
    orthogonal=Term(eq.orthogonality, inputs="weight", weight=1e-4, every=4),
)

# Which segments are lit: top, top left, top right, middle, bottom left, bottom right, bottom.
DIGITS = [
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
]
SEGMENTS = [(0, 1), (1, 0), (1, 2), (3, 1), (4, 0), (4, 2), (6, 1)]


def digit_images() -> Tensor:
    """The ten digits on a grid of 7×3."""
    images = torch.zeros(10, 7, 3)
    for digit, lit in enumerate(DIGITS):
        for (row, column), on in zip(SEGMENTS, lit, strict=True):
            images[digit, row, column] = float(on)
            if column != 1:  # upright segments are two high
                images[digit, row + 1, column] = float(on)
    return images.flatten(1)


def batch(images: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """Noisy copies of random digits, and which they are."""
    labels = torch.randint(10, (size,))
    return images[labels] + 0.6 * torch.randn(size, images.shape[1]), labels


class Reader(nn.Module):
    """Two layers, whose hidden activations are an output too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(21, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden activations and logits."""
        hidden = self.first(x).relu()
        return hidden, self.second(hidden)


def train_teacher(images: Tensor) -> Reader:
    """A wide reader that knows the labels."""
    teacher = Reader(256)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(300):
        x, labels = batch(images)
        F.cross_entropy(teacher(x)[1], labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return teacher.requires_grad_(requires_grad=False)


def train_student(student: Reader, teacher: Reader, images: Tensor) -> tracking.History:
    """Train with all terms, and remember what each of them did."""
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    history = tracking.History(window=STEPS)
    progress = tqdm(range(STEPS), desc="training", unit="step")
    for step in progress:
        x, labels = batch(images)
        hidden, logits = student(x)
        result = PIPELINE(
            student=logits,
            teacher=teacher(x)[1],
            hidden=hidden,
            weight=student.first.weight.T,
            labels=labels,
            step=step,
            track="gram",
        )
        result.total.backward()
        history.add(result)
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0:
            progress.set_postfix(loss=f"{result.metrics()['total']:.3f}")
            last = result
    print(f"\n\n{PIPELINE}\n\nThe terms at step {step - step % 40}:\n\n{last}")
    return history


def main() -> None:
    """Train, then say which term moved the model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small: threads would wait for one another
    images = digit_images()
    teacher, student = train_teacher(images), Reader(32)
    history = train_student(student, teacher, images)
    means, trends = history.means(), history.trends()
    print(f"\nOver all {len(history)} steps, gradient norm and trend (later half over earlier):\n")
    for name in sorted(means, key=lambda name: -means[name]):
        print(f"{name:<12}{means[name]:>10.4f}{trends[name]:>8.2f}×")
    print(f"\nWhat moved the model most: {history.dominant()}")
    for finding in history.findings():
        print(f"Finding, {finding}")
    x, labels = batch(images, 4096)
    accuracy = (student(x)[1].argmax(-1) == labels).double().mean()
    print(f"\nThe student reads {accuracy:.1%} of new digits.")


if __name__ == "__main__":
    main()
