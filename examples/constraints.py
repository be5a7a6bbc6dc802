"""Constraints as penalties: orthogonal weights, and outputs that do not depend on noise."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, training


def network() -> nn.Sequential:
    """The same start for every run."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


PIPELINE = Pipeline(
    orthogonal=Term(
        eq.orthogonality,
        inputs="features",
        weight=0.1,
        options={"mode": "hard", "normalize": False},
    ),
    consistent=Term(
        eq.consistency, inputs=("clean", "noisy"), weight=2.0, options={"metric": "mse"}
    ),
)


def trained(pipeline: Pipeline) -> nn.Sequential:
    """A classifier of noisy points."""
    model = network()
    torch.manual_seed(0)
    centers = torch.randn(3, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        labels = torch.randint(3, (64,))
        x = centers[labels] + 0.5 * torch.randn(64, 8)
        with training.capture(model, clean="0") as seen:
            logits = model(x)
            clean = seen["clean"]
        result = pipeline(
            features=model[0].weight.T,  # eight directions of sixteen numbers
            clean=clean,
            noisy=model[0](x + 0.3 * torch.randn_like(x)),
            base=F.cross_entropy(logits, labels),
        )
        optimizer.zero_grad()
        result.total.backward()
        optimizer.step()
    return model


def described(model: nn.Sequential) -> str:
    """How far both constraints are met."""
    weight = model[0].weight.detach()
    gram: Tensor = weight.T @ weight
    off = (gram - torch.eye(8)).abs().max()
    torch.manual_seed(2)
    x = torch.randn(256, 8)
    with torch.no_grad():
        moved = (model(x + 0.3 * torch.randn_like(x)) - model(x)).square().mean().sqrt()
    singular = torch.linalg.svdvals(weight)
    return f"{off:14.2f}{singular.min():16.2f} … {singular.max():4.2f}{moved:22.2f}"


def main() -> None:
    """With no constraint, one, and both."""
    print("constraints        |WᵀW − I|      singular values    output moved by noise")
    free = PIPELINE.reweighted(orthogonal=0.0, consistent=0.0)
    print(f"{'none':<14}{described(trained(free))}")
    print(f"{'orthogonal':<14}{described(trained(PIPELINE.reweighted(consistent=0.0)))}")
    print(f"{'consistent':<14}{described(trained(PIPELINE.reweighted(orthogonal=0.0)))}")
    print(f"{'both':<14}{described(trained(PIPELINE))}")


if __name__ == "__main__":
    main()
