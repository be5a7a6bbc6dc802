"""The last pass over the rows of logits: the summed gradient, and what its parts are long.

Five kinds of gradient meet in it: sign(x) and x, whose inner products pass one knows, and those of
entropy, divergence, Jensen-Shannon divergence and cross-entropy, which are measured here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from equipoise.kernels._statistics import (
    COLUMNS,
    FROM_X,
    LOG_ZERO,
    PTX,
    TO_X,
    exp2,
    exponents,
    load,
    tile,
)

LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(2e-38)

# Entropy, divergence, Jensen-Shannon divergence, cross-entropy; in this order everywhere.
KINDS = 4

# Of each kind the value, the squared norm of its gradient, and the inner product with sign(x) and
# with x; then the inner products of every two kinds, and the square of the whole sum.
SQUARES, SIGNS, LINES = tl.constexpr(4), tl.constexpr(8), tl.constexpr(12)
PRODUCTS, TOTAL, RESULTS = tl.constexpr(16), tl.constexpr(22), tl.constexpr(23)


@triton.jit
def _log_parts(p, q, u, v, beta, EXACT: tl.constexpr):
    """log₂(p/m) and log₂(q/m), where m = βp + (1−β)q, u = log₂ p and v = log₂ q.

    Exactly: from the larger of p and q, whose log₂ is that of a number between β or 1−β and 1; that
    of the smaller differs from it by u − v. Nothing cancels, and one logarithm serves both.
    """
    a = tl.maximum(u, LOG_ZERO, tl.PropagateNan.ALL)
    b = tl.maximum(v, LOG_ZERO, tl.PropagateNan.ALL)
    if EXACT:
        d = b - a
        w = tl.where(d > 0, 1 - beta, beta)
        larger = -tl.log2(w + (1 - w) * exp2(-tl.abs(d)))
        # Not through minimum and maximum, which would lose a NaN.
        return tl.where(d > 0, larger - d, larger), tl.where(d > 0, larger, larger + d)
    log_m = _quick_log2(tl.maximum(beta * p + (1 - beta) * q, TINY, tl.PropagateNan.ALL))
    return a - log_m, b - log_m


@triton.jit
def _quick_log2(x):
    """log₂ x as the hardware computes it, to 2⁻²²: enough for what is rounded to bfloat16."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def logarithms(x, cols, V, unit, zero, keep, TAIL: tl.constexpr, SUPPORT: tl.constexpr):
    """log₂ of the probabilities."""
    return exponents(x, cols, V, unit, zero[0], zero[1], keep, TAIL, SUPPORT)


