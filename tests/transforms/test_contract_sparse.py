"""Sparse gradients, such as those of embeddings: worked on as they are, or refused by name."""

import warnings

import pytest
import torch
from torch import Tensor

import equipoise as eq
from tests.transforms.assertions import assert_same_bits
from tests.transforms.members import FUNCTIONAL, Member

REFUSED = "needs dense gradients, got a sparse one for gradient 0. Use `masked` to leave it out"


def sparse() -> Tensor:
    """The gradient of an embedding of five rows in which one was used twice."""
    values = torch.tensor([[0.5, -1.0], [2.0, 0.25], [1.0, -3.0]], dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.tensor([[3, 0, 3]]), values, (5, 2), check_invariants=True)


@pytest.mark.parametrize("member", [m for m in FUNCTIONAL if m.sparse], ids=lambda m: m.id)
def test_sparse_gradients_stay_sparse(member: Member) -> None:
    """The result has the rows that were used, each once, transformed as if dense."""
    transform, weight = member.make(), torch.ones(5, 2, dtype=torch.float64)
    (got,), _ = transform.update([sparse()], transform.init([weight]), [weight])
    assert got is not None
    assert got.layout == torch.sparse_coo
    assert_same_bits(got.coalesce().indices(), torch.tensor([[0, 3]]))
    rows = torch.tensor([[2.0, 0.25], [1.5, -4.0]], dtype=torch.float64)
    part = weight[:2]
    (expected,), _ = transform.update([rows], transform.init([part]), [part])
    assert expected is not None
    torch.testing.assert_close(got.coalesce().values(), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("member", [m for m in FUNCTIONAL if m.sparse], ids=lambda m: m.id)
def test_sparse_gradients_are_not_written_to(member: Member) -> None:
    """The sparse gradient that went in is what it was, coalesced or not."""
    transform, weight = member.make(), torch.ones(5, 2, dtype=torch.float64)
    for grad in (sparse(), sparse().coalesce()):
        before = grad.to_dense().clone()
        transform.update([grad], transform.init([weight]), [weight])
        assert_same_bits(grad.to_dense(), before)


@pytest.mark.parametrize("member", [m for m in FUNCTIONAL if m.sparse], ids=lambda m: m.id)
def test_a_sparse_gradient_without_rows(member: Member) -> None:
    """An embedding of which nothing was used has a gradient of no rows, before and after."""
    transform, weight = member.make(), torch.ones(5, 2)
    none = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (5, 2), check_invariants=True
    )
    (got,), _ = transform.update([none], transform.init([weight]), [weight])
    assert got is not None
    assert (got.layout, got._nnz()) == (torch.sparse_coo, 0)


REFUSING = [m for m in FUNCTIONAL if not m.sparse and m.factory != "snapshot"]


@pytest.mark.parametrize("member", REFUSING, ids=lambda m: m.id)
def test_what_would_become_dense_is_refused(member: Member) -> None:
    """What adds to every entry, or needs the weights, says so and how to leave such a one out."""
    transform, weight = member.make(), torch.ones(5, 2, dtype=torch.float64)
    with pytest.raises(eq.InputError, match=f"`{member.factory}` {REFUSED}"):
        transform.update([sparse()], transform.init([weight]), [weight])


def test_a_figure_sees_the_sparse_gradient() -> None:
    """`snapshot` hands a sparse gradient on as it is."""
    seen = []

    def figure(grads: list[Tensor | None]) -> float:
        seen.extend(grads)
        return 0.0

    snap = eq.transforms.snapshot("rows", figure)
    weight = torch.ones(5, 2, dtype=torch.float64)
    snap.update([sparse()], snap.init([weight]), [weight])
    assert seen[0].layout == torch.sparse_coo


def test_other_sparse_layouts_are_refused() -> None:
    """A compressed gradient is refused with its name and what to write instead."""
    identity = eq.transforms.identity()
    with warnings.catch_warnings(action="ignore"):  # torch says once that they are new
        grad = torch.eye(2).to_sparse_csr()
    with pytest.raises(
        eq.InputError, match=r"torch.sparse_csr for gradient 0. Use `.to_sparse_coo"
    ):
        identity.update([grad], identity.init([grad]), [torch.eye(2)])
