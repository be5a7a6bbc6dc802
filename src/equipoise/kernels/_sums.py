"""The few numbers between and after the passes, in one launch each.

Before the last pass: every term's coefficients of sign(x), of x and of the four kinds. After it:
values, contributions, squared norms and inner products. In float64, by a single program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from equipoise.kernels._gradient import TOTAL

PARTS = tl.constexpr(6)
"""sign(x), x, and the kinds."""
# The lines of a plan's constants: the factors of Σ|x| and Σx², root and target of a magnitude,
# which kind a term is of (−1: none), whether its weight is a number, and whether it is the base.
ONE, TWO, ROOT, TARGET, KIND, NUMBER, BASE = (tl.constexpr(i) for i in range(7))


@triton.jit
def _line(constants, which, t, T):
    return tl.load(constants + which * T + t, mask=t < T, other=0.0)


@triton.jit
def prepare(
    sizes, weight, constants, units, labels, ignored, rows, terms, magnitudes, shared, T,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients of every term; and ``shared``: of sign(x), of x, of each kind, of each label."""
    t = tl.arange(0, WIDTH)
    there = t < T
    w = tl.load(weight + t, mask=there, other=0.0)
    one, two, root = (
        _line(constants, ONE, t, T),
        _line(constants, TWO, t, T),
        _line(constants, ROOT, t, T),
    )
    kind = tl.load(constants + KIND * T + t, mask=there, other=-1.0)
    length = tl.sqrt(tl.load(sizes + 1))
    distance = root * length - _line(constants, TARGET, t, T)
    # d(root·‖x‖ − target)²/dx = 2·distance·root·x/‖x‖, and 0 at x = 0.
    slope = tl.where(length == 0, 0.0, 2 * distance * root / tl.where(length == 0, 1.0, length))
    tl.store(magnitudes + t, distance * distance, mask=there)
    # Selected, not multiplied: what is absent stays so beside an infinite weight.
    signs = tl.where(one == 0, 0.0, one * w)
    lines = tl.where(root != 0, slope * w, tl.where(two == 0, 0.0, 2 * two * w))
    tl.store(terms + t * PARTS, signs, mask=there)
    tl.store(terms + t * PARTS + 1, lines, mask=there)
    tl.store(shared, tl.sum(signs).to(tl.float32))
    tl.store(shared + 1, tl.sum(lines).to(tl.float32))
    for k in tl.static_range(4):
        tl.store(terms + t * PARTS + 2 + k, tl.where(kind == k, 1.0, 0.0), mask=there)
        weighted = tl.sum(tl.where(kind == k, w, 0.0)) * tl.load(units + k)
        tl.store(shared + 2 + k, weighted.to(tl.float32))
    each = 1.0
    if COUNT:
        counted = tl.zeros([BLOCK], tl.float32)
        for start in range(0, rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            label = tl.load(labels + at, mask=at < rows, other=ignored)
            counted += tl.where(label == ignored, 0.0, 1.0)
        # No label at all: the mean of nothing is NaN, as torch has it.
        each = 1.0 / tl.sum(counted)
    tl.store(shared + 6, each)


@triton.jit
def finish(
    sizes, results, weight, constants, terms, magnitudes, where, numbers, figures, T,
    WIDTH: tl.constexpr, GRAM: tl.constexpr,
):  # fmt: skip
    """``numbers``: total, penalty, values, contributions; ``figures``: squares, products."""
    t = tl.arange(0, WIDTH)
    there = t < T
    w = tl.load(weight + t, mask=there, other=0.0)
    one, two = _line(constants, ONE, t, T), _line(constants, TWO, t, T)
    kind = tl.load(constants + KIND * T + t, mask=there, other=-1.0)
    value = tl.where(one == 0, 0.0, one * tl.load(sizes))
    value += tl.where(two == 0, 0.0, two * tl.load(sizes + 1))
    for k in tl.static_range(4):
        value += tl.where(kind == k, tl.load(results + k), 0.0)
    far = tl.load(magnitudes + t, mask=there, other=0.0)
    value = tl.where(_line(constants, ROOT, t, T) != 0, far, value)
    # Weight 0 as a number leaves the term out, where 0 · inf would be NaN.
    part = tl.where((w == 0) & (_line(constants, NUMBER, t, T) != 0), 0.0, w * value)
    rest = tl.where(_line(constants, BASE, t, T) != 0, 0.0, part)
    tl.store(numbers, tl.sum(part).to(tl.float32))
    tl.store(numbers + 1, tl.sum(rest).to(tl.float32))
    tl.store(numbers + 2 + t, value.to(tl.float32), mask=there)
    tl.store(numbers + 2 + T + t, part.to(tl.float32), mask=there)
    _products(results, sizes, terms, where, figures, T, WIDTH, GRAM)


@triton.jit
def _products(results, sizes, terms, where, figures, T, WIDTH: tl.constexpr, GRAM: tl.constexpr):
    """Squared norms, that of the sum, and all inner products, out of those of the six parts."""
    t = tl.arange(0, WIDTH)
    there = t < T
    squares = tl.zeros([WIDTH], tl.float64)
    gram = tl.zeros([WIDTH, WIDTH], tl.float64)
    for i in tl.static_range(PARTS):
        first = tl.load(terms + t * PARTS + i, mask=there, other=0.0)
        for j in tl.static_range(PARTS):
            second = tl.load(terms + t * PARTS + j, mask=there, other=0.0)
            at = tl.load(where + i * PARTS + j)
            early = tl.load(sizes + at, mask=at < 3, other=0.0)
            product = tl.load(results + at - 3, mask=at >= 3, other=0.0) + early
            squares += tl.where(first * second == 0, 0.0, first * second * product)
            if GRAM:
                pair = first[:, None] * second[None, :]
                gram += tl.where(pair == 0, 0.0, pair * product)
    tl.store(figures + t, squares, mask=there)
    tl.store(figures + T, tl.load(results + TOTAL))
    if GRAM:
        both = there[:, None] & there[None, :]
        tl.store(figures + T + 1 + t[:, None] * T + t[None, :], gram, mask=both)
