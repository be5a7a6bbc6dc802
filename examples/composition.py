"""A pipeline is a formula: composed, edited, evaluated, and read from plain data."""

import torch
import torch.nn.functional as F

import equipoise as eq
from equipoise import Pipeline, Term, schedules


def main() -> None:
    """Compose, edit, evaluate."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        base=Term(F.cross_entropy, inputs=("student", "labels")),
        sparsity=Term(eq.l1, inputs="hidden", weight=1e-3),
        distill=Term(
            eq.kl_divergence,
            inputs=("teacher", "student"),
            weight=0.5,
            options={"from_logits": True, "temperature": 2.0},
        ),
        decay=Term(eq.l2, inputs="weights", weight=schedules.warmup(1e-4, steps=100), every=4),
    )
    print(pipeline)
    print(pipeline.reweighted(sparsity=0.01).disable("decay").renamed(distill="imitate"))

    hidden = torch.randn(8, 16, requires_grad=True)
    head = torch.nn.Linear(16, 5)
    data = {
        "hidden": hidden,
        "student": head(hidden),
        "teacher": torch.randn(8, 5),
        "labels": torch.randint(5, (8,)),
        "weights": list(head.parameters()),
    }
    print(f"\nAt step 40, when `decay` has its turn:\n\n{pipeline(**data, step=40)}")

    class Focal(torch.nn.Module):
        """Anything callable that returns a scalar is a penalty, with metrics if it likes."""

        def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """How certain the model is beyond 0.3."""
            certainty = logits.softmax(-1).amax(-1)
            return (certainty - 0.3).clamp_min(0).square().mean(), {"certainty": certainty.mean()}

    own = pipeline.with_term("calm", Term(Focal(), inputs="student", weight=0.1))
    metrics = own(**data, step=41).metrics()
    print(f"\nYour own: calm {metrics['calm']:.4f}, calm/certainty {metrics['calm/certainty']:.4f}")

    try:
        pipeline.reweighted(sparsty=0.1)
    except eq.OptionError as error:
        print(error)
    config = pipeline.without("base").to_config()
    print(f"\nAs plain data: {config['decay']}")
    print(f"And back: {Pipeline.from_config(config)}")


if __name__ == "__main__":
    main()
