"""Gradient reports in eager mode: right in every figure, free of charge, and harmless."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise import Pipeline, Term
from equipoise._figures import Figures
from equipoise._numerics import CHUNK
from equipoise._recorder import Recorder
from tests.contracts.test_device import NoWaiting
from tests.penalties.assertions import assert_close, assert_equal
from tests.pipeline.assertions import (
    LEVELS,
    assert_norm,
    assert_relative,
    assert_report,
    assert_same_bits,
    assert_same_figures,
    assert_tracking_changes_no_bit,
    by_hand,
    trained,
)
from tests.pipeline.networks import BASES, TERMS, all_terms, evaluated, network, pipeline

SINGLE = 1e-6
"""Norms of float32 gradients are promised to be exact to 1e-6."""


def ramp(n: int = 4) -> Tensor:
    """1, 2, 3, … as a float64 leaf."""
    return torch.arange(1.0, n + 1, dtype=torch.float64).requires_grad_()


def two_terms(weight: float = 0.5) -> Pipeline:
    """Gradients 2x and `weight` everywhere."""
    return Pipeline(l2=Term(eq.l2), sum=Term(lambda x: x.sum(), weight=weight))


# Tracking changes nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BASES)
def test_tracking_changes_no_bit_of_the_training(kind: str, dtype: torch.dtype) -> None:
    """Loss and gradients of a model are the same to the last bit, whatever form the base has."""

    def evaluate(track: Any) -> tuple[eq.Evaluation, list[Tensor]]:
        result, net = evaluated(kind, track, dtype)
        return result, net.leaves

    assert_tracking_changes_no_bit(evaluate)


def test_tracking_changes_no_bit_at_the_inputs() -> None:
    """Also where the inputs themselves are the leaves, read by several terms each."""

    def evaluate(track: Any) -> tuple[eq.Evaluation, list[Tensor]]:
        net = network(torch.float32)
        leaves = {key: net.inputs[key].detach().requires_grad_() for key in ("hidden", "student")}
        result = pipeline("term")(**{**net.inputs, **leaves}, step=3, track=track)
        return result, [*leaves.values(), *net.leaves]

    assert_tracking_changes_no_bit(evaluate)


def test_tracking_changes_no_bit_of_a_learned_weight() -> None:
    """A weight that requires grad gets its own gradient, the value, tracked or not."""
    x, values = ramp(), []
    for track in (False, *LEVELS):
        weight = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
        learned = Pipeline(l2=Term(eq.l2, weight=weight))
        result = learned(x, track=track)
        result.total.backward()
        assert_equal(weight.grad, 30.0)
        values.append(result.gradients if track else None)
    for report in values[1:]:
        assert_norm(report["l2"].grad_norm, 2 * math.sqrt(30))
        assert_norm(report["l2"].grad_norm_weighted, math.sqrt(30) / 2)


@pytest.mark.parametrize("track", LEVELS)
def test_a_report_is_of_the_weight_that_was_used(track: str) -> None:
    """An optimizer that changes a learned weight in place changes no figure of what was before."""
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    result = Pipeline(l2=Term(eq.l2, weight=weight))(ramp(), track=track)
    history = eq.tracking.History()
    result.total.backward()
    history.add(result)
    told = (result.metrics(), result.to_dict(), str(result))
    torch.optim.SGD([weight], lr=0.1).step()
    assert weight.item() == pytest.approx(0.5 - 0.1 * 30)
    assert (result.metrics(), result.to_dict(), str(result)) == told
    assert told[0]["l2_grad_norm"] == pytest.approx(2 * math.sqrt(30))
    assert history._read(None)[0].weights == {"l2": 0.5}
    assert not result.gradients.weights[0].requires_grad  # type: ignore[union-attr]


def test_values_are_in_the_graph_of_their_own_terms() -> None:
    """A term's value can be differentiated by itself, and that is not taken for the training."""
    x = ramp()
    for track in LEVELS:
        result = two_terms()(x, track=track)
        (alone,) = torch.autograd.grad(result.terms["l2"].value, x, retain_graph=True)
        assert_equal(alone, 2 * x)
        result.total.backward()
        again = torch.autograd.grad(two_terms()(x).terms["sum"].contribution, x)[0]
        assert_equal(again, torch.full((4,), 0.5))
        assert_report(result.gradients, by_hand(two_terms().terms, {"x": x}))


# The figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("kind", BASES)
def test_observed_norms_are_those_of_autograd(kind: str, track: str) -> None:
    """What the probes see is the gradient of each term by hand, at each input and at all."""
    result, net = evaluated(kind, track)
    result.total.backward()
    assert_report(result.gradients, by_hand(all_terms(kind), net.inputs, step=3))


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("kind", BASES)
def test_norms_on_demand_are_those_of_autograd(kind: str, track: Any) -> None:
    """Before any backward pass the report is made on demand, tracked or not."""
    result, net = evaluated(kind, track)
    report = result.gradients
    assert_report(report, by_hand(all_terms(kind), net.inputs, step=3))
    assert (report.grams is None) == (track == "norms")
    assert report is result.gradients  # made once


@pytest.mark.parametrize("kind", BASES)
def test_every_way_to_a_report_leads_to_the_same(kind: str) -> None:
    """Observed and on demand, with norms and with inner products: one report."""
    reports = []
    for track in LEVELS:
        result, _ = evaluated(kind, track)
        reports.append(result.gradients)
        result.total.backward()
        reports.append(result.gradients)
    assert_same_figures(*reports)


def test_norms_are_those_of_difference_quotients() -> None:
    """Moving each entry of an input by itself moves each term as its reported norm says."""
    result, net = evaluated("term", "norms")
    result.total.backward()
    inputs = {key: net.inputs[key].detach() for key in net.inputs if key != "weights"}
    for name, term in all_terms("term").items():
        if term.inputs == ("weights",):
            continue
        squares = sum(quotients(term, inputs, key).square().sum() for key in ("hidden", "student"))
        # Central quotients are off by h²·f‴/6 with h = 1e-5 and by 2⁻⁵³/h = 1e-11 for each of the
        # 54 entries; both absolutely, against norms of 0.1 and more.
        assert_norm(result.gradients[name].grad_norm, squares.sqrt(), within=1e-7)


