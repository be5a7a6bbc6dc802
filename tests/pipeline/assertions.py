"""What a gradient report must say, computed by hand; and that tracking changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import assert_close, assert_equal

RELATIVE = 1e-12
"""Norms of at most a hundred float64 gradients: 100 roundings of 2⁻⁵³ each are 1.1e-14, and the
gradients themselves are computed by the same operations. Two digits are left for cancellation."""

LEVELS = ("norms", "gram")


def assert_relative(actual: Tensor, expected: Tensor | float, within: float = RELATIVE) -> None:
    """The same number but for the last digits of what is expected."""
    wanted = torch.as_tensor(expected, dtype=actual.dtype).detach()
    torch.testing.assert_close(actual.detach(), wanted, rtol=within, atol=0)


def assert_norm(actual: Tensor | None, expected: Tensor | float, within: float = RELATIVE) -> None:
    """There is a norm, and it is this one."""
    assert actual is not None
    assert not actual.requires_grad
    assert_relative(actual, expected, within)


def assert_same_bits(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal in every bit that a number shows; or both absent."""
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert actual.dtype == expected.dtype
        assert_equal(actual, expected)


# Gradients by hand -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """Each term's weighted gradient at each input, all tensors of the input in one vector."""

    weights: Mapping[str, float]
    gradients: Mapping[str, Mapping[str, Tensor]]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(next(iter(self.gradients.values())))

    def vector(self, name: str, *inputs: str) -> Tensor:
        """One term's weighted gradient, at some inputs or at all of them."""
        return torch.cat([self.gradients[name][key] for key in inputs or self.inputs])

    def total(self, *inputs: str) -> Tensor:
        """The sum of all weighted gradients."""
        return torch.stack([self.vector(name, *inputs) for name in self.gradients]).sum(0)


def by_hand(
    terms: Mapping[str, eq.Term], inputs: Mapping[str, Any], step: int = 0, **weights: float
) -> ByHand:
    """Differentiate each penalty by itself, at copies of the inputs cut off from all else."""
    leaves = {key: _detached(x) for key, x in inputs.items()}
    moving = {key: found for key, x in leaves.items() if (found := _moving(x))}
    factors: dict[str, float] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for name, term in terms.items():
        weight = term.weight(step) if callable(term.weight) else term.weight
        factors[name] = weights.get(name, float(weight))
        value = _value(term, [leaves[key] for key in term.inputs or ("x",)])
        gradients[name] = {key: factors[name] * _slope(value, xs) for key, xs in moving.items()}
    return ByHand(factors, gradients)


def _detached(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, list | tuple):
        return [_detached(item) for item in x]
    return x


def _moving(x: Any) -> list[Tensor]:
    items = x if isinstance(x, list) else [x]
    return [item for item in items if isinstance(item, Tensor) and item.requires_grad]


def _value(term: eq.Term, arguments: list[Any]) -> Tensor:
    returned = term.penalty(*arguments, **term.options)
    return returned[0] if isinstance(returned, tuple) else returned


def _slope(value: Tensor, xs: list[Tensor]) -> Tensor:
    slopes = torch.autograd.grad(
        value, xs, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([slope.flatten().double() for slope in slopes])


def assert_report(report: eq.Gradients, expected: ByHand, within: float = RELATIVE) -> None:
    """Every figure of the report is the one found by hand, jointly and by input."""
    assert set(report.names) == set(expected.gradients)
    assert set(report.inputs) == set(expected.inputs)
    _assert_figures(report, expected, (), within)
    for key, part in report.by_input.items():
        _assert_figures(part, expected, (key,), within)


def _assert_figures(
    report: eq.Gradients, expected: ByHand, inputs: tuple[str, ...], within: float
) -> None:
    vectors = {name: expected.vector(name, *inputs) for name in report.names}
    for name, vector in vectors.items():
        length = torch.linalg.vector_norm(vector)
        assert_norm(report[name].grad_norm_weighted, length, within)
        assert_norm(report[name].grad_norm, length / abs(expected.weights[name]), within)
    together = torch.linalg.vector_norm(expected.total(*inputs))
    assert_norm(report.total_norm, together, within)
    if report.grams is not None:
        stacked = torch.stack([*vectors.values()])
        size = stacked.square().sum().item()
        assert_close(report.gram, stacked @ stacked.mT, within=within * max(size, 1.0))


# Tracking changes nothing ------------------------------------------------------------------------

Evaluate = Callable[[Any], tuple[eq.Evaluation, list[Tensor]]]
"""Evaluates at fresh leaves with this `track=`, and returns the leaves."""


def trained(evaluate: Evaluate, track: object) -> tuple[eq.Evaluation, list[Tensor | None]]:
    """One backward pass: the evaluation, and the gradients that training would use."""
    result, leaves = evaluate(track)
    result.total.backward()
    return result, [leaf.grad for leaf in leaves]


def assert_tracking_changes_no_bit(evaluate: Evaluate) -> None:
    """Total, penalty, base and every gradient are those of the untracked pipeline, bit by bit."""
    plain, wanted = trained(evaluate, False)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in wanted)
    for level in LEVELS:
        tracked, gradients = trained(evaluate, level)
        assert_same_bits(tracked.total, plain.total)
        assert_same_bits(tracked.penalty, plain.penalty)
        assert_same_bits(tracked.base, plain.base)
        for gradient, same in zip(gradients, wanted, strict=True):
            assert_same_bits(gradient, same)
        assert tracked.gradients.total_norm > 0  # it was tracked


def assert_same_figures(*reports: eq.Gradients, within: float = RELATIVE) -> None:
    """Reports that were made in different ways hold the same norms and errors."""
    for first, second in pairwise(reports):
        assert first.names == second.names
        assert first.inputs == second.inputs
        assert first.errors.keys() == second.errors.keys()
        torch.testing.assert_close(first.squares, second.squares, rtol=within, atol=0)
