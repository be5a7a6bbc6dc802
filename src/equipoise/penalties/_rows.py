"""Distributions row by row: which rows and entries count, and chunks for large vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from equipoise._context import inside_transform
from equipoise._errors import InputError, check_count, check_flag, check_tensor
from equipoise._logspace import log_probabilities
from equipoise._numerics import check_mask, full_precision

RowValue = Callable[..., Tensor]
"""From which entries exist (None: all) and log-probabilities, to one value a row."""


@dataclass(frozen=True)
class Kept:
    """What counts: rows by ``mask`` (leading shape), entries by ``support`` (full shape)."""

    mask: Tensor | None
    support: Tensor | None

    def entries(self) -> Tensor | None:
        """Which entries exist and lie in a row that counts; None for all of them."""
        if self.mask is None:
            return None if self.support is None else self.support != 0
        rows = (self.mask != 0).unsqueeze(-1)
        return rows if self.support is None else rows & (self.support != 0)

    def check(self, shape: torch.Size) -> None:
        """Refuse what does not fit distributions of this shape."""
        if self.mask is not None:
            check_mask("mask", self.mask, shape[:-1])
        if self.support is not None:
            check_mask("support", self.support, shape)


@dataclass(frozen=True)
class Given:
    """How the inputs are given: as logits or normalised, for what temperature, to be checked?"""

    from_logits: bool
    temperature: float
    check: bool

    def __post_init__(self) -> None:
        """Refuse what is no flag."""
        check_flag("from_logits", self.from_logits)
        check_flag("check", self.check)

    @property
    def normalized(self) -> bool:
        """Whether the normalisation is done here, and so is exact."""
        return self.from_logits or self.temperature != 1.0


def row_values(
    row_value: RowValue, inputs: Mapping[str, Tensor], given: Given, kept: Kept, chunk: int | None
) -> Tensor:
    """Normalise the inputs where asked, and value every row."""
    for name, x in inputs.items():
        check_tensor(name, x)
        if x.dim() == 0:
            raise InputError(
                f"`{name}` must have a last dimension to be a distribution over, got a 0-d tensor. "
                "Use `sampled_kl` for the log-probabilities of sampled tokens."
            )
        kept.check(x.shape)
        if given.check and not given.from_logits:
            _check_distribution(name, x, kept)

    def value(mask: Tensor | None, support: Tensor | None, *tensors: Tensor) -> Tensor:
        keep = Kept(mask, support).entries()
        logs = [
            log_probabilities(
                full_precision(x),
                normalize=given.normalized,
                temperature=given.temperature,
                keep=keep,
            )
            for x in tensors
        ]
        return row_value(keep, *logs)

    if chunk is None:
        return value(kept.mask, kept.support, *inputs.values())
    return _in_chunks(value, chunk, kept, *inputs.values())


def _check_distribution(name: str, x: Tensor, kept: Kept) -> None:
    keep = kept.entries()
    p = full_precision(x).exp()
    sums = (p if keep is None else torch.where(keep, p, 0.0)).sum(-1)
    error = (sums - 1).abs()
    if kept.mask is not None:
        error = torch.where(kept.mask != 0, error, 0.0)
    # Log-probabilities rounded to their own precision sum to 1 within a few units of it times the
    # entropy; the root of the unit is far above that and far below any real mistake.
    if error.numel() and not bool((error <= torch.finfo(x.dtype).eps ** 0.5).all()):
        worst = int(error.flatten().nan_to_num(torch.inf).argmax())
        raise InputError(
            f"`{name}` must hold log-probabilities that sum to 1 over the last dimension, got a "
            f"sum of {sums.flatten()[worst].item():.6g} in row {worst}. "
            "Use `from_logits=True` for logits, and `support` for entries that do not exist."
        )


def _in_chunks(value: RowValue, chunk: int, kept: Kept, *inputs: Tensor) -> Tensor:
    """Value a number of rows at a time, and compute them again in the backward pass.

    One split into all chunks, not a slice for each: the backward of a slice is as large as the
    whole input.
    """
    check_count("chunk", chunk)
    leading, vocabulary = inputs[0].shape[:-1], inputs[0].shape[-1]
    flat = [torch.split(x.reshape(leading.numel(), vocabulary), chunk) for x in inputs]
    mask, support = kept.mask, kept.support
    masks: Sequence[Tensor | None] = [None] * len(flat[0])
    supports: Sequence[Tensor | None] = [support] * len(flat[0])
    if mask is not None:
        masks = torch.split(mask.expand(leading).flatten(), chunk)
    if support is not None and support.dim() > 1:
        supports = torch.split(
            support.expand(inputs[0].shape).reshape(leading.numel(), vocabulary), chunk
        )
    values = [
        value(*rows)
        if inside_transform()
        else checkpoint(value, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(masks, supports, *flat, strict=True)
    ]
    return torch.cat(values).reshape(leading)
