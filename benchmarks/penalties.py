"""Penalties: value and gradient against the usual lines of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise as eq
from benchmarks.measure import seconds, table

Loss = Callable[[Tensor, Tensor], Tensor]


def js_by_hand(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon as it is usually written."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453
    halves = [F.kl_div(log_m, x, log_target=True, reduction="batchmean") for x in (log_p, log_q)]
    return (halves[0] + halves[1]) / 2


def entropy_by_hand(p: Tensor, _q: Tensor) -> Tensor:
    """Entropy as it is usually written."""
    log_p = p.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def orthogonality_by_hand(p: Tensor, _q: Tensor) -> Tensor:
    """Orthogonality with its identity matrix."""
    rows = F.normalize(p, dim=-1)
    gram = rows @ rows.T
    return (gram - torch.eye(len(gram), device=p.device)).square().sum()


PAIRS: dict[str, tuple[Loss, Loss]] = {
    "l1": (lambda p, _q: eq.l1(p), lambda p, _q: p.abs().sum()),
    "l2": (lambda p, _q: eq.l2(p), lambda p, _q: p.square().sum()),
    "kl_divergence": (
        lambda p, q: eq.kl_divergence(p, q, from_logits=True),
        lambda p, q: F.kl_div(
            q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
        ),
    ),
    "js_divergence": (lambda p, q: eq.js_divergence(p, q, from_logits=True), js_by_hand),
    "entropy": (lambda p, _q: eq.entropy(p, from_logits=True), entropy_by_hand),
    "orthogonality": (lambda p, _q: eq.orthogonality(p, mode="hard"), orthogonality_by_hand),
}


def differentiated(loss: Loss, p: Tensor, q: Tensor) -> Callable[[], object]:
    """A call that computes the loss and both gradients."""
    return lambda: torch.autograd.grad(loss(p, q), (p, q), allow_unused=True)


def main() -> None:
    """Every pair on logits [256, 32000], eager and compiled, value and gradient."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p, q = (torch.randn(256, 32000, device=device, requires_grad=True) for _ in range(2))
    rows = []
    for name, (ours, theirs) in PAIRS.items():
        times = seconds(
            {
                "ours": differentiated(ours, p, q),
                "theirs": differentiated(theirs, p, q),
                "ours compiled": differentiated(torch.compile(ours), p, q),
                "theirs compiled": differentiated(torch.compile(theirs), p, q),
            }
        )
        rows.append(
            [
                name,
                f"{times['theirs'] * 1e3:.1f} ms",
                f"{times['ours'] / times['theirs']:.2f}×",
                f"{times['theirs compiled'] * 1e3:.1f} ms",
                f"{times['ours compiled'] / times['theirs compiled']:.2f}×",
            ]
        )
    table(
        ["[256, 32000] float32", "torch", "equipoise", "torch compiled", "equipoise compiled"], rows
    )


if __name__ == "__main__":
    main()
