"""Train a small classifier with several penalties, and see which of them moved it.

A student learns to read noisy seven-segment digits. Beside the labels it has a teacher to imitate,
activations to keep sparse, an entropy to keep up, and first-layer weights to keep orthogonal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import equipoise as eq

STEPS = 400
TRACK_EVERY = 20
WEIGHTS = {"base": 1.0, "distill": 0.5, "sparse": 2e-4, "explore": 0.02, "orthogonal": 1e-3}

# Which segments are lit: top, top left, top right, middle, bottom left, bottom right, bottom.
DIGITS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010",
          "1111111", "1111011"]  # fmt: skip
SEGMENTS = [(0, 1), (1, 0), (1, 2), (3, 1), (4, 0), (4, 2), (6, 1)]


def digit_images() -> Tensor:
    """The ten digits on a grid of 7×3."""
    images = torch.zeros(10, 7, 3)
    for digit, lit in enumerate(DIGITS):
        for (row, column), on in zip(SEGMENTS, lit, strict=True):
            images[digit, row, column] = float(on)
            if column != 1:
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


def terms(student: Reader, teacher: Reader, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Every term of the loss, before its weight."""
    hidden, logits = student(x)
    return {
        "base": F.cross_entropy(logits, labels),
        "distill": eq.kl_divergence(teacher(x)[1], logits, from_logits=True),
        "sparse": eq.l1(hidden) / len(x),
        "explore": eq.entropy(logits, mode="bonus", from_logits=True),
        "orthogonal": eq.orthogonality(student.first.weight.T),
    }


def gradients(values: dict[str, Tensor], student: Reader) -> dict[str, Tensor]:
    """Each weighted term's gradient with respect to all parameters, as one vector."""
    parameters = list(student.parameters())
    vectors = {}
    for name, value in values.items():
        parts = torch.autograd.grad(
            WEIGHTS[name] * value, parameters, retain_graph=True, materialize_grads=True
        )
        vectors[name] = torch.cat([part.flatten() for part in parts])
    return vectors


def table(values: dict[str, Tensor], history: list[dict[str, Tensor]]) -> str:
    """The terms with their last value and what their gradients did, on average."""
    lines = [f"{'term':<12}{'value':>10}{'weight':>10}{'gradient':>12}{'share':>9}"]
    for name, value in values.items():
        norms = torch.stack([step[name].norm() for step in history])
        shares = []
        for step in history:
            total = torch.stack(list(step.values())).sum(0)
            shares.append(step[name] @ total / total.square().sum())
        share = torch.stack(shares).mean()
        lines.append(
            f"{name:<12}{value:>10.4f}{WEIGHTS[name]:>10.4g}{norms.mean():>12.4f}{share:>9.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Train, then say which term moved the model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small: threads would wait for one another
    images = digit_images()
    teacher, student = train_teacher(images), Reader(32)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    history = []
    progress = tqdm(range(STEPS), desc="training", unit="step")
    for step in progress:
        x, labels = batch(images)
        values = terms(student, teacher, x, labels)
        if step % TRACK_EVERY == 0:
            history.append(gradients(values, student))
            progress.set_postfix(loss=f"{values['base'].item():.3f}")
        torch.stack([WEIGHTS[name] * value for name, value in values.items()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    x, labels = batch(images, 4096)
    accuracy = (student(x)[1].argmax(-1) == labels).double().mean()
    print(f"\nThe student reads {accuracy:.1%} of new digits. What moved it:\n")
    print(table(values, history))
    print(
        "\nshare: how much of the step along the total gradient is this term's; they sum to 100 %"
    )


if __name__ == "__main__":
    main()
