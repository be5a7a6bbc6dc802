"""Pipelines inside compiled functions and functional transforms: the same values and reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.penalties.assertions import assert_close, assert_equal
from tests.pipeline.assertions import LEVELS, assert_norm, assert_report, by_hand

Outcome = tuple[Tensor, dict[str, Any]]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No graph of one test serves another."""
    torch.compiler.reset()


def moved(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A value with a tensor, and a number, to report."""
    return x.square().mean(), {"mean": x.mean(), "entries": x.numel()}


TERMS = {
    "base": Term(F.cross_entropy, inputs=("student", "labels")),
    "distill": Term(
        eq.kl_divergence,
        inputs=("teacher", "student"),
        weight=-0.5,
        options={"from_logits": True},
    ),
    "moved": Term(moved, inputs="student", weight=0.25),
    "decay": Term(eq.l2, inputs="weights", weight=0.1),
    "silent": Term(eq.l1, inputs="student", differentiable=False, weight=2.0),
}
PIPELINE = Pipeline(**TERMS)
LABELS = torch.tensor([0, 2, 1])
Inputs = dict[str, Any]


def inputs(scale: float = 1.0) -> Inputs:
    """The same leaves at every call, with a teacher that does not learn."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "student": leaf(3, 4).requires_grad_(),
        "teacher": leaf(3, 4),
        "labels": LABELS,
        "weights": [leaf(2).requires_grad_(), leaf(2, 2).requires_grad_()],
    }


def moving(given: Inputs) -> list[Tensor]:
    """The leaves."""
    return [given["student"], *given["weights"]]


def evaluate(given: Inputs, track: Any) -> Outcome:
    """A total, and every figure of its report as a tensor."""
    result = PIPELINE(**given, track=track)
    figures: dict[str, Any] = {"penalty": result.penalty, **result.terms["moved"].metrics}
    if not track:
        return result.total, figures
    report = result.gradients
    figures |= {f"{name}_norm": norm for name, norm in report.norms.items()}
    figures |= {f"{name}_weighted": norm for name, norm in report.weighted.items()}
    figures |= {f"total_at_{key}": part.total_norm for key, part in report.by_input.items()}
    figures["total_norm"] = report.total_norm
    if track == "gram":
        figures |= {"gram": report.gram, **report.shares}
        figures["cosine"] = report.cosine("distill", "base")
    return result.total, figures


def in_eager_mode(track: Any, scale: float = 1.0) -> tuple[Outcome, tuple[Tensor, ...]]:
    """Values, figures and gradients without compiler; the report observed in the backward pass."""
    given = inputs(scale)
    result = PIPELINE(**given, track=track)
    slopes = torch.autograd.grad(result.total, moving(given), retain_graph=True)
    if track:
        assert_report(
            seen_only(result.gradients), by_hand(differentiable_terms(), given), within=1e-11
        )
    return evaluate(given, track), slopes


def differentiable_terms() -> dict[str, Term]:
    """Those that have a gradient."""
    return {name: term for name, term in TERMS.items() if term.differentiable}


def seen_only(report: eq.Gradients) -> eq.Gradients:
    """The report without the term that has no gradient."""
    kept = [i for i, name in enumerate(report.names) if name not in report.errors]
    return eq.Gradients(
        names=tuple(report.names[i] for i in kept),
        inputs=report.inputs,
        weights=tuple(report.weights[i] for i in kept),
        errors={},
        squares=report.squares[:, [*kept, len(report.names)]],
        grams=None if report.grams is None else report.grams[:, kept][:, :, kept],
    )


def assert_same_outcome(actual: Outcome, expected: Outcome, within: float) -> None:
    """The same total and the same figures, none of them missing, none NaN."""
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=within, atol=within)
    assert actual[1].keys() == expected[1].keys()


def assert_compiles(track: Any, backend: str, within: float) -> None:
    """One graph; values, figures and gradients as in eager mode; never compiled again."""
    compiled = torch.compile(evaluate, fullgraph=True, backend=backend)
    for scale, stance in ((1.0, "default"), (0.5, "fail_on_recompile")):
        wanted, wanted_slopes = in_eager_mode(track, scale)
        given = inputs(scale)
        with torch.compiler.set_stance(stance):
            outcome = compiled(given, track)
            slopes = torch.autograd.grad(outcome[0], moving(given))
        assert_same_outcome(outcome, wanted, within)
        for slope, same in zip(slopes, wanted_slopes, strict=True):
            assert_close(slope, same, within=within)