@triton.jit
def _mixed(
    x_row, y_row, keep, cols, V, unit, zero_x, zero_y, beta, sums,
    TAIL: tl.constexpr, SUPPORT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile to Σ β·p·log(p/m) and Σ (1−β)·q·log(q/m), in bits."""
    own, other, whole = sums
    u = logarithms(load(x_row, cols, V, TAIL), cols, V, unit, zero_x, keep, TAIL, SUPPORT)
    v = logarithms(load(y_row, cols, V, TAIL), cols, V, unit, zero_y, keep, TAIL, SUPPORT)
    p, q = exp2(u), exp2(v)
    from_p, from_q = _log_parts(p, q, u, v, beta, EXACT)
    own += tl.sum(p * from_p, 1)
    other += tl.sum(q * from_q, 1)
    whole += tl.sum(p, 1)
    return own, other, whole


@triton.jit
def _mixture(
    x_row, y_row, keep, V, unit, zero_x, zero_y, beta, SUPPORT: tl.constexpr, LANES: tl.constexpr,
    EACH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Both parts of a row's Jensen-Shannon divergence, in bits."""
    zero = tl.zeros([LANES], tl.float32)
    sums = zero, zero, zero
    whole = V // (LANES * EACH) * (LANES * EACH)
    for start in range(0, whole, LANES * EACH):
        cols = tile(start, LANES, EACH)
        sums = _mixed(
            x_row, y_row, keep, cols, V, unit, zero_x, zero_y, beta, sums, False, SUPPORT, EXACT
        )
    if whole < V:
        cols = tile(whole, LANES, EACH)
        sums = _mixed(
            x_row, y_row, keep, cols, V, unit, zero_x, zero_y, beta, sums, True, SUPPORT, EXACT
        )
    # By a sum of all p that is 1 but for rounding: what the gradient subtracts must not be off.
    ones = tl.sum(sums[2])
    own = beta * tl.sum(sums[0]) / tl.where(ones == 0, 1.0, ones)
    return own, (1 - beta) * tl.sum(sums[1])


@triton.jit
def _slopes(
    x, y, keep, cols, V, unit, zero_x, zero_y, row, label, beta,
    ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr,
    SUPPORT: tl.constexpr, TAIL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of the four kinds' weighted gradients at the logits; 0 for those absent."""
    ce, ck, cj, cc, entropy, need, extra, mixed = row
    zero = tl.zeros_like(x)
    g_entropy, g_kl, g_js, g_ce = zero, zero, zero, zero
    u = logarithms(x, cols, V, unit, zero_x, keep, TAIL, SUPPORT)
    p = exp2(u)
    a = tl.maximum(u, LOG_ZERO)
    if ENTROPY:
        g_entropy = ce * (p * (a + entropy))
    if KL or JS:
        v = logarithms(y, cols, V, unit, zero_y, keep, TAIL, SUPPORT)
        q = exp2(v)
    if KL == TO_X:
        g_kl = tl.where(u == float("-inf"), 0.0, ck * (p * need - q))
    elif KL:
        d = a - tl.maximum(v, LOG_ZERO)
        good = tl.abs(d) < 1e29
        if KL == FROM_X:
            g_kl = ck * LN2 * (p * (tl.where(good, d, 0.0) - need))
        else:
            part = tl.where(good, LN2 * (p * d) + (p - q), 0.0)
            g_kl = 0.5 * ck * (part - p * (LN2 * need + extra))
    if JS:
        part, _ = _log_parts(p, q, u, v, beta, EXACT)
        g_js = cj * (p * (beta * part - mixed))
    if CE:
        g_ce = cc * tl.where(cols == label, p - 1.0, p)
    return g_entropy, g_kl, g_js, g_ce


@triton.jit
def _squares(
    sums, slopes, ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr
):
    """Add a tile to each kind's squared norm."""
    ee, kk, jj, cc = sums
    e, k, j, c = slopes
    if ENTROPY:
        ee += tl.sum(e * e, 1)
    if KL:
        kk += tl.sum(k * k, 1)
    if JS:
        jj += tl.sum(j * j, 1)
    if CE:
        cc += tl.sum(c * c, 1)
    return ee, kk, jj, cc


@triton.jit
def _products(
    sums, slopes, ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr
):
    """Add a tile to the inner products of every two kinds."""
    ek, ej, ec, kj, kc, jc = sums
    e, k, j, c = slopes
    if ENTROPY and KL:
        ek += tl.sum(e * k, 1)
    if ENTROPY and JS:
        ej += tl.sum(e * j, 1)
    if ENTROPY and CE:
        ec += tl.sum(e * c, 1)
    if KL and JS:
        kj += tl.sum(k * j, 1)
    if KL and CE:
        kc += tl.sum(k * c, 1)
    if JS and CE:
        jc += tl.sum(j * c, 1)
    return ek, ej, ec, kj, kc, jc


@triton.jit
def _against(
    sums, slopes, z, ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr
):
    """Add a tile to the inner products of every kind with ``z``."""
    ze, zk, zj, zc = sums
    e, k, j, c = slopes
    if ENTROPY:
        ze += tl.sum(e * z, 1)
    if KL:
        zk += tl.sum(k * z, 1)
    if JS:
        zj += tl.sum(j * z, 1)
    if CE:
        zc += tl.sum(c * z, 1)
    return ze, zk, zj, zc


@triton.jit
def _one_tile(
    x_row, y_row, g_row, keep, cols, V, unit, zero_x, zero_y, row, label, beta, alpha, gamma, sums,
    ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr,
    SIGN: tl.constexpr, LINE: tl.constexpr, NORMS: tl.constexpr, GRAM: tl.constexpr,
    SUPPORT: tl.constexpr, TAIL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write a tile of the summed gradient, and add to what is measured of its parts."""
    squares, products, signs, lines, total = sums
    x = load(x_row, cols, V, TAIL)
    y = load(y_row, cols, V, TAIL) if KL or JS else x
    slopes = _slopes(
        x, y, keep, cols, V, unit, zero_x, zero_y, row, label, beta, ENTROPY, KL, JS, CE, SUPPORT,
        TAIL, EXACT,
    )  # fmt: skip
    g = slopes[0] + slopes[1] + slopes[2] + slopes[3]
    if SIGN:  # NaN stays what it is
        g += tl.where(x > 0, alpha, tl.where(x < 0, -alpha, x))
    if LINE:
        g += tl.where(gamma == 0, 0.0, gamma * x)
    if NORMS:
        squares = _squares(squares, slopes, ENTROPY, KL, JS, CE)
        total += tl.sum(g * g, 1)
    if GRAM:
        products = _products(products, slopes, ENTROPY, KL, JS, CE)
        if SIGN:
            one = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
            signs = _against(signs, slopes, one, ENTROPY, KL, JS, CE)
        if LINE:
            lines = _against(lines, slopes, x, ENTROPY, KL, JS, CE)
    out = g.to(g_row.dtype.element_ty)
    if TAIL:
        tl.store(g_row + cols, out, mask=cols < V)
    else:
        tl.store(g_row + cols, out)
    return squares, products, signs, lines, total


@triton.jit
def _values(out, table, own, other, loss, left_out, each, use, use_stride):
    """Each kind's value in this row, as it counts; a row that does not count may hold anything."""
    for kind in tl.static_range(4):
        used = tl.load(use + kind * use_stride)
        value = own + other
        if kind == 0:
            value = tl.load(table + 7)
        elif kind == 1:
            value = tl.load(table + 8)
        elif kind == 3:
            used *= each
            # If no row counts, each counts infinitely: torch's mean of nothing is NaN.
            value = tl.where(left_out, 0.0, loss)
        tl.store(out + kind, tl.where(used == 0, 0.0, used * value))


@triton.jit
def gradient(
    x, y, g, keep, labels, table, use, shared, out, V, x_stride, y_stride, keep_stride,
    use_stride, use_kind, unit, beta, ignored,
    ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr,
    SIGN: tl.constexpr, LINE: tl.constexpr, NORMS: tl.constexpr, GRAM: tl.constexpr,
    SUPPORT: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row a program: its gradient, and its results in the order of `RESULTS`."""
    r = tl.program_id(0).to(tl.int64)
    x_row, y_row, g_row = x + r * x_stride, y + r * y_stride, g + r * V
    keep, table, out = keep + r * keep_stride, table + r * COLUMNS, out + r * RESULTS
    use = use + r * use_stride
    zero_x = tl.load(table + 3), tl.load(table + 4)
    zero_y = tl.load(table + 5), tl.load(table + 6)
    alpha, gamma = tl.load(shared), tl.load(shared + 1)
    own, other, loss = 0.0, 0.0, 0.0
    label = ignored
    if JS:  # noqa: SIM102 -- the first question is for the compiler
        if tl.load(use + 2 * use_kind) != 0:
            own, other = _mixture(
                x_row, y_row, keep, V, unit, zero_x, zero_y, beta, SUPPORT, LANES, EACH, EXACT
            )
    if CE:
        label = tl.load(labels + r)
        inside = (label >= 0) & (label < V)
        at = tl.load(x_row + label, mask=inside, other=float("nan")).to(tl.float32)
        loss = zero_x[1] - (at - zero_x[0]) * unit
    each = tl.load(shared + 6)
    _values(out, table, own, other, loss, label == ignored, each, use, use_kind)
    ce = tl.load(shared + 2) * tl.load(use)
    ck = tl.load(shared + 3) * tl.load(use + use_kind)
    cj = tl.load(shared + 4) * tl.load(use + 2 * use_kind)
    cc = tl.load(shared + 5) * tl.load(use + 3 * use_kind) * each
    cc = tl.where(label == ignored, 0.0, cc) if CE else 0.0
    row = ce, ck, cj, cc, tl.load(table + 7), tl.load(table + 9), tl.load(table + 10), own
    if (ce == 0) & (ck == 0) & (cj == 0) & (cc == 0):
        _over(
            x_row, y_row, g_row, keep, out, V, unit, zero_x, zero_y, row, label, beta, alpha, gamma,
            False, 0, False, False, SIGN, LINE, NORMS, GRAM, SUPPORT, LANES, EACH, EXACT,
        )  # fmt: skip
    else:
        _over(
            x_row, y_row, g_row, keep, out, V, unit, zero_x, zero_y, row, label, beta, alpha, gamma,
            ENTROPY, KL, JS, CE, SIGN, LINE, NORMS, GRAM, SUPPORT, LANES, EACH, EXACT,
        )  # fmt: skip


@triton.jit
def _over(
    x_row, y_row, g_row, keep, out, V, unit, zero_x, zero_y, row, label, beta, alpha, gamma,
    ENTROPY: tl.constexpr, KL: tl.constexpr, JS: tl.constexpr, CE: tl.constexpr,
    SIGN: tl.constexpr, LINE: tl.constexpr, NORMS: tl.constexpr, GRAM: tl.constexpr,
    SUPPORT: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The whole row, tile by tile, and then what was measured of it."""
    z = tl.zeros([LANES], tl.float32)
    sums = (z, z, z, z), (z, z, z, z, z, z), (z, z, z, z), (z, z, z, z), z
    whole = V // (LANES * EACH) * (LANES * EACH)
    for start in range(0, whole, LANES * EACH):
        sums = _one_tile(
            x_row, y_row, g_row, keep, tile(start, LANES, EACH), V, unit, zero_x, zero_y, row,
            label, beta, alpha, gamma, sums, ENTROPY, KL, JS, CE, SIGN, LINE, NORMS, GRAM, SUPPORT,
            False, EXACT,
        )  # fmt: skip
    if whole < V:
        sums = _one_tile(
            x_row, y_row, g_row, keep, tile(whole, LANES, EACH), V, unit, zero_x, zero_y, row,
            label, beta, alpha, gamma, sums, ENTROPY, KL, JS, CE, SIGN, LINE, NORMS, GRAM, SUPPORT,
            True, EXACT,
        )  # fmt: skip
    squares, products, signs, lines, total = sums
    for i in tl.static_range(4):
        tl.store(out + SQUARES + i, tl.sum(squares[i]))
        tl.store(out + SIGNS + i, tl.sum(signs[i]))
        tl.store(out + LINES + i, tl.sum(lines[i]))
    for i in tl.static_range(6):
        tl.store(out + PRODUCTS + i, tl.sum(products[i]))
    tl.store(out + TOTAL, tl.sum(total))
