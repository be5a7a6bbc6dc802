"""What all balancers share: reports in, weights out, and what is remembered in between."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import InputError, InputTypeError, OptionError, check_count, check_number
from equipoise._evaluation import Evaluation
from equipoise._gradients import Gradients
from equipoise._pipeline import Pipeline
from equipoise._recorder import BASE

Report = Evaluation | Gradients
Limits = tuple[float, float]
LIMITS: Limits = (1e-6, 1e4)
"""No weight becomes 0: its term's gradient would be 0, and nothing could be learned of it."""

logger = logging.getLogger("equipoise")


class Balancer(ABC):
    """Sets weights of a pipeline from gradient reports.

    ``pipeline = balancer.update(report, pipeline)`` after each backward pass gives the pipeline of
    the next step; its weights are tensors on the device. `apply` puts the last weights into a
    pipeline, after a resume. Values are reported as ever: only weights change.

    *At the edge:* an evaluation that was not tracked changes nothing, and neither does a report in
    which a gradient is NaN, infinite or 0; all this is decided on the device, and nothing waits for
    it. A term without a gradient keeps its weight, which is logged once. A schedule ends
    with the first report after ``warmup``, whether it holds or not. Weights keep their signs, and
    stay within ``limits``. Where `torch.distributed` is initialized the report is reduced over
    all processes, so that weights are the same on each; then every process must update at the same
    steps, and waits for the others. What is measured against a base needs one.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, weight=0.1))
        >>> balancer = eq.balance.GradientRatio({"l1": 1.0})
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> result = pipeline(x, base=lambda x: 7 * x.sum(), track=True)
        >>> result.total.backward()
        >>> pipeline = balancer.update(result, pipeline)
        >>> pipeline["l1"].weight
        tensor(7.)
    """

    def __init__(
        self, names: Sequence[str], *, limits: Limits, warmup: int, base: str | None = None
    ) -> None:
        check_limits(limits)
        check_count("warmup", warmup, low=0)
        self._names = tuple(names)
        self._read = self._names if base is None else (base, *self._names)
        self._limits = limits
        self._warmup = warmup
        self._reports = 0
        self._weights: dict[str, Tensor] = {}
        self._memory: dict[str, Tensor] = {}
        self._told: set[str] = set()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that were set, by term."""
        return dict(self._weights)

    def update(
        self, report: Report, pipeline: Pipeline, /, *, values: Mapping[str, Tensor] | None = None
    ) -> Pipeline:
        """Take note of a report, and give the pipeline with new weights.

        ``report`` is an evaluation after its backward pass, or a gradient report by itself, for
        instance that of `tracking.parameter_gradients`. ``values`` are the terms' values, where a
        balancer looks at these and a report came without.
        """
        self._check(report, pipeline)
        if isinstance(report, Evaluation):
            if not report.has_report:
                return self.apply(pipeline)
            found = {name: term.value.detach() for name, term in report.results.items()}
            values = found if values is None else values
            report = report.gradients
        self._check_base(report)
        if _several_processes():
            report = report.reduce()
        self._reports += 1
        wanted = self._wanted(report, values, pipeline)
        if self._reports <= self._warmup:
            return pipeline
        self._set(wanted, report, pipeline)
        return self.apply(pipeline)

    def apply(self, pipeline: Pipeline, /) -> Pipeline:
        """The pipeline with the weights that were set last."""
        return pipeline.reweighted(**self._weights) if self._weights else pipeline

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on: tensors and plain data."""
        return {
            "kind": type(self).__name__,
            "reports": self._reports,
            "weights": {name: weight.clone() for name, weight in self._weights.items()},
            "memory": {name: tensor.clone() for name, tensor in self._memory.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from where `state_dict` was taken; use `apply` on the pipeline then."""
        given: object = state_dict
        kind = given.get("kind") if isinstance(given, Mapping) else None
        if kind != type(self).__name__:
            raise InputError(
                f"a state must be that of a {type(self).__name__}, got "
                f"{kind or type(given).__name__}. Use what its `state_dict()` returned."
            )
        for name in state_dict["weights"]:
            if self._names and name not in self._names:
                raise InputError(
                    f"a state must be that of the same balancer, of {', '.join(self._names)}, got "
                    f"one of {name!r}. Use the terms it was saved with."
                )
        self._reports = int(state_dict["reports"])
        self._weights = {n: weight.clone() for n, weight in state_dict["weights"].items()}
        self._memory = {n: tensor.clone() for n, tensor in state_dict["memory"].items()}

    @abstractmethod
    def _wanted(
        self, report: Gradients, values: Mapping[str, Tensor] | None, pipeline: Pipeline
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The size of each weight, and whether it holds."""

    def _set(
        self, wanted: Mapping[str, tuple[Tensor, Tensor]], report: Gradients, pipeline: Pipeline
    ) -> None:
        for name, (size, holds) in wanted.items():
            own = own_weight(report, name, pipeline)
            before = self._weights.get(name, own).to(own)
            weight = size.clamp(*self._limits) * own.sign()
            self._weights[name] = torch.where(holds, weight, before).to(torch.float32)

    def _measurable(self, report: Gradients, names: Sequence[str]) -> list[str]:
        """Those terms whose gradient the report holds; why another's is missing is logged once."""
        for name in names:
            if name in report.errors and name not in self._told:
                self._told.add(name)
                logger.warning("%s keeps its weight: %s", name, report.errors[name])
        return [n for n in names if n in report.names and n not in report.errors]

    def _averaged(self, key: str, x: Tensor, holds: Tensor, decay: float) -> Tensor:
        """The exponential average, its bias corrected (Kingma & Ba 2015)."""
        zero = torch.zeros((*x.shape, 2), dtype=x.dtype, device=x.device)
        before = self._memory.get(key, zero).to(x)
        now = torch.stack([x, torch.ones_like(x)], -1)
        after = torch.where(holds, decay * before + (1 - decay) * now, before)
        self._memory[key] = after
        return after[..., 0] / after[..., 1]

    def _check(self, report: object, pipeline: object) -> None:
        if not isinstance(report, Evaluation | Gradients):
            raise InputTypeError(
                "`report` must be an evaluation or a gradient report, got "
                f"{type(report).__name__}. Use `balancer.update(result, pipeline)`."
            )
        if not isinstance(pipeline, Pipeline):
            raise InputTypeError(
                f"`pipeline` must be a Pipeline, got {type(pipeline).__name__}. "
                "Use the one that gave the report."
            )
        for name in self._read:
            if name != BASE:
                pipeline[name]  # refuses a name it does not know

    def _check_base(self, report: Gradients) -> None:
        if BASE in self._read and BASE not in report.names:
            raise InputError(
                f"{self} measures against the base, got a report of {', '.join(report.names)}. "
                "Use `pipeline(..., base=loss)`, a term named 'base', or the name of another term."
            )


def used_weight(report: Gradients, name: str) -> Tensor:
    """The weight that a term had in this report."""
    weight = report.weights[report.names.index(name)]
    if isinstance(weight, Tensor):
        return weight.detach().to(report.squares)
    return report.squares.new_full((), weight)


def own_weight(report: Gradients, name: str, pipeline: Pipeline) -> Tensor:
    """The same as the pipeline has it: of a lazy term, what it weighs on average."""
    used = used_weight(report, name)
    if name not in pipeline.terms:
        return used  # a base that was given at the call
    term = pipeline[name]
    return used / term.every if term.rescale else used


def good(*sizes: Tensor) -> Tensor:
    """Whether all of these are finite and above 0."""
    together = torch.cat([size.reshape(-1) for size in sizes])
    return (together > 0).all() & together.isfinite().all()


def check_limits(limits: object) -> None:
    """Refuse what is not a smallest weight above 0 and a largest one."""
    if not isinstance(limits, tuple) or len(limits) != 2:
        raise OptionError(
            f"`limits` must be the smallest and the largest weight, got {limits!r}. Use {LIMITS}."
        )
    low, high = limits
    check_number("limits[0]", low, above=0.0)
    check_number("limits[1]", high, low=low)


def check_decay(decay: object) -> None:
    """Refuse what is not a decay of an average: from 0, which remembers nothing, to below 1."""
    check_number("decay", decay, low=0.0)
    if not decay < 1.0:  # type: ignore[operator]
        raise OptionError(f"`decay` must be below 1, got {decay!r}. Use 0.9, say.")


def over_processes(x: Tensor) -> Tensor:
    """The mean over all processes, the same on each."""
    if not _several_processes():
        return x
    together = x.clone()
    torch.distributed.all_reduce(together)
    return together / torch.distributed.get_world_size()


def of_first_process(x: Tensor) -> Tensor:
    """What the first process has, on each."""
    if not _several_processes():
        return x
    first = x.clone()
    torch.distributed.broadcast(first, src=0)
    return first


def _several_processes() -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1
