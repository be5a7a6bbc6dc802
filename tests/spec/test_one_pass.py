"""Agreement where all terms are evaluated in one pass: compiled pipelines and the fused kernels."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from flint import arb
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, spec
from equipoise.fast import _one_pass, _take
from equipoise.spec.sums import length
from equipoise.spec.tracking import signed_shares, total_gradient
from tests.fast.beside import serves
from tests.spec.cases import ROW_WEIGHTS, SOME_ENTRIES, SOME_ROWS, cases, draw, kinds
from tests.spec.oracle import (
    Case,
    assert_agrees,
    computed_in,
    entries,
    flatten,
    rows,
)

Log = pytest.LogCaptureFixture
FLOATS = (torch.float32, torch.bfloat16)


TRITON = importlib.util.find_spec("triton") is not None


def compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph as users compile, without generating machine code for it."""
    torch.compiler.reset()
    compile_ = torch.compile

    def quickly(function: Any, **options: Any) -> Any:
        return compile_(function, **{**options, "backend": "aot_eager"})

    monkeypatch.setattr(_one_pass.torch, "compile", quickly)


def ask_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """About tensors on the CPU too."""
    monkeypatch.setattr(_take, "KERNELS_ON", {"cpu"})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without generating code; no graph serves two tests."""
    compile_quickly(monkeypatch)
    yield
    torch.compiler.reset()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines that ask the kernels."""
    if not TRITON:
        # On Linux it belongs to the test set-up, and leaving tests out would hide its absence.
        assert sys.platform != "linux", "these tests need triton; run `make test`"
        pytest.skip("there is no triton")
    ask_the_kernels(monkeypatch)


def pipeline_of(case: Case) -> Pipeline:
    """The penalty as the only term."""
    keys = tuple("xy"[: case.inputs])
    penalty = getattr(eq, case.penalty)
    return Pipeline(term=Term(penalty, inputs=keys, options=case.options))


def cut_to(dtype: torch.dtype, slopes: list[Any]) -> list[Any]:
    """The balls of numbers that Triton's interpreter turns to bfloat16.

    It cuts them, where hardware rounds: one unit more. It makes of a subnormal number any other,
    where hardware may make 0 of it.
    """
    if dtype != torch.bfloat16:
        return slopes
    subnormal = arb(0, 2.0**-126)
    cut = [v.once_more("bfloat16") for v in slopes]
    return [spec.Enclosure(v.context, v.exact, v.rounded + subnormal) for v in cut]


def assert_pipeline_agrees(
    pipeline: Pipeline,
    case: Case,
    tensors: Sequence[Tensor],
    moving: Sequence[int],
    cut: bool = False,
) -> None:
    """Its total is an admissible value, and what it leaves at the inputs that move a gradient."""
    leaves = [x.detach().clone().requires_grad_(i in moving) for i, x in enumerate(tensors)]
    total = pipeline(**dict(zip("xy", leaves, strict=False))).total
    total.backward()
    K = spec.Rounding(computed_in(tensors[0].dtype), steps=case.steps)

    def check() -> None:
        assert_agrees(total, flatten([case.definition(case.penalty, K, tensors)]), where="value")
        slopes = case.definition(f"{case.penalty}_grad", K, tensors)
        for i in moving:
            slope = flatten(slopes if len(leaves) == 1 else slopes[i])
            slope = cut_to(tensors[i].dtype, slope) if cut else slope
            gradient = leaves[i].grad
            gradient = torch.zeros_like(leaves[i]) if gradient is None else gradient
            assert_agrees(gradient, slope, tensors[i].dtype, where=f"gradient {i}")

    spec.decided(check)


