"""What is claimed of the definitions and of the runtime, and how sure each claim is.

*proved* for all real numbers; *certified* on given inputs, by rigorous error bounds; *exhaustive*,
for every number of a format; *tested* on examples and random inputs; *believed*, since checked by
none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from equipoise.spec import rechecks
from equipoise.spec.proofs import (
    clamping,
    clipping,
    divergence,
    percentiles,
    sizes,
    summation,
    tracking,
)

Level = Literal["proved", "certified", "exhaustive", "tested", "believed"]


@dataclass(frozen=True)
class Claim:
    """A statement, its level, for what it holds, and where or how it is checked."""

    statement: str
    level: Level
    scope: str
    by: str
    check: Callable[[], list[str]] | None = None
    """Finds what is wrong with it now, if it can be checked without the runtime."""


def proved() -> list[Claim]:
    """The theorems, each with its mutants."""
    areas = (clipping, clamping, percentiles, sizes, divergence, tracking, summation)
    theorems = [theorem for area in areas for theorem in area.theorems()]
    axiom = Claim("ln t ≤ t − 1", "proved", "every t > 0", "sympy", rechecks.axiom)
    return [axiom, *(Claim(t.claim, "proved", t.lengths, "z3", t.faults) for t in theorems)]


def checked_here() -> list[Claim]:
    """What balls and formats say without the runtime."""
    return [
        Claim(
            "entropy, divergences and norms have their values in closed form",
            "certified",
            "four examples, to 10⁻³⁰",
            "arb",
            rechecks.known_values,
        ),
        Claim(
            "a left fold in a format gives a result that its ball holds",
            "certified",
            "four formats, ten hard numbers",
            "arb",
            rechecks.folds_lie_in_their_balls,
        ),
        Claim(
            "clamp, sign and percentile are exact in half precision",
            "exhaustive",
            "all finite float16 and bfloat16 numbers",
            "numpy, ml_dtypes",
            rechecks.every_half,
        ),
    ]


def checked_by_tests() -> list[Claim]:
    """What is claimed of the runtime."""
    inputs = "float64, float32, bfloat16, float16; the inputs of the tests"
    return [
        Claim(
            "every penalty has the value and the gradient of its definition",
            "certified",
            inputs,
            "tests/spec/test_penalties.py",
        ),
        Claim(
            "gradient penalties have the value and the gradient of their definition",
            "certified",
            inputs,
            "tests/spec/test_smoothness.py",
        ),
        Claim(
            "every gradient transform gives what its definition says",
            "certified",
            inputs,
            "tests/spec/test_transforms.py",
        ),
        Claim(
            "large inputs, and any floats, have the values and gradients of the definitions",
            "certified",
            "4,096 entries in float64, random ones in float64 and float32; also compiled",
            "tests/spec/test_any_input.py",
        ),
        Claim(
            "compiled pipelines agree with the same definitions",
            "certified",
            "float64: every option that gives a number; float32, bfloat16: every penalty; gradient "
            "penalties are compiled by themselves, in float64",
            "tests/spec/test_one_pass.py",
        ),
        Claim(
            "tracked terms have the gradients, norms and signed shares of the definitions",
            "certified",
            "six terms on one input, float64, float32; plain, compiled and by the kernels",
            "tests/spec/test_one_pass.py",
        ),
        Claim(
            "the fused kernels agree with the same definitions",
            "certified",
            "float32, bfloat16; rows of 16 entries, in Triton's interpreter",
            "tests/spec/test_one_pass.py",
        ),
        Claim(
            "edges, axes, samples of rows and lists of tensors are those of the definitions",
            "certified",
            "the inputs of the tests",
            "tests/spec/test_edges.py",
        ),
        Claim(
            "a definition says the same of floats, fractions, balls, formats and symbols",
            "certified",
            "an example of each value and each derivative",
            "tests/spec/test_contexts.py",
        ),
        Claim(
            "every derivative in the spec is that of the value beside it",
            "certified",
            "every option but `gradient` and `stop_gradient`, random directions; srip: two "
            "singular values",
            "tests/spec/test_derivatives.py",
        ),
        Claim(
            "a clip takes the branch of exact arithmetic",
            "tested",
            "whole lengths times powers of two, with squares that float64 adds; limits units off",
            "tests/spec/test_transforms.py",
        ),
        Claim(
            "the percentile clip is exact to the bit",
            "tested",
            "up to 70,000 entries, every whole percentage",
            "tests/spec/test_transforms.py",
        ),
        Claim(
            "entry by entry, penalties and transforms are those of their definitions",
            "exhaustive",
            "all 65,536 patterns of float16 and of bfloat16; of logarithms those down to −80",
            "tests/spec/test_exhaustive.py",
        ),
        Claim(
            "roots, exponentials and logarithms of this machine's CPU are within 2 ulp",
            "tested",
            "four million float32 numbers, 2,000 float64 ones",
            "tests/spec/test_constants.py",
        ),
        Claim(
            "a fault in a formula of the runtime is found",
            "tested",
            "the deliberate faults of tests/spec/mutants.py",
            "tests/spec/test_mutants.py",
        ),
    ]


def believed() -> list[Claim]:
    """What everything above rests on."""
    return [
        Claim("what holds of a sum by induction holds of every list", "believed", "", "induction"),
        Claim("z3, arb and sympy answer truly", "believed", "", "their authors"),
        Claim(
            "where the definition has one rounding the runtime has no more than were counted",
            "believed",
            "the steps of each ball, counted by hand beside it",
            "tests/spec/cases.py",
        ),
        Claim(
            "roots, exponentials and logarithms are within 2 ulp",
            "believed",
            "every number and device; over all float32 numbers a CPU had 0.85 ulp",
            "the vector libraries",
        ),
        Claim(
            "eigenvalues are within 10·n·ε·‖G‖",
            "believed",
            "orthogonality, mode='srip'",
            "LAPACK's guide",
        ),
        Claim(
            "formulas agree at sizes and on devices that no test has",
            "believed",
            "",
            "the formulas being the same",
        ),
    ]


def claims() -> list[Claim]:
    """All of them, from the surest to the least sure."""
    return [*proved(), *checked_here(), *checked_by_tests(), *believed()]
