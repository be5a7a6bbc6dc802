"""What each of two processes does; tests compare it with one process that holds everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import equipoise as eq
from equipoise import transforms
from tests.transforms.members import FUNCTIONAL, Member

SPREAD: dict[str, tuple[tuple[int, ...], str]] = {
    "even": ((4, 3), "rows"),
    "uneven": ((3, 4), "rows"),
    "one row": ((1, 5), "rows"),
    "columns": ((2, 3), "columns"),
    "vector": ((5,), "rows"),
    "one entry": ((1,), "rows"),
    "plain": ((2, 3), "plain"),
    "replicated": ((3, 2), "replicated"),
    "convolution": ((3, 2, 2, 2), "rows"),
    "four here, three there": ((7,), "rows"),
    "three and three": ((6,), "rows"),
    "strided": ((4, 3), "strided"),
}
"""Shapes of whole parameters, and how each is spread over two processes.

Some shards have one shape on one process and two on the other. Strided ones are what FSDP2 makes of
rows that tensor parallelism has dealt out before.
"""

SHARDED = [m for m in FUNCTIONAL if m.factory != "add_noise" and m.id != "snapshot-peak"]
"""Noise differs from shard to shard, and that figure is the user's."""


def numbers(step: int) -> list[Tensor]:
    """Whole tensors, the same on every process."""
    generator = torch.Generator().manual_seed(500 + step)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape, _ in SPREAD.values()
    ]


def with_nan(tensors: list[Tensor]) -> list[Tensor]:
    """A NaN in the last row of the uneven one, which lies on the second process."""
    tensors[1][2, 0] = math.nan
    return tensors


def spread(tensors: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Whole tensors as the table spreads them."""
    placements = {
        "rows": Shard(0),
        "columns": Shard(1),
        "replicated": Replicate(),
        "strided": _StridedShard(0, split_factor=2),
    }
    return [
        x.clone() if how == "plain" else distribute_tensor(x.clone(), mesh, [placements[how]])
        for x, (_, how) in zip(tensors, SPREAD.values(), strict=True)
    ]


def gathered(x: Any) -> Any:
    """Whole tensors again, wherever one stands in a structure."""
    if isinstance(x, DTensor):
        return x.full_tensor()
    if isinstance(x, dict):
        return {key: gathered(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [gathered(value) for value in x]
    return x


def three_steps(member: Member, place: Callable[[list[Tensor]], list[Tensor]]) -> dict[str, Any]:
    """Gradients and states after three updates of tensors that lie anywhere."""
    transform, params = member.make(), place(numbers(9))
    state, outs, states = transform.init(params), [], []
    for step in range(3):
        out, state = transform.update(place(numbers(step)), state, params)
        outs.append(gathered(list(out)))
        states.append(gathered(state))
    return {"grads": outs, "states": states}


def with_a_nan(policy: str, place: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """What a clip makes of gradients among which one is not finite."""
    clip = transforms.clip_by_norm(0.5, nonfinite=policy)  # type: ignore[arg-type]
    params = place(numbers(9))
    out, _ = clip.update(place(with_nan(numbers(0))), clip.init(params), params)
    return gathered(list(out))  # type: ignore[no-any-return]


def complaint(mesh: DeviceMesh) -> str:
    """What the policy to raise says here of a NaN that lies on the second process."""
    clip = transforms.clip_by_norm(0.5, nonfinite="raise")
    params = spread(numbers(9), mesh)
    try:
        clip.update(spread(with_nan(numbers(0)), mesh), clip.init(params), params)
    except eq.NonFiniteError as error:
        return str(error)
    return "nothing"


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of what is reduced over all processes."""
    sizes: list[int] = []
    plain = dist.all_reduce

    def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = plain


COUNTED = {
    "clip_by_global_norm": lambda: transforms.clip_by_global_norm(0.5),
    "clip_by_norm": lambda: transforms.clip_by_norm(0.5),
    "clip_by_norm_history": transforms.clip_by_norm_history,
    "adaptive_clip": transforms.adaptive_clip,
    "centralize": transforms.centralize,
    "clip_by_percentile, global": lambda: transforms.clip_by_percentile(40),
    "clip_by_percentile, tensor": lambda: transforms.clip_by_percentile(40, scope="tensor"),
    "clip_by_value": lambda: transforms.clip_by_value(-1, 1),
    "chain": lambda: transforms.chain(
        transforms.snapshot("before"),
        transforms.clip_by_norm(0.5),
        transforms.snapshot("between"),
        transforms.clip_by_global_norm(0.5),
        transforms.snapshot("after"),
    ),
}


def reductions(mesh: DeviceMesh) -> dict[str, int]:
    """How many all-reduces an update of float32 gradients takes."""
    found = {}
    params = spread([x.float() for x in numbers(9)], mesh)
    for name, make in COUNTED.items():
        transform = make()
        with counted() as sizes:
            transform.update(
                spread([x.float() for x in numbers(0)], mesh), transform.init(params), params
            )
        found[name] = len(sizes)
    return found


def noise(mesh: DeviceMesh) -> dict[str, Tensor]:
    """What is added here to a sharded, a replicated and a plain gradient of zeros."""
    zeros = torch.zeros(4, 3)
    grads = [
        distribute_tensor(zeros, mesh, [Shard(0)]),
        distribute_tensor(zeros, mesh, [Replicate()]),
        zeros.clone(),
    ]
    add = transforms.add_noise(1.0, seed=5)
    sharded, replicated, plain = add.update(grads, add.init(grads), grads)[0]
    return {"sharded": sharded.to_local(), "replicated": replicated.to_local(), "plain": plain}


def partial_sums(mesh: DeviceMesh, rank: int) -> Tensor:
    """A clip of a gradient that nobody has added up over processes yet."""
    param = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
    grad = DTensor.from_local(torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank]), mesh, [Partial()])
    clip = transforms.clip_by_global_norm(1.0)
    return gathered(clip.update([grad], clip.init([param]), [param])[0][0])  # type: ignore[no-any-return]


