"""What the compiled function cannot serve is served by the plain definition, and logged."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, tracking
from tests.fast.beside import assert_as_plain, hands_over, plainly, serves

PIPELINE = Pipeline(cube=Term(lambda x: x.pow(3).sum()), l2=Term(eq.l2, weight=0.5)).compiled()
Log = pytest.LogCaptureFixture


def draw() -> dict[str, Any]:
    """One input."""
    return {"x": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)}


def single() -> Tensor:
    """That input."""
    x: Tensor = draw()["x"]
    return x


def test_a_second_derivative(caplog: Log) -> None:
    """Differentiating the gradient again gives the true second derivative."""
    x = single()
    (slope,) = torch.autograd.grad(PIPELINE(x).total, x, create_graph=True)
    with hands_over(caplog, "differentiated again"):
        (slope,) = torch.autograd.grad(PIPELINE(x).total, x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    torch.testing.assert_close(curvature, 6 * x.detach() + 1, rtol=1e-12, atol=0)


def test_gradgradcheck() -> None:
    """Both derivatives are those of finite differences."""
    x = single()
    assert torch.autograd.gradcheck(lambda x: PIPELINE(x).total, x)
    assert torch.autograd.gradgradcheck(lambda x: PIPELINE(x).total, x)


def test_parts_by_themselves(caplog: Log) -> None:
    """The penalty, a value, a contribution: each has its own gradient, and so have sums of them."""
    x = single()
    result = PIPELINE(x)
    with hands_over(caplog, "a part of the total"):
        (slope,) = torch.autograd.grad(result.terms["l2"].contribution, x, retain_graph=True)
    torch.testing.assert_close(slope, x.detach())
    (slope,) = torch.autograd.grad(result.terms["cube"].value, x, retain_graph=True)
    torch.testing.assert_close(slope, 3 * x.detach().square())
    mixed = 2 * result.total + 3 * result.terms["l2"].value
    (slope,) = torch.autograd.grad(mixed, x)
    torch.testing.assert_close(slope, 6 * x.detach().square() + 8 * x.detach())


def test_a_graph_that_is_kept(caplog: Log) -> None:
    """A second backward pass gives the same gradient; without keeping the graph it is refused."""
    x = single()
    total = PIPELINE(x).total
    (first,) = torch.autograd.grad(5 * total, x, retain_graph=True)
    with hands_over(caplog, "given away"):
        (second,) = torch.autograd.grad(5 * total, x)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, x)


def test_an_input_changed_in_place_is_noticed() -> None:
    """As in any graph, what the backward pass would need again may not have changed."""
    x = single()
    y = x * 1
    total = PIPELINE(y).total
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, x)


def test_functional_transforms(caplog: Log) -> None:
    """Under `torch.func` the plain definition answers."""
    x = single()
    with hands_over(caplog, "functional transform"):
        slope = torch.func.grad(lambda x: PIPELINE(x).total)(x.detach())
    torch.testing.assert_close(slope, 3 * x.detach().square() + x.detach())
    with hands_over(caplog, "functional transform"):
        rows = torch.func.vmap(lambda x: PIPELINE(x).total)(torch.ones(2, 3))
    assert rows.tolist() == [4.5, 4.5]


def test_forward_derivatives(caplog: Log) -> None:
    """A dual number passes through the plain definition."""
    x = single()
    with torch.autograd.forward_ad.dual_level(), hands_over(caplog, "forward derivative"):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(PIPELINE(dual).total).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, (3 * x.detach().square() + x.detach()).sum())


def test_inside_a_compiled_function(caplog: Log) -> None:
    """A compiled step traces the plain definition."""
    x = single()
    compiled = torch.compile(lambda x: PIPELINE(x).total, fullgraph=True, backend="eager")
    with serves(caplog):  # nothing can be logged in there
        total = compiled(x)
    torch.testing.assert_close(total, plainly(PIPELINE)(x).total)


def test_parameters_that_are_no_input(caplog: Log) -> None:
    """A term that reads a layer trains that layer."""
    layer = nn.Linear(3, 1, bias=False).double()
    pipeline = Pipeline(out=Term(lambda x: layer(x).square().sum())).compiled()
    with hands_over(caplog, "is no input of the pipeline"):
        pipeline(single()).total.backward()
    wanted = torch.autograd.grad(layer(single()).square().sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, wanted)


def test_a_module_as_input(caplog: Log) -> None:
    """Data that is no tensor reaches the term untouched."""
    layer = nn.Linear(3, 1, bias=False).double()
    pipeline = Pipeline(out=Term(lambda m, x: m(x).sum(), inputs=("m", "x"))).compiled()
    with hands_over(caplog, "of the type Linear"):
        pipeline(m=layer, x=single()).total.backward()
    torch.testing.assert_close(layer.weight.grad, single().detach()[None])


def test_random_numbers(caplog: Log) -> None:
    """A term that draws is evaluated as without the compiler, in the same random state."""
    pipeline = Pipeline(noisy=Term(lambda x: (x * torch.rand_like(x)).sum())).compiled()
    for reason in ("draws random numbers", "draws random numbers", "an earlier attempt failed"):
        torch.manual_seed(3)
        with hands_over(caplog, reason):
            total = pipeline(single()).total
        torch.manual_seed(3)
        assert total == plainly(pipeline)(single()).total


def test_policies_weights_and_types(caplog: Log) -> None:
    """A NaN policy, a weight that learns, float16: each by its reason."""
    with hands_over(caplog, "nan_policy"):
        assert_as_plain(PIPELINE.with_nan_policy("skip"), draw, track="norms")
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with hands_over(caplog, "weight of 'l2' is differentiable"):
        PIPELINE.reweighted(l2=weight)(single()).total.backward()
    assert weight.grad == single().detach().square().sum()
    with hands_over(caplog, "float16"):
        PIPELINE(single().detach().half().requires_grad_())
    with hands_over(caplog, "no input requires grad"):
        assert PIPELINE(single().detach()).total == plainly(PIPELINE)(single()).total


def test_a_tracked_base_that_is_a_tensor(caplog: Log) -> None:
    """Its gradient must be taken first; the report is complete."""
    x = single()
    with hands_over(caplog, "give it as a function"):
        result = PIPELINE(x, base=x.sum(), track="gram")
    result.total.backward()
    assert result.gradients.norms["base"] == pytest.approx(3**0.5)


def test_what_does_not_compile(caplog: Log) -> None:
    """A penalty that leaves the graph is evaluated plainly, without another attempt each time."""
    calls = []

    def stubborn(x: Tensor) -> Tensor:
        calls.append(float(x.detach().sum()))
        return x.square().sum() * (1.0 if calls[-1] > -9 else 2.0)

    pipeline = Pipeline(stubborn=Term(stubborn)).compiled()
    for _ in range(4):
        x = single()
        pipeline(x).total.backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())
    with hands_over(caplog, "an earlier attempt failed"):
        pipeline(single())


def test_the_error_of_a_wrong_input_is_the_plain_one() -> None:
    """Not the compiler's; and the name of the term is in it."""
    pipeline = Pipeline(kl=Term(eq.kl_divergence, inputs=("p", "q"))).compiled()
    with pytest.raises(eq.InputError, match="must have one shape") as caught:
        pipeline(p=torch.zeros(2, 3, requires_grad=True), q=torch.zeros(2, 4))
    assert caught.value.__notes__ == ["in the term 'kl'"]
    assert pipeline(p=torch.zeros(2, 3, requires_grad=True), q=torch.zeros(2, 3)).total == 0


