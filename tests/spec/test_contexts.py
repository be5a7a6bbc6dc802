"""Every definition over every kind of number: what one computes, the others contain or prove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest

from equipoise import spec
from equipoise.spec.formats import FORMATS
from equipoise.spec.proofs.statement import Statement, judge, satisfiable
from equipoise.spec.symbols import Symbols
from tests.spec.oracle import flatten
from tests.spec.test_names import DEFINED

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)


@dataclass(frozen=True)
class Example:
    """Arguments that every format holds, and whether the results are rational."""

    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    rational: bool = True
    plain: tuple[Any, ...] = ()
    """Arguments that are no scalars, behind the others: limits, percentages."""

    def over(self, K: Any, name: str) -> list[Any]:
        """What the definition of that name gives over some numbers, in one list."""
        data = [_read(K, argument) for argument in self.arguments]
        return flatten([getattr(spec, name)(K, *data, *self.plain, **self.options)])


def _read(K: Any, data: Any) -> Any:
    if isinstance(data, list):
        return [_read(K, part) for part in data]
    return data if data is None or callable(data) else K.const(data)


def same(row: Any) -> Any:
    """The gradient of half the squares."""
    return row


ENTRIES = [3, -4, 0, HALF]
G, V, W = [3, -4], [1, HALF], [6, 8]
P, Q = [[0, None], [-1, -HALF]], [[0, None], [-HALF, -2]]
LENGTHS = [1, 3]
BETWEEN = {"epsilon": [HALF, QUARTER]}
# Roots of squares only, so that fractions have them: 3, 4, 5 and their multiples.
EXAMPLES: dict[str, Example] = {
    "l1": Example((ENTRIES,), {"scale": HALF}),
    "l2": Example((ENTRIES,), {"center": "mean", "clip": 2, "clip_mode": "huber"}),
    "elastic_net": Example((ENTRIES,), {"l1_ratio": QUARTER, "mask": [1, HALF, True, 0]}),
    "output_magnitude": Example(([[3, -4], [0, 0]],), {"norm": "l2", "target": 2}),
    "kl_divergence": Example((P, Q), rational=False),
    "js_divergence": Example((P, Q), rational=False),
    "entropy": Example((P,), rational=False),
    "sampled_kl": Example(([-1, None, -2], [-HALF, -1, -2]), {"estimator": "k2"}),
    "consistency": Example(([[3, 4], [0, 0]], [[4, -3], [1, 2]]), {"metric": "cosine"}),
    "orthogonality": Example(([[3, 4], [0, 0], [5, 0]],), {"mode": "spectral"}),
    "gradient_penalty": Example(([[3, -4], [0, 0]],), {"sided": "one", "target": 2}),
    "interpolated_gradient_penalty": Example((same, [[6, 8], [0, 8]], [[0, 0], [0, 0]]), BETWEEN),
    "clip_by_value": Example((ENTRIES,), plain=(-2, HALF)),
    "clip_by_norm": Example((G,), plain=(HALF,)),
    "clip_by_global_norm": Example((G,), plain=(-2,)),
    "adaptive_clip": Example(([G], [W]), {"factor": QUARTER, "eps": HALF}),
    "clip_by_percentile": Example((ENTRIES,), plain=(50,)),
    "clip_by_norm_history": Example((G, LENGTHS), plain=(50,)),
    "clip_by_zscore": Example((G, LENGTHS), plain=(1,)),
    "add_l2_decay": Example((G, W), {"rate": QUARTER}),
    "add_l1_decay": Example((G, W), {"rate": QUARTER}),
    "add_elastic_net_decay": Example((G, W), {"rate": QUARTER, "l1_ratio": HALF}),
    "add_noise": Example((G, V), {"step": 0, "variance": QUARTER, "decay": HALF}),
    "centralize": Example(([ENTRIES],)),
    "skip_nonfinite": Example((G,)),
    # Derivatives whose arguments are not those of the value: pullbacks take what comes from above.
    "clip_by_value_grad": Example((ENTRIES, ENTRIES), plain=(-2, HALF)),
    "clip_by_norm_grad": Example((G, V), plain=(HALF,)),
    "clip_by_global_norm_grad": Example((G, V), plain=(-2,)),
    "adaptive_clip_grad": Example(([G], [W], [V]), {"factor": QUARTER, "eps": HALF}),
    "clip_by_percentile_grad": Example((ENTRIES, ENTRIES), plain=(50,)),
    "clip_by_norm_history_grad": Example((G, V, LENGTHS), plain=(50,)),
    "clip_by_zscore_grad": Example((G, V, LENGTHS), plain=(1,)),
    "add_l2_decay_grad": Example((V,), {"rate": QUARTER}),
    "add_l1_decay_grad": Example((V,), {"rate": QUARTER}),
    "add_elastic_net_decay_grad": Example((V,), {"rate": QUARTER, "l1_ratio": HALF}),
    "add_noise_grad": Example((V,)),
    "centralize_grad": Example(([V],)),
    "skip_nonfinite_grad": Example((G, V)),
}
NAMES = sorted(DEFINED)
# How many rows a matrix has that are not zero is structure, which symbols do not have.
STRUCTURED = {"orthogonality", "orthogonality_grad"}


def example(name: str) -> Example:
    """Its own, or that of the value it is the derivative of."""
    return EXAMPLES.get(name) or EXAMPLES[name.removesuffix("_grad")]


def decided(name: str, check: Callable[[list[Any]], None], K: Any) -> None:
    """A check of what a definition gives over balls."""
    spec.decided(lambda: check(example(name).over(K, name)))


@pytest.mark.parametrize("name", NAMES)
def test_fractions_are_exact_and_balls_contain_them(name: str) -> None:
    """Where a result is rational it is in its ball of radius below 10⁻³⁰; else it is refused."""
    if not example(name).rational:
        with pytest.raises(spec.UnsupportedError, match="must be rational, and is not"):
            example(name).over(spec.Rational(), name)
        return
    exact = example(name).over(spec.Rational(), name)
    assert all(isinstance(x, Fraction) for x in exact)

    def check(balls: list[Any]) -> None:
        for x, ball in zip(exact, balls, strict=True):
            assert (ball * x.denominator).contains(x.numerator)
            assert ball.rad() < 1e-30

    decided(name, check, spec.Ball())


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_format_gives_lies_in_its_ball(name: str, format_: str) -> None:
    """A left fold in NumPy's numbers, or those of ml_dtypes, is one of the admissible results."""
    K = spec.Rounded(format_)
    found = example(name).over(K, name)
    assert {type(x) for x in found} == {type(K.const(0))}

    def check(balls: list[Any]) -> None:
        for x, ball in zip(found, balls, strict=True):
            assert ball.contains(float(x)), f"{x!r} is not in {ball.rounded.str(20)}"

    decided(name, check, spec.Rounding(format_))