# Compiled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_compiled_in_one_graph_and_once(track: Any) -> None:
    """Several inputs, lists, metrics and a base: everything as in eager mode, in float64."""
    # Two orders of adding up at most twenty numbers below 100: 20·100·2⁻⁵³ = 2e-13.
    assert_compiles(track, "aot_eager", within=1e-12)


def test_generated_code_agrees() -> None:
    """The default backend gives the same report with its own machine code."""
    # Its exp and log are good to a few units in the last place: 1e-15, over sums of twelve.
    assert_compiles("norms", "inductor", within=1e-11)


def test_a_whole_evaluation_leaves_the_compiler() -> None:
    """Returned from a compiled function it is as good as any: metrics, table, report, backward."""
    given = inputs()

    def step(student: Tensor, weights: list[Tensor]) -> eq.Evaluation:
        return PIPELINE(**{**given, "student": student, "weights": weights}, track="gram")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result = compiled(given["student"], given["weights"])
    plain = PIPELINE(**inputs(), track="gram")
    plain.total.backward()
    result.total.backward()
    assert result.metrics() == pytest.approx(plain.metrics(), rel=1e-12)
    assert str(result) == str(plain)
    assert result.metrics()["silent_grad_norm_error"] == 1.0
    assert_report(seen_only(result.gradients), by_hand(differentiable_terms(), given), within=1e-11)


def test_an_untracked_evaluation_of_a_compiled_function_has_no_report() -> None:
    """It says that it would have had to be asked for, and claims nothing about the terms."""
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(Pipeline(l1=Term(eq.l1)), backend="eager", fullgraph=True)
    with pytest.raises(eq.GradientError, match=r"got track=False\. Use `track='norms'`"):
        _ = compiled(x).gradients
    assert compiled(x).metrics() == {"total": 3.0, "penalty": 3.0, "l1": 3.0, "l1_weighted": 3.0}


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.linear(0.0, 1.0, steps=11),
        schedules.cosine(1.0, 0.0, steps=11),
        schedules.warmup(1.0, steps=10),
        schedules.piecewise({0: 0.5, 5: 2.0}),
    ],
    ids=str,
)
def test_a_schedule_does_not_compile_at_every_step(schedule: schedules.Schedule) -> None:
    """Fifteen steps take at most three compilations: one number, any number, one branch more."""
    scheduled = Pipeline(base=Term(eq.l2), l1=Term(eq.l1, weight=schedule))
    counter = CompileCounter()

    def total(x: Tensor, step: int) -> Tensor:
        return scheduled(x, step=step, track="norms").total

    compiled = torch.compile(total, fullgraph=True, backend=counter)
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    for step in range(15):
        assert_close(compiled(x, step), 5.0 + 3.0 * schedule(step), within=1e-15)
    assert counter.frame_count <= 3


def test_a_lazy_term_is_compiled_with_and_without() -> None:
    """Two graphs, with the term and without it, serve every step; an idle total is a zero."""
    lazy = Pipeline(l1=Term(eq.l1, every=4))
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x, step: lazy(x, step=step).total, fullgraph=True, backend=counter
    )
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    for step in range(12):
        total = compiled(x, step)
        (slope,) = torch.autograd.grad(total, x)
        due = step % 4 == 0
        assert_equal(total, 12.0 if due else 0.0)
        assert_equal(slope, 4 * x.detach().sign() if due else torch.zeros(2))
    assert counter.frame_count <= 3


def test_a_model_is_compiled_together_with_its_pipeline() -> None:
    """Norms at a hidden layer inside the graph; the parameters learn as in eager mode."""
    terms = {
        "sparsity": Term(eq.l1, inputs="hidden", weight=0.1),
        "base": Term(lambda out: out.square().mean(), inputs="out"),
    }

    def step(net: nn.Sequential, x: Tensor) -> Outcome:
        hidden = net[0](x)
        result = Pipeline(**terms)(hidden=hidden, out=net[1](hidden), track="norms")
        return result.total, {key: part.norms for key, part in parts(result)}

    outcomes, slopes = [], []
    for mode in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
        outcomes.append(mode(net, x))
        slopes.append(torch.autograd.grad(outcomes[-1][0], list(net.parameters())))
    assert_same_outcome(outcomes[1], outcomes[0], within=1e-12)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-12, atol=1e-12)
    assert_norm(outcomes[1][1]["hidden"]["sparsity"], math.sqrt(8))
    assert_norm(outcomes[1][1]["hidden"]["base"], 0.0)  # it reads the output only


def parts(result: eq.Evaluation) -> list[tuple[str, eq.Gradients]]:
    """The report by input."""
    return list(result.gradients.by_input.items())


