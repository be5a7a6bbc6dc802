"""Gradients with respect to parameters: one pass a term, and their sum trains."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, tracking

PIPELINE = Pipeline(
    base=Term(F.mse_loss, inputs=("y", "target")),
    activity=Term(eq.l2, inputs="hidden", weight=0.01),
    decay=Term(eq.l2, inputs="weights", weight=0.1),
)


class Model(nn.Module):
    """Two layers, hidden activations beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 7).double(), nn.Linear(7, 2).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return hidden, self.head(hidden)


@pytest.fixture
def model() -> Model:
    """The same model for each test."""
    torch.manual_seed(1)
    return Model()


def evaluated(model: Model, **options: object) -> eq.Evaluation:
    """The pipeline on one fixed batch."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    target = torch.randn(6, 2, dtype=torch.float64, generator=generator)
    hidden, y = model(x)
    return PIPELINE(  # type: ignore[arg-type]
        y=y, target=target, hidden=hidden, weights=list(model.parameters()), **options
    )


def grads(model: Model) -> list[Tensor]:
    """The parameters' gradients."""
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("level", ["norms", "gram"])
def test_the_sum_is_the_training_gradient(model: Model, level: str) -> None:
    """The gradients set equal those of a plain backward, within rounding."""
    evaluated(model).total.backward()
    expected = [g.clone() for g in grads(model)]
    model.zero_grad()
    tracking.parameter_gradients(evaluated(model), model.parameters(), level=level)  # type: ignore[arg-type]
    # The same terms, added in another order.
    torch.testing.assert_close(grads(model), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("level", ["norms", "gram"])
def test_sparse_gradients_train_as_in_a_backward_pass(level: Any) -> None:
    """Added to one another and to dense ones, at the first call and at the second."""
    w = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).requires_grad_()

    def rows(w: Tensor) -> Tensor:
        return F.embedding(torch.tensor([1, 1]), w, sparse=True).square().sum()

    both = Pipeline(rows=Term(rows, inputs="w"), l2=Term(eq.l2, inputs="w"))
    for pipeline in (both.without("l2"), both):
        report = tracking.parameter_gradients(pipeline(w=w), [w], level=level)
    scales = torch.tensor([[2.0], [10.0], [2.0]], dtype=torch.float64)
    assert w.grad is not None
    torch.testing.assert_close(w.grad.to_dense(), scales * w.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(report.total_norm, (w * (scales - 4 * (scales > 2))).norm())


def test_gradients_accumulate_and_are_scaled(model: Model) -> None:
    """A second call adds to `.grad`, times its scale."""
    tracking.parameter_gradients(evaluated(model), model.parameters())
    once = [g.clone() for g in grads(model)]
    tracking.parameter_gradients(evaluated(model), model.parameters(), scale=3.0)
    torch.testing.assert_close(grads(model), [4 * g for g in once], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("scale", [2.0**16, torch.tensor(2.0**16)], ids=["number", "tensor"])
@pytest.mark.parametrize("level", ["norms", "gram"])
def test_the_scale_is_that_of_the_loss(level: Any, scale: Any) -> None:
    """A gradient of 1e-9 is 0 in float16 unless it is scaled before it gets there."""
    slopes = []
    for scaled_by_hand in (True, False):
        w = torch.ones(2, requires_grad=True)
        result = Pipeline(tiny=Term(lambda h: 1e-9 * h.float().sum()))(w.half() * 1)
        if scaled_by_hand:
            (scale * result.total).backward()
        else:
            report = tracking.parameter_gradients(result, [w], level=level, scale=scale)
        slopes.append(w.grad)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0, atol=0)
    assert slopes[1].min() > 0  # type: ignore[union-attr]
    for norm in (report.weighted["tiny"], report.total_norm):
        # A float16 has 11 bits, and 65536e-9 is a normal one.
        torch.testing.assert_close(norm.float(), torch.tensor(2**0.5 * 1e-9), rtol=2**-11, atol=0)  # type: ignore[union-attr]


def by_hand(model: Model) -> dict[str, Tensor]:
    """Each weighted term's gradient as one vector."""
    result = evaluated(model)
    contributions = {name: term.contribution for name, term in result.results.items()}
    return {
        name: torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    value, list(model.parameters()), retain_graph=True, materialize_grads=True
                )
            ]
        )
        for name, value in contributions.items()
    }