@pytest.mark.parametrize("name", NAMES)
def test_python_floats_lie_in_the_ball_of_float64(name: str) -> None:
    """The reference that runs everywhere."""
    found = example(name).over(spec.Float(), name)
    assert {type(x) for x in found} == {float}

    def check(balls: list[Any]) -> None:
        assert all(ball.contains(x) for x, ball in zip(found, balls, strict=True))

    decided(name, check, spec.Rounding("float64"))


@pytest.mark.parametrize("name", sorted(DEFINED - STRUCTURED))
def test_symbols_are_proved_to_be_the_fractions(name: str) -> None:
    """z3 finds the values of the fractions the only ones; or it holds any, where none is."""
    rational = example(name).rational
    exact = example(name).over(spec.Rational(), name) if rational else []

    def equal(K: Symbols) -> Statement:
        found = example(name).over(K, name)
        pairs = zip(found, exact, strict=True) if rational else ()
        return Statement([], K.z3.And(*(x == K.const(y) for x, y in pairs)))

    assert satisfiable(equal)
    assert judge(equal) == "proved"


@pytest.mark.parametrize("name", sorted(STRUCTURED))
def test_symbols_refuse_what_is_structure(name: str) -> None:
    """Whether a row is zero decides how many rows there are, and a symbol could be either."""
    from z3 import Z3Exception

    K = Symbols()
    with pytest.raises(Z3Exception, match="cannot be cast to concrete Boolean"):
        getattr(spec, name)(K, [K.reals("x", 2)])


def test_the_only_rational_exponential_and_logarithm() -> None:
    """e⁰ = 1 and ln 1 = 0; every other one is irrational, and refused."""
    K = spec.Rational()
    assert K.exp(Fraction(0)) == 1
    assert K.log(Fraction(1)) == 0
    assert spec.entropy(K, [[Fraction(0), None]]) == 0
