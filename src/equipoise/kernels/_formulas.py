"""What the kernels do, in whole tensors: for the compiler, which fuses it on any device.

No term is differentiated by a machine here. The gradient of each kind at the logits stands as its
formula, beside the value that it belongs to; the sizes need none but sign(x) and x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise._logspace import LOG_ZERO, entropy_of, gap, log_probabilities
from equipoise.kernels._fused import Fused, as_rows, constants, on_device, uses, weights
from equipoise.kernels._recognise import KINDS, Plan

PARTS = 2 + len(KINDS)
"""sign(x), x, and the kinds."""
Row = tuple[Tensor, Tensor]
"""Every row's value, and its gradient at the logits."""


@dataclass(frozen=True)
class Form:
    """What is constant in a compiled function; all else comes as tensors."""

    sign: bool
    line: bool
    entropy: bool
    direction: str
    js: bool
    labels: str
    ignored: int
    measure: str | None


class Given(NamedTuple):
    """The tensors: logits and what they are compared with, row by row, and the numbers."""

    x: Tensor
    y: Tensor | None
    keep: Tensor | None
    labels: Tensor | None
    use: Tensor
    weight: Tensor
    constants: Tensor
    options: Tensor


class Found(NamedTuple):
    """Values, contributions, total and penalty; the gradient; squared norms, inner products."""

    values: Tensor
    contributions: Tensor
    total: Tensor
    penalty: Tensor
    gradient: Tensor
    squares: Tensor
    gram: Tensor | None


Formulas = Callable[[Given], Found]


def form_of(plan: Plan, measure: str | None) -> Form:
    """What tells a plan's compiled function from others."""
    kl, ce = plan.of_kind("kl"), plan.of_kind("ce")
    return Form(
        sign=any(size.one for size in plan.sizes.values()),
        line=any(size.two or size.root for size in plan.sizes.values()),
        entropy=plan.of_kind("entropy") is not None,
        direction="" if kl is None else kl.direction,
        js=plan.of_kind("js") is not None,
        labels="" if ce is None else "mean" if ce.mean else "sum",
        ignored=-100 if ce is None else ce.ignored,
        measure=measure,
    )


def formulas(form: Form) -> Formulas:
    """The function to be compiled."""

    def evaluate(given: Given) -> Found:
        return _evaluated(form, given)

    return evaluate


def evaluate(plan: Plan, weight: Mapping[str, float | Tensor], *, by: Formulas) -> Fused:
    """Values, gradient and figures of a plan's terms, by its function."""
    x = plan.x.detach()
    width, together = x.shape[-1], [weight[name] for name in plan.names]
    js, ce, keep = plan.of_kind("js"), plan.of_kind("ce"), plan.support
    rows = as_rows(x, width)
    found = by(
        Given(
            x=rows,
            y=None if plan.other is None else as_rows(plan.other.detach(), width),
            keep=None if keep is None else (keep != 0).reshape(-1, width),
            labels=None if ce is None or ce.labels is None else ce.labels.reshape(-1),
            use=uses(plan, len(rows), x.device, torch.float64),
            weight=weights(together, x.device),
            constants=on_device(constants(plan, together), x.device).view(-1, len(plan.names)),
            options=on_device((plan.temperature, 0.5 if js is None else js.beta), x.device),
        )
    )
    return Fused(
        names=plan.names,
        total=found.total,
        penalty=found.penalty,
        values=found.values,
        contributions=found.contributions,
        gradient=found.gradient.view(x.shape),
        squares=found.squares,
        gram=found.gram,
    )


