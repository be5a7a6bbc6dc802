"""Distributed tensors: every penalty and every report, as of the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import equipoise as eq
from equipoise import Pipeline, Term, tracking
from tests.contracts.members import MEMBERS, Member

PLACEMENTS = {"sharded": Shard(0), "replicated": Replicate()}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of this one process, which runs the same code as one of many."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def spread(x: Tensor, mesh: DeviceMesh, how: str) -> Tensor:
    """The tensor as a leaf whose parts lie on a mesh."""
    return distribute_tensor(x.detach(), mesh, [PLACEMENTS[how]]).requires_grad_()


def whole(x: Any) -> Any:
    """The tensor that all parts together are."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.id)
def test_value_and_gradient_are_those_of_the_whole(
    member: Member, mesh: DeviceMesh, how: str
) -> None:
    """Every option gives the numbers of a plain tensor; a mask must be distributed too."""
    plain = member.inputs()
    inputs = [spread(x, mesh, how) for x in plain]
    if "tensor" in member.label:
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            member.call(*inputs)
        return
    value, wanted = member.call(*inputs), member.call(*plain)
    slopes = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(wanted.sum(), plain, allow_unused=True)
    # Sums of at most 24 numbers in another order.
    torch.testing.assert_close(whole(value), wanted, rtol=1e-12, atol=1e-14)
    for slope, same in zip(slopes, expected, strict=True):
        torch.testing.assert_close(whole(slope), same, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", PLACEMENTS)
def test_random_choices_are_those_of_the_whole(mesh: DeviceMesh, how: str) -> None:
    """From one seed the same rows are sampled and the same epsilons drawn."""
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    calls = {
        "rows": lambda x, _, g: eq.orthogonality(x, sample=2, generator=g),
        "epsilons": lambda x, y, g: eq.interpolated_gradient_penalty(
            lambda z: z.pow(3).sum(-1), x, y, generator=g
        ),
    }
    for call in calls.values():
        values = []
        for a, b in ((x, y), (spread(x, mesh, how), spread(y, mesh, how))):
            values.append(whole(call(a, b, torch.Generator().manual_seed(5))).detach())
        torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)


def test_what_is_not_finite_is_found(mesh: DeviceMesh) -> None:
    """Counts and the first index are those of the whole."""
    x = torch.tensor([[1.0, 2.0], [torch.inf, torch.nan]])
    with pytest.raises(eq.NonFiniteError, match=r"1 NaN and 1 inf among 4 .* index \(1, 0\)"):
        eq.check_finite(spread(x, mesh, "sharded"))
    eq.check_finite(spread(x[:1], mesh, "sharded"))


TERMS = {
    "l1": Term(eq.l1, inputs="w", weight=0.1),
    "l2": Term(eq.l2, inputs="w", options={"center": 0.5}),
}


def evaluated(w: Tensor, track: Any) -> eq.Evaluation:
    """A task loss on a plain tensor, and two penalties on weights that may be distributed."""
    base = Term(lambda y: y.square().sum(), inputs="y")
    return Pipeline(base=base, **TERMS)(
        w=[w], y=torch.tensor([1.0, 2.0], requires_grad=True), track=track
    )


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("track", [False, "norms", "gram"])
def test_a_pipeline_on_distributed_weights(mesh: DeviceMesh, how: str, track: Any) -> None:
    """Total, gradient and every metric are those of plain weights, beside a plain task loss."""
    plain = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    wanted = evaluated(plain, track)
    wanted.total.backward()
    w = spread(plain, mesh, how)
    result = evaluated(w, track)
    result.total.backward()
    # Sums of twelve float32 numbers in another order.
    torch.testing.assert_close(whole(w.grad), plain.grad, rtol=1e-6, atol=1e-7)
    assert result.metrics() == pytest.approx(wanted.metrics(), rel=1e-6)
    if track == "gram":
        torch.testing.assert_close(
            result.gradients.gram, wanted.gradients.gram, rtol=1e-6, atol=1e-6
        )


def test_parameter_gradients_of_distributed_weights(mesh: DeviceMesh) -> None:
    """The report and the gradients set are those of plain weights."""
    plain = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    w = spread(plain, mesh, "sharded")
    reports = [
        tracking.parameter_gradients(evaluated(x, track=False), [x], level="gram")
        for x in (plain, w)
    ]
    torch.testing.assert_close(reports[1].gram, reports[0].gram, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole(w.grad), plain.grad, rtol=1e-6, atol=1e-7)


def rows_of(w: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of penalties on weights."""
    result = Pipeline(
        l1=Term(eq.l1, weight=0.1),
        l2=Term(eq.l2),
        size=Term(eq.output_magnitude),
        angles=Term(eq.orthogonality),
    )(w, track="gram")
    result.total.backward()
    assert w.grad is not None
    return whole(w.grad), result.metrics()


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    pair = init_device_mesh("cpu", (2,))
    found = {n: rows_of(spread(weights(n), pair, "sharded")) for n in ROWS}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


ROWS = (4, 3, 1)
"""The same number on both processes, one more on the first, and none on the second."""


def weights(rows: int) -> Tensor:
    """A leaf of so many rows."""
    return torch.linspace(-1, 1, 3 * rows).reshape(rows, 3).requires_grad_()


def test_two_processes_that_hold_parts_of_the_weights(tmp_path: Path) -> None:
    """Whatever part each of them holds, all figures and gradients are those of the whole."""
    mp.spawn(_process, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for rows in ROWS:
            gradient, metrics = rows_of(weights(rows))
            torch.testing.assert_close(found[rows][0], gradient, rtol=1e-5, atol=1e-6)
            assert found[rows][1] == pytest.approx(metrics, rel=1e-5, abs=1e-6)
