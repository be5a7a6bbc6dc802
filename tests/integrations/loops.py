"""A small model, a pipeline on it, and the same training written by hand in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules

STEPS = 20
RAMP = 0.2  # where the weight of `sparsity` ends

PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("logits", "labels")),
    sparsity=Term(
        eq.l1,
        inputs="hidden",
        weight=schedules.linear(0.0, RAMP, steps=STEPS),
        options={"reduction": "mean"},
    ),
    certain=Term(eq.entropy, inputs="logits", weight=0.3, options={"from_logits": True}),
    decay=Term(eq.l2, inputs="weights", weight=0.05),
)


class Net(nn.Module):
    """Two layers; the hidden activations are an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden activations and logits."""
        hidden = torch.tanh(self.first(x))
        return hidden, self.second(hidden)


def net() -> Net:
    """The model as it is before every training here."""
    torch.manual_seed(1)
    return Net()


def batches(size: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """The same samples in the same order, whatever the size of a batch."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size * number, 6, generator=generator)
    y = torch.randint(3, (size * number,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def terms(model: Net, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Every term's value, in plain torch."""
    hidden, logits = model(x)
    logp = logits.log_softmax(-1)
    return {
        "base": -logp.gather(1, y[:, None]).mean(),
        "sparsity": hidden.abs().mean(),
        "certain": -(logp.exp() * logp).sum(-1).mean(),
        "decay": sum((p.square().sum() for p in model.parameters()), torch.zeros(())),
    }


def weights(step: int) -> dict[str, float]:
    """Every term's weight at a step."""
    ramp = RAMP * min(step / (STEPS - 1), 1.0)
    return {"base": 1.0, "sparsity": ramp, "certain": 0.3, "decay": 0.05}


@dataclass
class Training:
    """What a training by hand shows: losses, norms of whole gradients, weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def by_hand(
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    accumulate: int = 1,
    change: Callable[[list[Tensor]], None] = lambda _: None,
    lr: float = 0.1,
) -> Training:
    """Train with SGD; ``change`` may write to the gradients before every update."""
    model, shown = net(), Training()
    params = list(model.parameters())
    for step in range(len(data) // accumulate):
        loss = torch.zeros(())
        for x, y in data[step * accumulate : (step + 1) * accumulate]:
            values, by = terms(model, x, y), weights(step)
            loss = loss + sum(by[n] * v for n, v in values.items()) / accumulate
        grads = list(torch.autograd.grad(loss, params))
        shown.losses.append(loss.item())
        shown.norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        change(grads)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param.sub_(grad, alpha=lr)
    shown.weights = [p.detach() for p in params]
    return shown


def norms_by_autograd(model: Net, x: Tensor, y: Tensor, *, step: int) -> dict[str, float]:
    """Weighted gradient norms of the terms at hidden activations and logits together.

    Each input counts by itself: what a term on the logits does to the hidden layer is not counted
    again there.
    """
    hidden, logits = (t.detach().requires_grad_() for t in model(x))
    logp = logits.log_softmax(-1)
    by = weights(step)
    values = {
        "base": F.nll_loss(logp, y),
        "sparsity": hidden.abs().mean(),
        "certain": -(logp.exp() * logp).sum(-1).mean(),
    }
    norms = {}
    for name, value in values.items():
        grads = torch.autograd.grad(value, [hidden, logits], retain_graph=True, allow_unused=True)
        square = sum(g.double().square().sum().item() for g in grads if g is not None)
        norms[name] = by[name] * square**0.5
    return norms


def clip(grads: Sequence[Tensor], limit: float) -> None:
    """Clip by global norm, exactly to the limit."""
    norm = torch.cat([g.flatten() for g in grads]).norm()
    for grad in grads:
        grad.mul_((limit / norm).clamp(max=1.0))


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], *, atol: float = 1e-6) -> None:
    """Weights agree: sums of a few numbers of size one, in another order, over twenty steps."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=atol)