def _evaluated(form: Form, given: Given) -> Found:
    """All terms on all rows."""
    x, weight = given.x, given.weight
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(wide)
    one, two, root, target, kind, number, base = given.constants.unbind()
    sums = torch.stack([(z != 0).sum(dtype=torch.float64), _dot(z, z.sign()), _dot(z, z)])
    length = sums[2].sqrt()
    distance = root * length - target
    # d(root·‖x‖ − target)²/dx = 2·distance·root·x/‖x‖, and 0 at x = 0.
    slope = torch.where(length == 0, 0.0, 2 * distance * root / torch.where(length == 0, 1, length))
    # Selected, not multiplied: what is absent stays so beside an infinite weight.
    signs = torch.where(one == 0, 0.0, one * weight)
    lines = torch.where(root != 0, slope * weight, torch.where(two == 0, 0.0, 2 * two * weight))
    gradient = _of_sizes(form, z, signs.sum().to(wide), lines.sum().to(wide))
    value = torch.where(one == 0, 0.0, one * sums[1]) + torch.where(two == 0, 0.0, two * sums[2])
    slopes: dict[int, Tensor] = {}
    for k, (rows, at) in _kinds(form, given, z).items():
        use = _use(form, given, k)
        mean = torch.where(use == 0, 0.0, use * rows.double()).sum()
        if given.labels is not None and KINDS[k] == "ce" and form.labels == "mean":
            # No label at all: the mean of nothing is NaN, as torch has it, and its gradient 0.
            mean = torch.where((given.labels == form.ignored).all(), torch.nan, mean)
        value = value + torch.where(kind == k, mean, 0.0)
        by = (torch.where(kind == k, weight, 0.0).sum() * use).to(wide).unsqueeze(-1)
        slopes[k] = torch.where(by == 0, 0.0, by * at)
        gradient = gradient + slopes[k]
    value = torch.where(root != 0, distance.square(), value)
    # Weight 0 as a number leaves the term out, where 0 · inf would be NaN.
    part = torch.where((weight == 0) & (number != 0), 0.0, weight * value)
    terms = torch.stack([signs, lines, *((kind == k).double() for k in range(len(KINDS)))], 1)
    products = _products(form, z, sums, slopes)
    total = [_dot(gradient, gradient)[None]] if form.measure else []
    return Found(
        values=value.to(wide),
        contributions=part.to(wide),
        total=part.sum().to(wide),
        penalty=torch.where(base != 0, 0.0, part).sum().to(wide),
        gradient=gradient.to(x.dtype),
        squares=torch.cat([_combined(terms, terms, products), *total]),
        gram=_combined(terms[:, None], terms, products) if form.measure == "gram" else None,
    )


def _of_sizes(form: Form, z: Tensor, alpha: Tensor, gamma: Tensor) -> Tensor:
    """``alpha·sign(z) + gamma·z``; what is not there does not meet NaN and inf either."""
    signs = alpha * z.sign() if form.sign else torch.zeros_like(z)
    return signs + torch.where(gamma == 0, 0.0, gamma * z) if form.line else signs


def _kinds(form: Form, given: Given, z: Tensor) -> dict[int, Row]:
    """Values and gradients of the kinds that there are."""
    temperature, beta = given.options.to(z.dtype).unbind()
    found: dict[int, Row] = {}
    u = _logs(z, given, temperature)
    p = u.exp()
    if form.entropy:
        found[0] = _entropy(p, u, temperature)
    if given.y is not None:
        v = _logs(given.y.to(z.dtype), given, temperature)
        q = v.exp()
        if form.direction:
            value, slope = _divergence(form.direction, p, q, u, v)
            found[1] = value, slope / temperature
        if form.js:
            found[2] = _mixture(p, q, u, v, beta)
    if given.labels is not None:
        found[3] = _cross_entropy(p, u, given.labels, form.ignored)
    return found


def _logs(z: Tensor, given: Given, temperature: Tensor) -> Tensor:
    return log_probabilities(z / temperature, normalize=True, keep=given.keep)


def _use(form: Form, given: Given, kind: int) -> Tensor:
    """How much each row counts; what the plan says is meant for values in bits."""
    use = given.use[kind].double() / math.log(2)
    if given.labels is None or KINDS[kind] != "ce":
        return use.expand(len(given.x))
    counts = (given.labels != form.ignored).double()
    return counts * (use / counts.sum().clamp(min=1) if form.labels == "mean" else use)


def _entropy(p: Tensor, u: Tensor, temperature: Tensor) -> Row:
    """−Σ p·u, with u = log p; its gradient −p·(u + H)."""
    value = entropy_of(u)
    return value, -p * (u + value.unsqueeze(-1)) / temperature


