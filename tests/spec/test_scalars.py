"""What each kind of scalar can do, and how it says what it cannot."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from equipoise import spec
from equipoise.spec.balls import HIGHEST
from equipoise.spec.formats import FORMATS
from equipoise.spec.scalars import sort_by

THIRD = Fraction(1, 3)


def test_rationals_are_exact_and_refuse_what_is_irrational() -> None:
    """A root of a square is rational; of 2 it is not, nor is an exponential or a logarithm."""
    K = spec.Rational()
    assert spec.l2(K, [THIRD, Fraction(1, 2)], center="mean") == Fraction(1, 72)
    assert spec.clip_by_norm(K, [Fraction(3), Fraction(4)], 1) == [Fraction(3, 5), Fraction(4, 5)]
    with pytest.raises(spec.UnsupportedError, match="2 must be a square"):
        K.sqrt(Fraction(2))
    with pytest.raises(spec.UnsupportedError, match=r"exp.1/3. must be rational"):
        K.exp(THIRD)
    with pytest.raises(spec.UnsupportedError, match=r"log.1/3. must be rational"):
        K.log(THIRD)


REALS = [spec.Rational(), spec.Ball(), spec.Rounding("float32")]


@pytest.mark.parametrize("K", REALS, ids=lambda K: type(K).__name__)
def test_what_has_no_real_value_is_refused(K: Any) -> None:
    """The root of −4, and the logarithms of 0 and −1: no value is made up for them."""
    with pytest.raises(spec.UnsupportedError, match="-4"):
        K.sqrt(K.const(-4))
    for number in (0, -1):
        with pytest.raises(spec.UnsupportedError, match=str(number)):
            K.log(K.const(number))


def test_a_ball_without_a_bound_admits_nothing() -> None:
    """1/0 may be anything, which is no agreement."""
    K = spec.Rounding("float32")
    assert not (K.exactly(1.0) / K.exactly(0.0)).contains(3.0)


def test_eigenvalues_need_balls_beyond_two_by_two() -> None:
    """A closed form up to there; certified enclosures for any symmetric matrix."""
    assert spec.Float().eigenvalues([[2.0, 1.0], [1.0, 2.0]]) == [1.0, 3.0]
    with pytest.raises(spec.UnsupportedError, match="3×3"):
        spec.Float().eigenvalues([[1.0] * 3] * 3)
    matrix = [[arb(int(i == j) * (i + 1)) for j in range(3)] for i in range(3)]
    found = sorted(spec.Ball().eigenvalues(matrix), key=lambda v: float(v.mid()))
    assert all(v.contains(i + 1) and v.rad() < 2**-40 for i, v in enumerate(found))
    assert len(found) == 3


def test_a_comparison_that_balls_cannot_decide_is_raised_until_it_can() -> None:
    """√2·√2 = 2 is never decided; √2·√2 > 2 − 10⁻⁵⁰ is, with more digits."""
    K = spec.Ball()

    def undecidable() -> bool:
        return K.gt(K.sqrt(K.const(2)) * K.sqrt(K.const(2)), K.const(2))

    def near() -> bool:
        root = K.sqrt(K.const(2))
        return K.gt(root * root, K.const(2 - Fraction(1, 10**50)))

    with pytest.raises(spec.UndecidedError, match=r"overlap\. Use `decided`"):
        spec.decided(undecidable, bits=HIGHEST)
    assert spec.decided(near) is True


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(sorted(FORMATS)))
def test_a_format_knows_its_numbers(x: float, name: str) -> None:
    """It holds just the numbers that rounding to it leaves as they are."""
    K = spec.Rounded(name)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(K.const(x))
    if math.isfinite(rounded):
        assert FORMATS[name].holds(x) == (rounded == x)


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_a_left_fold_in_float32_lies_in_its_ball(numbers: list[float]) -> None:
    """Numpy's own arithmetic, one operation after the other."""
    fold, K = spec.Rounded("float32"), spec.Rounding("float32")
    value: Any = spec.l2(fold, [fold.const(x) for x in numbers], center="mean", reduction="mean")

    def held() -> bool:
        ball: Any = spec.l2(K, [K.exactly(x) for x in numbers], center="mean", reduction="mean")
        return bool(ball.contains(float(value)))

    assert spec.decided(held)


def test_a_ball_holds_no_more_than_the_roundings_allow() -> None:
    """Two additions may be wrong by one unit each of the sum of sizes, and by no more."""
    K = spec.Rounding("float32")
    total = K.sum([K.exactly(1.0), K.exactly(1.0), K.exactly(2.0)])
    unit = 2.0**-24
    assert total.contains(4 + 7.9 * unit)
    assert not total.contains(4 + 8.1 * unit)
    product = K.exactly(3.0) * K.exactly(5.0)
    assert product.contains(15 * (1 + 0.99 * unit))
    assert not product.contains(15 * (1 + 1.01 * unit))
    assert K.const(0.5).contains(0.5)
    assert not K.const(0.5).contains(0.5 + 2**-30)
    assert K.const(THIRD).contains(float(np.float32(1 / 3)))


def test_the_errors_of_several_steps_multiply() -> None:
    """Four roundings upwards, one on the other, are more than four units; and no more than that."""
    K, unit = spec.Rounding("bfloat16", steps=4), 2.0**-8
    product = K.exactly(3.0) * K.exactly(5.0)
    worst = 15 * (1 + unit) ** 4
    assert worst > 15 * (1 + 4 * unit + 5 * unit**2)
    assert product.contains(worst)
    assert not product.contains(worst * (1 + 1e-6))


def test_small_results_may_be_wrong_by_half_the_smallest_number() -> None:
    """Near 0 the error is absolute."""
    K = spec.Rounding("float16")
    tiny = K.exactly(2.0**-20) * K.exactly(2.0**-10)
    assert tiny.contains(0.0)
    assert not tiny.contains(2.0**-24)


@given(st.lists(st.integers(-50, 50), max_size=12))
def test_all_scalars_sort_alike(numbers: list[int]) -> None:
    """By comparison, as numbers are sorted."""
    K = spec.Rational()
    assert sort_by(K, [Fraction(x) for x in numbers]) == sorted(numbers)
    assert [float(x.mid()) for x in spec.Ball().sort([arb(x) for x in numbers])] == sorted(numbers)


@given(
    st.lists(st.fractions(-10, 10, max_denominator=9), min_size=1, max_size=8),
    st.integers(0, 120),
)
def test_floats_and_rationals_and_balls_agree(xs: list[Fraction], pct: int) -> None:
    """One definition over three kinds of number."""
    exact = spec.clip_by_percentile(spec.Rational(), xs, pct)
    ball = spec.Ball()
    found = spec.clip_by_percentile(spec.Float(), [float(x) for x in xs], pct)
    assert found == [float(x) for x in exact]
    squares = spec.l2(spec.Rational(), xs, center="mean", reduction="mean")
    enclosed: Any = spec.l2(ball, [ball.const(x) for x in xs], center="mean", reduction="mean")
    assert enclosed.overlaps(ball.const(squares))  # type: ignore[arg-type]