def test_the_report_is_that_of_the_gradients(model: Model) -> None:
    """Norms, total and inner products equal those of gradients taken term by term."""
    vectors = by_hand(model)
    report = tracking.parameter_gradients(evaluated(model), model.parameters(), level="gram")
    stacked = torch.stack([*vectors.values()])
    torch.testing.assert_close(report.gram, stacked @ stacked.T, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(report.total_norm, stacked.sum(0).norm(), rtol=1e-12, atol=0)
    norms = tracking.parameter_gradients(evaluated(model), model.parameters())
    for name, vector in vectors.items():
        torch.testing.assert_close(norms.weighted[name], vector.norm(), rtol=1e-12, atol=0)
    torch.testing.assert_close(norms.total_norm, stacked.sum(0).norm(), rtol=1e-12, atol=0)


def test_terms_on_weights_are_counted(model: Model) -> None:
    """Weight decay, which no activation sees, has the gradient 2·0.1·w."""
    report = tracking.parameter_gradients(evaluated(model), model.parameters())
    length = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(report.weighted["decay"], 0.2 * length, rtol=1e-12, atol=0)


def test_a_part_of_the_model_leaves_the_rest_alone(model: Model) -> None:
    """For the head alone: its norms, no `.grad` anywhere, and a graph that can still train."""
    result = evaluated(model)
    report = tracking.parameter_gradients(
        result, parameters=model.head.parameters(), set_grad=False
    )
    assert not grads(model)
    assert report["activity"].grad_error == "its value does not depend on these parameters"
    result.total.backward()
    head = torch.cat([p.grad.flatten() for p in model.head.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(report.total_norm, head.norm(), rtol=1e-12, atol=0)


def test_a_part_of_the_model_costs_only_its_own_part(model: Model) -> None:
    """For the head alone no gradient is computed further down, in any of the passes."""
    passed = {"head": 0, "body": 0}
    result = evaluated(model)
    for name in passed:

        def count(_: Tensor, name: str = name) -> None:
            passed[name] += 1

        getattr(model, name).weight.register_hook(count)
    tracking.parameter_gradients(result, model.head.parameters(), set_grad=False)
    # The base and the decay reach the head's weight; nothing may reach the body's.
    assert passed == {"head": 2, "body": 0}


def test_groups_are_reported_by_themselves(model: Model) -> None:
    """A mapping gives one row a group, and squared norms add up over the groups."""
    groups = {"body": model.body.parameters(), "head": model.head.parameters()}
    report = tracking.parameter_gradients(evaluated(model), groups)
    parts = [report.by_input[name].total_norm for name in groups]
    body = torch.cat([p.grad.flatten() for p in model.body.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(parts[0], body.norm(), rtol=1e-12, atol=0)
    torch.testing.assert_close(report.total_norm, torch.stack(parts).norm(), rtol=1e-12, atol=0)


def test_shares_are_compared_with_those_at_the_inputs(model: Model) -> None:
    """`deviations` is the distance between each term's parts of all norms, here and there."""
    result = evaluated(model)
    inputs = result.gradients
    report = tracking.parameter_gradients(result, model.parameters(), check_against=inputs)

    def parts(of: eq.Gradients) -> Tensor:
        norms = torch.stack([norm for norm in of.weighted.values() if norm is not None])
        return norms / norms.sum()

    assert report.deviations is not None
    torch.testing.assert_close(
        torch.stack([*report.deviations.values()]),
        (parts(report) - parts(inputs)).abs(),
        rtol=1e-12,
        atol=0,
    )
    assert max(report.deviations.values()) > 0.01


def test_a_tracked_result_keeps_its_metrics(model: Model) -> None:
    """Metrics asked for afterwards still hold the norms at the inputs, though the graph is gone."""
    result = evaluated(model, track=True)
    tracking.parameter_gradients(result, model.parameters())
    expected, metrics = evaluated(model).gradients.norms, result.metrics()
    for name in ("base", "activity", "decay"):
        assert metrics[f"{name}_grad_norm"] == pytest.approx(float(expected[name]), rel=1e-12)  # type: ignore[arg-type]


def test_a_backward_pass_after_it_fails(model: Model) -> None:
    """The gradients are set: a second time they would count twice."""
    result = evaluated(model)
    tracking.parameter_gradients(result, model.parameters())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.total.backward()


@pytest.mark.parametrize("level", ["norms", "gram"])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_each_gradient_has_memory_of_its_own(level: Any, scale: float) -> None:
    """One tensor may be the gradient of two parameters, or of each entry; clipping is in place."""
    a, b, c = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    result = Pipeline(
        both=Term(lambda a, b: (a + b).square().sum(), inputs=("a", "b")),
        flat=Term(lambda c: c.sum(), inputs="c"),
    )(a=a, b=b, c=c)
    tracking.parameter_gradients(result, [a, b, c], level=level, scale=scale)
    torch.nn.utils.clip_grad_norm_([a, b, c], 1.0)
    # Gradients 4, 4 and 1 an entry, whatever they are multiplied with: of length √(3·33).
    for parameter, size in ((a, 4.0), (b, 4.0), (c, 1.0)):
        wanted = torch.full((3,), size / 99**0.5, dtype=torch.float64)
        # The clip divides by the norm plus 1e-6.
        torch.testing.assert_close(parameter.grad, wanted, rtol=2e-7, atol=0)


def test_terms_without_gradient_are_reported(model: Model) -> None:
    """A weight of 0 and a value without graph are reported with their reasons; the rest trains."""
    x = torch.randn(4, 5, dtype=torch.float64)
    hidden, _ = model(x)
    pipeline = Pipeline(
        live=Term(eq.l2, inputs="hidden"),
        silent=Term(eq.l1, inputs="hidden", weight=0.0),
        rounded=Term(lambda h: h.round().detach().sum(), inputs="hidden"),
    )
    report = tracking.parameter_gradients(pipeline(hidden=hidden), model.body.parameters())
    assert report["silent"].grad_error == "its weight is 0, so that no gradient flows"
    assert report["rounded"].grad_error == "its value has no graph"
    assert len(grads(model)) == 2


def test_an_empty_generator_is_refused(model: Model) -> None:
    """Parameters that were read before are an error, not a report of nothing."""
    parameters = model.parameters()
    list(parameters)
    with pytest.raises(eq.InputError, match="a generator can be read only once"):
        tracking.parameter_gradients(evaluated(model), parameters)


def test_a_result_without_graph_is_refused(model: Model) -> None:
    """Under `no_grad` there is nothing to differentiate."""
    with torch.no_grad():
        result = evaluated(model)
    with pytest.raises(eq.GradientError, match=r"need a term with a graph, got none"):
        tracking.parameter_gradients(result, model.parameters())


def test_signed_shares_are_compared_where_both_reports_have_them(model: Model) -> None:
    """With inner products here and there, `deviations` is the distance of the signed shares."""
    result = evaluated(model, track="gram")
    inputs = result.gradients
    report = tracking.parameter_gradients(
        result, model.parameters(), level="gram", check_against=inputs
    )
    assert report.deviations is not None
    assert set(report.deviations) == {"base", "activity", "decay"}
    for name, deviation in report.deviations.items():
        wanted = (report.shares[name] - inputs.shares[name]).abs()
        torch.testing.assert_close(deviation, wanted, rtol=1e-12, atol=1e-15)
    assert max(report.deviations.values()) > 0.01


def test_reports_without_a_common_term_deviate_nowhere(model: Model) -> None:
    """Nor does one without any gradient: there is nothing to compare."""
    x = torch.ones(2, requires_grad=True)
    other = Pipeline(off=Term(eq.l1, differentiable=False))(x).gradients
    report = tracking.parameter_gradients(evaluated(model), model.parameters(), check_against=other)
    assert report.deviations == {}


def test_a_single_parameter_is_a_group(model: Model) -> None:
    """A mapping from names to parameters, as a model has it, gives one row each."""
    report = tracking.parameter_gradients(evaluated(model), dict(model.named_parameters()))
    weight = model.head.weight
    assert weight.grad is not None
    torch.testing.assert_close(
        report.by_input["head.weight"].total_norm, weight.grad.norm(), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda m: [*m.parameters(), m.head.weight], r"hold each tensor once, got .* count twice"),
        (
            lambda m: {"all": m.parameters(), "head": m.head.parameters()},
            r"in 'all' and again in 'head'\. .* Use groups that do not overlap",
        ),
        (lambda m: m.named_parameters(), r"must hold tensors, got tuple\. Use `model\.parameters"),
        (lambda m: m, r"must hold tensors, got Model\. Use `model\.parameters\(\)`"),
        (lambda m: [2 * m.head.weight], r"`parameters\[0\]` must be a leaf to have a `\.grad`"),
    ],
    ids=["twice", "overlap", "named", "module", "computed"],
)
def test_what_cannot_be_parameters_is_refused(model: Model, choose: Any, message: str) -> None:
    """Nothing is differentiated, and no `.grad` set, where the parameters are wrong."""
    result = evaluated(model)
    with pytest.raises(eq.InputError, match=message):
        tracking.parameter_gradients(result, choose(model))
    assert not grads(model)
    result.total.backward()  # the graph is whole


def test_parameters_that_no_term_reaches_are_refused(model: Model) -> None:
    """To train them would be to stand still in silence; to look at them is allowed."""
    stranger = torch.ones(2, requires_grad=True)
    with pytest.raises(eq.GradientError, match=r"got parameters that none of them reaches"):
        tracking.parameter_gradients(evaluated(model), [stranger])
    assert stranger.grad is None
    report = tracking.parameter_gradients(evaluated(model), [stranger], set_grad=False)
    assert set(report.errors.values()) == {"its value does not depend on these parameters"}


def test_after_a_backward_pass_it_is_too_late(model: Model) -> None:
    """The graph is gone: an error that says so and what to do, and no second addition."""
    result = evaluated(model)
    result.total.backward()
    before = [g.clone() for g in grads(model)]
    with pytest.raises(eq.GradientError, match=r"graph is gone .* Use `parameter_gradients` in"):
        tracking.parameter_gradients(result, model.parameters())
    torch.testing.assert_close(grads(model), before, rtol=0, atol=0)


def test_an_unknown_level_is_refused(model: Model) -> None:
    """The levels are those of `track=`, without the bools."""
    with pytest.raises(eq.OptionError, match=r"`level` must be 'norms' or 'gram', got 'gam'"):
        tracking.parameter_gradients(evaluated(model), model.parameters(), level="gam")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (
            lambda m, r: tracking.parameter_gradients(r.total, m.parameters()),
            eq.InputTypeError,
            r"`result` must be what a pipeline returned, got Tensor\. Use the whole evaluation",
        ),
        (
            lambda m, r: tracking.parameter_gradients(r, m.parameters(), check_against=True),
            eq.InputTypeError,
            r"`check_against` must be a gradient report, got bool\. Use `result\.gradients`",
        ),
        (
            lambda m, r: tracking.parameter_gradients(r, m.parameters(), set_grad="no"),
            eq.OptionError,
            r"`set_grad` must be True or False, got 'no'",
        ),
    ],
    ids=["total", "check", "text"],
)
def test_what_it_cannot_work_with_is_refused(
    model: Model, ask: Any, error: type[Exception], message: str
) -> None:
    """Before anything is differentiated."""
    with pytest.raises(error, match=message):
        ask(model, evaluated(model))
    assert not grads(model)
