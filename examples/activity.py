"""Activity regularization: penalties on hidden activations of a model that stays as it is."""

import torch
import torch.nn.functional as F
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, training


def network() -> nn.Sequential:
    """A model that returns logits alone."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def trained(weight: float) -> tuple[float, float, float]:
    """Accuracy, and which part of the units of either layer is at work on new data."""
    model = network()
    pipeline = Pipeline(
        first=Term(eq.l1, inputs="early", weight=weight, options={"reduction": "mean"}),
        second=Term(eq.l1, inputs="late", weight=weight, options={"reduction": "mean"}),
    )
    seen = training.capture(model, early="1", late="3")
    step = training.TrainStep(
        model,
        F.cross_entropy,
        pipeline,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        inputs=seen,
    )
    torch.manual_seed(1)
    centers = torch.randn(4, 10)
    for _ in range(300):
        labels = torch.randint(4, (64,))
        step(centers[labels] + torch.randn(64, 10), labels)
    labels = torch.randint(4, (2000,))
    with torch.no_grad(), seen:  # at the end of the block the hooks come off
        logits = model(centers[labels] + torch.randn(2000, 10))
        at_work = [(x > 1e-3).double().mean().item() for x in seen.take().values()]
    return (logits.argmax(-1) == labels).double().mean().item(), *at_work


def main() -> None:
    """From no penalty to a strong one."""
    print("weight    accuracy    first layer at work    second")
    for weight in (0.0, 0.3, 3.0):
        accuracy, early, late = trained(weight)
        print(f"{weight:6}{accuracy:12.1%}{early:23.1%}{late:10.1%}")


if __name__ == "__main__":
    main()