def quotients(term: Term, inputs: dict[str, Tensor], key: str) -> Tensor:
    """Central difference quotients of a term by each entry of an input."""
    if key not in (term.inputs or ()):
        return torch.zeros(1)

    def value(moved: Tensor) -> Tensor:
        given = {**inputs, key: moved}
        return term.penalty(*(given[k] for k in term.inputs or ()), **term.options)

    x, h = inputs[key], 1e-5
    axes = h * torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    return torch.stack([(value(x + axis) - value(x - axis)) / (2 * h) for axis in axes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("track", LEVELS)
def test_low_precision_is_measured_in_high(track: str, dtype: torch.dtype) -> None:
    """The norms are those of the low-precision gradients, not low-precision norms."""
    slopes = torch.linspace(-3, 3, 1001).to(dtype)
    x = torch.zeros(1001, dtype=dtype, requires_grad=True)
    result = Pipeline(tilt=Term(lambda x: (slopes * x).sum()))(x, track=track)
    result.total.backward()
    assert_norm(result.gradients["tilt"].grad_norm, slopes.double().norm(), within=SINGLE)


@pytest.mark.parametrize("way", ["observed", "on demand"])
def test_gram_cosines_shares_and_contributions(way: str) -> None:
    """Of gradients (3, 0), (0, 4) and 2·(−1, 1) every figure of the report is known by hand."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = Pipeline(
        right=Term(lambda x: 3 * x[0] + 1),
        up=Term(lambda x: 4 * x[1] + 2),
        back=Term(lambda x: x[1] - x[0] + 3, weight=2.0),
    )(x, track="gram")
    if way == "observed":
        result.total.backward()
    report = result.gradients
    wanted = torch.tensor([[9.0, 0.0, -6.0], [0.0, 16.0, 8.0], [-6.0, 8.0, 8.0]])
    assert_equal(report.gram, wanted)
    assert_equal(report.gram.diagonal(), report.squares[0, :-1])
    root = math.sqrt(0.5)
    cosines = [[1.0, 0.0, -root], [0.0, 1.0, root], [-root, root, 1.0]]
    assert_close(report.cosines, torch.tensor(cosines, dtype=torch.float64))
    assert_close(report.cosine("back", "up"), root)
    # The sum is (1, 6), of square 37; the terms contribute 3, 24 and 10 of it.
    assert_relative(report.total_norm, math.sqrt(37))
    for name, part in {"right": 3, "up": 24, "back": 10}.items():
        assert_relative(report.shares[name], part / 37)
    assert report.dominant() == "up"
    (conflict,) = report.conflicts()
    assert (conflict.first, conflict.second) == ("back", "right")
    assert conflict.cosine == pytest.approx(-root, rel=1e-12)
    assert report.conflicts(below=-0.8) == []
    with pytest.raises(eq.OptionError, match=r"`below` must be a finite number, got '-0\.1'"):
        report.conflicts(below="-0.1")  # type: ignore[arg-type]
    pairs = [(c.first, c.second) for c in report.conflicts(below=0.5)]
    assert pairs == [("back", "right"), ("up", "right")]
    assert [r.contribution.item() for r in result.terms.values()] == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("kind", BASES)
def test_shares_sum_to_one_and_gram_to_the_square_of_the_total(kind: str) -> None:
    """1ᵀG1 = ‖g‖², the diagonal holds squared norms, and the signed shares are all of it."""
    result, _ = evaluated(kind, "gram")
    result.total.backward()
    for report in (result.gradients, *result.gradients.by_input.values()):
        assert_relative(report.gram.sum(), report.total_norm.square())
        assert_relative(report.gram.diagonal(), report.squares[:, :-1].sum(0))
        assert_relative(torch.stack([*report.shares.values()]).sum(), 1.0)
    shares = torch.stack([*result.gradients.shares.values()])
    assert shares.min() < 0 < shares.max()


@pytest.mark.parametrize("level", LEVELS)
def test_a_report_prints_as_a_table(level: str) -> None:
    """Norms before and after the weight, shares where known, a dash where there is none."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = Pipeline(
        right=Term(lambda x: 3 * x[0]),
        up=Term(lambda x: 2 * x[1], weight=2.0),
        off=Term(lambda x: x.sum(), differentiable=False),
    )(x, track=level)
    result.total.backward()
    rows = [line.split() for line in str(result.gradients).splitlines()]
    shares = [["share"], ["0.36"], ["0.64"], ["–"], []] if level == "gram" else [[]] * 5
    assert rows == [
        ["term", "before", "weight", "gradient", *shares[0]],
        ["right", "3", "3", *shares[1]],
        ["up", "2", "4", *shares[2]],
        ["off", "–", "–", *shares[3]],
        ["total", "5"],
    ]
    assert repr(result.gradients) == str(result.gradients)


def test_inner_products_need_the_gradients_themselves() -> None:
    """A report of norms refuses what norms do not tell, and says how to get it."""
    result = two_terms()(ramp(), track="norms")
    result.total.backward()
    for ask in (
        lambda: result.gradients.gram,
        lambda: result.gradients.cosines,
        lambda: result.gradients.shares,
        lambda: result.gradients.cosine("l2", "sum"),
        result.gradients.conflicts,
    ):
        with pytest.raises(eq.GradientError, match=r"got a report of norms\. Use `track='gram'`"):
            ask()
    assert result.gradients.dominant() == "l2"


def test_a_report_names_the_terms_it_has() -> None:
    """Asking for a term that is not there suggests the near one."""
    report = two_terms()(ramp()).gradients
    with pytest.raises(eq.InputError, match=r"has no term 'sums'\. Did you mean 'sum'\?"):
        report["sums"]
    with pytest.raises(eq.InputError, match="has no term 'base'"):
        report.cosine("l2", "base")


def test_the_order_of_terms_changes_only_the_order() -> None:
    """The same norms, cosines and total by name, whichever way round the terms are written."""
    reports = []
    for names in (list(TERMS), list(reversed(TERMS))):
        inputs = network().inputs
        del inputs["labels"]
        result = Pipeline(**{name: TERMS[name] for name in names})(**inputs, step=3, track="gram")
        result.total.backward()
        reports.append(result.gradients)
    first, second = reports
    assert first.names == tuple(reversed(second.names))
    assert_relative(first.total_norm, second.total_norm)
    for name in first.names:
        assert_norm(first[name].grad_norm, second[name].grad_norm)
        # The sums of the cosines' products run in another order: absolutely, of numbers up to 1.
        assert_close(first.cosine(name, "distill"), second.cosine(name, "distill"), within=1e-12)


@pytest.mark.parametrize("track", LEVELS)
def test_complex_entries_count_as_two(track: str) -> None:
    """The gradient of Σ|z|² is 2z, of length 2·√(|z₁|² + |z₂|²)."""
    z = torch.tensor([3 + 4j, 1 - 2j], dtype=torch.complex128, requires_grad=True)
    terms = {"power": Term(lambda z: z.abs().square().sum()), "real": Term(lambda z: z.real.sum())}
    result = Pipeline(**terms)(z, track=track)
    on_demand = result.gradients
    result.total.backward()
    for report in (on_demand, result.gradients):
        assert_norm(report["power"].grad_norm, 2 * math.sqrt(30))
        assert_norm(report.total_norm, math.sqrt(7**2 + 8**2 + 3**2 + 4**2))


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_nested_tensor_counts_as_its_values(track: Any) -> None:
    """Ragged examples in one jagged tensor have the norm of all their entries."""
    rows = [torch.tensor([[3.0]]), torch.tensor([[0.0], [4.0]])]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    result = Pipeline(l2=Term(lambda x: x.values().square().sum()))(x, track=track)
    report = result.gradients
    result.total.backward()
    assert x.grad is not None
    assert_equal(x.grad.values(), 2 * x.values())
    if track:
        report = result.gradients
    assert_norm(report["l2"].grad_norm, 10.0)


def rows(i: Tensor, w: Tensor) -> Tensor:
    """Squares of some rows of a table, whose gradient is sparse."""
    return F.embedding(i, w, sparse=True).square().sum()


@pytest.mark.parametrize("base", ["none", "tensor"])
@pytest.mark.parametrize("order", [("rows", "l2"), ("l2", "rows"), ("rows", "more")])
@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_sparse_gradient_counts_as_its_entries(
    track: Any, order: tuple[str, ...], base: str
) -> None:
    """Row 2 is read twice, and its gradient is 4w; beside dense gradients, in either order."""
    w = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3).requires_grad_()
    i, j = torch.tensor([1, 2, 2]), torch.tensor([0, 2])
    by_name = {
        "rows": Term(partial(rows, i), inputs="w"),
        "more": Term(partial(rows, j), inputs="w", weight=0.5),
        "l2": Term(eq.l2, inputs="w", weight=0.5),
    }
    terms = {name: by_name[name] for name in order}
    task = w.sum() if base == "tensor" else None
    result = Pipeline(**terms)(w=w, base=task, track=track)
    counts = {"rows": [0.0, 1, 2, 0], "more": [1.0, 0, 1, 0], "l2": [1.0, 1, 1, 1]}
    slopes = {n: 2 * w * torch.tensor(c, dtype=w.dtype)[:, None] for n, c in counts.items()}
    total = sum(terms[name].weight * slopes[name] for name in order) + (base == "tensor")
    on_demand = result.gradients
    result.total.backward()
    assert w.grad is not None
    assert_close(w.grad.to_dense(), total)
    for report in (on_demand, result.gradients if track else on_demand):
        for name in order:
            assert_norm(report[name].grad_norm, slopes[name].norm())
        assert_norm(report.total_norm, total.norm())
        if track == "gram":
            inner = (slopes[order[0]] * slopes[order[1]]).sum()
            wanted = inner / slopes[order[0]].norm() / slopes[order[1]].norm()
            assert_relative(report.cosine(*order), wanted)


