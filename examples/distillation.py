"""Distillation on handwritten digits: imitate a teacher, stay uncertain, and see what did it."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, balance, tracking, training

TEACHER = Pipeline(decay=Term(eq.l2, inputs="weights", weight=1e-4))
STUDENT = Pipeline(
    distill=Term(
        eq.kl_divergence,
        inputs=("teacher", "prediction"),
        options={"from_logits": True, "temperature": 3.0, "temperature_squared": True},
    ),
    uncertain=Term(
        eq.entropy,
        inputs="prediction",
        weight=0.05,
        options={"mode": "bonus", "from_logits": True, "normalize": True},
    ),
)


def network(width: int) -> nn.Sequential:
    """A classifier of 8×8 images."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The part that is read right."""
    with torch.no_grad():
        return (model(x).argmax(-1) == y).double().mean().item()


def main() -> None:
    """A wide teacher from all labels; a narrow student from few, with and without it."""
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, digits, test_size=0.4, random_state=0)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y, y_test = (torch.tensor(part) for part in parts[2:])

    teacher = network(256)
    learn = training.TrainStep(
        teacher,
        F.cross_entropy,
        TEACHER,
        torch.optim.Adam(teacher.parameters(), lr=2e-3),
        inputs={"weights": training.parameters(teacher, exclude="*bias")},
    )
    for _ in range(120):
        learn(x, y)
    teacher.eval().requires_grad_(requires_grad=False)
    print(f"teacher: {accuracy(teacher, x_test, y_test):.1%}")

    few = torch.randperm(len(x))[:60]  # the labels the student is given
    alone, taught = network(16), network(16)
    taught.load_state_dict(alone.state_dict())
    for model, pipeline in ((alone, Pipeline()), (taught, STUDENT)):
        soft = teacher(x[few]) if len(pipeline) else None
        step = training.TrainStep(
            model,
            F.cross_entropy,
            pipeline,
            torch.optim.Adam(model.parameters(), lr=3e-3),
            inputs={"teacher": soft} if soft is not None else None,
            track=tracking.every(5),
            # Three quarters of the gradient, however the two losses are scaled; with a short
            # memory, for what is left to imitate falls all the time.
            balancer=balance.GradientShare({"distill": 0.75}, decay=0.5) if len(pipeline) else None,
        )
        for _ in range(300):
            step(x[few], y[few])
        name = "taught" if len(pipeline) else "alone"
        print(f"student {name}, from 60 labels: {accuracy(model, x_test, y_test):.1%}")
    criterion = training.wrap_loss(
        F.cross_entropy, step.pipeline, inputs={"teacher": soft}, track="gram"
    )
    criterion(taught(x[few]), y[few]).backward()
    print(f"\nWhat moved the student at the end:\n\n{criterion.last}\n")
    norms = criterion.last.gradients.weighted
    part = norms["distill"] / (norms["distill"] + norms["base"])
    print(f"Of the lengths of both gradients the teacher's is {part:.0%}.")


if __name__ == "__main__":
    main()
