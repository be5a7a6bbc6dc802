"""Clipping at a percentile, for each length up to four: sorting is unrolled, not induced.

A percentage matters through its rank alone, and `PERCENTS` have every rank that so many entries
can have: what is proved for them holds for all percentages. What holds for exchanging neighbours
holds for every order, which is made of such exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from equipoise.spec.percentile import clip_by_percentile, percentile, rank
from equipoise.spec.proofs.statement import Lemma, Statement, Theorem
from equipoise.spec.sums import clamp, magnitude
from equipoise.spec.symbols import Real, Symbols

LENGTHS = (1, 2, 3, 4)
PERCENTS = (0, 50, 90, 100)
Clip = Callable[[Symbols, Sequence[Real], int], list[Real]]


def signs_are_kept(K: Symbols, n: int, pct: int, clip: Clip = clip_by_percentile) -> Statement:
    """Every entry keeps its sign and grows no larger."""
    g = K.reals("g", n)
    out = clip(K, g, pct)
    kept = [
        part for x, y in zip(g, out, strict=True) for part in (x * y >= 0, K.abs(y) <= K.abs(x))
    ]
    return Statement([], K.z3.And(*kept))


def few_entries_change(K: Symbols, n: int, pct: int, fewer: int = 0) -> Statement:
    """At most n − 1 − rank entries change."""
    g = K.reals("g", n)
    out = clip_by_percentile(K, g, pct)
    changed = K.z3.Sum([K.z3.If(x == y, 0, 1) for x, y in zip(g, out, strict=True)])
    return Statement([], changed <= n - 1 - rank(n, pct) - fewer)


def hundred_changes_nothing(K: Symbols, n: int, pct: int = 100) -> Statement:
    """The largest size is the bound."""
    g = K.reals("g", n)
    return Statement([], _same(K, clip_by_percentile(K, g, pct), g))


def twice_is_once(K: Symbols, n: int, pct: int, clip: Clip = clip_by_percentile) -> Statement:
    """Clipping what is clipped changes nothing."""
    g = K.reals("g", n)
    out = clip(K, g, pct)
    return Statement([], _same(K, clip(K, out, pct), out))


def more_percent_clip_less(K: Symbols, n: int, low: int, high: int) -> Statement:
    """A higher percentile leaves entries at least as large."""
    g = K.reals("g", n)
    less, more = clip_by_percentile(K, g, low), clip_by_percentile(K, g, high)
    return Statement([], K.z3.And(*(K.abs(x) <= K.abs(y) for x, y in zip(less, more, strict=True))))


def order_does_not_matter(
    K: Symbols, n: int, pct: int, clip: Clip = clip_by_percentile
) -> Statement:
    """Two neighbours exchanged are clipped to the same, and exchanged."""
    g = K.reals("g", n)
    out = clip(K, g, pct)
    same = [_same(K, clip(K, _exchanged(g, i), pct), _exchanged(out, i)) for i in range(n - 1)]
    return Statement([], K.z3.And(*same))


def scale_goes_through(K: Symbols, n: int, pct: int, clip: Clip = clip_by_percentile) -> Statement:
    """t·g is clipped to t times what g is clipped to, for t > 0."""
    g, t = K.reals("g", n), K.real("t")
    scaled = K.reals("s", n)
    # What `scaling_keeps_the_order` proves of any two entries is put in for these.
    known = [y == t * x for x, y in zip(g, scaled, strict=True)]
    known += [
        K.z3.And(K.abs(y) == t * K.abs(x), (K.abs(x) > K.abs(v)) == (K.abs(y) > K.abs(w)))
        for x, y in zip(g, scaled, strict=True)
        for v, w in zip(g, scaled, strict=True)
    ]
    out = clip(K, g, pct)
    return Statement([t > 0, *known], _same(K, clip(K, scaled, pct), [t * x for x in out]))


def scaling_keeps_the_order(K: Symbols) -> Statement:
    """|t·x| = t·|x|, and |x| > |v| exactly where |t·x| > |t·v|, for t > 0."""
    x, v, t = K.real("x"), K.real("v"), K.real("t")
    order = (K.abs(x) > K.abs(v)) == (K.abs(t * x) > K.abs(t * v))
    return Statement([t > 0], K.z3.And(K.abs(t * x) == t * K.abs(x), order))


def without_sizes(K: Symbols, g: Sequence[Real], pct: int) -> list[Real]:
    """A rule that sorts the entries and not their sizes."""
    b = percentile(K, g, pct)
    return [clamp(K, x, -b, b) for x in g]


def by_the_first(K: Symbols, g: Sequence[Real], _pct: int) -> list[Real]:
    """A rule that clips at the size of the first entry."""
    b = magnitude(K, g[0])
    return [clamp(K, x, -b, b) for x in g]


def halved(K: Symbols, g: Sequence[Real], pct: int) -> list[Real]:
    """A rule that clips at half the percentile."""
    b = percentile(K, [magnitude(K, x) for x in g], pct) / K.const(2)
    return [clamp(K, x, -b, b) for x in g]


def at_least_one(K: Symbols, g: Sequence[Real], pct: int) -> list[Real]:
    """A rule whose bound never falls below 1."""
    b = K.max(percentile(K, [magnitude(K, x) for x in g], pct), K.const(1))
    return [clamp(K, x, -b, b) for x in g]


def _exchanged(xs: Sequence[Real], i: int) -> list[Real]:
    """With the entry at a place and the next one exchanged."""
    return [*xs[:i], xs[i + 1], xs[i], *xs[i + 2 :]]


def _same(K: Symbols, xs: Sequence[Real], ys: Sequence[Real]) -> Real:
    return K.z3.And(*(x == y for x, y in zip(xs, ys, strict=True)))


def _each(lemma: Callable[..., Statement], lengths: Sequence[int] = LENGTHS) -> list[Lemma]:
    return [partial(lemma, n=n, pct=pct) for n in lengths for pct in PERCENTS]


def theorems() -> list[Theorem]:
    """What clipping at a percentile does to up to four entries."""
    up_to_four = "n ≤ 4"
    steps = list(pairwise(PERCENTS))
    return [
        Theorem(
            "clipping at a percentile keeps the signs and enlarges nothing",
            up_to_four,
            _each(signs_are_kept),
            {"entries for sizes": partial(signs_are_kept, n=3, pct=0, clip=without_sizes)},
        ),
        Theorem(
            "clipping at a percentile changes at most n−1−⌊pct·(n−1)/100⌋ entries",
            up_to_four,
            _each(few_entries_change),
            {"one entry fewer": partial(few_entries_change, n=3, pct=50, fewer=1)},
        ),
        Theorem(
            "clipping at 100 percent changes nothing",
            up_to_four,
            [partial(hundred_changes_nothing, n=n) for n in LENGTHS],
            {"99 percent": partial(hundred_changes_nothing, n=3, pct=99)},
        ),
        Theorem(
            "clipping at a percentile twice is clipping once",
            up_to_four,
            _each(twice_is_once),
            {"half the bound": partial(twice_is_once, n=2, pct=50, clip=halved)},
        ),
        Theorem(
            "clipping at a higher percentile clips less",
            up_to_four,
            [
                partial(more_percent_clip_less, n=n, low=low, high=high)
                for n in LENGTHS
                for low, high in steps
            ],
            {"swapped percentiles": partial(more_percent_clip_less, n=3, low=100, high=0)},
        ),
        Theorem(
            "clipping at a percentile does not depend on the order of the entries",
            up_to_four,
            _each(order_does_not_matter, LENGTHS[1:]),
            {"the first for all": partial(order_does_not_matter, n=2, pct=50, clip=by_the_first)},
        ),
        Theorem(
            "clipping at a percentile is homogeneous",
            up_to_four,
            [scaling_keeps_the_order, *_each(scale_goes_through)],
            {"a least bound": partial(scale_goes_through, n=2, pct=50, clip=at_least_one)},
        ),
    ]
