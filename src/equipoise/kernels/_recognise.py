"""Which terms the kernels can take, and what each of them is in the kernels' terms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.penalties._divergence import js_divergence, kl_divergence
from equipoise.penalties._entropy import entropy
from equipoise.penalties._magnitude import elastic_net, l1, l2, output_magnitude

KINDS = ("entropy", "kl", "js", "ce")
"""The parts of a gradient that differ from row to row, in the kernels' order."""
FLOATS = (torch.float32, torch.bfloat16)
SIMPLE = (bool, int, float, str, type(None))
TENSORS = ("mask", "support", "denominator")
"""What options may be, and those that may be tensors instead."""


@dataclass(frozen=True, eq=False)
class Request:
    """A term that might be fused: its penalty, options and inputs."""

    name: str
    penalty: Callable[..., Any]
    options: Mapping[str, Any]
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Sizes:
    """``one·Σ|x| + two·Σx²``; or, with a root, ``(root·‖x‖ − target)²``."""

    one: float = 0.0
    two: float = 0.0
    root: float = 0.0
    target: float = 0.0


@dataclass(frozen=True, eq=False)
class Rows:
    """A mean or sum over rows of one of `KINDS`, ``factor`` times what the kernel finds in bits."""

    kind: str
    factor: float
    temperature: float = 1.0
    other: Tensor | None = None
    other_first: bool = False
    direction: str = ""
    beta: float = 0.5
    mask: Tensor | None = None
    support: Tensor | None = None
    mean: bool = True
    denominator: float | Tensor | None = None
    labels: Tensor | None = None
    ignored: int = -100


@dataclass(frozen=True, eq=False)
class Plan:
    """Terms on one tensor ``x``, with one other tensor, one temperature and one support at most."""

    x: Tensor
    sizes: Mapping[str, Sizes]
    rows: Mapping[str, Rows]

    @property
    def names(self) -> tuple[str, ...]:
        """All terms, in no particular order."""
        return (*self.sizes, *self.rows)

    def of_kind(self, kind: str) -> Rows | None:
        """The term of a kind, if there is one."""
        return next((row for row in self.rows.values() if row.kind == kind), None)

    @property
    def other(self) -> Tensor | None:
        """The tensor that x is compared with."""
        return next((row.other for row in self.rows.values() if row.other is not None), None)

    @property
    def temperature(self) -> float:
        """That of all rows."""
        return next((row.temperature for row in self.rows.values()), 1.0)

    @property
    def support(self) -> Tensor | None:
        """That of all rows."""
        return next((row.support for row in self.rows.values()), None)


def plan(
    requests: Sequence[Request], x: Tensor, floats: Sequence[torch.dtype] = FLOATS
) -> Plan | None:
    """The terms on x that can be evaluated together; None if there is none."""
    if x.dim() == 0 or x.numel() == 0 or x.dtype not in floats:
        return None
    sizes: dict[str, Sizes] = {}
    rows: dict[str, Rows] = {}
    for request in requests:
        found = _understood(request, x)
        if isinstance(found, Sizes):
            sizes[request.name] = found
        elif found is not None and all(_fit(found, row) for row in rows.values()):
            rows[request.name] = found
    return Plan(x, sizes, rows) if sizes or rows else None


def _fit(row: Rows, other: Rows) -> bool:
    """Whether two kinds of rows can share one pass."""
    same_other = row.other is other.other or row.other is None or other.other is None
    return (
        row.kind != other.kind
        and row.temperature == other.temperature
        and row.support is other.support
        and same_other
    )


def _understood(request: Request, x: Tensor) -> Sizes | Rows | None:
    reader = _READERS.get(request.penalty)
    if reader is None or not all(isinstance(tensor, Tensor) for tensor in request.inputs):
        return None
    simple = tuple(
        (name, type(value), value)
        for name, value in request.options.items()
        if name not in TENSORS or not isinstance(value, Tensor)
    )
    if not all(kind in SIMPLE for _, kind, _ in simple):
        return None
    if not _accepted(request.penalty, len(request.inputs), simple):
        return None
    return reader({**_defaults(request.penalty), **request.options}, request.inputs, x)


@lru_cache(maxsize=256)
def _accepted(
    penalty: Callable[..., Any], inputs: int, options: tuple[tuple[str, type, Any], ...]
) -> bool:
    """Whether the definition takes these options; its own words are the best where it does not."""
    x = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
    label = torch.zeros(1, dtype=torch.int64, device="cpu")
    given = (x, label if penalty is F.cross_entropy else x)[:inputs]
    try:
        penalty(*given, **{name: value for name, _, value in options})
    except Exception:  # noqa: BLE001 -- it will be raised where the term's name is known
        return False
    return True