# Whatever is done with the total -----------------------------------------------------------------


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("factor", [1024.0, 1 / 3, -1.0])
def test_scaling_the_loss_does_not_change_the_report(kind: str, factor: float) -> None:
    """Loss scaling and division for accumulation are taken out again."""
    reports = []
    for by in (1.0, factor):
        for track in LEVELS:
            result, _ = evaluated(kind, track)
            (by * result.total).backward()
            reports.append(result.gradients)
    assert_same_figures(*reports)
    products = [r.gram for r in reports if r.grams is not None]
    torch.testing.assert_close(*products, rtol=1e-12, atol=1e-12)  # entries near 0 among those of 1


def test_a_gradient_scaler_does_not_change_the_report() -> None:
    """With `GradScaler` the report is that of the unscaled loss, and the step is the same."""
    reports, weights = [], []
    for scaling in (False, True):
        result, net = evaluated("term", "norms", torch.float32)
        optimizer = torch.optim.SGD(net.leaves, lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaling)
        scaler.scale(result.total).backward()
        scaler.step(optimizer)
        scaler.update()
        reports.append(result.gradients)
        weights.append(net.leaves[0])
    # A power of two changes no digit of float32.
    assert_same_figures(*reports)
    assert_same_bits(*weights)


def test_accumulated_batches_report_their_own() -> None:
    """Two micro-batches that add up in one `.grad` are reported each by itself."""
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for scale in (1.0, 5.0):
        x = torch.arange(4.0, dtype=torch.float64) * scale
        h = w * x
        result = two_terms()(h, track="norms")
        (result.total / 2).backward()
        assert_report(result.gradients, by_hand(two_terms().terms, {"x": h}))
    assert_close(w.grad, sum((2 * w * x * x + 0.5 * x) / 2 for x in micro_batches()))


def micro_batches() -> list[Tensor]:
    """The inputs of the test above."""
    return [torch.arange(4.0, dtype=torch.float64) * scale for scale in (1.0, 5.0)]


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("kind", ["term", "callable"])
def test_penalty_and_base_are_seen_alone(kind: str, track: str) -> None:
    """Backward of one of them shows its gradients, and says that the others were left out."""
    for part in ("penalty", "base"):
        result, net = evaluated(kind, track)
        (1024 * getattr(result, part)).backward()
        report = result.gradients
        expected = by_hand(all_terms(kind), net.inputs, step=3)
        for name in report.names:
            if (name == "base") == (part == "base"):
                assert_norm(report[name].grad_norm_weighted, expected.vector(name).norm())
            else:
                assert report[name].grad_norm is None
                assert "or the backward pass left it out" in str(report[name].grad_error)
        taken = [expected.vector(n) for n in report.names if n not in report.errors]
        assert_norm(report.total_norm, torch.stack(taken).sum(0).norm())


@pytest.mark.parametrize("track", LEVELS)
def test_base_and_penalty_scaled_apart(track: str) -> None:
    """Each is reported without the factor it was given outside."""
    result, net = evaluated("term", track)
    (8 * result.base - 2 * result.penalty).backward()
    expected = by_hand(all_terms("term"), net.inputs, step=3)
    for name, norm in result.gradients.weighted.items():
        assert_norm(norm, expected.vector(name).norm())


@pytest.mark.parametrize("track", LEVELS)
def test_a_base_reached_by_its_own_value_is_scaled_as_the_rest(track: str) -> None:
    """Added up by hand, base and penalty are reported as they are in the total, in any pass."""
    result, net = evaluated("term", track)
    expected = by_hand(all_terms("term"), net.inputs, step=3)
    (8 * result.total).backward(retain_graph=True)
    assert_report(result.gradients, expected)
    (2 * (result.penalty + result.results["base"].value)).backward()
    assert_report(result.gradients, expected)


@pytest.mark.parametrize("track", LEVELS)
def test_contributions_added_up_by_hand_are_reported_as_unseen(track: str) -> None:
    """Nothing tells what they were scaled with: the report says so, and the logger goes on."""
    x = ramp()
    result = Pipeline(l2=Term(eq.l2), l1=Term(eq.l1))(x, track=track)
    torch.stack([term.contribution for term in result.terms.values()]).sum().backward()
    assert_equal(x.grad, 2 * x + 1)
    metrics = result.metrics()
    assert (metrics["l2"], metrics["l2_grad_norm_error"]) == (30.0, 1.0)
    assert math.isnan(metrics["total_grad_norm"])
    assert "l2" in str(result)
    for term in result.gradients.terms.values():
        assert term.grad_norm is None
        assert "began neither at the total nor at the penalty or base" in str(term.grad_error)


@pytest.mark.parametrize("track", LEVELS)
def test_a_second_backward_pass_reports_the_same(track: str) -> None:
    """With a retained graph the second pass replaces the first and does not add to it."""
    result, net = evaluated("callable", track)
    result.total.backward(retain_graph=True)
    first = result.gradients
    (3 * result.total).backward()
    assert_same_figures(first, result.gradients)
    assert net.leaves[0].grad is not None


