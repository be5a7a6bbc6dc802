"""The algebra of gradient tracking, for every number of terms and every length.

Two folds: over the entries of two gradients, and over the terms. ⟨a, b⟩ = Σaᵢbᵢ is one real number,
of which only what was proved by induction over the entries is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from equipoise.spec.proofs.sizes import cauchy_schwarz, triangle_of_lengths
from equipoise.spec.proofs.statement import Statement, Theorem, induction
from equipoise.spec.scalars import plus
from equipoise.spec.sums import square
from equipoise.spec.symbols import Real, Symbols
from equipoise.spec.tracking import add_weighted

Step = Callable[[Symbols, Real, Real, Real], Real]


def product_is_linear(K: Symbols) -> Statement:
    """Over the entries: ⟨t + w·g, y⟩ = ⟨t, y⟩ + w·⟨g, y⟩."""
    t, g, y, w, joint, T, G = _reals(K, "t g y w joint T G")
    longer = [plus(joint, add_weighted(K, t, w, g) * y), plus(T, t * y), plus(G, g * y)]

    def holds(joint: Real, T: Real, G: Real) -> Real:
        return joint == add_weighted(K, T, w, G)

    return induction(K, holds, [joint, T, G], longer)


def square_of_a_term_more(K: Symbols) -> Statement:
    """Over the entries: ‖t + w·g‖² = ‖t‖² + 2w⟨t, g⟩ + w²‖g‖²."""
    t, g, w, joint, T, C, G = _reals(K, "t g w joint T C G")
    longer = [
        plus(joint, square(K, add_weighted(K, t, w, g))),
        plus(T, square(K, t)),
        plus(C, t * g),
        plus(G, square(K, g)),
    ]

    def holds(joint: Real, T: Real, C: Real, G: Real) -> Real:
        return joint == T + 2 * w * C + w * w * G

    return induction(K, holds, [joint, T, C, G], longer)


def shares_follow_the_total(K: Symbols) -> Statement:
    """Over the terms: Σ⟨wₖgₖ, g⟩ = ⟨Σwₖgₖ, g⟩."""
    shares, total, w, G = _reals(K, "shares total w G")
    # `product_is_linear` says what ⟨t + w·g, g⟩ is.
    longer = [plus(shares, w * G), add_weighted(K, total, w, G)]
    return induction(K, lambda shares, total: shares == total, [shares, total], longer)


def shares_sum_to_one(K: Symbols, missing: int = 0) -> Statement:
    """All terms together are ⟨g, g⟩ = N > 0, and over N they are 1."""
    shares, N = _reals(K, "shares N")
    return Statement([N > 0, shares == N - missing], shares / N == 1)


def gram_form_follows(K: Symbols, twice: int = 2) -> Statement:
    """Over the terms: ‖Σwₖgₖ‖² = w′Gw, with r = Σwⱼ⟨gⱼ, g⟩ in the new row."""
    norm, form, w, r, G = _reals(K, "norm form w r G")
    # The new row and the new column of the Gram matrix are the same; `product_is_linear` gives r,
    # and `square_of_a_term_more` the norm.
    longer = [norm + 2 * w * r + w * w * G, form + twice * w * r + w * w * G]
    return induction(K, lambda norm, form: norm == form, [norm, form], longer)


def length_below_sum(K: Symbols, sign: int = 1) -> Statement:
    """Over the terms: ‖Σwₖgₖ‖ ≤ Σ|wₖ|·‖gₖ‖. `square_of_a_term_more` gives the norm."""
    T, G, C, w, bound = _reals(K, "T G C w bound")
    longer = [T + 2 * w * C + w * w * G, plus(bound, sign * K.abs(w) * K.sqrt(G))]

    def holds(squares: Real, bound: Real) -> Real:
        return K.z3.And(squares >= 0, K.sqrt(squares) <= bound)

    return induction(K, holds, [T, bound], longer, [G >= 0, C * C <= T * G])


def quotients_add_up(K: Symbols, step: Step = add_weighted) -> Statement:
    """Over the terms: the difference quotient of Σwₖfₖ is Σwₖ times those of fₖ, at every h.

    In the limit: the gradient of the total is the weighted sum of the terms' gradients.
    """
    before, after, f, moved, w, h, slope = _reals(K, "before after f moved w h slope")
    longer = [
        add_weighted(K, before, w, f),
        add_weighted(K, after, w, moved),
        step(K, slope, w, (moved - f) / h),
    ]

    def holds(before: Real, after: Real, slope: Real) -> Real:
        return (after - before) / h == slope

    return induction(K, holds, [before, after, slope], longer, [h != 0])


def unweighted(K: Symbols, total: Real, weight: Real, value: Real) -> Real:  # noqa: ARG001
    """A step without the weight."""
    return total + value


def _reals(K: Symbols, names: str) -> list[Real]:
    return [K.real(name) for name in names.split()]


def theorems() -> list[Theorem]:
    """What a gradient report may rely on."""
    every = "every n, every number of terms"
    return [
        Theorem(
            "signed shares sum to 1",
            every,
            [product_is_linear, shares_follow_the_total, shares_sum_to_one],
            {"a share left out": partial(shares_sum_to_one, missing=1)},
        ),
        Theorem(
            "the squared norm of the total is w′Gw",
            every,
            [product_is_linear, square_of_a_term_more, gram_form_follows],
            {"products counted once": partial(gram_form_follows, twice=1)},
        ),
        Theorem(
            "the norm of the total lies within the triangle bounds",
            every,
            [cauchy_schwarz, square_of_a_term_more, length_below_sum, triangle_of_lengths],
            {"a swapped sign": partial(length_below_sum, sign=-1)},
        ),
        Theorem(
            "the sum of the terms' gradients is the gradient of the total",
            every,
            [quotients_add_up],
            {"a weight left out": partial(quotients_add_up, step=unweighted)},
        ),
    ]
