"""Gradients on their way to the optimizer: clipped, skipped when broken, decayed where it fits."""

import logging

import torch
import torch.nn.functional as F
from torch import nn

from equipoise import transforms
from equipoise.transforms import select

logging.getLogger("equipoise").setLevel(logging.ERROR)  # skipped steps are counted below


def run(*, shaped: bool) -> tuple[float, transforms.Handle | None]:
    """Regression in which some batches are wild and one is broken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = None
    if shaped:
        shaping = transforms.chain(
            transforms.skip_nonfinite(limit=3),
            transforms.snapshot("norm_before"),
            transforms.clip_by_norm_history(75, window=50),
            transforms.clip_by_global_norm(1.0),
            transforms.masked(transforms.add_l2_decay(1e-4), select.no_bias_or_norm(model)),
        )
        print(f"{shaping}\n")
        handle = transforms.attach(shaping, optimizer, names=model)
    for step in range(200):
        x = torch.randn(32, 4)
        y = x.sum(1, keepdim=True)
        if step % 20 == 13:
            y = 300.0 * y  # a wild batch
        if step == 100:
            y[0] = torch.nan  # a broken one
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(1000, 4)
    with torch.no_grad():
        return F.mse_loss(model(x), x.sum(1, keepdim=True)).item(), handle


def main() -> None:
    """The same training with and without shaping."""
    plain, _ = run(shaped=False)
    shaped, handle = run(shaped=True)
    print(f"error without shaping: {plain:.3g}")
    print(f"error with shaping:    {shaped:.3f}")
    assert handle is not None
    print(f"\nskipped steps, and why: {handle.nonfinite()}")
    print("the last step:")
    for name, figure in handle.metrics().items():
        print(f"  {name:<38}{figure:8.3f}")


if __name__ == "__main__":
    main()
