"""What is kept of gradients once they are measured, and a report's table made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise._gradients import Gradients, added, gram_matrix
from equipoise._numerics import total_norm

if TYPE_CHECKING:
    from equipoise._recorder import Level, Place


@dataclass(frozen=True, eq=False)
class Figures:
    """What is kept of the weighted gradients at one place: squared norms, or inner products."""

    names: tuple[str, ...]
    squares: Tensor  # one a term, and last that of the sum
    gram: Tensor | None

    @staticmethod
    def of(
        gradients: Mapping[str, Tensor], level: Level, scales: Sequence[Tensor] | None = None
    ) -> Figures:
        """Measure gradients that are all at hand, each without the factor it was scaled with."""
        vectors = [gradient.detach() for gradient in gradients.values()]
        if level == "gram":
            gram = gram_matrix(vectors)
            if scales is not None:
                by = torch.stack(list(scales)).to(gram.dtype)
                gram = gram / (by.unsqueeze(0) * by.unsqueeze(1))
            return Figures(tuple(gradients), torch.cat([gram.diagonal(), gram.sum()[None]]), gram)
        together = vectors[0]
        for vector in vectors[1:]:
            together = added(together, vector)
        return Figures.of_norms(gradients, [total_norm([v]) for v in (*vectors, together)])

    @staticmethod
    def of_norms(names: Mapping[str, object], norms: Sequence[Tensor]) -> Figures:
        """Norms of the terms' gradients, and last that of their sum."""
        wide = torch.float32 if norms[0].device.type == "mps" else torch.float64
        return Figures(tuple(names), torch.stack(list(norms)).to(wide).square(), None)


def unmeasured(device: torch.device) -> Tensor:
    """The squares of a report before there are any, on the device of those that will be."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(0, dtype=wide, device=device)


def filled(report: Gradients, figures: Mapping[Place, Figures], level: Level) -> Gradients:
    """The report with the figures of all places, added up by input; without any, with zeros.

    Its form depends on the level alone: processes that combine theirs may have measured different
    terms, or none.
    """
    some = next((at.squares for at in figures.values()), report.squares)
    size = len(report.names)
    squares = [[some.new_zeros(()) for _ in range(size + 1)] for _ in report.inputs]
    grams = [[[some.new_zeros(())] * size for _ in range(size)] for _ in report.inputs]
    for (name, _), at in figures.items():
        row = report.inputs.index(name)
        columns = [report.names.index(term) for term in at.names]
        for column, square in zip((*columns, size), at.squares.to(some.device), strict=True):
            squares[row][column] = squares[row][column] + square
        if at.gram is not None:
            for i, line in zip(columns, at.gram.to(some.device), strict=True):
                for j, product in zip(columns, line, strict=True):
                    grams[row][i][j] = grams[row][i][j] + product
    report = replace(report, squares=torch.stack([torch.stack(line) for line in squares]))
    if level == "norms":
        return report
    return replace(
        report, grams=torch.stack([torch.stack([torch.stack(r) for r in m]) for m in grams])
    )
