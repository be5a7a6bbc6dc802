"""Pass one over the rows of logits: everything about a row that its gradient needs beforehand.

Exponents are in base 2, which the hardware knows, and sums are kept by every thread on its own and
brought together once a row. A row is added up relative to the largest entry of its first block:
floating point has room for 2³⁰ times more. Rows for which that was not enough, and rows with an
infinite divergence, are done again, carefully; there are hardly any.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
"""Whether this is compiled for a GPU that understands PTX."""
LOG_ZERO = tl.constexpr(-1e30)
INFINITE = tl.constexpr(1e29)
"""A difference of exponents above this has a `LOG_ZERO` in it."""

# Which divergence between x, which moves, and y: none, KL(y‖x), KL(x‖y), or the mean of both.
TO_X, FROM_X, BOTH = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

COLUMNS = tl.constexpr(11)
"""Σ|x|, Σx², number of x ≠ 0; of x and of y what exponents are relative to, and log₂ of their sum;
entropy, divergence, and two that its gradient needs. All but the last in bits."""


@triton.jit
def exp2(x):
    """2ˣ as the hardware computes it: to two units in the last place, 0 instead of denormals."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def load(row, cols, V, TAIL: tl.constexpr):
    """A tile of a row in float32, and 0 beyond its end."""
    if TAIL:
        return tl.load(row + cols, mask=cols < V, other=0.0).to(tl.float32)
    return tl.load(row + cols).to(tl.float32)


@triton.jit
def exponents(x, cols, V, unit, zero, less, keep, TAIL: tl.constexpr, SUPPORT: tl.constexpr):
    """``(x − zero)·unit − less``, and −inf where there is no entry.

    The difference comes first: large logits lose nothing by it.
    """
    z = (x - zero) * unit - less
    if SUPPORT:
        z = tl.where(tl.load(keep + cols, mask=cols < V, other=0) != 0, z, float("-inf"))
    elif TAIL:
        z = tl.where(cols < V, z, float("-inf"))
    return z


@triton.jit
def tile(start, LANES: tl.constexpr, EACH: tl.constexpr):
    """Columns of a tile: neighbours along the second axis belong to one thread."""
    return start + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def _add_sizes(sums, x, SIZES: tl.constexpr):
    """Add a tile to Σ|x|, Σx² and the number of x ≠ 0."""
    one, two, some = sums
    if SIZES:
        one += tl.sum(tl.abs(x), 1)
        two += tl.sum(x * x, 1)
        some += tl.sum(tl.where(x == 0, 0.0, 1.0), 1)
    return one, two, some


@triton.jit
def _add_rows(
    sums, u, v, ENTROPY: tl.constexpr, KL: tl.constexpr, PAIR: tl.constexpr, CAREFUL: tl.constexpr
):
    """Add a tile of both sides' exponents to the sums that entropy and divergence come from."""
    sx, hx, sy, dx, dy, worst, kx, ky = sums
    e = exp2(u)
    u = tl.maximum(u, LOG_ZERO)
    sx += tl.sum(e, 1)
    if ENTROPY:
        hx += tl.sum(e * u, 1)
    if PAIR:
        f = exp2(v)
        sy += tl.sum(f, 1)
        if KL:
            d = u - tl.maximum(v, LOG_ZERO)
            if KL != FROM_X:
                worst = tl.maximum(worst, tl.max(-d, 1))
            if KL != TO_X:
                worst = tl.maximum(worst, tl.max(d, 1))
            if CAREFUL:
                both = tl.abs(d) < INFINITE
                d = tl.where(both, d, 0.0)
                kx += tl.sum(tl.where(both, e, 0.0), 1)
                ky += tl.sum(tl.where(both, f, 0.0), 1)
            if KL != FROM_X:
                dy += tl.sum(f * d, 1)
            if KL != TO_X:
                dx += tl.sum(e * d, 1)
    return sx, hx, sy, dx, dy, worst, kx, ky


