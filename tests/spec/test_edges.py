"""Where a definition refuses, the runtime says so too: infinities, nothing, lists, zero rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import spec
from tests.spec.cases import COSINE, DISTRIBUTION, MATRIX, SCALED
from tests.spec.oracle import (
    Case,
    assert_agrees,
    assert_gradient_agrees,
    assert_value_agrees,
    entries,
    flatten,
    rows,
)

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


KINKED = torch.tensor([[0.75, -0.75, 0.0, -0.0, 1.0, -2.0]], dtype=torch.float64)
HALVED = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
HELD = torch.tensor([[-1.0, -2.0, -0.75]], dtype=torch.float64)
KINKS: list[tuple[str, dict[str, Any], list[Tensor]]] = [
    ("l2", {"clip": 0.75}, [KINKED]),
    ("l2", {"clip": 0.75, "clip_mode": "huber"}, [KINKED]),
    ("consistency", {"metric": "l1"}, [KINKED, KINKED.flip(1)]),
    ("consistency", {"metric": "cosine"}, [KINKED, KINKED]),
    ("consistency", {"metric": "cosine"}, [KINKED, -KINKED]),
    ("consistency", {"metric": "cosine"}, [KINKED, 0 * KINKED]),
    ("consistency", {"metric": "kl"}, [HALVED, HALVED]),
    ("kl_divergence", {}, [HALVED, HALVED]),
    ("kl_divergence", {"floor": -2.0}, [HALVED, HELD]),
    ("js_divergence", {}, [HALVED, HALVED]),
    ("output_magnitude", {"dim": -1, "target": 0.0}, [0 * KINKED]),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options", "inputs"), KINKS)
def test_at_a_kink_both_take_the_same_side(
    name: str, options: dict[str, Any], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """At a bound itself, at 0, and where two inputs are equal or opposite."""
    layout = entries if name == "l2" else rows
    case = Case(name, options, layout, COSINE, inputs=len(inputs))
    tensors = [x.to(dtype) for x in inputs]
    assert_value_agrees(case, tensors)
    assert_gradient_agrees(case, tensors)


BY_ROW = ("kl_divergence", "js_divergence", "entropy")
MASKED = sorted(set(EMPTY) - {"output_magnitude", "orthogonality"})


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_keeps_nothing_leaves_nothing(name: str) -> None:
    """The mean is 0 in both, and nothing moves it, not even what is no number."""
    leaves = [torch.full((2, 3), torch.nan, requires_grad=True) for _ in range(EMPTY[name][1])]
    mask = torch.zeros((2,) if name in BY_ROW else (2, 3), dtype=torch.bool)
    value = getattr(eq, name)(*leaves, reduction="mean", mask=mask)
    value.backward()
    nested = name in BY_ROW or name == "consistency"
    data = [[[1.0] * 3] * 2 if nested else [1.0] * 6 for _ in leaves]
    options: dict[str, Any] = {"reduction": "mean", "mask": mask.flatten().tolist()}
    slopes = getattr(spec, f"{name}_grad")(spec.Float(), *data, **options)
    assert value.item() == getattr(spec, name)(spec.Float(), *data, **options) == 0.0
    assert not any(flatten([slopes]))
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_a_row_in_which_nothing_is_possible_has_no_divergence() -> None:
    """Between normalised rows it counts as 0, and moves nothing."""
    logits = torch.full((1, 3), -torch.inf)
    row = [[None, None, None]]
    assert eq.kl_divergence(logits, logits, from_logits=True).item() == 0.0
    assert spec.kl_divergence(spec.Float(), row, row, from_logits=True) == 0.0
    other = torch.zeros(1, 3)
    assert eq.kl_divergence(logits, other, from_logits=True).item() == 0.0
    assert spec.kl_divergence(spec.Float(), row, [[0.0, 0.0, 0.0]], from_logits=True) == 0.0


def test_a_share_of_the_largest_entropy_counts_the_entries_that_exist() -> None:
    """Of one, two or three that exist, or none; where no choice is left the share is 0."""
    support = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]]).bool()
    options: dict[str, Any] = {"normalize": True, "from_logits": True, "support": support}
    case = Case("entropy", {**options, "reduction": "none"}, rows, DISTRIBUTION)
    logits = torch.tensor([[0.5, -1.0, 0.25]], dtype=torch.float64).repeat(4, 1)
    assert_value_agrees(case, [logits])
    assert_gradient_agrees(case, [logits])


def test_a_floor_holds_up_a_row_in_which_nothing_is_possible() -> None:
    """KL from two equal parts to nothing, held at −3, is 3 − ln 2."""
    case = Case("kl_divergence", {"from_logits": True, "floor": -3.0}, rows, DISTRIBUTION, 2)
    for dtype in (torch.float64, torch.float32):
        equal, nothing = torch.zeros(1, 2, dtype=dtype), torch.full((1, 2), -torch.inf, dtype=dtype)
        assert_value_agrees(case, [equal, nothing])
        assert_gradient_agrees(case, [equal, nothing])
    K = spec.Ball()
    exact: Any = spec.kl_divergence(K, [[K.const(0)] * 2], [[None] * 2], from_logits=True, floor=-3)
    assert exact.overlaps(K.const(3) - K.log(K.const(2)))
    assert exact.rad() < 2**-40


@pytest.mark.parametrize("name", ["l1", "l2", "elastic_net"])
def test_several_tensors_are_one_long_list(name: str) -> None:
    """The runtime never joins them, and gives what the definition says of all their entries."""
    tensors = [torch.tensor([[1.5, -2.25], [0.0, 3.0]]), torch.tensor([0.1, -7.0, 1e-3])]
    leaves = [t.requires_grad_() for t in tensors]
    K = spec.Rounding("float32", steps=4)

    def check() -> None:
        joined = [K.exactly(v) for v in torch.cat([t.flatten() for t in tensors]).tolist()]
        for options in ({}, {"reduction": "mean"}, {"reduction": "none"}):
            expected = getattr(spec, name)(K, joined, **options)
            value = getattr(eq, name)(tensors, **options)
            assert_agrees(value, flatten([expected]))
            slopes = torch.autograd.grad(value.sum(), leaves)
            together = torch.cat([slope.flatten() for slope in slopes])
            assert_agrees(together, getattr(spec, f"{name}_grad")(K, joined, **options))

    spec.decided(check)


AXES: dict[str | int, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.reshape(6, 4),
    "sequence": lambda x: x.permute(1, 0, 2).reshape(3, 8),
    "vocabulary": lambda x: x.permute(2, 0, 1).reshape(4, 6),
    0: lambda x: x.reshape(2, 12),
    1: lambda x: x.permute(1, 0, 2).reshape(3, 8),
}


def slope_of(value: Tensor, x: Tensor) -> Tensor:
    """The gradient of the value."""
    (slope,) = torch.autograd.grad(value, x)
    return slope


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_says_which_matrix_is_meant(axis: Any) -> None:
    """The definition knows rows only; the runtime's axes are permutations of the entries."""
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    value = eq.orthogonality(x, axis=axis)
    slopes = AXES[axis](slope_of(value, x))
    K = spec.Rounding("float64", steps=MATRIX)

    def check() -> None:
        matrix = rows(K, AXES[axis](x))
        assert_agrees(value, [spec.orthogonality(K, matrix)])
        assert_agrees(slopes, spec.orthogonality_grad(K, matrix))

    spec.decided(check)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("mode", ["soft", "hard", "spectral"])
