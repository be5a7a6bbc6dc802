"""Which term moves the model? The numbers of the backward pass that training runs anyway."""

import torch
import torch.nn.functional as F
from torch import nn

import equipoise as eq
from equipoise import Pipeline, Term, tracking

PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("logits", "labels")),
    smooth=Term(eq.l2, inputs="logits", weight=0.02, options={"reduction": "mean"}),
    calm=Term(eq.entropy, inputs="logits", weight=0.3, options={"from_logits": True}),
    tiny=Term(eq.l1, inputs="logits", weight=1e-7),
)


def main() -> None:
    """Train a little, and ask."""
    torch.manual_seed(0)
    centers = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = tracking.History(window=100)
    for step in range(100):
        labels = torch.randint(4, (64,))
        logits = model(centers[labels] + torch.randn(64, 6))
        result = PIPELINE(logits=logits, labels=labels, step=step, track="gram")
        if step == 99:  # before the graph is gone: the same at the parameters
            report = tracking.parameter_gradients(
                result, model.parameters(), level="gram", set_grad=False
            )
        result.total.backward()
        history.add(result)
        optimizer.step()
        optimizer.zero_grad()

    print(f"At the logits, for nothing:\n\n{result}\n")
    print(f"At the parameters, for one backward pass a term:\n\n{report}\n")
    for conflict in result.gradients.conflicts():
        first, second = sorted((conflict.first, conflict.second))
        print(f"{first} and {second} pull against each other: cosine {conflict.cosine:.2f}")
    print(f"Over 100 steps {history.dominant()} dominated.")
    for finding in history.findings():
        if finding.kind == "dominated":
            print(f"Finding: {finding.term} hardly moves the model.")


if __name__ == "__main__":
    main()
