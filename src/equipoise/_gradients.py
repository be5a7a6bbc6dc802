"""The gradient report: how hard each term pulls, and in which direction.

All figures are tensors on the device, with the graph left behind; only what names an answer
(`Gradients.dominant`, `Gradients.conflicts`) and printing wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise._context import distributed, whole
from equipoise._errors import GradientError, InputError, check_number, nearest
from equipoise._numerics import CHUNK, real_entries
from equipoise._table import as_text, number


@dataclass(frozen=True)
class TermGradient:
    """One term's gradient norm without and with its weight; or, without one, the reason."""

    grad_norm: Tensor | None
    grad_norm_weighted: Tensor | None
    grad_error: str | None = None


@dataclass(frozen=True)
class Conflict:
    """Two terms that pull against each other, and the cosine between their gradients."""

    first: str
    second: str
    cosine: float


@dataclass(frozen=True, eq=False, repr=False)
class Gradients:
    """Gradient norms of every term (the base included) and of their sum, at the inputs.

    ``squares`` holds the squared norms of the weighted gradients: a row an input, a column a term
    and last the sum of all terms. ``grams`` (with ``track="gram"``) holds their inner products, a
    matrix an input. Everything else is read off these. ``deviations`` tells how far each term's
    share is from that in another report, where one was compared.

    *At the edge:* a term without a gradient has ``grad_norm`` None and ``grad_error`` says why; it
    takes no part in shares and conflicts. Where all gradients are 0, cosines and shares are NaN.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1), l2=eq.Term(eq.l2, weight=0.5))
        >>> result = pipeline(torch.tensor([3.0, -4.0], requires_grad=True), track="gram")
        >>> result.total.backward()
        >>> result.gradients.norms["l2"].item(), result.gradients.weighted["l2"].item()
        (10.0, 5.0)
        >>> result.gradients.dominant()
        'l2'
    """

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[float | Tensor, ...]
    errors: Mapping[str, str]
    squares: Tensor
    grams: Tensor | None = None
    deviations: Mapping[str, Tensor] | None = None

    def __str__(self) -> str:
        """A table; waits for the device."""
        columns = {"before weight": self.norms, "gradient": self.weighted}
        if self.grams is not None:
            columns["share"] = {**dict.fromkeys(self.names), **self.shares}
        figures = [figure for column in columns.values() for figure in column.values()]
        known = [f for f in (*figures, self.total_norm) if f is not None]
        host = iter(torch.stack(known).tolist())
        cells = iter([number(next(host) if figure is not None else None) for figure in figures])
        written = [[next(cells) for _ in self.names] for _ in columns]
        rows = [list(row) for row in zip(self.names, *written, strict=True)]
        total = ["total", "", number(next(host)), *[""] * (len(columns) - 2)]
        return as_text(["term", *columns], [*rows, total])

    __repr__ = __str__

    @property
    def terms(self) -> dict[str, TermGradient]:
        """The report of each term."""
        return {name: self[name] for name in self.names}

    def __getitem__(self, name: str) -> TermGradient:
        """The report of one term."""
        if name not in self.names:
            raise InputError(f"the report has no term {name!r}. {nearest(name, self.names)}")
        if name in self.errors:
            return TermGradient(None, None, self.errors[name])
        column = self.names.index(name)
        weighted = self.squares[:, column].sum().sqrt()
        weight = self.weights[column]
        size = weight.detach().abs() if isinstance(weight, Tensor) else abs(weight)
        return TermGradient(weighted / size, weighted)

    @property
    def norms(self) -> dict[str, Tensor | None]:
        """Each term's gradient norm, before its weight."""
        return {name: term.grad_norm for name, term in self.terms.items()}

    @property
    def weighted(self) -> dict[str, Tensor | None]:
        """Each term's gradient norm times the size of its weight: what reaches the model."""
        return {name: term.grad_norm_weighted for name, term in self.terms.items()}

    @property
    def total_norm(self) -> Tensor:
        """Norm of the sum of all weighted gradients."""
        return self.squares[:, -1].sum().sqrt()

    @property
    def by_input(self) -> dict[str, Gradients]:
        """The same report with respect to one input alone."""
        return {
            name: replace(
                self,
                inputs=(name,),
                squares=self.squares[row : row + 1],
                grams=None if self.grams is None else self.grams[row : row + 1],
            )
            for row, name in enumerate(self.inputs)
        }

    @property
    def gram(self) -> Tensor:
        """Inner products ``⟨w_i g_i, w_j g_j⟩`` of the weighted gradients, in order of names."""
        if self.grams is None:
            raise GradientError(
                "inner products, cosines, shares and conflicts need the gradients themselves, got "
                "a report of norms. Use `track='gram'`."
            )
        return self.grams.sum(0)

    @property
    def cosines(self) -> Tensor:
        """Cosine between every two terms' weighted gradients, in the order of names."""
        gram = self.gram
        lengths = gram.diagonal().sqrt()
        return gram / (lengths.unsqueeze(0) * lengths.unsqueeze(1))

    @property
    def shares(self) -> dict[str, Tensor]:
        """Each term's part of the step along the total gradient: ``⟨w_k g_k, g⟩/‖g‖²``.

        Signed, and they sum to 1: a term that pulls backwards has a negative share.
        """
        gram = self.gram
        parts = gram.sum(1) / gram.sum()
        return {n: parts[i] for i, n in enumerate(self.names) if n not in self.errors}

    def cosine(self, first: str, second: str) -> Tensor:
        """Cosine between two terms' weighted gradients."""
        for name in (first, second):
            self[name]
        return self.cosines[self.names.index(first), self.names.index(second)]

    def conflicts(self, below: float = -0.1) -> list[Conflict]:
        """The pairs of terms whose cosine is below a limit, worst first. Waits for the device."""
        check_number("below", below)
        cosines = self.cosines.tolist()
        pairs = [
            Conflict(first, second, cosines[i][j])
            for i, first in enumerate(self.names)
            for j, second in enumerate(self.names[:i])
            if cosines[i][j] < below
        ]
        return sorted(pairs, key=lambda pair: pair.cosine)

    def reduce(self, group: torch.distributed.ProcessGroup | None = None) -> Gradients:
        """The report over all processes, as if their inputs were one batch; one all-reduce.

        Squared norms and inner products add up. A term without a gradient on one process has none
        at all. Every process must call this, with the same terms and inputs. Waits for the device.

        *At the edge:* what is the same on every process, such as parameters, counts once for each.
        A report of `parameter_gradients` is none to combine: there gradients add up, not squares.
        """
        failures = self.squares.new_tensor([float(name in self.errors) for name in self.names])
        parts = [failures, self.squares, *([] if self.grams is None else [self.grams])]
        packed = torch.cat([part.flatten() for part in parts])
        torch.distributed.all_reduce(packed, group=group)
        failed, squares, *grams = torch.split(packed, [part.numel() for part in parts])
        reasons = {
            name: self.errors.get(name, "it has no gradient on another process")
            for name, number in zip(self.names, failed.tolist(), strict=True)
            if number
        }
        return replace(
            self,
            errors=reasons,
            squares=squares.view_as(self.squares),
            grams=grams[0].view_as(self.grams) if self.grams is not None else None,
        )

    def dominant(self) -> str:
        """The term with the longest weighted gradient; NaN outweighs all. Waits for the device."""
        sizes = dict(zip(self.names, self.squares[:, :-1].sum(0).tolist(), strict=True))
        candidates = {n: size for n, size in sizes.items() if n not in self.errors}
        if not candidates:
            raise GradientError(f"no term has a gradient: {self.errors}. Use differentiable terms.")
        return largest(candidates)