@pytest.mark.parametrize("track", LEVELS)
def test_a_pass_of_the_penalty_replaces_one_of_the_base(track: str) -> None:
    """What the base did to an input that the penalty does not read is no part of its norm."""
    a, b = ramp(2), ramp(2)
    pipeline = Pipeline(
        base=Term(lambda a, b: (a * b).sum(), inputs=("a", "b")), l1=Term(eq.l1, inputs="b")
    )
    result = pipeline(a=a, b=b, track=track)
    result.base.backward(retain_graph=True)  # type: ignore[union-attr]
    assert_norm(result.gradients["base"].grad_norm, math.sqrt(10))
    assert result.gradients["l1"].grad_norm is None
    result.penalty.backward()
    assert_norm(result.gradients["l1"].grad_norm, math.sqrt(2))
    assert result.gradients["base"].grad_norm is None
    assert_norm(result.gradients.total_norm, math.sqrt(2))


@pytest.mark.parametrize("track", LEVELS)
def test_a_pass_that_ends_early_is_not_taken_for_the_whole(track: str) -> None:
    """Of a term whose inputs were seen in part there is no norm; one that ignores them has one."""
    a, b = ramp(2), ramp(2)
    terms = {
        "both": Term(lambda a, b: (a * b).sum(), inputs=("a", "b")),
        "first": Term(lambda a, b: (a * b.detach()).sum(), inputs=("a", "b")),
        "second": Term(eq.l1, inputs="b"),
    }
    result = Pipeline(**terms)(a=a, b=b, track=track)
    result.total.backward(inputs=[a])
    assert_equal(a.grad, 2 * b)
    report = result.gradients
    assert report["both"].grad_error == "the backward pass ended before it came to the input 'b'"
    assert_norm(report["first"].grad_norm, b.norm())
    assert "or the backward pass left it out" in str(report["second"].grad_error)
    assert report.total_norm.isnan()


@pytest.mark.parametrize("track", LEVELS)
def test_gradients_of_a_batch_of_directions_are_not_measured(track: str) -> None:
    """`is_grads_batched` sends what has no single norm: training goes on, the report says why."""
    x = ramp(2)
    result = two_terms()(x, track=track)
    (slopes,) = torch.autograd.grad(
        result.total * torch.ones(2, dtype=torch.float64), x, torch.eye(2), is_grads_batched=True
    )
    assert_equal(slopes, (2 * x + 0.5).expand(2, 2))
    for term in result.gradients.terms.values():
        assert term.grad_norm is None
        assert "Batching rule not implemented" in str(term.grad_error)
    assert result.gradients.total_norm.isnan()


