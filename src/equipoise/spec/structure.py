"""How far the rows of a matrix are from orthogonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from equipoise.spec.scalars import Scalars, T
from equipoise.spec.sums import (
    dot,
    flat,
    square,
    sum_of_squares,
    unit_vector,
    unit_vector_grad,
    zero,
)

Matrix = Sequence[Sequence[T]]
Mode = Literal["soft", "hard", "spectral", "srip"]


def orthogonality(
    K: Scalars[T],
    x: Matrix[T],
    *,
    mode: Mode = "soft",
    normalize: bool = True,
    reduction: Literal["sum", "mean"] = "sum",
) -> T:
    """Of G = M·Mᵀ: soft ``Σ_{i≠j} G_ij²``, hard ``Σ (G − I)_ij²``; spectral; srip ``max|σᵢ² − 1|``.

    spectral is ``Σ (σᵢ² − mean σ²)² = ‖G‖² − (tr G)²/r`` over the r = min(n, d) singular values.
    ``x`` is one matrix of rows; normalised, its rows have length 1. The mean is over n(n−1), n²,
    r or 1 entries.

    At the edge: zero rows are left out. Without rows the value is 0, and so is the mean over none.

    Examples:
        >>> from equipoise import spec
        >>> spec.orthogonality(spec.Float(), [[1.0, 0.0], [3.0, 4.0]], mode="hard", normalize=False)
        594.0
    """
    rows = _rows(K, x, normalize=normalize)
    if not rows:
        return zero(K)
    value = _VALUES[mode](K, rows)
    entries = _entries(rows, mode) if reduction == "mean" else 1
    return value / K.const(entries) if entries else zero(K)


def orthogonality_grad(
    K: Scalars[T],
    x: Matrix[T],
    *,
    mode: Mode = "soft",
    normalize: bool = True,
    reduction: Literal["sum", "mean"] = "sum",
) -> list[list[T]]:
    """``4·H·M`` with H = G without its diagonal (soft), G − I (hard) or G − (tr G/r)·I (spectral).

    srip: ``±½·v·vᵀ`` is H, with G's outermost eigenvector v. Normalised: then through ``m/‖m‖``.

    At the edge: zero rows have gradient 0. srip has one only where the outermost σ is simple.

    Examples:
        >>> from equipoise import spec
        >>> spec.orthogonality_grad(spec.Float(), [[1.0, 0.0], [1.0, 1.0]], normalize=False)
        [[4.0, 4.0], [4.0, 0.0]]
    """
    places = _nonzero(K, x)
    rows = _rows(K, x, normalize=normalize)
    entries = _entries(rows, mode) if reduction == "mean" else 1
    gradient = [[zero(K)] * len(row) for row in x]
    if not rows or not entries:
        return gradient
    for i, slope in zip(places, _slopes(K, rows, mode), strict=True):
        shared = [v / K.const(entries) for v in slope]
        gradient[i] = unit_vector_grad(K, x[i], shared) if normalize else shared
    return gradient


def gram(K: Scalars[T], rows: Matrix[T]) -> list[list[T]]:
    """``G_ij = mᵢ·mⱼ``."""
    return [[dot(K, a, b) for b in rows] for a in rows]


def transposed(rows: Matrix[T]) -> list[list[T]]:
    """The columns as rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def product(K: Scalars[T], a: Matrix[T], b: Matrix[T]) -> list[list[T]]:
    """``A·B``."""
    return [[dot(K, row, column) for column in transposed(b)] for row in a]