def largest(sizes: Mapping[str, float]) -> str:
    """The name of the largest number; NaN, which no number outweighs, counts as larger than all."""
    return max(sizes, key=lambda name: (math.isnan(sizes[name]), sizes[name]))


def added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two gradients, either of which may be sparse: torch adds that to a dense only."""
    return b + a if a.is_sparse else a + b


def gram_matrix(vectors: list[Tensor]) -> Tensor:
    """All inner products of vectors of one shape, added in float64 without stacking them whole."""
    wide = torch.float32 if vectors[0].device.type == "mps" else torch.float64
    if any(distributed(v) for v in vectors):
        long = [v.detach().to(wide) for v in vectors]
        return torch.stack([torch.stack([whole((a * b).sum()) for b in long]) for a in long])
    dense = [v.to_dense() if v.is_sparse else v for v in vectors]
    flat = [real_entries(v.detach()).reshape(-1) for v in dense]
    chunk = CHUNK if flat[0].device.type == "cpu" else 1 << 22
    gram = torch.zeros(len(flat), len(flat), dtype=wide, device=flat[0].device)
    for parts in zip(*(torch.split(v, chunk) for v in flat), strict=True):
        rows = torch.stack([part.to(wide) for part in parts])
        gram = gram + rows @ rows.mT
    return gram
