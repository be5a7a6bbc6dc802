"""The result of calling a pipeline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise._errors import InputTypeError
from equipoise._gradients import Gradients
from equipoise._host import on_host
from equipoise._recorder import BASE, Recorder
from equipoise._table import as_html, as_text, number

Number = float | Tensor


@dataclass(frozen=True, eq=False)
class TermResult:
    """One term of an evaluation, in the graph: ``contribution = weight · value``."""

    name: str
    value: Tensor
    weight: Number
    contribution: Tensor
    metrics: Mapping[str, Number]


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What a pipeline computed: the total in the graph, its parts, and the gradient report.

    ``total = base + penalty``, where ``penalty`` is the sum of ``weight · value`` over ``terms``,
    the base left out.

    *At the edge:* only `metrics`, `to_dict`, `to_json` and printing wait for the device, each of
    them once. After the backward pass of a tracked evaluation the gradient report is there for
    free; before it, asking differentiates every term down to the inputs, and the graph stays.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, weight=0.1), l2=eq.Term(eq.l2, weight=0.01))
        >>> result = pipeline(torch.tensor([1.0, -2.0], requires_grad=True), track=True)
        >>> result.total.backward()
        >>> print(result)
        term     value    weight    contribution    gradient
        l1           3       0.1             0.3      0.1414
        l2           5      0.01            0.05     0.04472
        total                               0.35      0.1844
    """

    total: Tensor
    penalty: Tensor
    base: Tensor | None
    terms: Mapping[str, TermResult]
    tracked: bool
    _base: TermResult | None = field(default=None)
    _recorder: Recorder = field(default_factory=lambda: Recorder(None))

    @property
    def gradients(self) -> Gradients:
        """The gradient report at the pipeline's inputs."""
        return self._recorder.report()

    def metrics(self) -> dict[str, float]:
        """Every figure by a flat name, as Python numbers, in one transfer from the device."""
        return on_host(self._figures())

    def to_dict(self) -> dict[str, Any]:
        """Every figure as nested plain data, in one transfer from the device."""
        weights = {("weight", name): term.weight for name, term in self.terms.items()}
        figures: dict[Any, float] = on_host({**self._figures(), **weights})

        def described(name: str) -> dict[str, Any]:
            custom = self.results[name].metrics
            return {
                "value": figures[name],
                "grad_norm": figures.get(f"{name}_grad_norm"),
                "custom": {str(key): figures[f"{name}/{key}"] for key in custom},
            }

        return {
            "loss_total": figures["total"],
            "base_loss": None if self._base is None else described(BASE),
            "regularizers": {
                name: {
                    **described(name),
                    "weight": figures["weight", name],
                    "contribution": figures[f"{name}_weighted"],
                    "grad_norm_weighted": figures.get(f"{name}_grad_norm_weighted"),
                }
                for name in self.terms
            },
            "regularizer_total": figures["penalty"],
            "total_grad_norm": figures.get("total_grad_norm"),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON, valid always: NaN and infinities become strings."""
        return json.dumps(_valid(self.to_dict()), allow_nan=False, indent=indent)

    def __str__(self) -> str:
        return as_text(*self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(*self._table())

    @property
    def results(self) -> dict[str, TermResult]:
        """The base, if there is one, and the terms."""
        return {**({} if self._base is None else {BASE: self._base}), **self.terms}

    @property
    def has_report(self) -> bool:
        """Whether gradients were tracked, and there was an input to track them at."""
        return self.tracked and bool(self._recorder.entries)

    def _report(self) -> Gradients | None:
        return self.gradients if self.has_report else None

    def _figures(self) -> dict[str, Number]:
        figures: dict[str, Number] = {"total": self.total}
        if self.base is not None:
            figures[BASE] = self.base
        figures["penalty"] = self.penalty
        for name, term in self.terms.items():
            figures[name], figures[f"{name}_weighted"] = term.value, term.contribution
        for name, result in self.results.items():
            figures.update({f"{name}/{key}": value for key, value in result.metrics.items()})
        report = self._report()
        return figures if report is None else {**figures, **gradient_figures(report)}

    def _table(self) -> tuple[list[str], list[list[str]]]:
        report = self._report()
        figures: dict[Any, Number] = {**self._figures()}
        for name, result in self.results.items():
            figures["weight", name] = result.weight
            figures.setdefault(f"{name}_weighted", result.contribution)
        columns = []
        if report is not None:
            columns.append("gradient")
            sizes = report.weighted.items()
            figures.update({("gradient", n): size for n, size in sizes if size is not None})
        if report is not None and report.grams is not None:
            columns.append("share")
            figures.update({("share", n): share for n, share in report.shares.items()})
            if BASE in report.names and BASE not in report.errors:
                columns.append("cosine to base")
                cosines = {n: report.cosine(n, BASE) for n in report.shares}
                figures.update({("cosine to base", n): c for n, c in cosines.items()})
        host = on_host(figures)
        rows = [
            [
                name,
                number(host[name]),
                number(host["weight", name]),
                number(host[f"{name}_weighted"]),
                *(number(host.get((column, name))) for column in columns),
            ]
            for name in self.results
        ]
        total = ["total", "", "", number(host["total"])]
        if columns:
            total += [number(host["total_grad_norm"]), *[""] * (len(columns) - 1)]
        return ["term", "value", "weight", "contribution", *columns], [*rows, total]


def check_evaluation(result: object) -> None:
    """Refuse what is not the whole result of a pipeline, such as its total."""
    if not isinstance(result, Evaluation):
        raise InputTypeError(
            f"`result` must be what a pipeline returned, got {type(result).__name__}. "
            "Use the whole evaluation, `result = pipeline(...)`."
        )


def gradient_figures(report: Gradients) -> dict[str, Number]:
    """The report by flat names."""
    figures: dict[str, Number] = {}
    for name, term in report.terms.items():
        if term.grad_norm is None or term.grad_norm_weighted is None:
            figures[f"{name}_grad_norm_error"] = 1.0
            continue
        figures[f"{name}_grad_norm"] = term.grad_norm
        if name != BASE:
            figures[f"{name}_grad_norm_weighted"] = term.grad_norm_weighted
    figures["total_grad_norm"] = report.total_norm
    return figures


def _valid(data: Any) -> Any:  # noqa: ANN401
    if isinstance(data, dict):
        return {key: _valid(value) for key, value in data.items()}
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    return data