SCALAR = [case for case in cases() if case.options.get("reduction") != "none"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("case", SCALAR, ids=lambda case: case.id)
def test_compiled_pipelines_agree(case: Case, caplog: Log) -> None:
    """Every penalty with every option, its value and gradient from one compiled function."""
    tensors = draw(case, "plain", torch.float64)
    with serves(caplog):
        assert_pipeline_agrees(pipeline_of(case).compiled(), case, tensors, range(case.inputs))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", sorted({case.penalty for case in SCALAR}))
def test_compiled_pipelines_agree_in_shorter_formats(
    name: str, dtype: torch.dtype, caplog: Log
) -> None:
    """Each penalty as it is by default, on each kind of input. float16 is left to the plain one."""
    case = next(case for case in SCALAR if case.penalty == name)
    pipeline = pipeline_of(case).compiled()
    with serves(caplog):
        for kind in kinds(case):
            tensors = draw(case, kind, dtype)
            assert_pipeline_agrees(pipeline, case, tensors, range(case.inputs))


# Exponents are taken to base 2, and rows are summed before they are normalised: a row of 16, which
# is one block, relative to its largest entry. H = log Σe − Σe·u/Σe then has parts of the sizes that
# Σ p·log p has, since |u| ≤ |log p| and log Σe ≤ |log p|; so have the others. A part is wrong by
# the difference, the product with log₂e, itself rounded, the exponential, two products, the
# quotient, the sum of 16 in any order, ln 2 and the factors of the term: by less than 40 u, where
# at 16 steps the definition's exponential alone has 64.
KERNEL = 16
LOGITS = {"from_logits": True}


def whole(K: spec.Rounding, x: Tensor) -> list[Any]:
    """All entries as one vector."""
    return [entries(K, x)]


def fused(name: str, options: dict[str, Any]) -> Case:
    """A penalty that the kernels know."""
    layout = {"output_magnitude": whole, "l1": entries, "l2": entries, "elastic_net": entries}
    pair = name in ("kl_divergence", "js_divergence")
    return Case(name, options, layout.get(name, rows), KERNEL, inputs=2 if pair else 1)


FUSED = [
    fused(name, options)
    for name, several in {
        "l1": [{}, {"reduction": "mean", "scale": 0.3}],
        "l2": [{}, {"reduction": "mean", "scale": 0.3}],
        "elastic_net": [{}, {"l1_ratio": 0.3, "reduction": "mean"}],
        "output_magnitude": [{}, {"norm": "l2", "target": 2.5}],
        "entropy": [
            LOGITS,
            {**LOGITS, "mode": "bonus", "normalize": True},
            {**LOGITS, "temperature": 2.7, "reduction": "sum"},
            {**LOGITS, "mask": ROW_WEIGHTS, "support": SOME_ENTRIES},
        ],
        "kl_divergence": [
            LOGITS,
            {**LOGITS, "direction": "reverse"},
            {**LOGITS, "direction": "symmetric"},
            {"temperature": 2.7, "temperature_squared": True},
            {**LOGITS, "mask": SOME_ROWS, "support": SOME_ENTRIES},
            {**LOGITS, "denominator": 5.5, "direction": "symmetric", "mask": ROW_WEIGHTS},
        ],
        "js_divergence": [
            LOGITS,
            {**LOGITS, "beta": 0.2, "base": 2},
            {**LOGITS, "beta": 0.7, "normalized": True, "reduction": "sum"},
            {**LOGITS, "mask": SOME_ROWS, "support": SOME_ENTRIES},
        ],
    }.items()
    for options in several
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns where IEEE arithmetic goes on
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.id)
def test_fused_kernels_agree(case: Case, dtype: torch.dtype, caplog: Log) -> None:
    """Every penalty the kernels know, in value and gradient, whichever of two inputs moves."""
    pipeline = pipeline_of(case)
    some = kinds(case) if dtype == torch.float32 else kinds(case)[:2]
    with serves(caplog):
        for kind in some:
            tensors = draw(case, kind, dtype)
            for moving in range(case.inputs):
                assert_pipeline_agrees(pipeline, case, tensors, [moving], cut=True)


TERMS = {
    "l1": (0.02, "l1", {}, "x"),
    "l2": (-0.3, "l2", {"reduction": "mean"}, "x"),
    "rms": (0.2, "output_magnitude", {"target": 0.5}, "x"),
    "entropy": (-0.2, "entropy", LOGITS, "x"),
    "kl": (0.7, "kl_divergence", LOGITS, "yx"),
    "js": (0.5, "js_divergence", LOGITS, "xy"),
}


def pipeline_of_terms() -> Pipeline:
    """All of them on one input, beside another that stays as it is."""
    return Pipeline(
        **{
            key: Term(getattr(eq, name), inputs=tuple(keys), weight=weight, options=options)
            for key, (weight, name, options, keys) in TERMS.items()
        }
    )


def assert_all_terms_agree(pipeline: Pipeline, dtype: torch.dtype) -> None:
    """The total, the summed gradient, the norms of all terms and of the whole, and the shares."""
    x, y = draw(FUSED[-1], "plain", dtype)
    leaf = x.clone().requires_grad_()
    result = pipeline(x=leaf, y=y, track="gram")
    result.total.backward()
    figures = result.metrics()
    K = spec.Rounding(computed_in(dtype), steps=KERNEL)

    def check() -> None:
        values, slopes, weights = {}, {}, {}
        for key, (weight, name, options, keys) in TERMS.items():
            case, tensors = fused(name, options), [x if k == "x" else y for k in keys]
            weights[key] = K.const(weight)
            values[key] = case.definition(name, K, tensors)
            slope = case.definition(f"{name}_grad", K, tensors)
            slopes[key] = flatten([slope if len(keys) == 1 else slope[keys.index("x")]])
            own = length(K, [weights[key] * v for v in slopes[key]])
            assert own.contains(figures[f"{key}_grad_norm_weighted"]), key
            assert values[key].contains(figures[key]), key
        total = total_gradient(K, list(weights.values()), list(slopes.values()))
        assert leaf.grad is not None
        assert_agrees(leaf.grad, cut_to(dtype, total), dtype)
        assert length(K, total).contains(figures["total_grad_norm"])
        shares = signed_shares(K, list(weights.values()), list(slopes.values()))
        for key, share in zip(TERMS, shares, strict=True):
            assert share.contains(result.gradients.shares[key].item()), key
        assert_agrees(result.total, [K.sum(weights[key] * values[key] for key in TERMS)])

    spec.decided(check)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_terms_differentiated_one_by_one_agree(dtype: torch.dtype) -> None:
    """Values, the total, the summed gradient, every norm and every share."""
    assert_all_terms_agree(pipeline_of_terms(), dtype)


# In half precision each term's gradient is rounded before they are added, as autograd does it.
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_terms_in_one_compiled_function_agree(dtype: torch.dtype, caplog: Log) -> None:
    """Values, the total, the summed gradient, every norm and every share."""
    with serves(caplog):
        assert_all_terms_agree(pipeline_of_terms().compiled(), dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_terms_in_one_pass_of_the_kernels_agree(dtype: torch.dtype, caplog: Log) -> None:
    """Values, the total, the summed gradient, every norm and every share."""
    with serves(caplog):
        assert_all_terms_agree(pipeline_of_terms(), dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.id)
def test_the_bounds_of_the_kernels_are_narrow(case: Case) -> None:
    """One part in 256 more than the kernels give is outside: a wrong formula is further off."""
    tensors = draw(case, "plain", torch.float32)
    tensors[0].requires_grad_()
    value = pipeline_of(case)(**dict(zip("xy", tensors, strict=False))).total
    K = spec.Rounding("float32", steps=KERNEL)

    def check() -> None:
        (ball,) = flatten([case.definition(case.penalty, K, tensors)])
        assert ball.contains(value.item())
        assert not ball.contains(value.item() * (1 + 2**-8))

    spec.decided(check)