@cache
def _defaults(penalty: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(penalty).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _size(options: Mapping[str, Any], x: Tensor) -> float | None:
    """The factor that reduction and scale give to a sum over all entries."""
    if options["mask"] is not None or options["reduction"] not in ("sum", "mean"):
        return None
    return float(options["scale"]) / (x.numel() if options["reduction"] == "mean" else 1)


def _l1(options: Mapping[str, Any], _inputs: tuple[Tensor, ...], x: Tensor) -> Sizes | None:
    factor = _size(options, x)
    return None if factor is None else Sizes(one=factor)


def _l2(options: Mapping[str, Any], _inputs: tuple[Tensor, ...], x: Tensor) -> Sizes | None:
    factor = _size(options, x)
    plain = options["center"] is None and options["clip"] is None
    return Sizes(two=factor) if plain and factor is not None else None


def _elastic(options: Mapping[str, Any], _inputs: tuple[Tensor, ...], x: Tensor) -> Sizes | None:
    factor, ratio = _size(options, x), options["l1_ratio"]
    if factor is None or not 0 <= ratio <= 1:
        return None
    return Sizes(one=factor * ratio, two=factor * (1 - ratio))


def _magnitude(options: Mapping[str, Any], _inputs: tuple[Tensor, ...], x: Tensor) -> Sizes | None:
    known = options["norm"] in ("rms", "l2") and options["reduction"] in ("sum", "mean")
    if not known or options["dim"] is not None:
        return None
    root = x.numel() ** -0.5 if options["norm"] == "rms" else 1.0
    return Sizes(root=root, target=float(options["target"]))


def _entropy(options: Mapping[str, Any], _inputs: tuple[Tensor, ...], x: Tensor) -> Rows | None:
    if not _normalises(options) or options["mode"] not in ("penalty", "bonus"):
        return None
    factor = math.log(2) if options["mode"] == "penalty" else -math.log(2)
    if options["normalize"]:
        if options["support"] is not None:
            return None
        factor *= 1 / math.log(x.shape[-1]) if x.shape[-1] > 1 else 0.0
    return _rows("entropy", options, x, factor=factor)


def _kl(options: Mapping[str, Any], inputs: tuple[Tensor, ...], x: Tensor) -> Rows | None:
    if not _normalises(options) or options["floor"] is not None:
        return None
    if options["direction"] not in ("forward", "reverse", "symmetric"):
        return None
    squared = options["temperature"] ** 2 if options["temperature_squared"] else 1.0
    pair = _pair(inputs, x)
    if pair is None:
        return None
    first = pair["other_first"] != (options["direction"] == "reverse")
    direction = "both" if options["direction"] == "symmetric" else "to" if first else "from"
    return _rows("kl", options, x, factor=math.log(2) * squared, direction=direction, **pair)


def _js(options: Mapping[str, Any], inputs: tuple[Tensor, ...], x: Tensor) -> Rows | None:
    beta, pair = options["beta"], _pair(inputs, x)
    if not options["from_logits"] or not 0 < beta < 1 or pair is None:
        return None
    if options["base"] not in ("e", 2):
        return None
    unit = math.log(2) if options["base"] == 2 else 1.0
    unit *= beta * (1 - beta) if options["normalized"] else 1.0
    own = 1 - beta if pair["other_first"] else beta
    return _rows("js", options, x, factor=math.log(2) / unit, beta=own, **pair)


def _cross_entropy(
    options: Mapping[str, Any], inputs: tuple[Tensor, ...], x: Tensor
) -> Rows | None:
    labels = inputs[1] if len(inputs) == 2 and inputs[0] is x else None
    plain = options["weight"] is None and options["label_smoothing"] == 0.0
    plain = plain and options["size_average"] is None and options["reduce"] is None
    if labels is None or not plain or options["reduction"] not in ("mean", "sum"):
        return None
    if x.dim() > 2 or labels.shape != x.shape[:-1] or labels.dtype != torch.int64:
        return None
    if labels.device != x.device:
        return None
    mean, ignored = options["reduction"] == "mean", int(options["ignore_index"])
    return Rows("ce", math.log(2), labels=labels, ignored=ignored, mean=mean)


def _normalises(options: Mapping[str, Any]) -> bool:
    """Whether the penalty makes distributions itself, as the kernels do."""
    temperature = options["temperature"]
    return bool(options["from_logits"] or temperature != 1.0) and temperature > 0


def _pair(inputs: tuple[Tensor, ...], x: Tensor) -> dict[str, Any] | None:
    """The other of two inputs, if it is one that stays as it is."""
    if len(inputs) != 2 or not any(tensor is x for tensor in inputs):
        return None
    first = inputs[1] is x
    other = inputs[0] if first else inputs[1]
    if other is x or other.requires_grad or other.shape != x.shape or other.device != x.device:
        return None
    known = other.dtype in (*FLOATS, torch.float16, x.dtype)
    return {"other": other, "other_first": first} if known else None


def _rows(kind: str, options: Mapping[str, Any], x: Tensor, **more: Any) -> Rows | None:  # noqa: ANN401
    mask, support, denominator = options["mask"], options["support"], options["denominator"]
    wrong = options["check"] and not options["from_logits"]
    if wrong or options["reduction"] not in ("sum", "mean"):
        return None
    if denominator is not None and options["reduction"] == "sum":
        return None
    if not _fits(mask, x.shape[:-1], x) or not _fits(support, x.shape, x):
        return None
    if isinstance(denominator, Tensor) and (denominator.numel() != 1 or denominator.requires_grad):
        return None
    return Rows(
        kind=kind,
        temperature=float(options.get("temperature", 1.0)),
        mask=mask,
        support=support,
        mean=options["reduction"] == "mean",
        denominator=denominator,
        **more,
    )


def _fits(mask: object, shape: torch.Size, x: Tensor) -> bool:
    """Whether a mask is none, or one of this very shape (a support may be one for all rows)."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.device != x.device or mask.requires_grad:
        return False
    one_row = shape == x.shape and mask.shape == x.shape[-1:]
    return not mask.is_complex() and (mask.shape == shape or one_row)


_READERS: dict[Callable[..., Any], Callable[..., Sizes | Rows | None]] = {
    l1: _l1,
    l2: _l2,
    elastic_net: _elastic,
    output_magnitude: _magnitude,
    entropy: _entropy,
    kl_divergence: _kl,
    js_divergence: _js,
    F.cross_entropy: _cross_entropy,
}
