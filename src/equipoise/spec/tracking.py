"""The algebra of gradient tracking: weighted gradients, their sum, and what each is of it."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.spec.scalars import Scalars, T
from equipoise.spec.sums import dot, sum_of_squares

Rows = Sequence[Sequence[T]]


def add_weighted(K: Scalars[T], total: T, weight: T, value: T) -> T:  # noqa: ARG001 — as all steps
    """The step of a weighted sum, of losses or of the entries of gradients."""
    return total + weight * value


def total_gradient(K: Scalars[T], weights: Sequence[T], gradients: Rows[T]) -> list[T]:
    """``g = Σ wₖ·gₖ``."""
    total = [K.const(0) for _ in gradients[0]]
    for weight, gradient in zip(weights, gradients, strict=True):
        total = [add_weighted(K, t, weight, v) for t, v in zip(total, gradient, strict=True)]
    return total


def signed_shares(K: Scalars[T], weights: Sequence[T], gradients: Rows[T]) -> list[T]:
    """``⟨wₖ·gₖ, g⟩/‖g‖²``: how much of the total gradient each term is."""
    total = total_gradient(K, weights, gradients)
    whole = sum_of_squares(K, total)
    return [
        weight * dot(K, gradient, total) / whole
        for weight, gradient in zip(weights, gradients, strict=True)
    ]


def gram_form(K: Scalars[T], weights: Sequence[T], gram: Rows[T]) -> T:
    """``w′·G·w``, the squared norm of the total from the inner products alone."""
    return dot(K, weights, [dot(K, row, weights) for row in gram])