def test_one_gram_matrix_a_sample_is_a_sum_of_values(mode: Any, reduction: Any) -> None:
    """Added over the samples; the mean is over the entries of all of them, as many in each."""
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    value = eq.orthogonality(x, per_sample=True, mode=mode, reduction=reduction)
    slopes = slope_of(value, x)
    K = spec.Rounding("float64", steps=MATRIX)
    parts = K.const(2 if reduction == "mean" else 1)
    options: dict[str, Any] = {"mode": mode, "reduction": reduction}

    def check() -> None:
        samples = [rows(K, sample) for sample in x]
        total = K.sum(spec.orthogonality(K, sample, **options) for sample in samples)
        assert_agrees(value, [total / parts])
        each = flatten([spec.orthogonality_grad(K, sample, **options) for sample in samples])
        assert_agrees(slopes, [slope / parts for slope in each])

    spec.decided(check)


def test_a_sample_of_rows_is_some_of_them() -> None:
    """The value is that of two of four rows, and of no other two; the rest has gradient 0."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    value = eq.orthogonality(x, sample=2, generator=torch.Generator().manual_seed(4))
    slopes = slope_of(value, x)
    K = spec.Rounding("float64", steps=MATRIX)

    def check() -> list[list[int]]:
        pairs = [list(pair) for pair in combinations(range(4), 2)]
        values = [spec.orthogonality(K, rows(K, x[pair])) for pair in pairs]
        return [p for p, ball in zip(pairs, values, strict=True) if ball.contains(value.item())]

    (chosen,) = spec.decided(check)
    spec.decided(
        lambda: assert_agrees(slopes[chosen], spec.orthogonality_grad(K, rows(K, x[chosen])))
    )
    assert not slopes[[i for i in range(4) if i not in chosen]].any()


GROUPS: dict[tuple[int, ...] | None, Callable[[Tensor], Tensor]] = {
    (0, 2): lambda x: x.permute(1, 0, 2).reshape(3, 8),
    None: lambda x: x.reshape(1, -1),
}


@pytest.mark.parametrize("dim", GROUPS)
@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_a_magnitude_over_other_dimensions(norm: Any, dim: Any) -> None:
    """Each norm is over the entries of ``dim``, the reduction over the rest."""
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    value = eq.output_magnitude(x, norm=norm, dim=dim)
    slopes = GROUPS[dim](slope_of(value, x))
    K = spec.Rounding("float64", steps=SCALED)

    def check() -> None:
        groups = rows(K, GROUPS[dim](x))
        assert_agrees(value, [spec.output_magnitude(K, groups, norm=norm)])
        assert_agrees(slopes, spec.output_magnitude_grad(K, groups, norm=norm))

    spec.decided(check)