def test_a_report_on_demand() -> None:
    """Asked for before any tracking, it is the plain one's."""
    result, plain = PIPELINE(single()), plainly(PIPELINE)(single())
    torch.testing.assert_close(result.gradients.gram, plain.gradients.gram)
    with pytest.raises(eq.GradientError, match="require grad"):
        _ = PIPELINE(single().detach()).gradients


def test_a_report_is_there_before_the_backward_pass() -> None:
    """It came with the values, and stays the same after it."""
    result = PIPELINE(single(), track="norms")
    before = dict(result.gradients.norms)
    (result.total * 7).backward()
    assert result.gradients.norms == before


def test_parameter_gradients() -> None:
    """One backward pass a term, through the parts: the same report as of the plain pipeline."""
    reports = []
    for pipeline in (PIPELINE, plainly(PIPELINE)):
        x = single()
        report = tracking.parameter_gradients(pipeline(x * 2), [x], level="gram")
        reports.append((report.gram, x.grad))
    torch.testing.assert_close(reports[0], reports[1], rtol=1e-12, atol=0)


def test_copies_stay_compiled() -> None:
    """Editing, copying and pickling keep what `compiled` said; equal formulas print equally."""
    pipeline = Pipeline(l1=Term(eq.l1), l2=Term(eq.l2)).compiled()
    for other in (
        pipeline.reweighted(l1=2.0),
        pipeline.without("l1"),
        pipeline.renamed(l1="sparsity"),
        pipeline.with_term("more", Term(eq.l2)),
        copy.deepcopy(pipeline),
        pickle.loads(pickle.dumps(pipeline)),
        pipeline.compiled(),
    ):
        grad_fn = other(single()).total.grad_fn
        assert grad_fn is not None
        assert "Known" in grad_fn.name()
    assert str(pipeline) == "l1(x) + l2(x)"


def test_nothing_is_kept_alive() -> None:
    """An evaluation that was never differentiated frees its graph, tracked or not."""
    for track in (False, "norms"):
        x = single()
        y = x * 1
        result = PIPELINE(y, track=track)
        recorder, hidden = weakref.ref(result._recorder), weakref.ref(y)
        del result, y
        assert recorder() is None
        assert hidden() is None