def less_diagonal(K: Scalars[T], matrix: Matrix[T], amount: T | None) -> list[list[T]]:
    """The matrix with an amount taken from its diagonal, or with nothing left of it."""
    return [
        [v if i - j else (zero(K) if amount is None else v - amount) for j, v in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def _soft(K: Scalars[T], rows: Matrix[T]) -> T:
    return sum_of_squares(K, flat(less_diagonal(K, gram(K, rows), None)))


def _hard(K: Scalars[T], rows: Matrix[T]) -> T:
    return sum_of_squares(K, flat(less_diagonal(K, gram(K, rows), K.const(1))))


def _spectral(K: Scalars[T], rows: Matrix[T]) -> T:
    whole = sum_of_squares(K, flat(gram(K, rows)))
    return whole - square(K, _trace(K, rows)) / K.const(_rank(rows))


def _srip(K: Scalars[T], rows: Matrix[T]) -> T:
    deviations = [K.abs(v - K.const(1)) for v in K.eigenvalues(gram(K, _wide(rows)))]
    largest = zero(K)
    for deviation in deviations:
        largest = K.max(largest, deviation)
    return largest


_VALUES = {"soft": _soft, "hard": _hard, "spectral": _spectral, "srip": _srip}


def _slopes(K: Scalars[T], rows: Matrix[T], mode: Mode) -> list[list[T]]:
    if mode == "srip":
        return _srip_slopes(K, rows)
    amount = None
    if mode == "hard":
        amount = K.const(1)
    if mode == "spectral":
        amount = _trace(K, rows) / K.const(_rank(rows))
    inner = less_diagonal(K, gram(K, rows), amount)
    four = K.const(4)
    return [[four * v for v in row] for row in product(K, inner, rows)]


def _srip_slopes(K: Scalars[T], rows: Matrix[T]) -> list[list[T]]:
    """``±2·v·vᵀ·M``, with ``v·vᵀ = Π (G − λⱼ)/(λ − λⱼ)`` over the other eigenvalues (Sylvester)."""
    wide = _wide(rows)
    square_matrix = gram(K, wide)
    values = K.eigenvalues(square_matrix)
    chosen = _outermost(K, values)
    slope = [list(row) for row in wide]
    for j, value in enumerate(values):
        if j - chosen:
            moved = product(K, less_diagonal(K, square_matrix, value), slope)
            gap = values[chosen] - value
            slope = [[v / gap for v in row] for row in moved]
    above = K.gt(values[chosen], K.const(1))
    two = K.ite(above, lambda: K.const(2), lambda: K.const(-2))
    scaled = [[two * v for v in row] for row in slope]
    return scaled if _is_wide(rows) else transposed(scaled)


def _outermost(K: Scalars[T], values: Sequence[T]) -> int:
    """Which eigenvalue lies furthest from 1."""
    chosen = 0
    for j, value in enumerate(values[1:], start=1):
        if K.gt(K.abs(value - K.const(1)), K.abs(values[chosen] - K.const(1))):
            chosen = j
    return chosen


def _rows(K: Scalars[T], x: Matrix[T], *, normalize: bool) -> list[list[T]]:
    kept = [x[i] for i in _nonzero(K, x)]
    return [unit_vector(K, row) if normalize else list(row) for row in kept]


def _nonzero(K: Scalars[T], x: Matrix[T]) -> list[int]:
    # How many rows there are is structure: a symbol, which could be either, is refused here.
    return [i for i, row in enumerate(x) if K.gt(sum_of_squares(K, row), zero(K))]


def _wide(rows: Matrix[T]) -> list[list[T]]:
    """The rows or the columns, whichever are fewer: both have the same singular values."""
    return [list(row) for row in rows] if _is_wide(rows) else transposed(rows)


def _is_wide(rows: Matrix[T]) -> bool:
    return len(rows) <= len(rows[0])


def _rank(rows: Matrix[T]) -> int:
    return len(_wide(rows))


def _trace(K: Scalars[T], rows: Matrix[T]) -> T:
    return sum_of_squares(K, flat(rows))


def _entries(rows: Matrix[T], mode: Mode) -> int:
    if not rows:
        return 0
    n = len(rows)
    return {"soft": n * (n - 1), "hard": n * n, "spectral": _rank(rows), "srip": 1}[mode]