def test_a_norm_that_cannot_be_taken_does_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The term whose norm failed says why, the others stay, and the next pass may succeed."""
    x = ramp()
    slope = 2 * x.detach() + 0.5

    def failing(tensors: list[Tensor]) -> Tensor:
        if torch.equal(tensors[0], 2 * x):
            raise torch.OutOfMemoryError("no memory\nleft")
        return torch.linalg.vector_norm(tensors[0])

    result = two_terms()(x, track="norms")
    with monkeypatch.context() as patch:
        patch.setattr("equipoise._recorder.total_norm", failing)
        result.total.backward(retain_graph=True)
    assert_equal(x.grad, slope)
    assert result.gradients["l2"].grad_error == "no memory"
    assert_norm(result.gradients["sum"].grad_norm, 2.0)
    assert result.gradients.total_norm.isnan()
    result.total.backward()
    assert_norm(result.gradients["l2"].grad_norm, 2 * x.norm())
    assert_norm(result.gradients.total_norm, slope.norm())


@pytest.mark.parametrize("track", LEVELS)
def test_only_passes_from_the_total_are_reported(track: str) -> None:
    """Differentiating one term, or a gradient, leaves the report as the training pass made it."""
    x = ramp()
    result = two_terms()(x, track=track)
    (gradient,) = torch.autograd.grad(result.total, x, create_graph=True)
    expected = by_hand(two_terms().terms, {"x": x})
    assert_report(result.gradients, expected)
    gradient.square().sum().backward(retain_graph=True)
    assert_report(result.gradients, expected)
    result.terms["sum"].value.backward(retain_graph=True)
    assert_report(result.gradients, expected)


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("kind", BASES)
def test_double_backward_is_that_of_the_untracked_total(kind: str, track: str) -> None:
    """The gradient of a squared gradient norm is the same to the last bit."""
    slopes = []
    for level in (False, track):
        result, net = evaluated(kind, level)
        first = torch.autograd.grad(result.total, net.leaves, create_graph=True)
        slopes.append(torch.autograd.grad(sum(g.square().sum() for g in first), net.leaves))
    for plain, tracked in zip(*slopes, strict=True):
        assert_same_bits(tracked, plain)
        assert plain.abs().max() > 0


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_the_derivative_forward_is_that_of_the_untracked_total(track: Any, policy: Any) -> None:
    """Along v it is ⟨∇total, v⟩, and the report is that of the backward pass as ever."""
    x, v = ramp(), torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        result = two_terms().with_nan_policy(policy)(dual, track=track)
        tangent = torch.autograd.forward_ad.unpack_dual(result.total).tangent
        assert_close(tangent, ((2 * x + 0.5) * v).sum())
        result.total.backward()
    if track:
        assert_norm(result.gradients["l2"].grad_norm, 2 * x.norm())


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_gradient_penalty_is_a_term_like_any_other(track: Any) -> None:
    """Its own differentiation inside is no backward pass: value, gradients and norms are right.

    The critic's slope is 2wx a sample, so (‖2wx‖ − 1)² moves w, and x too.
    """
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[3.0, 4.0], [1.0, 0.5]], dtype=torch.float64, requires_grad=True)

    def by_formula(w: Tensor, x: Tensor) -> Tensor:
        return ((2 * w * x).norm(dim=1) - 1).square().mean()

    penalty = partial(eq.gradient_penalty, lambda x: (w * x * x).sum(-1))
    result = Pipeline(steep=Term(penalty, weight=0.5), l2=Term(eq.l2))(x, track=track)
    assert_close(result.terms["steep"].value, by_formula(w, x))
    slopes = torch.autograd.grad(by_formula(w, x), (w, x))
    on_demand = result.gradients
    result.total.backward()
    assert_close(w.grad, 0.5 * slopes[0])
    assert_close(x.grad, 0.5 * slopes[1] + 2 * x)
    for report in (on_demand, result.gradients):
        assert_norm(report["steep"].grad_norm, slopes[1].norm())
        assert_norm(report["l2"].grad_norm, 2 * x.norm())


def test_the_hessian_through_a_tracked_total_is_right() -> None:
    """Of Σx³ + Σx² it is 6x + 2, and the report stays that of the first derivative."""
    x = ramp()
    result = Pipeline(cube=Term(lambda x: x.pow(3).sum()), l2=Term(eq.l2))(x, track="gram")
    (slope,) = torch.autograd.grad(result.total, x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    assert_close(curve, 6 * x + 2)
    assert_norm(result.gradients["l2"].grad_norm, 2 * x.norm())


# Inputs ------------------------------------------------------------------------------------------


def test_every_input_of_a_term_counts() -> None:
    """Of Σa·b the norms are ‖b‖ by a, ‖a‖ by b, and √(‖a‖² + ‖b‖²) by both."""
    a, b = ramp(), (2 * ramp()).detach().requires_grad_()
    for track in LEVELS:
        product = Pipeline(product=Term(lambda a, b: (a * b).sum(), inputs=("a", "b"), weight=3.0))
        result = product(a=a, b=b, track=track)
        result.total.backward()
        report = result.gradients
        assert_norm(report.by_input["a"]["product"].grad_norm, b.norm())
        assert_norm(report.by_input["b"]["product"].grad_norm, a.norm())
        assert_norm(report["product"].grad_norm, (a.norm() ** 2 + b.norm() ** 2).sqrt())
        assert_norm(report.total_norm, 3 * (a.norm() ** 2 + b.norm() ** 2).sqrt())


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("skipping", [False, True])
def test_an_input_that_is_two_arguments_of_a_term_is_seen_whole(track: Any, skipping: bool) -> None:
    """Of Σa·b at a = b = x the gradient is 2x, though either argument alone has only x."""
    x = ramp()
    product = Term(lambda a, b: (a * b).sum(), inputs=("x", "x"), weight=3.0)
    pipeline = Pipeline(product=product, sum=Term(lambda x: x.sum(), inputs="x"))
    result = pipeline.with_nan_policy("skip" if skipping else "propagate")(x=x, track=track)
    reports = [result.gradients]
    result.total.backward()
    if track:
        reports.append(result.gradients)
    for report in reports:
        assert_norm(report["product"].grad_norm, 2 * x.norm())
        assert_norm(report.total_norm, (6 * x + 1).norm())
        if report.grams is not None:
            assert_relative(report.cosine("product", "sum"), x.sum() / (x.norm() * 2))
    assert_equal(x.grad, 6 * x + 1)


@pytest.mark.parametrize("track", LEVELS)
def test_a_list_is_one_long_vector(track: str) -> None:
    """A list, a tuple or a mapping of tensors has the norms of their concatenation."""
    x = ramp(6)
    whole = two_terms()(x, track=track)
    whole.total.backward()
    cut = [x.detach()[:1].clone(), x.detach()[1:4].reshape(3, 1), x.detach()[4:]]
    terms = {
        "l2": Term(lambda xs: eq.l2(flat(xs)), inputs="xs"),
        "sum": Term(lambda xs: sum(x.sum() for x in flat(xs)), inputs="xs", weight=0.5),
    }
    for shape in (list, tuple, lambda xs: {"deep": [xs[0]], "two": xs[1:]}):
        parts = shape([part.clone().requires_grad_() for part in cut])
        result = Pipeline(**terms)(xs=parts, track=track)
        result.total.backward()
        torch.testing.assert_close(
            result.gradients.squares, whole.gradients.squares, rtol=1e-12, atol=0
        )
        if track == "gram":
            assert_relative(result.gradients.gram, whole.gradients.gram)


def flat(xs: Any) -> list[Tensor]:
    """The tensors in nested containers, in order."""
    if isinstance(xs, Tensor):
        return [xs]
    items = xs.values() if isinstance(xs, dict) else xs
    return [tensor for item in items for tensor in flat(item)]


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("kind", ["term", "callable", "tensor"])
def test_what_passes_through_a_later_input_is_not_counted_at_an_earlier_one(
    kind: str, track: Any
) -> None:
    """A base that reads logits has no gradient at the hidden layer they are computed from."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    hidden = 3 * w
    logits = 5 * hidden

    def base(logits: Tensor) -> Tensor:
        return 7 * logits.sum()

    terms: dict[str, Term] = {"l1": Term(eq.l1, inputs="hidden")}
    if kind == "term":
        terms["base"] = Term(base, inputs="logits")
    given = {"callable": base, "tensor": base(logits)}.get(kind)
    result = Pipeline(**terms, idle=Term(lambda z: 0 * z.sum(), inputs="logits"))(
        hidden=hidden, logits=logits, base=given, track=track
    )
    reports = [result.gradients]
    result.total.backward()
    if track:
        reports.append(result.gradients)
    for report in reports:
        by_input = report.by_input
        assert_norm(by_input["hidden"]["base"].grad_norm, 0.0)
        assert_norm(by_input["logits"]["base"].grad_norm, 7 * math.sqrt(2))
        assert_norm(by_input["hidden"]["l1"].grad_norm, math.sqrt(2))
        assert_norm(by_input["logits"].total_norm, 7 * math.sqrt(2))
        assert_norm(by_input["hidden"].total_norm, math.sqrt(2))
    assert_close(w.grad, torch.full((2,), 3.0 + 7 * 5 * 3))


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_base_tensor_counts_at_both_inputs_it_reads(track: Any) -> None:
    """What it reads of the hidden layer besides the logits is counted there, and only that."""
    hidden = ramp(3)
    logits = 5 * hidden
    base = 7 * logits.sum() + 2 * hidden.sum()
    result = Pipeline(
        l2=Term(eq.l2, inputs="hidden"), peak=Term(eq.output_magnitude, inputs="logits")
    )(hidden=hidden, logits=logits, base=base, track=track)
    reports = [result.gradients]
    result.total.backward()
    if track:
        reports.append(result.gradients)
    for report in reports:
        assert_norm(report.by_input["hidden"]["base"].grad_norm, 2 * math.sqrt(3))
        assert_norm(report.by_input["logits"]["base"].grad_norm, 7 * math.sqrt(3))
        assert_norm(report.by_input["hidden"].total_norm, (2 * hidden + 2).norm())


@pytest.mark.parametrize("track", LEVELS)
def test_outputs_of_one_operation_are_inputs_of_their_own(track: str) -> None:
    """Halves of one `chunk` have each their own gradient from a base that is a tensor."""
    a, b = ramp(4).mul(1).chunk(2)
    base = 3 * a.sum() + 4 * b.sum()
    result = Pipeline(
        first=Term(eq.l2, inputs="a", weight=0.5), second=Term(eq.l2, inputs="b", weight=0.5)
    )(a=a, b=b, base=base, track=track)
    result.total.backward()
    report = result.gradients
    assert_norm(report.by_input["a"]["base"].grad_norm, 3 * math.sqrt(2))
    assert_norm(report.by_input["b"]["base"].grad_norm, 4 * math.sqrt(2))
    assert_norm(report.by_input["a"].total_norm, (a + 3).norm())
    assert_norm(report.by_input["b"].total_norm, (b + 4).norm())