@pytest.mark.parametrize("kind", ["callable", "tensor"])
def test_a_base_given_at_the_call(kind: str) -> None:
    """As a function it is measured; as a tensor it says that it cannot be, and so does the sum."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    single = Pipeline(l1=Term(eq.l1))

    def step(x: Tensor) -> Any:
        base = eq.l2(x) if kind == "tensor" else lambda x: 1.0 * eq.l2(x)
        result = single(x, base=base, track="norms")
        report = result.gradients
        return result.total, report.norms["l1"], report.norms["base"], report.total_norm

    for mode in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        total, term, base, together = mode(x)
        assert_equal(total, 8.0)
        assert_equal(torch.autograd.grad(total, x)[0], 2 * x.detach() + 1)
        assert_norm(term, math.sqrt(2))
        if kind == "callable" or mode is step:
            assert_norm(base, math.sqrt(20))
            assert_norm(together, math.sqrt(34))
        else:
            assert base is None
            assert together.isnan()


OTHER = torch.ones(2, dtype=torch.float64, requires_grad=True)
ODD = {
    "detached": Term(lambda x: x.detach().sum()),
    "not differentiable": Term(lambda x: x.argmax().double()),
    "whole number": Term(lambda x: x.argmax(), weight=2.0),
    "truth": Term(lambda x: (x > 0).all()),
    "elsewhere": Term(lambda _: (3 * OTHER).sum()),
    "switched off": Term(eq.l1, differentiable=False),
    "weightless": Term(eq.l1, weight=0.0),
}


@pytest.mark.parametrize("how", ["compiled", "transformed", "both"])
def test_a_term_without_gradient_has_no_norm(how: str) -> None:
    """It is an error in its place, never a 0; a gradient that is 0 has norm 0."""
    terms = {name.replace(" ", "_"): term for name, term in ODD.items()}
    pipeline = Pipeline(l2=Term(eq.l2), flat=Term(lambda x: 0 * x.sum()), **terms)

    def step(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        result = pipeline(x, track="gram")
        norms = {name: norm for name, norm in result.gradients.norms.items() if norm is not None}
        return result.total, {**norms, "total": result.gradients.total_norm}

    function = step if how == "compiled" else torch.func.grad(step, has_aux=True)
    if how != "transformed":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.tensor([3.0, -4.0], dtype=torch.float64, requires_grad=True)
    outcome, norms = function(x)
    if how == "compiled":
        assert_close(outcome, pipeline(x).total, within=1e-15)
    else:
        assert_equal(outcome, 2 * x)
    assert norms.keys() == {"l2", "flat", "total"}
    assert_norm(norms["l2"], 10.0)
    assert_norm(norms["flat"], 0.0)
    assert_norm(norms["total"], 10.0)


def test_options_for_one_call_reach_their_term() -> None:
    """Overrides work inside the graph, for the value and for the norm."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    single = Pipeline(l1=Term(eq.l1))

    def step(x: Tensor) -> Any:
        result = single(x, options={"l1": {"scale": 10.0}}, track="norms")
        return result.total, result.gradients.norms["l1"]

    total, norm = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert_equal(total, 30.0)
    assert_norm(norm, 10 * math.sqrt(2))


# Functional transforms ---------------------------------------------------------------------------


