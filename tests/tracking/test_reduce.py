"""Reports of several processes add up in one all-reduce."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import equipoise as eq
from equipoise import Pipeline, Term

X = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)


def pipeline(rank: int) -> Pipeline:
    """The same terms everywhere; one has no gradient on the second process."""
    return Pipeline(
        l1=Term(eq.l1, weight=0.5),
        l2=Term(eq.l2),
        sometimes=Term(lambda x: x.sum() if rank == 0 else x.detach().sum()),
    )


def report(rank: int, level: str, x: torch.Tensor) -> eq.Gradients:
    """One process's report."""
    result = pipeline(rank)(x.clone().requires_grad_(), track=level)  # type: ignore[arg-type]
    result.total.backward()
    return result.gradients


def _process(rank: int, folder: str, level: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    calls = 0
    plain = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    reduced = report(rank, level, X[rank]).reduce()
    figures = {
        "l1": reduced.weighted["l1"],
        "l2": reduced.weighted["l2"],
        "sometimes": reduced["sometimes"].grad_error,
        "gram": reduced.grams,
        "calls": calls,
    }
    torch.save(figures, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("level", ["norms", "gram"])
def test_two_processes_report_as_one(tmp_path: Path, level: str) -> None:
    """Norms and inner products over two processes are those of one process with both batches."""
    mp.spawn(_process, args=(str(tmp_path), level), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = report(0, level, X)
    for name in ("l1", "l2"):
        torch.testing.assert_close(first[name], whole.weighted[name], rtol=1e-12, atol=0)
        assert torch.equal(first[name], second[name])
    if level == "gram":
        torch.testing.assert_close(first["gram"][0, :2, :2], whole.gram[:2, :2], rtol=1e-12, atol=0)
    assert first["sometimes"] == "it has no gradient on another process"
    assert second["sometimes"].startswith("its value has no graph")
    assert first["calls"] == second["calls"] == 1


def _process_with_nothing(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = X[rank].clone().requires_grad_()
    result = Pipeline(l1=pipeline(rank)["sometimes"])(x, track="gram")
    if rank == 0:
        result.total.backward()
    reduced = result.gradients.reduce()
    torch.save((reduced.grams, reduced["l1"].grad_error), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_a_process_without_any_gradient_takes_part(tmp_path: Path) -> None:
    """Its report has the form of the others', with zeros: else they cannot be added up."""
    mp.spawn(_process_with_nothing, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first[0], torch.full((1, 1, 1), 3.0, dtype=torch.float64))
    assert torch.equal(first[0], second[0])
    assert first[1] == "it has no gradient on another process"