@pytest.mark.parametrize("track", LEVELS)
def test_one_tensor_under_two_names_has_two_rows(track: str) -> None:
    """Each name has what its own terms do to the tensor; training sees their sum."""
    x = ramp()
    result = Pipeline(l2=Term(eq.l2, inputs="p"), l1=Term(eq.l1, inputs="q", weight=0.5))(
        p=x, q=x, track=track
    )
    result.total.backward()
    rows = result.gradients.by_input
    assert_norm(rows["p"].total_norm, 2 * x.norm())
    assert_norm(rows["q"].total_norm, 1.0)
    assert_norm(rows["p"]["l1"].grad_norm, 0.0)
    assert_equal(x.grad, 2 * x + 0.5)


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_base_tensor_reads_a_tensor_of_two_names_once(track: Any) -> None:
    """It is counted at the first name: which of them it went by, nothing tells."""
    x = ramp()
    result = Pipeline(l2=Term(eq.l2, inputs="p"), l1=Term(eq.l1, inputs="q"))(
        p=x, q=x, base=3 * x.sum(), track=track
    )
    reports = [result.gradients]
    result.total.backward()
    if track:
        reports.append(result.gradients)
    for report in reports:
        assert_norm(report["base"].grad_norm, 6.0)
        assert_norm(report.by_input["p"].total_norm, (2 * x + 3).norm())
        assert_norm(report.by_input["q"].total_norm, 2.0)


@pytest.mark.parametrize("track", LEVELS)
def test_inputs_without_gradient_have_no_row(track: str) -> None:
    """Neither integers, nor what does not require grad, nor data, nor what no term reads."""
    x = ramp()
    net = Pipeline(
        gather=Term(lambda x, i, keep, _: x[i][keep].sum(), inputs=("x", "i", "mask", "name")),
        silent=Term(eq.l1, inputs="unread", enabled=False),
    )
    result = net(
        x=x,
        i=torch.tensor([0, 2]),
        mask=torch.tensor([True, False]),
        name="data",
        unread=ramp(),
        track=track,
    )
    result.total.backward()
    assert result.gradients.inputs == ("x",)
    assert list(result.gradients.by_input) == ["x"]
    assert result.gradients.names == ("gather",)
    assert_norm(result.gradients.total_norm, 1.0)


# Without gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("kind", BASES)
def test_evaluation_without_gradients_has_values_and_no_report(kind: str, track: Any) -> None:
    """Under `no_grad` metrics and print work, and asking for gradients is a clear error."""
    wanted, _ = evaluated(kind)
    with torch.no_grad():
        result, _ = evaluated(kind, track)
        metrics = result.metrics()
        assert "sparsity" in str(result)
    assert metrics == wanted.metrics()
    assert not any("grad_norm" in name for name in metrics)
    with pytest.raises(eq.GradientError, match=r"require grad, got none \(or `torch\.no_grad`\)"):
        _ = result.gradients


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_inference_mode_has_values_and_no_report(track: Any) -> None:
    """`torch.inference_mode` is no error either."""
    with torch.inference_mode():
        metrics = two_terms()(torch.ones(4), track=track).metrics()
    assert metrics == {
        "total": 6.0,
        "penalty": 6.0,
        "l2": 4.0,
        "l2_weighted": 4.0,
        "sum": 4.0,
        "sum_weighted": 2.0,
    }


# What has no gradient says why -------------------------------------------------------------------


class Mute(torch.autograd.Function):
    """The identity, with a backward that fails without a word."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(*_: Any) -> Tensor:
        raise ValueError


class Stubborn(torch.autograd.Function):
    """The identity, with a backward that fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(*_: Any) -> Tensor:
        raise RuntimeError("no way back\nin two lines")