def measured(mesh: DeviceMesh) -> dict[str, float]:
    """Figures that users compute of the gradient of three rows, two here and one there."""
    grad = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    figures: dict[str, Callable[[list[Any]], Tensor]] = {
        "squares": lambda grads: grads[0].square().sum(),
        "largest": lambda grads: grads[0].max(),
    }
    shaping = transforms.chain(*(transforms.snapshot(n, fn) for n, fn in figures.items()))
    _, state = shaping.update([grad], shaping.init([grad]), [grad])
    return {name: figure.item() for name, figure in transforms.recorded(state).items()}


def skipping(mesh: DeviceMesh) -> dict[str, Any]:
    """A step of Adam in which one process holds a NaN."""
    params = [nn.Parameter(p) for p in spread(numbers(9), mesh)]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=False)
    skip = transforms.chain(transforms.skip_nonfinite(), transforms.add_l2_decay(decoupled=True))
    handle = transforms.attach(skip, optimizer)
    for param, grad in zip(params, spread(with_nan(numbers(0)), mesh), strict=True):
        param.grad = grad
    optimizer.step()
    return {
        "weights": gathered([p.detach() for p in params]),
        "names": list(handle.nonfinite()),
        "moments": len(optimizer.state),
        "metrics": handle.metrics(),
    }


def network() -> nn.Module:
    """Five rows, then one: both cut unevenly by two."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch() -> Tensor:
    """The inputs of both processes together."""
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def shaping() -> transforms.GradientTransform:
    """A chain of most kinds of links."""
    return transforms.chain(
        transforms.snapshot("raw"),
        transforms.centralize(),
        transforms.clip_by_percentile(80),
        transforms.adaptive_clip(0.5),
        transforms.clip_by_norm_history(50, window=2),
        transforms.add_l2_decay(0.1),
        transforms.add_l1_decay(0.05, decoupled=True),
    )


def trained(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Three steps, and the figures of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    handle = transforms.attach(shaping(), optimizer, names=model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    weights = gathered([p.detach() for p in model.parameters()])
    return {"weights": weights, "metrics": handle.metrics()}


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each layer by itself, then what is left."""
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Resumable:
    """Training under FSDP2 that goes through distributed checkpoints."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.model = fully_sharded(network(), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        noisy = transforms.chain(shaping(), transforms.add_noise(0.01))
        self.handle = transforms.attach(noisy, self.optimizer)
        self.states()

    def states(self) -> dict[str, Any]:
        """What goes into a checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "handle": self.handle}

    def steps(self, x: Tensor, number: int) -> None:
        """Steps on the same inputs."""
        for _ in range(number):
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> Any:
        """The whole ones."""
        return gathered([p.detach() for p in self.model.parameters()])


def resumed(mesh: DeviceMesh, x: Tensor, folder: str) -> dict[str, Any]:
    """Four steps in a row, and two, a checkpoint, and two more."""
    straight, first, second = (Resumable(mesh) for _ in range(3))
    straight.steps(x, 4)
    first.steps(x, 2)
    dcp.save(first.states(), checkpoint_id=folder)
    states = second.states()
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        second.model,
        second.optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    second.steps(x, 2)
    return {
        "straight": straight.weights(),
        "resumed": second.weights(),
        "keys": list(states["optimizer"]),
    }


def process(rank: int, folder: str) -> None:
    """All that one of two processes does, in a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    half = batch()[4 * rank : 4 * rank + 4]
    found: dict[str, Any] = {
        "steps": {m.id: three_steps(m, lambda xs: spread(xs, mesh)) for m in SHARDED},
        "policies": {
            policy: with_a_nan(policy, lambda xs: spread(xs, mesh))
            for policy in ("propagate", "zero", "skip")
        },
        "reductions": reductions(mesh),
        "noise": noise(mesh),
        "partial": partial_sums(mesh, rank),
        "measured": measured(mesh),
        "skipping": skipping(mesh),
        "complaint": complaint(mesh),
        "resumed": resumed(mesh, half, f"{folder}/checkpoint"),
        "fsdp": trained(fully_sharded(network(), mesh), half),
        "ddp": trained(DistributedDataParallel(network()), half),
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
