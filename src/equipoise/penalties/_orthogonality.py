"""How far the rows of a matrix are from orthogonal."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._context import as_distributed_as, without_autocast
from equipoise._errors import (
    InputError,
    OptionError,
    check_choice,
    check_count,
    check_dim,
    check_flag,
    check_generator,
    check_tensor,
    names_its_options,
)
from equipoise._numerics import divide, full_precision, unit

Mode = Literal["soft", "hard", "spectral", "srip"]
Axis = Literal["rows", "sequence", "vocabulary"]


@names_its_options
def orthogonality(
    x: Float[Tensor, "*shape"],
    /,
    *,
    mode: Mode = "soft",
    normalize: bool = True,
    axis: Axis | int = "rows",
    reduction: Literal["sum", "mean"] = "sum",
    per_sample: bool = False,
    sample: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """How far the rows mᵢ of a matrix M (n×d) are from orthogonal, through G = M·Mᵀ.

    | mode         | value                   | it asks for                                      |
    |--------------|-------------------------|--------------------------------------------------|
    | ``soft``     | Σ_{i≠j} G_ij²           | rows at right angles, of any length              |
    | ``hard``     | Σ (G − I)_ij²           | rows orthonormal                                 |
    | ``spectral`` | Σ (σᵢ² − mean σ²)²      | all min(n, d) singular values σᵢ equal           |
    | ``srip``     | max abs(σᵢ² − 1)        | no direction stretched (Bansal et al. 2018)      |

    With unit rows (``normalize``) ``"soft"`` and ``"hard"`` are the same, and ``"spectral"`` too
    where n ≤ d. With n > d only ``"spectral"`` can reach zero. ``reduction="mean"`` divides by the
    number of entries summed (n(n−1), n², min(n, d)), so that the value does not grow with n.

    ``axis`` says what the rows are: for ``[b, s, v]`` ``"rows"`` gives [b·s, v], ``"sequence"``
    [s, b·v], ``"vocabulary"`` [v, b·s]; a number takes that dimension. ``per_sample`` keeps the
    first of three dimensions apart, one Gram matrix a sample. ``sample`` takes so many random rows
    (a fresh draw each call, from ``generator``).

    The smaller of M·Mᵀ and Mᵀ·M is formed, so memory is min(n, d)² a Gram matrix.

    *At the edge:* zero rows count for nothing, with gradient 0. One row gives 0 in soft mode. Empty
    gives 0. NaN and inf propagate. Half precision and autocast are computed in float32. ``"srip"``
    has a second derivative only where the outermost singular value is simple, and its decomposition
    waits for the device.

    Examples:
        >>> import torch, equipoise as eq
        >>> m = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        >>> eq.orthogonality(m)
        tensor(0.7200)
        >>> eq.orthogonality(m, mode="hard", normalize=False)
        tensor(594.)
    """
    check_choice("mode", mode, ("soft", "hard", "spectral", "srip"))
    check_choice("reduction", reduction, ("sum", "mean"))
    check_flag("normalize", normalize)
    check_flag("per_sample", per_sample)
    check_generator(generator)
    check_tensor("x", x)
    rows = _matrices(full_precision(x), axis, per_sample)
    if sample is not None:
        check_count("sample", sample)
        rows = _sampled(rows, sample, generator)
    with without_autocast(rows):
        return _value(rows, mode, normalize, reduction)


def _matrices(x: Tensor, axis: Axis | int, per_sample: bool) -> Tensor:
    """``[samples, rows, features]``, one sample unless ``per_sample``."""
    if x.dim() == 0:
        raise InputError(
            "`x` must have at least one dimension to hold rows, got a 0-d tensor. "
            "Use `.reshape(1, -1)` for a single row."
        )
    if per_sample:
        if x.dim() != 3:
            raise InputError(
                f"`per_sample` needs three dimensions [batch, sequence, features], got "
                f"{tuple(x.shape)}. Use `x.unflatten` to make them, or per_sample=False."
            )
        rows = _row_dim(axis, 3)
        if rows == 0:
            raise OptionError(
                "`axis` must be a dimension of one sample when `per_sample` is set, got the batch "
                "dimension 0. Use 'sequence' or 'vocabulary'."
            )
        return x.mT if rows == 2 else x
    if x.dim() == 1:
        _row_dim(axis, 1)
        return x.reshape(1, 1, -1)
    if axis == "rows":
        return x.reshape(1, x.shape[:-1].numel(), x.shape[-1])
    return x.movedim(_row_dim(axis, x.dim()), 0).flatten(1).unsqueeze(0)


def _row_dim(axis: Axis | int, dims: int) -> int:
    if isinstance(axis, int):
        check_dim("axis", axis, dims)
        return axis % dims
    check_choice("axis", axis, ("rows", "sequence", "vocabulary"))
    return dims - 1 if axis == "vocabulary" else dims - 2


def _sampled(rows: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    samples, n, features = rows.shape
    if number >= n:
        return rows
    device = rows.device if generator is None else generator.device
    draw = torch.rand(samples, n, generator=generator, device=device).to(rows.device)
    draw = as_distributed_as(rows, draw)
    chosen = draw.topk(number, dim=1).indices.unsqueeze(-1)
    return rows.gather(1, chosen.expand(samples, number, features))


def _value(rows: Tensor, mode: Mode, normalize: bool, reduction: str) -> Tensor:
    directions, some = unit(rows, -1)
    rows = directions if normalize else rows
    nonzero = some.squeeze(-1)
    n = nonzero.sum(-1).to(rows.dtype)
    rank = n.clamp(max=rows.shape[-1])
    if mode == "srip":
        per_sample, entries = _largest_deviation(rows, nonzero, rank), torch.ones_like(n)
    elif mode == "spectral":
        per_sample, entries = _spread(rows, nonzero, rank), rank
    else:
        per_sample, entries = _off_diagonal(rows), n * (n - 1)
        if mode == "hard":
            lengths = rows.square().sum(-1)
            per_sample = per_sample + torch.where(nonzero, (lengths - 1).square(), 0.0).sum(-1)
            entries = n.square()
    total = per_sample.sum()
    return total if reduction == "sum" else divide(total, entries.sum())


def _off_diagonal(rows: Tensor) -> Tensor:
    """Σ_{i≠j} G_ij², from whichever Gram matrix is smaller."""
    if rows.shape[-2] <= rows.shape[-1]:
        return 2 * (rows @ rows.mT).triu(1).square().sum((-2, -1))
    # ‖M·Mᵀ‖² = ‖Mᵀ·M‖². What is subtracted comes close to it only where most rows are zero.
    lengths = rows.square().sum(-1)
    return _raised((rows.mT @ rows).square().sum((-2, -1)) - lengths.square().sum(-1))


def _raised(x: Tensor) -> Tensor:
    """What a rounding made negative as 0, with its own gradient."""
    return x - x.detach().clamp(max=0)


def _spread(rows: Tensor, nonzero: Tensor, rank: Tensor) -> Tensor:
    """‖G‖² − (tr G)²/rank, the diagonal as a sum of squares so that nothing cancels."""
    wide = rows.shape[-2] <= rows.shape[-1]
    gram = rows @ rows.mT if wide else rows.mT @ rows
    diagonal = rows.square().sum(-1 if wide else -2)
    counted = nonzero if wide else torch.ones_like(diagonal, dtype=torch.bool)
    size, rank = counted.sum(-1).clamp(min=1).to(rows.dtype), rank.clamp(min=1)
    trace = diagonal.sum(-1)
    deviation = torch.where(counted, diagonal - (trace / size).unsqueeze(-1), 0.0)
    # The last part is 0 unless a tall matrix has fewer non-zero rows than columns.
    return _raised(
        2 * gram.triu(1).square().sum((-2, -1))
        + deviation.square().sum(-1)
        + trace.square() * (1 / size - 1 / rank)
    )


def _largest_deviation(rows: Tensor, nonzero: Tensor, rank: Tensor) -> Tensor:
    """max |σ² − 1| over the ``rank`` largest singular values."""
    # A zero row has no part in any singular vector, but rounding gives it one: it gets gradient 0.
    rows = torch.where(nonzero.unsqueeze(-1), rows, 0.0)
    gram = rows @ rows.mT if rows.shape[-2] <= rows.shape[-1] else rows.mT @ rows
    if gram.numel() == 0:
        return rows.sum((-2, -1))
    # torch refuses to decompose NaN and inf. Here they propagate as elsewhere, by a sum.
    finite = gram.detach().isfinite().all(-1).all(-1)
    squares = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0.0))  # ascending
    size = gram.shape[-1]
    # Numbered by a sum of ones, and not `arange`, so that a distributed tensor gets its like.
    counted = torch.ones_like(squares).cumsum(-1) > size - rank.unsqueeze(-1)
    largest = torch.where(counted, (squares - 1).abs(), 0.0).amax(-1)
    return torch.where(finite, largest, gram.sum((-2, -1)))