def functional(track: Any) -> Callable[[Tensor], Outcome]:
    """A function of the student alone, with what it reports as auxiliary output."""
    given = inputs()

    def function(student: Tensor) -> Outcome:
        result = PIPELINE(**{**given, "student": student}, track=track)
        if not track:
            return result.total, {}
        part = result.gradients.by_input["student"]
        figures = {n: norm for n, norm in part.norms.items() if norm is not None}
        return result.total, {**figures, "total": part.total_norm}

    return function


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("how", ["eager", "compiled", "intermediate"])
def test_under_func_grad(how: str, track: Any) -> None:
    """`torch.func.grad` with auxiliary output: gradient and norms are those of autograd.

    What the transform does not differentiate has no row: the weights come from outside of it.
    """
    function = functional(track)
    given = inputs()
    student = given["student"].detach()
    transformed = torch.func.grad(function, has_aux=True)
    if how == "intermediate":
        transformed = torch.func.grad(lambda x: function(1.0 * x), has_aux=True)
    if how == "compiled":
        transformed = torch.compile(transformed, fullgraph=True, backend="aot_eager")
    gradient, figures = transformed(student)
    total = PIPELINE(**given).total
    assert_close(gradient, torch.autograd.grad(total, given["student"])[0], within=1e-12)
    if track:
        expected = by_hand(differentiable_terms(), given)
        assert set(figures) == {"base", "distill", "moved", "total"}
        for name, norm in figures.items():
            if name == "total":
                assert_norm(norm, expected.total("student").norm())
            else:
                wanted = expected.vector(name, "student").norm() / abs(expected.weights[name])
                assert_norm(norm, wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_under_func_vmap(compiled: bool) -> None:
    """Mapped over samples the untracked totals, and their gradients, are those one by one."""
    pipeline = Pipeline(l2=Term(eq.l2, weight=0.5), l1=Term(eq.l1), gone=Term(eq.l2, weight=0.0))
    x = torch.tensor([[1.0, -2.0], [3.0, 0.5], [0.0, 4.0]], dtype=torch.float64)
    totals = torch.func.vmap(lambda x: pipeline(x).total)
    slopes = torch.func.vmap(torch.func.grad(lambda x: pipeline(x).total))
    if compiled:
        totals = torch.compile(totals, fullgraph=True, backend="aot_eager")
        slopes = torch.compile(slopes, fullgraph=True, backend="aot_eager")
    assert_close(totals(x), x.square().sum(1) / 2 + x.abs().sum(1))
    assert_close(slopes(x), x + x.sign())


@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_that_is_two_arguments_of_a_term_is_seen_whole(compiled: bool) -> None:
    """Of Σa·b at a = b = x the gradient is 2x there too."""
    pipeline = Pipeline(product=Term(lambda a, b: (a * b).sum(), inputs=("x", "x"), weight=3.0))

    def function(x: Tensor) -> Outcome:
        result = pipeline(x=x, track="norms")
        return result.total, result.gradients.norms

    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    call = torch.func.grad(function, has_aux=True)
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    slope, norms = call(x)
    assert_equal(slope, 6 * x)
    assert_norm(norms["product"], 10.0)


@pytest.mark.parametrize("track", [False, "norms"])
def test_a_failing_term_says_its_name_under_a_transform(track: Any) -> None:
    """As anywhere else; only while the compiler traces it shows the line instead."""
    broken = Pipeline(fine=Term(eq.l1), broken=Term(lambda x: x @ torch.ones(7)))
    with pytest.raises(RuntimeError, match="size") as caught:
        torch.func.grad(lambda x: broken(x, track=track).total)(torch.ones(2))
    assert caught.value.__notes__ == ["in the term 'broken'"]


def test_under_vmap_of_grad_norms_are_per_sample() -> None:
    """The report of each sample by itself: per-example gradient norms."""
    pipeline = Pipeline(l2=Term(eq.l2, weight=0.5))
    x = torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=torch.float64)

    def function(x: Tensor) -> Outcome:
        result = pipeline(x, track="norms")
        return result.total, {"l2": result.gradients.norms["l2"]}

    slopes, figures = torch.func.vmap(torch.func.grad(function, has_aux=True))(x)
    assert_equal(slopes, x)
    assert_close(figures["l2"], torch.tensor([10.0, 20.0], dtype=torch.float64))


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_under_jacobian_and_hessian(track: Any) -> None:
    """Second derivatives of Σx³ + Σx² are 6x + 2, tracked or not."""
    pipeline = Pipeline(cube=Term(lambda x: x.pow(3).sum()), l2=Term(eq.l2))
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for second in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        curve = second(lambda x: pipeline(x, track=track).total)(x)
        assert_close(curve, (6 * x + 2).diag())


def test_with_functional_parameters() -> None:
    """Over `functional_call`, gradients by parameters are those of the module."""
    net = nn.Linear(3, 2).double()
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    pipeline = Pipeline(l2=Term(eq.l2, inputs="out"), decay=Term(eq.l1, inputs="weights"))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out = torch.func.functional_call(net, parameters, (x,))
        return pipeline(out=out, weights=[*parameters.values()], track="norms").total

    given = {name: p.detach() for name, p in net.named_parameters()}
    slopes = torch.func.grad(loss)(given)
    pipeline(out=net(x), weights=list(net.parameters())).total.backward()
    for name, parameter in net.named_parameters():
        assert_close(slopes[name], parameter.grad)


def test_all_disabled_under_a_transform() -> None:
    """The zero total has a zero gradient there too."""
    off = Pipeline(l1=Term(eq.l1, enabled=False))
    x = torch.ones(2, dtype=torch.float64)
    assert_equal(torch.func.grad(lambda x: off(x).total)(x), torch.zeros(2))
