"""Sharded gradients: everything is that of the whole parameters, on every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from equipoise import transforms
from tests.transforms.assertions import assert_same_bits
from tests.transforms.members import Member
from tests.transforms.sharded import (
    COUNTED,
    SHARDED,
    batch,
    network,
    numbers,
    process,
    three_steps,
    trained,
    with_a_nan,
)
from tests.transforms.sharded_twice import MEASURING, TWICE, process_of_four, wider


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes have found, the first's and the second's."""
    folder = tmp_path_factory.mktemp("sharded")
    mp.spawn(process, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def assert_close(got: Any, expected: Any) -> None:
    """Equal up to the order of sums in float64."""
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("member", SHARDED, ids=lambda m: m.id)
def test_sharded_is_whole(found: list[dict[str, Any]], member: Member) -> None:
    """Three updates of sharded, replicated and plain gradients are those of the whole ones.

    States and figures too.
    """
    expected = three_steps(member, lambda xs: xs)
    for rank in range(2):
        got = found[rank]["steps"][member.id]
        assert_close(got["grads"], expected["grads"])
        assert_close(got["states"], expected["states"])


@pytest.mark.parametrize("policy", ["propagate", "zero", "skip"])
def test_a_nan_on_one_process(found: list[dict[str, Any]], policy: str) -> None:
    """A NaN that one process holds is dealt with on both as in one list of whole gradients."""
    expected = with_a_nan(policy, lambda xs: xs)
    for rank in range(2):
        assert_close(found[rank]["policies"][policy], expected)


ALL_REDUCES = {
    "clip_by_global_norm": 1,
    "clip_by_norm": 1,
    "clip_by_norm_history": 1,
    "adaptive_clip": 1,
    "centralize": 1,
    "clip_by_percentile, global": 3,  # one for each digit of float32
    "clip_by_percentile, tensor": 3,
    "clip_by_value": 0,
    "chain": 1,
}


@pytest.mark.parametrize("name", COUNTED)
def test_one_packed_reduction(found: list[dict[str, Any]], name: str) -> None:
    """All that a pass needs of the other process comes in one all-reduce; of a chain too.

    Percentiles are found in three passes, and so are those of every tensor by itself.
    """
    assert [found[rank]["reductions"][name] for rank in range(2)] == [ALL_REDUCES[name]] * 2


def test_the_process_that_does_not_hold_the_nan_raises_too(found: list[dict[str, Any]]) -> None:
    """Both name the tensor; how many there are and where, only the one that holds them can say."""
    here, there = (found[rank]["complaint"] for rank in range(2))
    assert here == (
        "gradients must be finite, got NaN or inf in gradient 1, in the part of another process. "
        "Use its message to see how many."
    )
    assert there.startswith("`gradient 1` must be finite, got 1 NaN among 4 entries, first at")


def test_a_sharded_run_resumes_bit_by_bit(found: list[dict[str, Any]]) -> None:
    """Through a distributed checkpoint that drops our key, with the handle saved beside it."""
    for rank in range(2):
        run = found[rank]["resumed"]
        assert run["keys"] == ["state", "param_groups"]
        assert_same_bits(run["resumed"], run["straight"])


def test_noise_of_shards_and_replicas(found: list[dict[str, Any]]) -> None:
    """Parts of one parameter get different noise; copies of one get the same."""
    first, second = (found[rank]["noise"] for rank in range(2))
    assert_same_bits(first["replicated"], second["replicated"])
    assert_same_bits(first["plain"], second["plain"])
    assert first["sharded"].shape == second["sharded"].shape
    assert not (first["sharded"] == second["sharded"]).any()


def test_partial_gradients_are_added_up_first(found: list[dict[str, Any]]) -> None:
    """(3, 0) here and (0, 4) there is a gradient of length 5."""
    for rank in range(2):
        assert_close(found[rank]["partial"], torch.tensor([0.6, 0.8]))


def test_a_users_figure_is_of_the_whole(found: list[dict[str, Any]]) -> None:
    """What a function makes of distributed gradients is brought together on every process."""
    for rank in range(2):
        assert found[rank]["measured"] == {"squares": 55.0, "largest": 5.0}


def test_a_skipped_step_is_skipped_everywhere(found: list[dict[str, Any]]) -> None:
    """One process holds the NaN; both skip, name the same tensor, and decay nothing."""
    for rank in range(2):
        skipped = found[rank]["skipping"]
        assert_same_bits(skipped["weights"], numbers(9))
        assert skipped["names"] == ["parameter 1 of group 0, (3, 4)"]
        assert skipped["moments"] == 0
        assert skipped["metrics"] == {"skip_nonfinite/skipped": 1.0, "skip_nonfinite/in_a_row": 1.0}


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_training_over_processes_is_training_in_one(found: list[dict[str, Any]], how: str) -> None:
    """With each half of a batch on a process, weights and figures are those of the whole batch.

    Parameters of five and of one row are cut by FSDP2; DDP's gradients are seen reduced.
    """
    expected = trained(network(), batch())
    for rank in range(2):
        assert_close(found[rank][how]["weights"], expected["weights"])
        assert found[rank][how]["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)


@pytest.fixture(scope="module")
def found_by_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four processes have found, two by two."""
    folder = tmp_path_factory.mktemp("twice")
    mp.spawn(process_of_four, args=(str(folder),), nprocs=4)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.mark.parametrize("how", TWICE)
@pytest.mark.parametrize("member", MEASURING, ids=lambda m: m.id)
def test_sharded_twice_is_whole(
    found_by_four: list[dict[str, Any]], member: Member, how: str
) -> None:
    """Cut over two dimensions of a mesh, gradients and figures are those of the whole ones."""
    expected = three_steps(member, lambda xs: xs)
    for rank in range(4):
        assert_close(found_by_four[rank]["steps"][how][member.id], expected)


def test_fsdp_over_tensor_parallelism(found_by_four: list[dict[str, Any]]) -> None:
    """Rows dealt out by tensor parallelism and again by FSDP2 train as the whole on one process."""
    expected = trained(wider(), batch())
    for rank in range(4):
        assert_close(found_by_four[rank]["fsdp"]["weights"], expected["weights"])
        assert found_by_four[rank]["fsdp"]["metrics"] == pytest.approx(
            expected["metrics"], rel=1e-12
        )


def test_the_whole_is_not_what_lies_here() -> None:
    """The first half of a batch alone would have been noticed by the test above."""
    whole, half = trained(network(), batch()), trained(network(), batch()[:4])
    assert whole["metrics"]["raw"] != pytest.approx(half["metrics"]["raw"], rel=1e-3)
    assert transforms.recorded({}) == {}
