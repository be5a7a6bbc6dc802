"""A curriculum: weights that follow the epoch, so that each term has its time."""

import torch
import torch.nn.functional as F
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules

EPOCHS = 12

PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("logits", "labels")),
    # First explore, then decide; sparsity only once there is something to prune.
    explore=Term(
        eq.entropy,
        inputs="logits",
        weight=schedules.linear(0.5, 0.0, steps=EPOCHS // 2),
        options={"mode": "bonus", "from_logits": True},
    ),
    sparsity=Term(
        eq.l1,
        inputs="first",
        weight=schedules.piecewise({0: 0.0, 4: 1e-3, 8: 4e-3}),
    ),
)


def main() -> None:
    """Train by epochs, and watch the weights move the model."""
    torch.manual_seed(0)
    print(f"{PIPELINE}\n")
    print("epoch    explore    sparsity    entropy    small weights    accuracy")
    centers = torch.randn(5, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        for _ in range(40):
            labels = torch.randint(5, (64,))
            logits = model(centers[labels] + 1.5 * torch.randn(64, 16))
            # The step of a schedule may count whatever counts up: here epochs.
            result = PIPELINE(logits=logits, labels=labels, first=model[0].weight, step=epoch)
            optimizer.zero_grad()
            result.total.backward()
            optimizer.step()
        if epoch % 2 == 1:
            weights = {name: float(term.weight) for name, term in result.terms.items()}
            small = (model[0].weight.abs() < 0.01).double().mean()
            entropy = eq.entropy(logits.detach(), from_logits=True)
            accuracy = (logits.argmax(-1) == labels).double().mean()
            print(
                f"{epoch:5}{weights['explore']:11.2f}{weights['sparsity']:12.4f}"
                f"{entropy:11.2f}{small:17.0%}{accuracy:12.0%}"
            )


if __name__ == "__main__":
    main()