def _divergence(direction: str, p: Tensor, q: Tensor, u: Tensor, v: Tensor) -> Row:
    """To x: Σ q·(v − u). From x: Σ p·(u − v). Both: half of each.

    What is impossible on the one side alone is infinite, and has no gradient.
    """
    no_x, no_y = u <= LOG_ZERO, v <= LOG_ZERO
    if direction == "to":
        infinite = no_x & ~no_y
        terms = torch.where(infinite, 0.0, gap(q, v - u, p))
        slope = p * torch.where(infinite, 0.0, q).sum(-1, keepdim=True) - q
        slope = torch.where(no_x, 0.0, slope)
        nothing = no_y.all(-1)
    elif direction == "from":
        infinite = no_y & ~no_x
        d = torch.where(infinite, 0.0, u - v)
        terms = torch.where(infinite, 0.0, gap(p, d, q))
        slope = p * (d - (p * d).sum(-1, keepdim=True))
        nothing = no_x.all(-1)
    else:
        infinite = no_x ^ no_y
        d = torch.where(infinite, 0.0, u - v)
        terms = 0.5 * (p - q) * d
        part = torch.where(infinite, 0.0, p * d + (p - q))
        slope = 0.5 * (part - p * part.sum(-1, keepdim=True))
        nothing = torch.zeros_like(no_x[..., 0])
    # Rounding may leave a little less than nothing.
    value = terms.sum(-1).clamp(min=0.0)
    value = torch.where(infinite.any(-1), value + torch.inf, value)
    return torch.where(nothing & ~value.isnan(), 0.0, value), slope


def _mixture(p: Tensor, q: Tensor, u: Tensor, v: Tensor, beta: Tensor) -> Row:
    """Σ β·p·log(p/m) + (1−β)·q·log(q/m), with m = βp + (1−β)q.

    Both logarithms from that of the larger of p and q, which is one of a number between β or 1−β
    and 1; that of the smaller differs from it by u − v, and nothing cancels.
    """
    d = v - u
    w = torch.where(d > 0, 1 - beta, beta)
    larger = -torch.log(w + (1 - w) * torch.exp(-d.abs()))
    log_p = torch.where(d > 0, larger - d, larger)
    log_q = torch.where(d > 0, larger, larger + d)
    own, ones = (beta * p * log_p).sum(-1), p.sum(-1)
    # By a sum of all p that is 1 but for rounding: what the gradient subtracts must not be off.
    own = own / torch.where(ones == 0, 1.0, ones)
    m = beta * p + (1 - beta) * q
    value = (beta * gap(p, log_p, m) + (1 - beta) * gap(q, log_q, m)).sum(-1)
    return value, p * (beta * log_p - own.unsqueeze(-1))


def _cross_entropy(p: Tensor, u: Tensor, labels: Tensor, ignored: int) -> Row:
    """−log p at the label, NaN where it does not exist; the gradient p, less 1 at the label."""
    at = torch.arange(u.shape[-1], device=u.device) == labels.unsqueeze(-1)
    chosen = torch.where(at, u, 0.0).sum(-1)
    loss = torch.where(chosen <= LOG_ZERO, torch.inf, -chosen)
    loss = torch.where((labels < 0) | (labels >= u.shape[-1]), torch.nan, loss)
    return torch.where(labels == ignored, 0.0, loss), torch.where(at, p - 1, p)


def _products(form: Form, z: Tensor, sums: Tensor, slopes: dict[int, Tensor]) -> Tensor:
    """Inner products of the parts, as far as they are asked for: [6, 6]."""
    found = {(0, 0): sums[0], (0, 1): sums[1], (1, 1): sums[2]}
    for k, slope in slopes.items() if form.measure else ():
        found[2 + k, 2 + k] = _dot(slope, slope)
        if form.measure == "gram":
            found[0, 2 + k] = _dot(slope, z.sign())
            found[1, 2 + k] = _dot(slope, z)
            found |= {(2 + k, 2 + j): _dot(slope, slopes[j]) for j in slopes if j > k}
    nothing = torch.zeros_like(sums[0])
    rows = [
        [found.get((min(i, j), max(i, j)), nothing) for j in range(PARTS)] for i in range(PARTS)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product, summed up in float64."""
    if a.device.type == "cpu":
        return (a.double() * b.double()).sum()
    # Rows in float32, as a tree, and only then in float64.
    return (a * b).sum(-1).sum(dtype=torch.float64)


def _combined(a: Tensor, b: Tensor, products: Tensor) -> Tensor:
    """Inner products of combinations of the parts, out of those of the parts."""
    pairs = a.unsqueeze(-1) * b.unsqueeze(-2)
    return torch.where(pairs == 0, 0.0, pairs * products).sum((-2, -1))
