"""WGAN-GP on a mixture of eight Gaussians: the gradient penalty of Gulrajani et al. (2017).

Run with a path to have the picture elsewhere: ``python examples/wgan_gp.py picture.png``.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term

mpl.use("Agg")  # writes files, needs no screen
from matplotlib import pyplot as plt

CRITIC = Pipeline(
    base=Term(lambda real, fake: fake.mean() - real.mean(), inputs=("real", "fake")),
    lipschitz=Term(
        eq.interpolated_gradient_penalty, inputs=("critic", "samples", "made"), weight=1.0
    ),
)


def mixture(size: int) -> Tensor:
    """Samples of eight Gaussians on a circle."""
    angle = torch.randint(8, (size,)) * torch.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(size, 2)


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def train(steps: int) -> tuple[nn.Module, nn.Module]:
    """Three steps of the critic for one of the generator."""
    critic, generator = network(2, 1), network(4, 2)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    print("step    distance    lipschitz    ‖∇critic‖")
    for step in range(steps):
        for _ in range(3):
            samples, made = mixture(128), generator(torch.randn(128, 4)).detach()
            result = CRITIC(
                real=critic(samples),
                fake=critic(made),
                critic=critic,
                samples=samples,
                made=made,
            )
            of_critic.zero_grad()
            result.total.backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(torch.randn(128, 4))).mean()).backward()
        of_generator.step()
        if step % 100 == 99:
            metrics = result.metrics()
            x = samples.clone().requires_grad_()
            (slope,) = torch.autograd.grad(critic(x).sum(), x)
            print(
                f"{step + 1:4}{-metrics['base']:12.2f}{metrics['lipschitz']:13.2f}"
                f"{slope.norm(dim=1).mean():13.2f}"
            )
    return critic, generator


def draw(critic: nn.Module, generator: nn.Module, path: Path) -> None:
    """Data, what was made of noise, and what the critic thinks of the plane."""
    line = torch.linspace(-1.8, 1.8, 120)
    plane = torch.cartesian_prod(line, line)
    with torch.no_grad():
        height = critic(plane).reshape(120, 120).T
        made, samples = generator(torch.randn(600, 4)), mixture(600)
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    shades = axes.contourf(line.numpy(), line.numpy(), height.numpy(), levels=12, cmap="Greys_r")
    figure.colorbar(shades, label="the critic's value: higher where it expects data")
    for points, color, label in ((samples, "#e69f00", "data"), (made, "#0072b2", "generated")):
        axes.scatter(*points.T.numpy(), s=7, color=color, alpha=0.7, linewidths=0, label=label)
    axes.set(aspect="equal", title="WGAN-GP after 600 steps")
    axes.legend(loc="lower left", framealpha=1.0)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train, measure, draw."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    critic, generator = train(600)
    with torch.no_grad():
        made = generator(torch.randn(2000, 4))
    near = (made.norm(dim=1) - 1).abs() < 0.2
    eighth = (torch.atan2(made[:, 1], made[:, 0]) / (torch.pi / 4)).round() % 8
    counts = torch.bincount(eighth[near].long(), minlength=8)
    found = int((counts > 2000 / 8 / 5).sum())
    print(f"\n{near.double().mean():.0%} of what it makes is near the circle; {found} of 8 modes")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "wgan_gp.png")
    draw(critic, generator, path)
    print(f"The picture is in {path.name}")


if __name__ == "__main__":
    main()
