"""Entropy as bonus or penalty, and normalized, so that one weight fits any number of classes."""

import math

import torch

import equipoise as eq


def after(mode: str, *, classes: int, normalize: bool = False) -> float:
    """The entropy that a policy has after some steps on it alone, as a part of the largest."""
    generator = torch.Generator().manual_seed(0)
    logits = (2.0 * torch.randn(8, classes, generator=generator)).requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=20.0)
    for _ in range(20):
        optimizer.zero_grad()
        eq.entropy(logits, mode=mode, from_logits=True, normalize=normalize).backward()
        optimizer.step()
    return eq.entropy(logits.detach(), from_logits=True, normalize=True).item()


def main() -> None:
    """Directions first, then sizes."""
    print("Part of the largest entropy after 20 steps:\n")
    print("classes    bonus    penalty")
    for classes in (4, 32):
        row = [after(mode, classes=classes) for mode in ("bonus", "penalty")]
        print(f"{classes:7}{row[0]:9.2f}{row[1]:11.2f}")

    print("\nUniform distributions, whose entropy is ln n, and 1 when normalized:\n")
    for classes in (2, 100, 50_000):
        uniform = torch.full((1, classes), -math.log(classes))
        plain, normalized = eq.entropy(uniform), eq.entropy(uniform, normalize=True)
        print(f"n = {classes:<7} {plain:8.4f} {normalized:8.4f}")

    logits = torch.tensor([[2.0, 0.0, -torch.inf]], requires_grad=True)  # a masked action
    value = eq.entropy(logits, mode="bonus", from_logits=True)
    value.backward()
    rounded = [round(g, 4) for g in logits.grad[0].tolist()]
    print(f"\nWith a masked action: {value:.4f}, gradient {rounded}, no NaN")


if __name__ == "__main__":
    main()
