"""Where a definition refuses, the runtime says so too: infinities, nothing, lists, zero rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise import spec
from tests.spec.cases import DISTRIBUTION
from tests.spec.oracle import Case, assert_agrees, assert_gradient_agrees, flatten, rows

P = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
Q = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
KL: list[dict[str, Any]] = [
    {},
    {"direction": "reverse"},
    {"direction": "symmetric"},
    {"from_logits": True},
    {"from_logits": True, "temperature": 2.0, "direction": "reverse"},
]


@pytest.mark.parametrize("options", KL, ids=str)
def test_an_infinite_divergence_is_infinite_in_both(options: dict[str, Any]) -> None:
    """The definition refuses it, the runtime gives inf; and both have the same gradient."""
    case = Case("kl_divergence", options, rows, DISTRIBUTION, inputs=2)
    K = spec.Rounding("float64", steps=DISTRIBUTION)
    with pytest.raises(spec.InfiniteError, match="p > 0 where q = 0"):
        spec.decided(lambda: case.definition("kl_divergence", K, [P, Q]))
    assert case.runtime(P, Q).item() == torch.inf
    if options.get("direction") != "symmetric":
        assert_gradient_agrees(case, [P, Q])


def test_an_infinite_estimate_is_infinite_in_both() -> None:
    """A token was sampled that Q holds to be impossible."""
    with pytest.raises(spec.InfiniteError, match="a token was sampled"):
        spec.sampled_kl(spec.Float(), [-1.0], [None])
    assert eq.sampled_kl(torch.tensor([-1.0]), torch.tensor([-torch.inf])).item() == torch.inf


def test_a_token_that_cannot_be_sampled_counts_for_nothing() -> None:
    """In value and gradient, whatever Q says of it."""
    assert spec.sampled_kl(spec.Float(), [None, -1.0], [None, -1.0], estimator="k1") == 0.0
    assert spec.sampled_kl_grad(spec.Float(), [None], [-2.0], estimator="k2") == ([-0.0], [0.0])
    p = torch.tensor([-torch.inf, -1.0], requires_grad=True)
    value = eq.sampled_kl(p, torch.tensor([-2.0, -1.0]), estimator="k2")
    value.backward()
    assert value.item() == 0.0
    assert p.grad is not None
    assert p.grad.tolist() == [0.0, 0.0]


EMPTY: dict[str, tuple[tuple[int, ...], int, float]] = {
    "l1": ((0,), 1, 0.0),
    "l2": ((0,), 1, 0.0),
    "elastic_net": ((0,), 1, 0.0),
    "output_magnitude": ((0,), 1, 1.0),
    "kl_divergence": ((0, 3), 2, 0.0),
    "js_divergence": ((0, 3), 2, 0.0),
    "entropy": ((0, 3), 1, 0.0),
    "sampled_kl": ((0,), 2, 0.0),
    "consistency": ((0, 3), 2, 0.0),
    "orthogonality": ((0, 3), 1, 0.0),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_has_the_same_value_in_both(name: str) -> None:
    """Sums and means of nothing are 0; a norm of nothing is that of the zero vector."""
    shape, inputs, value = EMPTY[name]
    data: list[Any] = [[[]] if name == "output_magnitude" else []] * inputs
    assert getattr(spec, name)(spec.Float(), *data) == value
    assert getattr(eq, name)(*[torch.empty(shape)] * inputs).item() == value
    slopes = getattr(spec, f"{name}_grad")(spec.Float(), *data)
    assert flatten([slopes]) == []


def test_a_row_in_which_nothing_is_possible_has_no_divergence() -> None:
    """Between normalised rows it counts as 0, and moves nothing."""
    logits = torch.full((1, 3), -torch.inf)
    row = [[None, None, None]]
    assert eq.kl_divergence(logits, logits, from_logits=True).item() == 0.0
    assert spec.kl_divergence(spec.Float(), row, row, from_logits=True) == 0.0
    other = torch.zeros(1, 3)
    assert eq.kl_divergence(logits, other, from_logits=True).item() == 0.0
    assert spec.kl_divergence(spec.Float(), row, [[0.0, 0.0, 0.0]], from_logits=True) == 0.0


def test_a_floor_holds_up_a_row_in_which_nothing_is_possible() -> None:
    """KL from two equal parts to nothing, held at −3, is 3 − ln 2."""
    value = eq.kl_divergence(
        torch.zeros(1, 2), torch.full((1, 2), -torch.inf), from_logits=True, floor=-3.0
    )
    exact = spec.kl_divergence(
        spec.Float(), [[0.0, 0.0]], [[None, None]], from_logits=True, floor=-3
    )
    assert exact == pytest.approx(3 - math.log(2))
    assert value.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", ["l1", "l2", "elastic_net"])
def test_several_tensors_are_one_long_list(name: str) -> None:
    """The runtime never joins them, and gives what the definition says of all their entries."""
    tensors = [torch.tensor([[1.5, -2.25], [0.0, 3.0]]), torch.tensor([0.1, -7.0, 1e-3])]
    K = spec.Rounding("float32", steps=4)

    def check() -> None:
        joined = [K.exactly(v) for v in torch.cat([t.flatten() for t in tensors]).tolist()]
        for options in ({}, {"reduction": "mean"}, {"reduction": "none"}):
            expected = getattr(spec, name)(K, joined, **options)
            assert_agrees(getattr(eq, name)(tensors, **options), flatten([expected]))

    spec.decided(check)


@pytest.mark.parametrize("axis", ["rows", "sequence", "vocabulary", 0, 1])
def test_an_axis_says_which_matrix_is_meant(axis: str | int) -> None:
    """The definition knows rows only; the runtime's axes are permutations of the entries."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    matrices = {
        "rows": x.reshape(6, 4),
        "sequence": x.permute(1, 0, 2).reshape(3, 8),
        "vocabulary": x.permute(2, 0, 1).reshape(4, 6),
        0: x.reshape(2, 12),
        1: x.permute(1, 0, 2).reshape(3, 8),
    }
    K = spec.Rounding("float64", steps=8)

    def check() -> None:
        matrix = rows(K, matrices[axis])
        assert_agrees(eq.orthogonality(x, axis=axis), [spec.orthogonality(K, matrix)])

    spec.decided(check)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("mode", ["soft", "hard", "spectral"])
def test_one_gram_matrix_a_sample_is_a_sum_of_values(mode: Any, reduction: Any) -> None:
    """Added over the samples; the mean is over the entries of all of them, as many in each."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    K = spec.Rounding("float64", steps=8)

    def check() -> None:
        values = [
            spec.orthogonality(K, rows(K, sample), mode=mode, reduction=reduction) for sample in x
        ]
        total = K.sum(values)
        expected = total / K.const(2) if reduction == "mean" else total
        runtime = eq.orthogonality(x, per_sample=True, mode=mode, reduction=reduction)
        assert_agrees(runtime, [expected])

    spec.decided(check)


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_a_magnitude_over_other_dimensions(norm: Any) -> None:
    """Each norm is over the entries of ``dim``, the reduction over the rest."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    K = spec.Rounding("float64", steps=4)

    def check() -> None:
        for dim, groups in (((0, 2), x.permute(1, 0, 2).reshape(3, 8)), (None, x.reshape(1, -1))):
            expected = spec.output_magnitude(K, rows(K, groups), norm=norm)
            assert_agrees(eq.output_magnitude(x, norm=norm, dim=dim), [expected])

    spec.decided(check)
