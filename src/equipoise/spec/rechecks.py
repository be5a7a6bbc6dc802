"""What can be checked again without the runtime: the axiom, known values, formats, every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from equipoise.spec.balls import Ball, Rounding, decided
from equipoise.spec.clipping import clip_by_global_norm, clip_by_value
from equipoise.spec.divergence import kl_divergence
from equipoise.spec.formats import Rounded, optional
from equipoise.spec.magnitude import l1_grad, l2, output_magnitude
from equipoise.spec.mixture import js_divergence
from equipoise.spec.percentile import clip_by_percentile
from equipoise.spec.proofs.divergence import logarithm_below_its_tangent
from equipoise.spec.scalars import Float, Scalars
from equipoise.spec.uncertainty import entropy

HALVES = ("float16", "bfloat16")
# A few numbers of each format that are hard to add: of very different sizes, cancelling, repeated.
HARD = (1.0, 2.0**-10, -1.0, 1.5, 2.0**-8, 3.0, -2.75, 2.0**-10, 0.0, -1.0)


def axiom() -> list[str]:
    """The tangent of the logarithm, by sympy."""
    return [] if logarithm_below_its_tangent() else ["sympy finds another minimum"]


def known_values() -> list[str]:
    """Values that are known in closed form lie in their balls, of radius below 10⁻³⁰."""
    K = Ball()

    def closed(number: int) -> Any:  # noqa: ANN401 — a ball
        return K.log(K.const(number))

    def check() -> list[str]:
        uniform = [[-closed(4) for _ in range(4)]]
        point = [[K.const(0), None, None, None]]
        found: dict[str, tuple[Any, Any]] = {
            "H of four equal parts is ln 4": (entropy(K, uniform), closed(4)),
            "KL from a point to four equal parts is ln 4": (
                kl_divergence(K, point, uniform),
                closed(4),
            ),
            "JS of two points is ln 2": (
                js_divergence(K, [[K.const(0), None]], [[None, K.const(0)]]),
                closed(2),
            ),
            "(‖(1, 1)‖ − 1)² is 3 − √8": (
                output_magnitude(K, [[K.const(1), K.const(1)]], norm="l2"),
                K.const(3) - K.sqrt(K.const(8)),
            ),
        }
        # Each is one number, for there is one row.
        return [
            name
            for name, (ball, value) in found.items()
            if not (ball.overlaps(value) and (ball - value).rad() < 1e-30)
        ]

    return decided(check)


def folds_lie_in_their_balls() -> list[str]:
    """A left fold in each format gives what its ball holds."""
    faults = []
    for name in ("float16", "bfloat16", "float32", "float64"):
        fold, balls = Rounded(name), Rounding(name)
        computed = _formulas(fold, [fold.const(x) for x in HARD])

        def check(
            balls: Rounding = balls, computed: Sequence[Any] = computed, name: str = name
        ) -> list[str]:
            held = _formulas(balls, [balls.exactly(x) for x in HARD])
            pairs = enumerate(zip(computed, held, strict=True))
            return [f"{name}: {i}" for i, (x, ball) in pairs if not ball.contains(float(x))]

        faults += decided(check)
    return faults


def _formulas(K: Scalars[Any], xs: list[Any]) -> list[Any]:
    return [l2(K, xs, center=1, reduction="mean"), *clip_by_global_norm(K, xs, 2)]


def every_half() -> list[str]:
    """Clamp, sign and percentile over all finite float16 and bfloat16 numbers.

    They compare and choose, and never round: the result is that of float64, which holds both.
    """
    wide = Float()
    faults = []
    for name in HALVES:
        K = Rounded(name)
        numbers = _all_numbers(name)
        rules: dict[str, Callable[[Scalars[Any], list[Any]], list[Any]]] = {
            "clamp": lambda K, xs: clip_by_value(K, xs, Fraction(-3, 2), 40),
            "sign": l1_grad,
            "percentile": lambda K, xs: clip_by_percentile(K, xs, 29),
        }
        for rule, compute in rules.items():
            pairs = zip(
                compute(K, numbers), compute(wide, [float(x) for x in numbers]), strict=True
            )
            if any(float(x) - y for x, y in pairs):
                faults.append(f"{rule} in {name}")
    return faults


def _all_numbers(name: str) -> list[Any]:
    numpy = optional("numpy")
    numbers = numpy.arange(1 << 16, dtype=numpy.uint16)
    kind = getattr(optional("ml_dtypes"), name) if name == "bfloat16" else getattr(numpy, name)
    with numpy.errstate(invalid="ignore"):
        return [x for x in numbers.view(kind) if numpy.isfinite(x)]