@triton.jit
def _over_row(
    x_row, y_row, keep, V, unit, cx, cy,
    ENTROPY: tl.constexpr, KL: tl.constexpr, PAIR: tl.constexpr, SIZES: tl.constexpr,
    SUPPORT: tl.constexpr, CAREFUL: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """All sums of one row, relative to the entries ``cx`` and ``cy``."""
    zero = tl.zeros([LANES], tl.float32)
    sizes = zero, zero, zero
    sums = zero, zero, zero, zero, zero, zero, zero, zero
    whole = V // (LANES * EACH) * (LANES * EACH)
    for start in range(0, whole, LANES * EACH):
        cols = tile(start, LANES, EACH)
        x = load(x_row, cols, V, False)
        y = load(y_row, cols, V, False) if PAIR else x
        sizes = _add_sizes(sizes, x, SIZES)
        u = exponents(x, cols, V, unit, cx, 0.0, keep, False, SUPPORT)
        v = exponents(y, cols, V, unit, cy, 0.0, keep, False, SUPPORT) if PAIR else u
        sums = _add_rows(sums, u, v, ENTROPY, KL, PAIR, CAREFUL)
    if whole < V:
        cols = tile(whole, LANES, EACH)
        x = load(x_row, cols, V, True)
        y = load(y_row, cols, V, True) if PAIR else x
        sizes = _add_sizes(sizes, x, SIZES)
        u = exponents(x, cols, V, unit, cx, 0.0, keep, True, SUPPORT)
        v = exponents(y, cols, V, unit, cy, 0.0, keep, True, SUPPORT) if PAIR else u
        sums = _add_rows(sums, u, v, ENTROPY, KL, PAIR, CAREFUL)
    sx, hx, sy, dx, dy, worst, kx, ky = sums
    one, two, some = sizes
    rows = (
        tl.sum(sx), tl.sum(hx), tl.sum(sy), tl.sum(dx), tl.sum(dy), tl.max(worst), tl.sum(kx),
        tl.sum(ky),
    )  # fmt: skip
    return rows, (tl.sum(one), tl.sum(two), tl.sum(some))


@triton.jit
def _largest(row, keep, V, stop, SUPPORT: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """The largest entry before column ``stop``, and 0 where there is none."""
    top = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, stop, LANES * EACH):
        cols = tile(start, LANES, EACH)
        z = exponents(load(row, cols, V, True), cols, V, 1.0, 0.0, 0.0, keep, True, SUPPORT)
        top = tl.maximum(top, tl.max(z, 1))
    largest = tl.max(top)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _unsafe(total):
    """Whether a sum of exponentials may have overflowed, vanished, or met a NaN."""
    return (total < 1e-10) | (total > 1e30) | ~(total >= 0)


@triton.jit
def _figures(rows, KL: tl.constexpr, CAREFUL: tl.constexpr):
    """Entropy, divergence and what its gradient needs, in bits, from the sums of one row."""
    sx, hx, sy, dx, dy, worst, kx, ky = rows
    no_x, no_y = sx == 0, sy == 0
    sx, sy = tl.where(no_x, 1.0, sx), tl.where(no_y, 1.0, sy)
    lx, ly = tl.log2(sx), tl.log2(sy)
    entropy = tl.where(no_x, 0.0, lx - hx / sx)
    # Σ q·(log q − log p) and Σ p·(log p − log q), over the entries where both are possible.
    px, qy = 1.0, 1.0
    if CAREFUL:
        px, qy = kx / sx, ky / sy
    to_x = tl.where(no_x | no_y, 0.0, (lx - ly) * qy - dy / sy)
    from_x = tl.where(no_x | no_y, 0.0, (ly - lx) * px + dx / sx)
    value, need = to_x, tl.where(no_x | no_y, 0.0, qy)
    if KL == FROM_X:
        value, need = from_x, from_x
    elif KL == BOTH:
        value, need = 0.5 * (to_x + from_x), from_x
    # Rounding may leave a little less than nothing.
    value = tl.maximum(value, 0.0, tl.PropagateNan.ALL) + tl.where(
        worst > INFINITE, float("inf"), 0.0
    )
    if KL != BOTH:
        value = tl.where(no_x if KL == FROM_X else no_y, 0.0, value)
    return lx, ly, entropy, value, need, px - qy


@triton.jit
def statistics(
    x, y, keep, out, V, x_stride, y_stride, keep_stride, unit,
    ROWS: tl.constexpr, ENTROPY: tl.constexpr, KL: tl.constexpr, PAIR: tl.constexpr,
    SIZES: tl.constexpr, SUPPORT: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One row a program: its figures, in the order of `COLUMNS`."""
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row, keep_row = x + row * x_stride, y + row * y_stride, keep + row * keep_stride
    first = tl.minimum(V, LANES * EACH)
    cx, cy = 0.0, 0.0
    if ROWS:
        cx = _largest(x_row, keep_row, V, first, SUPPORT, LANES, EACH)
    if PAIR:
        cy = _largest(y_row, keep_row, V, first, SUPPORT, LANES, EACH)
    rows, sizes = _over_row(
        x_row, y_row, keep_row, V, unit, cx, cy, ENTROPY, KL, PAIR, SIZES, SUPPORT, False,
        LANES, EACH,
    )  # fmt: skip
    lx, ly, entropy, value, need, extra = _figures(rows, KL, False)
    if ROWS:
        again = _unsafe(rows[0])
        if PAIR:
            again = again | _unsafe(rows[2]) | (rows[5] > INFINITE)
        if again:
            cx = _largest(x_row, keep_row, V, V, SUPPORT, LANES, EACH)
            if PAIR:
                cy = _largest(y_row, keep_row, V, V, SUPPORT, LANES, EACH)
            rows, _ = _over_row(
                x_row, y_row, keep_row, V, unit, cx, cy, ENTROPY, KL, PAIR, False, SUPPORT, True,
                LANES, EACH,
            )  # fmt: skip
            lx, ly, entropy, value, need, extra = _figures(rows, KL, True)
    out += row * COLUMNS
    tl.store(out, sizes[0])
    tl.store(out + 1, sizes[1])
    tl.store(out + 2, sizes[2])
    tl.store(out + 3, cx)
    tl.store(out + 4, lx)
    tl.store(out + 5, cy)
    tl.store(out + 6, ly)
    tl.store(out + 7, entropy)
    tl.store(out + 8, value)
    tl.store(out + 9, need)
    tl.store(out + 10, extra)
