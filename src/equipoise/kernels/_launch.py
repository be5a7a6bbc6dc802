"""Running the kernels on a plan, and reading values, norms and inner products off their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
from torch import Tensor

from equipoise.kernels._fused import Fused, as_rows, constants, on_device, uses, weights
from equipoise.kernels._gradient import RESULTS, gradient
from equipoise.kernels._recognise import Plan
from equipoise.kernels._statistics import COLUMNS, statistics
from equipoise.kernels._sums import PARTS, finish, prepare

DIRECTIONS = {"": 0, "to": 1, "from": 2, "both": 3}
WARPS = 4
BYTES = 16
"""How much of a row every thread reads at once."""


def evaluate(plan: Plan, weight: Mapping[str, float | Tensor], *, measure: str | None) -> Fused:
    """Values, gradient and, with ``measure`` "norms" or "gram", figures of a plan's terms."""
    x = plan.x.detach()
    flat, terms = as_rows(x, x.shape[-1]), len(plan.names)
    given = [weight[name] for name in plan.names]
    together = weights(given, x.device)
    known = on_device(constants(plan, given), x.device)
    table = _statistics(plan, flat)
    sizes = table[:, :3].sum(0, dtype=torch.float64)
    wide = sizes.new_empty(terms * (PARTS.value + 1))
    coefficients, magnitudes = wide[terms:], wide[:terms]
    shared = table.new_empty(7)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _prepare(plan, sizes, together, known, coefficients, magnitudes, shared)
        result, out = _gradient(plan, flat, table, shared, measure)
        results = out.sum(0, dtype=torch.float64)
        numbers = table.new_empty(2 + 2 * terms)
        figures = sizes.new_empty(1 + terms + (terms * terms if measure == "gram" else 0))
        finish[(1,)](
            sizes,
            results,
            together,
            known,
            coefficients,
            magnitudes,
            _where(x.device),
            numbers,
            figures,
            terms,
            WIDTH=triton.next_power_of_2(terms),
            GRAM=measure == "gram",
            num_warps=1,
        )
    return Fused(
        names=plan.names,
        total=numbers[0],
        penalty=numbers[1],
        values=numbers[2 : 2 + terms],
        contributions=numbers[2 + terms :],
        gradient=result.view(x.shape),
        squares=figures[: terms + 1],
        gram=figures[terms + 1 :].view(terms, terms) if measure == "gram" else None,
    )


def _shape(x: Tensor) -> dict[str, int]:
    """How a row is cut into tiles."""
    each = max(1, BYTES // x.element_size())
    return {"LANES": WARPS * 32, "EACH": each, "num_warps": WARPS}


def _support(plan: Plan, x: Tensor) -> tuple[Tensor, int]:
    keep = plan.support
    if keep is None:
        return x, 0
    keep = (keep != 0).view(torch.uint8)
    return (keep, 0) if keep.dim() == 1 else (as_rows(keep, x.shape[-1]), x.shape[-1])


def _statistics(plan: Plan, x: Tensor) -> Tensor:
    """Every row's figures."""
    rows, width = x.shape
    table = x.new_empty((rows, COLUMNS.value), dtype=torch.float32)
    keep, keep_stride = _support(plan, x)
    other = plan.other
    y = x if other is None else as_rows(other.detach(), width)
    kl = plan.of_kind("kl")
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        statistics[(rows,)](
            x,
            y,
            keep,
            table,
            width,
            x.stride(0),
            y.stride(0),
            keep_stride,
            math.log2(math.e) / plan.temperature,
            ROWS=bool(plan.rows),
            ENTROPY=plan.of_kind("entropy") is not None,
            KL=DIRECTIONS[kl.direction] if kl is not None else 0,
            PAIR=other is not None,
            SIZES=bool(plan.sizes),
            SUPPORT=plan.support is not None,
            **_shape(x),
        )
    return table


def _prepare(  # noqa: PLR0917 -- three that are read, three that are written
    plan: Plan,
    sizes: Tensor,
    weight: Tensor,
    constants: Tensor,
    coefficients: Tensor,
    magnitudes: Tensor,
    shared: Tensor,
) -> None:
    """The terms' coefficients, and what all rows share."""
    t, bit, ce = plan.temperature, math.log(2), plan.of_kind("ce")
    # What turns a kind's use into the coefficient of its gradient.
    units = on_device((-1 / t, 1 / (bit * t), 1 / t, 1 / bit), sizes.device)
    labels = None if ce is None else ce.labels
    prepare[(1,)](
        sizes,
        weight,
        constants,
        units,
        sizes if labels is None else labels.contiguous(),
        0 if ce is None else ce.ignored,
        0 if labels is None else labels.numel(),
        coefficients,
        magnitudes,
        shared,
        len(plan.names),
        WIDTH=triton.next_power_of_2(len(plan.names)),
        COUNT=ce is not None and ce.mean,
        BLOCK=1024,
    )


def _gradient(
    plan: Plan, x: Tensor, table: Tensor, shared: Tensor, measure: str | None
) -> tuple[Tensor, Tensor]:
    """The summed gradient, and every row's results."""
    rows, width = x.shape
    result = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    out = x.new_empty((rows, RESULTS.value), dtype=torch.float32)
    keep, keep_stride = _support(plan, x)
    y = x if plan.other is None else as_rows(plan.other.detach(), width)
    kl, js, ce = (plan.of_kind(kind) for kind in ("kl", "js", "ce"))
    use = uses(plan, rows, x.device, torch.float32)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        gradient[(rows,)](
            x,
            y,
            result,
            keep,
            x if ce is None or ce.labels is None else ce.labels.contiguous(),
            table,
            use,
            shared,
            out,
            width,
            x.stride(0),
            y.stride(0),
            keep_stride,
            int(use.shape[1] > 1),
            use.stride(0),
            math.log2(math.e) / plan.temperature,
            js.beta if js is not None else 0.5,
            ce.ignored if ce is not None else -100,
            ENTROPY=plan.of_kind("entropy") is not None,
            KL=DIRECTIONS[kl.direction] if kl is not None else 0,
            JS=js is not None,
            CE=ce is not None,
            SIGN=any(size.one for size in plan.sizes.values()),
            LINE=any(size.two or size.root for size in plan.sizes.values()),
            NORMS=measure is not None,
            GRAM=measure == "gram",
            EXACT=x.dtype == torch.float32,
            SUPPORT=plan.support is not None,
            **_shape(x),
        )
    return result, out


@lru_cache(maxsize=8)
def _where(device: torch.device) -> Tensor:
    """Where among all sums the inner product of every two parts stands: [6, 6]."""
    at = torch.full((6, 6), -1)
    at[0, 0], at[0, 1], at[1, 1] = 2, 0, 1
    pair = 3 + 16
    for i in range(4):
        at[2 + i, 2 + i] = 3 + 4 + i
        at[0, 2 + i] = 3 + 8 + i
        at[1, 2 + i] = 3 + 12 + i
        for j in range(i + 1, 4):
            at[2 + i, 2 + j] = pair
            pair += 1
    below = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    return torch.where(below, at.T, at).to(device)