NOT_REACHED = (
    "its value does not depend on an input that requires grad, or the backward pass left it out"
)
REASONS: dict[str, tuple[Term, str]] = {
    "not differentiable": (
        Term(lambda x: x.argmax().double()),
        "its value has no graph: something in it is detached or not differentiable",
    ),
    "detached": (
        Term(lambda x: x.detach().sum()),
        "its value has no graph: something in it is detached or not differentiable",
    ),
    "switched off": (Term(eq.l1, differentiable=False), "it is marked differentiable=False"),
    "weightless": (Term(eq.l1, weight=0.0), "its weight is 0, so that no gradient flows"),
    "no input": (Term(eq.l1, inputs="fixed"), "none of its inputs requires grad"),
    "elsewhere": (
        Term(lambda _: (3 * OTHER).sum()),
        NOT_REACHED,
    ),
}
OTHER = torch.ones(2, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("when", ["observed", "on demand"])
@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("reason", REASONS)
def test_a_term_without_gradient_says_why(reason: str, track: str, when: str) -> None:
    """The reason stands in its place, the other terms and the total keep their figures."""
    term, why = REASONS[reason]
    terms = {"l2": Term(eq.l2, inputs="x"), "odd": term.with_changes(inputs=term.inputs or "x")}
    x = ramp()
    given = {"x": x, "fixed": torch.ones(3)} if reason == "no input" else {"x": x}
    result = Pipeline(**terms)(**given, track=track)
    if when == "observed":
        result.total.backward()
        assert_equal(x.grad, 2 * x)
    odd = result.gradients["odd"]
    assert (odd.grad_norm, odd.grad_norm_weighted, odd.grad_error) == (None, None, why)
    assert_norm(result.gradients["l2"].grad_norm, 2 * x.norm())
    assert_norm(result.gradients.total_norm, 2 * x.norm())
    metrics = result.metrics()
    assert metrics["odd_grad_norm_error"] == 1.0
    assert "odd_grad_norm" not in metrics
    if track == "gram":
        assert_equal(result.gradients.shares["l2"], 1.0)
        assert list(result.gradients.shares) == ["l2"]


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_backward_that_fails_on_demand_is_reported_in_place(track: Any) -> None:
    """Its message becomes the reason; the sum, of which it is a part, is not known."""
    x = ramp()
    result = Pipeline(l2=Term(eq.l2), wall=Term(lambda x: Stubborn.apply(x).sum()))(x, track=track)
    report = result.gradients
    assert report["wall"].grad_error == "no way back"
    assert_norm(report["l2"].grad_norm, 2 * x.norm())
    assert report.total_norm.isnan()
    with pytest.raises(RuntimeError, match="no way back"):
        result.total.backward()


@pytest.mark.parametrize("base", [False, True])
def test_a_backward_that_fails_in_its_own_way_is_reported_in_place(base: bool) -> None:
    """Any exception is a reason; one that says nothing is told by its name."""
    x = ramp()
    pipeline = Pipeline(l2=Term(eq.l2))
    if base:
        report = pipeline(x, base=Mute.apply(x).sum(), track=True).gradients
    else:
        report = pipeline.with_term("wall", Term(lambda x: Mute.apply(x).sum()))(x).gradients
    assert report["base" if base else "wall"].grad_error == "ValueError"
    assert_norm(report["l2"].grad_norm, 2 * x.norm())


@pytest.mark.parametrize("track", LEVELS)
def test_a_base_that_cannot_be_pulled_does_not_stop_the_training(track: str) -> None:
    """A reentrant checkpoint refuses partial passes: an error in the report, not at the call."""
    x = ramp()
    h = checkpoint(lambda x: x * x, x, use_reentrant=True)
    k = checkpoint(lambda h: 3 * h, h, use_reentrant=True)
    result = Pipeline(h=Term(eq.l1, inputs="h"), k=Term(eq.l1, inputs="k"))(
        h=h, k=k, base=k.sum(), track=track
    )
    result.total.backward()
    assert "use_reentrant" in str(result.gradients["base"].grad_error)
    assert_norm(result.gradients["h"].grad_norm, 2.0)
    assert result.gradients.total_norm.isnan()
    assert_equal(x.grad, 2 * x * (1 + 3 + 3))


def test_a_report_without_any_gradient_has_no_dominant_term() -> None:
    """Asking which term dominates is an error that holds all the reasons."""
    result = Pipeline(off=Term(eq.l1, differentiable=False))(ramp())
    with pytest.raises(eq.GradientError, match=r"no term has a gradient: .*differentiable=False"):
        result.gradients.dominant()


def test_nothing_evaluated_has_no_report() -> None:
    """With every term disabled there is nothing to ask, and metrics still work."""
    result = Pipeline(l1=Term(eq.l1, enabled=False))(ramp(), track=True)
    with pytest.raises(eq.GradientError, match=r"without any term\. Use `enable`, or a base"):
        _ = result.gradients
    assert result.metrics() == {"total": 0.0, "penalty": 0.0}


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_a_base_without_inputs_is_no_error(track: Any) -> None:
    """A base tensor and no input at all: there is no place to take a gradient at."""
    w = ramp()
    result = Pipeline()(base=w.square().sum(), track=track)
    result.total.backward()
    assert_equal(w.grad, 2 * w)
    assert result.metrics() == {"total": 30.0, "base": 30.0, "penalty": 0.0}


# When --------------------------------------------------------------------------------------------


def test_the_graph_is_still_usable_after_asking() -> None:
    """A report on demand keeps the graph, and touches no `.grad`."""
    result, net = evaluated("callable", False)
    _ = result.gradients
    assert all(leaf.grad is None for leaf in net.leaves)
    result.total.backward()
    _, wanted = trained(lambda track: with_leaves("callable", track), False)
    for leaf, gradient in zip(net.leaves, wanted, strict=True):
        assert_same_bits(leaf.grad, gradient)


def with_leaves(kind: str, track: Any) -> tuple[eq.Evaluation, list[Tensor]]:
    """As `trained` wants it."""
    result, net = evaluated(kind, track)
    return result, net.leaves


@pytest.mark.parametrize("kind", BASES)
def test_untracked_and_after_backward_there_is_no_report(kind: str) -> None:
    """The graph is gone and nothing was seen: an error that says both and what to do."""
    result, _ = evaluated(kind, False)
    result.total.backward()
    with pytest.raises(eq.GradientError, match=r"the graph is gone .* Use `track='norms'`"):
        _ = result.gradients
    assert "sparsity_grad_norm" not in result.metrics()


def test_a_report_made_before_backward_outlives_it() -> None:
    """What was asked for untracked before the pass can be asked for again after it."""
    result, _ = evaluated("term", False)
    before = result.gradients
    result.total.backward()
    assert result.gradients is before


# Free of charge ----------------------------------------------------------------------------------


class Counting(torch.autograd.Function):
    """The identity; counts how often it is computed and differentiated."""

    forwards = 0
    backwards = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        Counting.forwards += 1
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        Counting.backwards += 1
        return gradients[0]


def counted(track: Any) -> tuple[int, int, eq.Evaluation]:
    """Passes through a model below the pipeline and through a penalty in it."""
    Counting.forwards = Counting.backwards = 0
    below = Counting.apply(ramp())
    result = Pipeline(
        base=Term(lambda x: Counting.apply(x).sum()),
        l2=Term(lambda x: Counting.apply(x).square().sum(), weight=0.1),
    )(below, track=track)
    result.total.backward()
    if track:
        assert_relative(result.gradients.total_norm, (1 + 0.2 * ramp()).norm())
        result.metrics()
        str(result)
    return Counting.forwards, Counting.backwards, result


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_there_is_one_forward_and_one_backward_pass(track: Any) -> None:
    """Model and penalties are computed once and differentiated once, report included."""
    forwards, backwards, _ = counted(track)
    assert (forwards, backwards) == (3, 3)


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_no_graph_is_retained(track: Any) -> None:
    """A second backward pass fails as usual: tracking kept nothing alive."""
    result, _ = evaluated("callable", track)
    result.total.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.total.backward()


@pytest.mark.parametrize("track", [False, *LEVELS])
@pytest.mark.parametrize("kind", BASES)
def test_nothing_waits_for_the_device(kind: str, track: Any) -> None:
    """Forward, backward and every figure of the report are tensors that stay where they are."""
    with NoWaiting():
        result, _ = evaluated(kind, track)
        result.total.backward()
        if not track:
            return
        report = result.gradients
        for part in (report, *report.by_input.values()):
            _ = (part.norms, part.weighted, part.total_norm)
            if track == "gram":
                _ = (part.gram, part.cosines, part.shares)
        assert report.total_norm.device == result.total.device


@pytest.mark.parametrize("kind", BASES)
def test_a_report_on_demand_does_not_wait_either(kind: str) -> None:
    """Nothing is fetched before somebody reads a number."""
    with NoWaiting():
        result, _ = evaluated(kind, False)
        _ = (result.gradients.shares, result.gradients.norms)


N = 1 << 20
"""More than the chunk that norms are computed in, so that a copy would be seen."""


class Made(TorchDispatchMode):
    """How many tensors of at least `N` bytes were made that share no memory with an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for made in result if isinstance(result, tuple | list) else (result,):
            fresh = isinstance(made, Tensor) and made.untyped_storage()._cdata not in known
            self.number += fresh and made.untyped_storage().nbytes() >= 4 * N
        return result


def large_pipeline() -> Pipeline:
    """Two terms and a base on one large tensor."""
    return Pipeline(
        base=Term(lambda x: (x * x).mean()),
        l1=Term(lambda x: x.abs().mean(), weight=0.1),
        l2=Term(lambda x: x.square().mean(), weight=0.1),
    )


def test_norms_make_no_tensor_of_the_size_of_an_input() -> None:
    """Tracking norms makes exactly as many large tensors as not tracking, report included."""
    numbers = []
    for track in (False, "norms"):
        x = torch.linspace(-1, 1, N).requires_grad_()
        with Made() as made:
            result = large_pipeline()(x, track=track)
            result.total.backward()
            if track:
                _ = result.gradients.total_norm
        numbers.append(made.number)
    assert numbers[0] == numbers[1] > 0


def peak(track: Any) -> int:
    """The most memory that torch held at a time, in bytes, as its own allocator tells.

    The terms keep nothing of their forward pass: its peak would hide what the backward pass takes.
    """
    x, slope = torch.linspace(-1, 1, N).requires_grad_(), torch.ones(N)
    terms = {name: Term(lambda x: torch.dot(x, slope), weight=0.1) for name in "abc"}
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        result = Pipeline(**terms)(x, track=track)
        result.total.backward()
    del result
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_norms_do_not_raise_the_peak_of_memory() -> None:
    """The peak is the same up to a chunk in float64; the gram keeps a gradient for each term."""
    plain, norms, gram = peak(False), peak("norms"), peak("gram")
    chunk = 8 * CHUNK
    assert plain > 4 * N
    assert norms <= plain + chunk + 4096  # scalars
    assert gram >= plain + 4 * N


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("track", [False, *LEVELS])
def test_nothing_outlives_its_evaluation(track: Any, differentiated: bool) -> None:
    """The probes know of the report, which knows of the graph: a circle that nobody could free."""
    h = torch.ones(10, requires_grad=True) * 1
    result = large_pipeline()(h, track=track)
    if differentiated:
        result.total.backward()
    kept = StorageWeakRef(h.untyped_storage())
    del h, result
    gc.collect()
    assert kept.expired()


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, list[StorageWeakRef]]]]:
    """Note the gradients that come together for a Gram matrix, without keeping them."""
    seen: list[tuple[int, list[StorageWeakRef]]] = []
    true = Figures.of

    def noting(gradients: dict[str, Tensor], *args: Any) -> Figures:
        refs = [StorageWeakRef(g.untyped_storage()) for g in gradients.values()]
        seen.append((sum(not ref.expired() for ref in refs), refs))
        return true(gradients, *args)

    monkeypatch.setattr(Figures, "of", staticmethod(noting))
    yield seen


def test_a_gram_matrix_keeps_gradients_only_until_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One gradient a term is kept until the input's own probe fires, and none afterwards."""
    x = torch.randn(1000, requires_grad=True)
    with watched(monkeypatch) as seen:
        result = large_pipeline()(x * 1, track="gram")
        result.total.backward()
    gc.collect()
    ((alive, refs),) = seen
    assert alive == 3
    assert all(ref.expired() for ref in refs)
    assert result._recorder.passing == {}
    assert result.gradients.gram.shape == (3, 3)


def test_norms_keep_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a term until the input's probe fires is one number."""
    kept: list[Tensor] = []
    true = Recorder._all_passed

    def noting(self: Recorder, gradient: Tensor, place: Any) -> None:
        kept.extend(self.passing[place].values())
        true(self, gradient, place)

    monkeypatch.setattr(Recorder, "_all_passed", noting)
    result = large_pipeline()(torch.randn(1000, requires_grad=True), track="norms")
    result.total.backward()
    assert [tensor.numel() for tensor in kept] == [1, 1, 1]


# Company -----------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    """The same small model at every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


BATCH = torch.linspace(-1, 1, 20).reshape(4, 5)

TASK = Pipeline(
    base=Term(F.cross_entropy, inputs=("logits", "labels")),
    l2=Term(eq.l2, inputs="logits", weight=0.01),
    explore=Term(eq.entropy, inputs="logits", options={"from_logits": True}, weight=-0.1),
)
LABELS = torch.tensor([0, 2, 1, 1])

Forward = Callable[[nn.Module, Tensor], Tensor]


def run(forward: Forward, track: Any = "gram") -> tuple[eq.Evaluation, list[Tensor | None]]:
    """One step of a model below the pipeline."""
    net = model()
    result = TASK(logits=forward(net, BATCH), labels=LABELS, track=track)
    result.total.backward()
    return result, [p.grad for p in net.parameters()]


SURROUNDINGS: dict[str, Forward] = {
    "checkpointed": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "checkpointed, reentrant": lambda net, x: checkpoint(
        net, x.clone().requires_grad_(), use_reentrant=True
    ),
    "compiled": lambda net, x: torch.compile(net, backend="aot_eager")(x),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_models_of_every_kind_below(name: str) -> None:
    """Checkpointed and compiled models train as they do without, and the report is the same."""
    plain, wanted = run(lambda net, x: net(x))
    result, gradients = run(SURROUNDINGS[name])
    assert_report(
        result.gradients,
        by_hand(TASK.terms, {"logits": result_logits(), "labels": LABELS}),
        within=1e-5,  # gradients in float32, by two routes
    )
    assert_same_figures(plain.gradients, result.gradients, within=1e-6)
    for gradient, same in zip(gradients, wanted, strict=True):
        assert_close(gradient, same, within=1e-6)  # float32, in another order


def result_logits() -> Tensor:
    """The logits of the model, as a leaf."""
    return model()(BATCH).detach().requires_grad_()


@pytest.mark.parametrize("track", [False, *LEVELS])
def test_inside_a_checkpointed_function(track: Any) -> None:
    """A pipeline that is itself recomputed in the backward pass trains as without, and reports."""
    results: list[eq.Evaluation] = []
    calls: list[Tensor] = []

    def loss(x: Tensor, w: Tensor) -> Tensor:
        h = (x * w).tanh()
        calls.append(h)
        results.append(two_terms()(h, track=track))
        return results[-1].total

    def gradient(through: Callable[..., Tensor]) -> Tensor:
        w = ramp()
        through(torch.ones(4, dtype=torch.float64), w).backward()
        assert w.grad is not None
        return w.grad

    plain = gradient(loss)
    again = gradient(partial(checkpoint, loss, use_reentrant=False))
    assert_same_bits(again, plain)
    assert len(calls) == 3  # the last one is the recomputation, which stops when it has enough
    if track:
        assert_same_figures(results[0].gradients, results[1].gradients)


def test_inside_autocast() -> None:
    """Under bfloat16 autocast the report is that of the gradients that flow."""
    net = model()
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(BATCH)
        result = TASK(logits=logits, labels=LABELS, track="gram")
        on_demand = result.gradients
    result.total.backward()
    assert logits.dtype == torch.bfloat16
    logits = logits.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = by_hand(TASK.terms, {"logits": logits, "labels": LABELS})
    # Gradients at the logits are rounded to 8 bits after their weight here, before it by hand.
    assert_report(result.gradients, expected, within=2.0**-7)
    assert_report(on_demand, expected, within=2.0**-7)


def test_two_pipelines_on_one_input_do_not_mix() -> None:
    """Each reports its own terms, in one common backward pass."""
    h = ramp() * 1
    first = Pipeline(a=Term(eq.l2))(h, track="norms")
    second = Pipeline(b=Term(lambda x: x.sum()))(h, track="gram")
    (first.total + 10 * second.total).backward()
    assert first.gradients.names == ("a",)
    assert second.gradients.names == ("b",)
    assert_norm(first.gradients.total_norm, 2 * h.norm())
    assert_norm(second.gradients.total_norm, 2.0)


def test_tracking_may_be_a_function_of_the_step() -> None:
    """It is asked once a call and decides about that call alone."""
    asked: list[int | None] = []

    def every_other(step: int | None) -> bool | str:
        asked.append(step)
        return "gram" if step else False

    x = ramp()
    assert not two_terms()(x, step=0, track=every_other).tracked
    result = two_terms()(x, step=1, track=every_other)
    assert result.tracked
    result.total.backward()
    assert result.gradients.gram.shape == (2, 2)
    assert asked == [0, 1]
    assert two_terms()(x, track=True).gradients.grams is None
