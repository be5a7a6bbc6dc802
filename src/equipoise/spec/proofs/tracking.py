"""The algebra of gradient tracking, for every number of terms and every length.

Two folds: over the entries of two gradients, and over the terms. ⟨a, b⟩ = Σaᵢbᵢ is one real number,
of which only what was proved by induction over the entries is known.
"""

from __future__ import annotations

from functools import partial

from equipoise.spec.proofs.sizes import cauchy_schwarz, triangle_of_lengths
from equipoise.spec.proofs.statement import Statement, Theorem
from equipoise.spec.scalars import plus
from equipoise.spec.sums import square
from equipoise.spec.symbols import Real, Symbols
from equipoise.spec.tracking import add_weighted


def product_is_linear(K: Symbols) -> Statement:
    """Step over the entries of ⟨t + w·g, y⟩ = ⟨t, y⟩ + w·⟨g, y⟩; the base is 0 = 0."""
    t, g, y, w, joint, T, G = _reals(K, "t g y w joint T G")
    hypothesis = joint == add_weighted(K, T, w, G)
    after = add_weighted(K, plus(T, t * y), w, plus(G, g * y))
    return Statement([hypothesis], plus(joint, add_weighted(K, t, w, g) * y) == after)


def square_of_a_term_more(K: Symbols) -> Statement:
    """Step over the entries of ‖t + w·g‖² = ‖t‖² + 2w⟨t, g⟩ + w²‖g‖²; the base is 0 = 0."""
    t, g, w, joint, T, C, G = _reals(K, "t g w joint T C G")
    after = plus(T, square(K, t)) + 2 * w * plus(C, t * g) + w * w * plus(G, square(K, g))
    entry = square(K, add_weighted(K, t, w, g))
    return Statement([joint == T + 2 * w * C + w * w * G], plus(joint, entry) == after)


def shares_follow_the_total(K: Symbols) -> Statement:
    """Step over the terms of Σ⟨wₖgₖ, g⟩ = ⟨Σwₖgₖ, g⟩; the base is 0 = ⟨0, g⟩."""
    shares, total, w, G = _reals(K, "shares total w G")
    # `product_is_linear` says what ⟨t + w·g, g⟩ is.
    return Statement([shares == total], plus(shares, w * G) == add_weighted(K, total, w, G))


def shares_sum_to_one(K: Symbols, missing: int = 0) -> Statement:
    """All terms together are ⟨g, g⟩ = N > 0, and over N they are 1."""
    shares, N = _reals(K, "shares N")
    return Statement([N > 0, shares == N - missing], shares / N == 1)


def gram_form_follows(K: Symbols, twice: int = 2) -> Statement:
    """Step over the terms of ‖Σwₖgₖ‖² = w′Gw, with r = Σwⱼ⟨gⱼ, g⟩ in the new row; base 0 = 0."""
    norm, form, w, r, G = _reals(K, "norm form w r G")
    # The new row and the new column of the Gram matrix are the same; `product_is_linear` gives r,
    # and `square_of_a_term_more` the norm.
    after = norm + 2 * w * r + w * w * G
    return Statement([norm == form], after == form + twice * w * r + w * w * G)


def length_below_sum(K: Symbols, sign: int = 1) -> Statement:
    """Step over the terms of ‖Σwₖgₖ‖ ≤ Σ|wₖ|·‖gₖ‖; the base is 0 ≤ 0."""
    T, G, C, w, bound = _reals(K, "T G C w bound")
    together = T + 2 * w * C + w * w * G
    length, own, before = K.sqrt(together), K.sqrt(G), K.sqrt(T)
    hypotheses = [T >= 0, G >= 0, together >= 0, C * C <= T * G, before <= bound]
    return Statement(hypotheses, length <= plus(bound, sign * K.abs(w) * own))


def quotients_add_up(K: Symbols) -> Statement:
    """Step over the terms: the difference quotient of Σwₖfₖ is Σwₖ times those of fₖ, at every h.

    In the limit: the gradient of the total is the weighted sum of the terms' gradients.
    """
    before, after, f, moved, w, h, slope = _reals(K, "before after f moved w h slope")
    hypotheses = [h != 0, after - before == slope * h]
    change = add_weighted(K, after, w, moved) - add_weighted(K, before, w, f)
    return Statement(hypotheses, change / h == add_weighted(K, slope, w, (moved - f) / h))


def unweighted(K: Symbols) -> Statement:
    """The same without the weight on one side: false."""
    before, after, f, moved, w, h, slope = _reals(K, "before after f moved w h slope")
    hypotheses = [h != 0, after - before == slope * h]
    change = add_weighted(K, after, w, moved) - add_weighted(K, before, w, f)
    return Statement(hypotheses, change / h == plus(slope, (moved - f) / h))


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
            {"a weight left out": unweighted},
        ),
    ]
