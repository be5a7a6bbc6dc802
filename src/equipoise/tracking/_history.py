"""What many gradient reports say together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from itertools import combinations
from typing import Any

from torch import Tensor

from equipoise._errors import GradientError, check_count, check_number
from equipoise._evaluation import Evaluation, Number, check_evaluation
from equipoise._gradients import largest
from equipoise._host import on_host
from equipoise._recorder import NO_GRAPH
from equipoise.tracking._findings import Finding, Step, column, findings, mean, mean_norm, terms


class History:
    """The last evaluations' gradient reports: means, trends, who dominated, what looks wrong.

    Figures stay on the device until something is read; then all that came since are fetched at
    once. Only tracked evaluations count, after their backward pass; others are passed over.

    *At the edge:* reading before any report came is an error. NaN and inf count as they are, and
    as exploding.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, weight=1e-6), l2=eq.Term(eq.l2))
        >>> history = eq.tracking.History(window=100)
        >>> for step in range(5):
        ...     result = pipeline(torch.tensor([1.0, -2.0], requires_grad=True), track=True)
        ...     result.total.backward()
        ...     history.add(result)
        >>> history.dominant()
        'l2'
        >>> for finding in history.findings():
        ...     print(finding)
        l1: 3.16e+06× below l2 on average, and hardly moves the model
    """

    def __init__(self, window: int = 100) -> None:
        check_count("window", window)
        self.window = window
        self._arriving: deque[dict[Any, Number]] = deque(maxlen=window)
        self._steps: deque[Step] = deque(maxlen=window)

    def __repr__(self) -> str:
        return f"History({len(self)} of {self.window} steps)"

    def __len__(self) -> int:
        """How many steps are remembered."""
        return min(len(self._steps) + len(self._arriving), self.window)

    def add(self, result: Evaluation) -> None:
        """Take note of a tracked evaluation, after its backward pass."""
        check_evaluation(result)
        if result.has_report:
            self._arriving.append(_figures(result))

    def means(self, last: int | None = None) -> dict[str, float]:
        """Mean weighted gradient norm of each term over the last steps.

        A step in which a term had no part counts as 0: it was not its turn, or its weight was 0.
        """
        steps = self._read(last)
        return {
            name: mean_norm(steps, name) for name in terms(steps) if column(steps, "norms", name)
        }

    def ema(self, decay: float = 0.9) -> dict[str, float]:
        """Exponential moving average of each term's weighted gradient norm."""
        check_number("decay", decay, low=0.0, high=1.0)
        averages = {}
        for name, norms in self._norms(None).items():
            average = norms[0]
            for norm in norms[1:]:
                average = decay * average + (1 - decay) * norm
            averages[name] = average
        return averages

    def trends(self, last: int | None = None) -> dict[str, float]:
        """How each norm develops: the mean of the later half over that of the earlier half."""
        halves = {
            name: (mean(n[: (len(n) + 1) // 2]), mean(n[len(n) // 2 :]))
            for name, n in self._norms(last).items()
        }
        return {
            name: late / early if early else (1.0 if late == early else float("inf"))
            for name, (early, late) in halves.items()
        }

    def dominant(self, last: int | None = None) -> str:
        """The term with the largest mean weighted gradient norm over the last steps."""
        means = self.means(last)
        if not means:
            raise GradientError(
                "no term had a gradient in these steps, so that none dominated, got only reasons. "
                "Use `result.gradients.errors` to read them."
            )
        return largest(means)

    def findings(self, last: int | None = None) -> list[Finding]:
        """What looks wrong over the last steps, each with threshold, window and numbers."""
        return findings(self._read(last))

    def _norms(self, last: int | None) -> dict[str, list[float]]:
        """The norms of each term in the steps in which it had one."""
        steps = self._read(last)
        norms = {name: column(steps, "norms", name) for name in terms(steps)}
        return {name: found for name, found in norms.items() if found}

    def _read(self, last: int | None) -> list[Step]:
        if last is not None:
            check_count("last", last)
            check_number("last", last, high=self.window)
        arrived = on_host(
            {(i, *k): f for i, new in enumerate(self._arriving) for k, f in new.items()}
        )
        for i, new in enumerate(self._arriving):
            self._steps.append(_step({key: arrived[i, *key] for key in new}))
        self._arriving.clear()
        steps = list(self._steps)[-(last or self.window) :]
        if not steps:
            raise GradientError(
                "a history needs at least one tracked evaluation after its backward pass, got "
                "none. Use `pipeline(..., track=True)` and `history.add(result)`."
            )
        return steps


def _figures(result: Evaluation) -> dict[Any, Number]:
    report = result.gradients
    figures: dict[Any, Number] = {}
    for name, term in result.results.items():
        figures["values", name] = term.value
        figures["weights", name] = term.weight
    for name, norm in report.weighted.items():
        if norm is not None:
            figures["norms", name] = norm
    for name, reason in report.errors.items():
        if reason == NO_GRAPH:
            figures["detached", name] = 1.0
    if report.grams is not None:
        alive = [name for name in report.names if name not in report.errors]
        cosines = report.cosines
        for first, second in combinations(alive, 2):
            place = (report.names.index(first), report.names.index(second))
            figures["cosines", first, second] = cosines[place]
    # Detached: a history of training must not hold on to its graphs.
    return {k: f.detach() if isinstance(f, Tensor) else f for k, f in figures.items()}


def _step(figures: Mapping[Any, float]) -> Step:
    parts: dict[str, dict[Any, float]] = {part.name: {} for part in fields(Step)}
    for (part, *names), figure in figures.items():
        parts[part][names[0] if len(names) == 1 else tuple(names)] = figure
    return Step(**parts)
