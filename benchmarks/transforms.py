"""Gradient transforms: speed and accuracy beside torch, a loop a parameter and separate passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.measure import seconds, table
from equipoise import transforms
from equipoise.transforms import GradientTransform

Sizes = tuple[tuple[int, ...], ...]
MODELS: dict[str, tuple[Sizes, int]] = {
    "150 large": (((1024, 1024), (1024,), (4096, 256)), 150),
    "3000 middle-sized": (((256, 256), (256,), (64, 64, 3, 3)), 3000),
    "3000 tiny": (((32, 32), (32,), (16, 8, 3, 3)), 3000),
}


def parameters(sizes: Sizes, number: int) -> list[Tensor]:
    """Parameters with gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = []
    for i in range(number):
        param = torch.randn(sizes[i % len(sizes)], device=device).requires_grad_()
        param.grad = torch.randn_like(param)
        out.append(param)
    return out


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients."""
    return [param.grad for param in params if param.grad is not None]


class Still(torch.optim.Optimizer):
    """An optimizer that does nothing, so that only what is attached takes time."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Leave everything as it is."""
        if closure is not None:
            closure()


def attached(
    params: list[Tensor], *shaping: GradientTransform, restore: bool = True
) -> Callable[[], None]:
    """A step through transforms; gradients that shrink are drawn larger again for the next."""
    optimizer = Still(params)
    for transform in shaping:
        transforms.attach(transform, optimizer)
    originals = [grad.clone() for grad in gradients(params)] if restore else []

    def run() -> None:
        if restore:
            torch._foreach_copy_(gradients(params), originals)
        optimizer.step()

    return run


def timm_agc(params: list[Tensor], factor: float = 0.01, eps: float = 1e-3) -> None:
    """Adaptive clipping as it is usually written: a loop a parameter, after timm's."""
    for param in params:
        weight, grad = param.detach(), param.grad
        assert grad is not None
        limit = unit_norm(weight).clamp_(min=eps).mul_(factor)
        norm = unit_norm(grad)
        clipped = grad * (limit / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < limit, grad, clipped))


def unit_norm(x: Tensor) -> Tensor:
    """The norm over all dimensions but the first."""
    return x.norm(2.0) if x.dim() < 2 else x.norm(2.0, dim=tuple(range(1, x.dim())), keepdim=True)


def with_copy(params: list[Tensor], run: Callable[[], object]) -> Callable[[], None]:
    """The same work as `attached` does to draw the gradients again."""
    originals = [grad.clone() for grad in gradients(params)]

    def both() -> None:
        torch._foreach_copy_(gradients(params), originals)
        run()

    return both


def accuracy() -> None:
    """The norm of 8 million equal entries, over 8 tensors."""
    params = [torch.zeros(10**6, requires_grad=True) for _ in range(8)]
    for param in params:
        param.grad = torch.full_like(param, 0.1)
    grads = gradients(params)
    exact = math.sqrt(math.fsum(g.double().square().sum().item() for g in grads))
    handle = transforms.attach(transforms.snapshot("norm"), Still(params))
    handle.optimizer.step()
    ours = abs(handle.metrics()["norm"] - exact) / exact
    theirs = abs(torch.nn.utils.get_total_norm(grads).item() - exact) / exact
    print(f"relative error of the norm of 8·10⁶ equal entries: ours {ours:.1e}, torch {theirs:.1e}")


def row(name: str, case: str, peer: float, ours: float) -> list[str]:
    """A line of the table."""
    return [name, case, f"{peer * 1e3:.1f} ms", f"{ours * 1e3:.1f} ms", f"{peer / ours:.2f}×"]


def compared(name: str, params: list[Tensor]) -> list[list[str]]:
    """Every comparison on one set of parameters, side by side."""
    clip = transforms.clip_by_global_norm
    four = [
        transforms.centralize(),
        transforms.clip_by_norm(1.0),
        transforms.clip_by_global_norm(0.5),
        transforms.add_l2_decay(0.01),
    ]
    copy = with_copy(params, lambda: None)
    cases: dict[str, Callable[[], object]] = {
        "copy": copy,
        "torch, nothing to clip": lambda: torch.nn.utils.clip_grad_norm_(params, 1e9),
        "ours, nothing to clip": attached(params, clip(1e9), restore=False),
        "torch, clipping": with_copy(params, lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)),
        "ours, clipping": attached(params, clip(1.0)),
        "timm, clipping": with_copy(params, lambda: timm_agc(params)),
        "agc, clipping": attached(params, transforms.adaptive_clip()),
        "timm, nothing to clip": lambda: timm_agc(params, 1e9),
        "agc, nothing to clip": attached(params, transforms.adaptive_clip(1e9), restore=False),
        "four passes": attached(params, *four),
        "one chain": attached(params, transforms.chain(*four)),
    }
    times = seconds(cases, repeats=9)
    base = times["copy"]
    for case in ("torch, clipping", "ours, clipping", "timm, clipping", "agc, clipping"):
        times[case] -= base
    times["four passes"] -= base
    times["one chain"] -= base
    return [
        row(name, "clip_grad_norm_, clipping", times["torch, clipping"], times["ours, clipping"]),
        row(
            name,
            "clip_grad_norm_, nothing to clip",
            times["torch, nothing to clip"],
            times["ours, nothing to clip"],
        ),
        row(name, "AGC a parameter, clipping", times["timm, clipping"], times["agc, clipping"]),
        row(
            name,
            "AGC a parameter, nothing to clip",
            times["timm, nothing to clip"],
            times["agc, nothing to clip"],
        ),
        row(name, "four separate transforms", times["four passes"], times["one chain"]),
    ]


def main() -> None:
    """Clips, adaptive clips and chains on large, middle-sized and tiny tensors."""
    rows = []
    for name, (sizes, number) in MODELS.items():
        rows += compared(name, parameters(sizes, number))
    table(["tensors", "against", "peer", "equipoise", "faster"], rows)
    print()
    accuracy()


if __name__ == "__main__":
    main()
