"""Composing terms: what goes in, how it adds up, when it is evaluated, and how it is edited."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.penalties.assertions import assert_close, assert_equal
from tests.penalties.inputs import tensors
from tests.pipeline.assertions import assert_same_bits
from tests.pipeline.test_term import Distance

weights = st.floats(-10, 10, allow_subnormal=False)


def vector(*entries: float) -> Tensor:
    """A float64 leaf."""
    return torch.tensor(entries or (1.0, -2.0, 3.0), dtype=torch.float64, requires_grad=True)


def slope(result: eq.Evaluation, x: Tensor) -> Tensor:
    """The gradient of the total."""
    return torch.autograd.grad(result.total, x, retain_graph=True)[0]


# What goes in ------------------------------------------------------------------------------------


def test_one_tensor_needs_no_name() -> None:
    """Terms that name no input read the one tensor; by keyword it is called x."""
    x = vector()
    pipeline = Pipeline(l1=Term(eq.l1, weight=0.1), l2=Term(eq.l2))
    assert_close(pipeline(x).total, 0.6 + 14.0)
    assert_same_bits(pipeline(x=x).total, pipeline(x).total)


def test_many_tensors_by_name() -> None:
    """Each term gets the inputs it names, in its own order, whatever the order of the call."""
    seen: dict[str, tuple[Tensor, ...]] = {}

    def note(name: str) -> Callable[..., Tensor]:
        def penalty(*tensors: Tensor) -> Tensor:
            seen[name] = tensors
            return torch.stack([t.sum() for t in tensors]).sum()

        return penalty

    a, b, c = (vector(i, i) for i in (1.0, 2.0, 3.0))
    Pipeline(
        forth=Term(note("forth"), inputs=("a", "b")),
        back=Term(note("back"), inputs=("b", "a")),
        three=Term(note("three"), inputs=["c", "c", "a"]),
    )(c=c, b=b, a=a)
    wanted = {"forth": (a, b), "back": (b, a), "three": (c, c, a)}
    assert seen.keys() == wanted.keys()
    for name, tensors_given in wanted.items():
        assert len(seen[name]) == len(tensors_given)
        for one, other in zip(seen[name], tensors_given, strict=True):
            assert_equal(one, other)


def test_the_one_tensor_and_named_ones_go_together() -> None:
    """A term without names reads the positional tensor, another its own."""
    pipeline = Pipeline(l1=Term(eq.l1), l2=Term(eq.l2, inputs="hidden"))
    assert_equal(pipeline(vector(1.0, -2.0), hidden=vector(3.0)).total, 12.0)


def test_parameters_of_a_model() -> None:
    """A list of parameters is one input, penalised as one long vector; each gets its gradient."""
    net = nn.Linear(2, 3).double()
    result = Pipeline(decay=Term(eq.l2, inputs="weights", weight=0.5))(
        weights=list(net.parameters())
    )
    assert_close(result.total, 0.5 * sum(p.square().sum() for p in net.parameters()))
    result.total.backward()
    for parameter in net.parameters():
        assert_close(parameter.grad, parameter)


def test_ragged_lists() -> None:
    """Log-probabilities of examples of different lengths, as lists on both sides."""
    ours = [vector(-1.0, -2.0), vector(-0.5)]
    theirs = [torch.tensor([-1.5, -1.0], dtype=torch.float64), ours[1].detach() - 1]
    sampled = Term(eq.sampled_kl, inputs=("ours", "theirs"), options={"estimator": "k2"})
    result = Pipeline(kl=sampled)(ours=ours, theirs=theirs)
    assert_close(result.total, (0.25 + 1.0 + 1.0) / 2 / 3)
    result.total.backward()
    assert_close(ours[0].grad, torch.tensor([0.5, -1.0], dtype=torch.float64) / 3)
    assert_close(ours[1].grad, torch.tensor([1.0], dtype=torch.float64) / 3)


class Pair(NamedTuple):
    """Data of a user's own making."""

    left: Any
    right: Any


DATA = {
    "text": "words",
    "number": 7,
    "list": ["a", 1, None],
    "mapping": {"deep": [1, {"deeper": 2}]},
    "tuple": (1, (2, 3)),
    "named tuple": Pair(1, 2),
    "integers": torch.tensor([1, 2]),
    "mask": torch.tensor([True, False]),
    "fixed": torch.tensor([1.0, 2.0]),
    "fixed tensors": [torch.tensor([1.0]), {"x": torch.tensor(2.0)}],
    "nothing": None,
    "function": len,
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("track", [False, "gram"])
def test_data_passes_through_untouched(name: str, track: Any) -> None:
    """What holds no tensor that requires grad reaches the penalty as the very same object."""
    seen: list[Any] = []

    def penalty(x: Tensor, data: Any) -> Tensor:
        seen.append(data)
        return x.sum()

    pipeline = Pipeline(p=Term(penalty, inputs=("x", "data")))
    assert_equal(pipeline(x=vector(), data=DATA[name], track=track).total, 2.0)
    assert seen[0] is DATA[name]


def test_containers_keep_their_form() -> None:
    """Lists, tuples and mappings of tensors arrive as such, with their data in place."""
    batch = {"p": [vector(1.0), "label", (vector(2.0), 3)], "q": torch.tensor([5])}
    seen: list[Any] = []

    def penalty(batch: Any) -> Tensor:
        seen.append(batch)
        return batch["p"][0].sum() * batch["p"][2][0].sum()

    result = Pipeline(p=Term(penalty, inputs="batch"))(batch=batch)
    (kept,) = seen
    assert_equal(result.total, 2.0)
    assert list(kept) == ["p", "q"]
    assert isinstance(kept["p"], list)
    assert kept["p"][1] == "label"
    assert isinstance(kept["p"][2], tuple)
    assert kept["p"][2][1] == 3
    assert kept["q"] is batch["q"]
    result.total.backward()
    assert_equal(batch["p"][0].grad, torch.tensor([2.0], dtype=torch.float64))


class Outputs(OrderedDict[str, Any]):
    """What a model of some library returns: a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("track", [False, "gram"])
def test_named_tuples_are_containers_too(track: Any) -> None:
    """A term sees the named tuple it was given, and its tensors are tracked."""
    x = vector(3.0, 4.0)
    product = Term(lambda pair: (pair.left * pair.right[0]).sum(), inputs="pair")
    result = Pipeline(product=product)(pair=Pair(x, [x, "label"]), track=track)
    result.total.backward()
    assert_close(x.grad, 2 * x)
    if track:
        # 2x in two parts, each seen by itself: √(‖x‖² + ‖x‖²).
        assert_close(result.gradients["product"].grad_norm, 5 * 2**0.5)


def test_a_container_that_torch_does_not_know_arrives_as_it_is() -> None:
    """It is not taken apart, and the gradient passes it by unseen."""
    outputs, seen = Outputs(logits=vector(3.0, 4.0)), []

    def penalty(x: Tensor, outputs: Any) -> Tensor:
        seen.append(outputs)
        return x.sum() + outputs.logits.sum()

    result = Pipeline(p=Term(penalty, inputs=("x", "outputs")))(vector(), outputs=outputs)
    result.total.backward()
    assert seen[0] is outputs
    assert_equal(outputs["logits"].grad, torch.ones(2))


PARAMETERS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda net: net.parameters(),
    "list of torch": lambda net: nn.ParameterList(net.parameters()),
    "filter": lambda net: filter(lambda p: p.requires_grad, net.parameters()),
    "map": lambda net: map(torch.ravel, net.parameters()),
    "chain": lambda net: chain(net.parameters(), ()),
    "values": lambda net: dict(net.named_parameters()).values(),
}


@pytest.mark.parametrize("track", [False, "norms"])
@pytest.mark.parametrize("form", PARAMETERS)
def test_parameters_as_the_model_gives_them(form: str, track: Any) -> None:
    """A generator is read once for all terms, and counts as the list of what it holds."""
    read = PARAMETERS[form]
    net = nn.Linear(2, 3).double()
    terms = {"l1": Term(eq.l1, inputs="w"), "l2": Term(eq.l2, inputs="w")}
    result = Pipeline(**terms)(w=read(net), track=track)
    wanted = Pipeline(**terms)(w=list(net.parameters()), track=track)
    assert_same_bits(result.total, wanted.total)
    result.total.backward()
    assert_close(net.weight.grad, 2 * net.weight + net.weight.sign())
    if track:
        assert_same_bits(result.gradients.total_norm, wanted.gradients.total_norm)


def test_inputs_are_not_changed() -> None:
    """Neither values, nor gradients, nor the containers they came in."""
    x, parts = vector(), [vector(1.0), vector(2.0)]
    before = [x.detach().clone(), *(p.detach().clone() for p in parts)]
    kept = list(parts)
    Pipeline(a=Term(eq.l1), b=Term(eq.l2, inputs="parts"))(x, parts=parts, track="gram")
    for tensor, same in zip([x, *parts], before, strict=True):
        assert_equal(tensor, same)
        assert tensor.grad is None
        assert tensor.is_leaf
    assert all(a is b for a, b in zip(parts, kept, strict=True))


# Penalties of every kind -------------------------------------------------------------------------


def with_metrics(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A value, and what else there is to tell."""
    return x.square().sum(), {"largest": x.abs().max(), "entries": x.numel()}


class Power:
    """An object that can be called."""

    def __call__(self, x: Tensor, *, power: float = 2.0) -> Tensor:
        return x.pow(power).sum()


class Squares(nn.Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


PENALTIES: dict[str, Callable[..., Any]] = {
    "of the library": eq.l2,
    "lambda": lambda x: x.square().sum(),
    "partial": partial(eq.l2, reduction="sum"),
    "partial of a lambda": partial(lambda scale, x: scale * (x * x).sum(), 1.0),
    "of torch": partial(F.mse_loss, target=torch.zeros(3).double(), reduction="sum"),
    "module": Squares(),
    "with metrics": with_metrics,
    "object": Power(),
    "shape (1,)": lambda x: x.square().sum().reshape(1),
    "method": torch.Tensor.dot,
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_any_callable(name: str) -> None:
    """Σx² = 14 and 2x, whoever computes it."""
    x = vector()
    term = Term(PENALTIES[name], inputs=("x", "x") if name == "method" else None)
    result = Pipeline(p=term)(x)
    assert_equal(result.total, 14.0)
    assert_equal(slope(result, x), 2 * x)


def test_a_module_learns() -> None:
    """The parameters of a penalty that is a module get their gradients, through its options too."""
    module = Distance().double()
    x = vector(3.0, 1.0)
    result = Pipeline(d=Term(module, weight=0.5, options={"power": 2}))(x)
    assert_equal(result.total, 0.5 * (4.0 + 4.0))
    result.total.backward()
    assert_equal(module.center.grad, -(x - module.center))
    assert_equal(x.grad, x - module.center)


def test_metrics_are_told_under_the_term() -> None:
    """A returned mapping is kept with the term, numbers and tensors alike."""
    term = Pipeline(p=Term(with_metrics))(vector()).terms["p"]
    assert term.metrics.keys() == {"largest", "entries"}
    assert_equal(term.metrics["largest"], 3.0)
    assert term.metrics["entries"] == 3


# Adding up ---------------------------------------------------------------------------------------


@given(x=tensors(4), w=st.lists(weights, min_size=3, max_size=3))
def test_the_total_is_the_weighted_sum(x: Tensor, w: list[float]) -> None:
    """total = base + Σ wᵢ·valueᵢ, added from left to right; penalty leaves the base out."""
    terms = {
        "a": Term(eq.l1, weight=w[0]),
        "b": Term(eq.l2, weight=w[1]),
        "c": Term(lambda x: x.mean(), weight=w[2]),
    }
    result = Pipeline(base=Term(lambda x: x.sin().sum()), **terms)(x)
    values = [eq.l1(x), eq.l2(x), x.mean()]
    penalty = w[0] * values[0] + w[1] * values[1] + w[2] * values[2]
    assert_equal(result.penalty, penalty)
    assert_equal(result.base, x.sin().sum())
    assert_equal(result.total, x.sin().sum() + penalty)
    for term, value, weight in zip(result.terms.values(), values, w, strict=True):
        assert_equal(term.value, value)
        assert term.weight == weight
        assert_equal(term.contribution, weight * value)


def test_without_a_base_the_total_is_the_penalty() -> None:
    """And there is no base to report."""
    result = Pipeline(l1=Term(eq.l1, weight=0.5))(vector())
    assert result.base is None
    assert_equal(result.total, 3.0)
    assert_equal(result.penalty, 3.0)
    assert list(result.terms) == ["l1"]


def test_a_base_alone_is_the_total() -> None:
    """With nothing to add, the penalty is 0."""
    x = vector()
    for result in (Pipeline(base=Term(eq.l2))(x), Pipeline()(base=eq.l2(x))):
        assert_equal(result.total, 14.0)
        assert_equal(result.base, 14.0)
        assert_equal(result.penalty, 0.0)
        assert list(result.terms) == []
        assert_equal(slope(result, x), 2 * x)


def as_function(hidden: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, int]]:
    """A task loss with a metric, its parameters named like inputs."""
    return (hidden - labels).square().sum(), {"seen": 3}


class Task(nn.Module):
    """The same as a module."""

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, int]]:
        return as_function(hidden, labels)


@pytest.mark.parametrize("kind", ["term", "callable", "module", "tensor", "tensor of shape (1,)"])
def test_the_base_in_every_form(kind: str) -> None:
    """As a term, a function, a module or a tensor: one total, one gradient."""
    hidden, labels = vector(), torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    terms = {"l1": Term(eq.l1, inputs="hidden", weight=0.5)}
    spare = {"labels": Term(lambda labels: labels.sum(), inputs="labels", enabled=False)}
    value = as_function(hidden, labels)[0]
    base: Any = {
        "callable": as_function,
        "module": Task(),
        "tensor": value,
        "tensor of shape (1,)": value.reshape(1),
    }.get(kind)
    if kind == "term":
        terms["base"] = Term(as_function, inputs=("hidden", "labels"))
    result = Pipeline(**terms, **spare)(hidden=hidden, labels=labels, base=base)
    assert_equal(result.base, 13.0)
    assert_equal(result.penalty, 3.0)
    assert_equal(result.total, 16.0)
    assert result.total.dim() == 0
    assert_close(slope(result, hidden), 2 * (hidden - 1) + 0.5 * hidden.sign())
    assert list(result.terms) == ["l1"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_default_of_a_base_function_stays(compiled: bool) -> None:
    """What is no input keeps its default; what is one is given."""
    x, y = vector(), vector(4.0)
    pipeline = Pipeline(l1=Term(eq.l1), l2=Term(eq.l2, inputs="y"))

    def total(x: Tensor, y: Tensor) -> Tensor:
        return pipeline(x, y=y, base=lambda x, y=7.0, by=3.0: by * x.sum() * y.sum()).base

    call = torch.compile(total, backend="eager", fullgraph=True) if compiled else total
    assert_equal(call(x, y), 3.0 * 2.0 * 4.0)


def test_a_base_that_is_no_function_of_the_inputs_still_counts() -> None:
    """A tensor from anywhere is added and differentiated by what it depends on."""
    x, w = vector(), vector(2.0)
    result = Pipeline(l1=Term(eq.l1))(x, base=(w * w).sum())
    result.total.backward()
    assert_equal(result.total, 10.0)
    assert_equal(w.grad, 2 * w)


@pytest.mark.parametrize("track", [False, "norms"])
def test_the_order_of_terms_changes_only_the_order(track: Any) -> None:
    """Values by name are the same bit for bit; the sum is added up in another order."""
    x = vector(0.1, 0.7, -1.3)
    terms = {
        "a": Term(eq.l1, weight=0.1),
        "b": Term(eq.l2, weight=-0.3),
        "base": Term(lambda x: x.exp().sum()),
        "c": Term(eq.output_magnitude),
    }
    forth = Pipeline(**terms)(x, track=track)
    back = Pipeline(**dict(reversed(terms.items())))(x, track=track)
    assert list(back.terms) == list(reversed(forth.terms))
    for name, term in forth.terms.items():
        assert_same_bits(back.terms[name].value, term.value)
        assert_same_bits(back.terms[name].contribution, term.contribution)
    # Three additions of numbers below 10 round three times, by 10·2⁻⁵³ each.
    assert_close(back.total, forth.total, within=1e-14)
    assert_close(slope(back, x), slope(forth, x), within=1e-14)


# Weights -----------------------------------------------------------------------------------------


def test_disabled_is_absent() -> None:
    """A disabled term is neither evaluated nor reported, and leaves not a bit behind."""
    calls: list[str] = []

    def costly(x: Tensor) -> Tensor:
        calls.append("costly")
        return x.exp().sum()

    x = vector(0.3, -0.7)
    others = {"l1": Term(eq.l1, weight=0.1), "l2": Term(eq.l2, weight=0.3)}
    off = Pipeline(costly=Term(costly, enabled=False), **others)(x, track="gram")
    without = Pipeline(**others)(x, track="gram")
    assert calls == []
    assert_same_bits(off.total, without.total)
    assert_same_bits(slope(off, x), slope(without, x))
    assert off.metrics() == without.metrics()
    assert off.gradients.names == ("l1", "l2")


def test_weight_zero_is_evaluated_and_contributes_nothing() -> None:
    """It is reported with its value and changes neither total nor gradient."""
    x = vector(0.3, -0.7)
    others = {"l1": Term(eq.l1, weight=0.1)}
    zero = Pipeline(idle=Term(eq.l2, weight=0), **others)(x)
    without = Pipeline(**others)(x)
    assert_same_bits(zero.total, without.total)
    assert_same_bits(slope(zero, x), slope(without, x))
    assert_close(zero.terms["idle"].value, 0.58)
    assert_equal(zero.terms["idle"].contribution, 0.0)
    assert zero.metrics()["idle"] == pytest.approx(0.58, rel=1e-15)
    assert zero.metrics()["idle_weighted"] == 0.0


def test_weight_zero_times_infinity_is_zero() -> None:
    """An infinite divergence that is not yet switched on does not spoil total or gradient."""
    p = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    q = torch.tensor([0.0, -torch.inf], dtype=torch.float64).requires_grad_()
    kl = Term(eq.kl_divergence, inputs=("p", "q"), weight=schedules.linear(0.0, 1.0, steps=10))
    result = Pipeline(base=Term(lambda q: q[0] + 2, inputs="q"), kl=kl)(p=p, q=q, step=0)
    assert result.terms["kl"].value == torch.inf
    assert_equal(result.total, 2.0)
    assert_equal(slope(result, q), torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_only_weights_of_zero_can_be_trained() -> None:
    """The first step of a warm-up has a total of 0 with a gradient of 0."""
    x = vector()
    warming = Pipeline(l1=Term(eq.l1, weight=schedules.warmup(1.0, steps=10)))
    result = warming(x, step=0)
    result.total.backward()
    assert_equal(result.total, 0.0)
    assert_equal(x.grad, torch.zeros(3, dtype=torch.float64))


def test_a_negative_weight_means_what_it_says() -> None:
    """It is subtracted, and its gradient pulls the other way."""
    x = vector()
    result = Pipeline(l2=Term(eq.l2, weight=-0.5))(x)
    assert_equal(result.total, -7.0)
    assert_equal(slope(result, x), -x)


def test_a_tensor_weight_counts_and_learns_only_if_it_requires_grad() -> None:
    """A 0-d tensor is a weight; one that requires grad gets the value as its gradient."""
    x = vector()
    for learns in (False, True):
        weight = torch.tensor(0.25, dtype=torch.float64, requires_grad=learns)
        result = Pipeline(l2=Term(eq.l2, weight=weight))(x)
        assert_equal(result.total, 3.5)
        assert_equal(slope(result, x), x / 2)
        result.total.backward()
        assert (weight.grad is not None) == learns
        if learns:
            assert_equal(weight.grad, 14.0)


def test_a_tensor_weight_is_read_at_every_call() -> None:
    """Changed in place, it weighs otherwise from then on."""
    weight = torch.tensor(0.5, dtype=torch.float64)
    pipeline = Pipeline(l2=Term(eq.l2, weight=weight))
    assert_equal(pipeline(vector()).total, 7.0)
    weight.fill_(2.0)
    assert_equal(pipeline(vector()).total, 28.0)


def test_a_schedule_weighs_by_the_step() -> None:
    """The weight is that of the step, whether a schedule, a lambda or one that gives a tensor."""
    x = vector()
    ramp = schedules.linear(0.0, 1.0, steps=11)
    for weight in (ramp, lambda step: step / 10, lambda step: torch.tensor(step / 10).double()):
        pipeline = Pipeline(l2=Term(eq.l2, weight=weight))
        for step in (0, 5, 10):
            result = pipeline(x, step=step)
            assert_close(result.total, 14.0 * step / 10)
            assert float(result.terms["l2"].weight) == step / 10
            assert_close(slope(result, x), 2 * x * step / 10)


# Now and then ------------------------------------------------------------------------------------


def test_a_lazy_term_is_evaluated_when_it_is_due() -> None:
    """At steps 0, n, 2n, … and at no other it is called and reported."""
    calls: list[int] = []

    def lazy(x: Tensor) -> Tensor:
        calls.append(0)
        return x.sum()

    pipeline = Pipeline(l1=Term(eq.l1), lazy=Term(lazy, every=3))
    reported = [step for step in range(8) if "lazy" in pipeline(vector(), step=step).terms]
    assert reported == [0, 3, 6]
    assert len(calls) == 3


def test_a_lazy_term_weighs_n_times_as_much() -> None:
    """Its weight is multiplied by n, a schedule's too; with rescale=False it is left alone."""
    x = vector()
    for weight in (0.5, lambda _: 0.5, torch.tensor(0.5).double()):
        for rescale, total in ((True, 28.0), (False, 7.0)):
            result = Pipeline(l2=Term(eq.l2, weight=weight, every=4, rescale=rescale))(x, step=8)
            assert_equal(result.total, total)
            assert float(result.terms["l2"].weight) == (2.0 if rescale else 0.5)


@given(every=st.integers(1, 6))
def test_the_mean_gradient_of_a_lazy_term_is_the_plain_one(every: int) -> None:
    """Over n steps the gradients of the lazy and of the plain pipeline have the same mean."""
    x = vector()
    base = Term(lambda x: x.sin().sum())

    def mean(pipeline: Pipeline) -> Tensor:
        slopes = [slope(pipeline(x, step=step), x) for step in range(every)]
        return torch.stack(slopes).mean(0)

    lazily = Pipeline(base=base, l2=Term(eq.l2, weight=0.3, every=every))
    # The mean of n ≤ 6 numbers below 12 is rounded n times.
    assert_close(mean(lazily), mean(Pipeline(base=base, l2=Term(eq.l2, weight=0.3))), within=1e-14)


@pytest.mark.parametrize("track", [False, "norms"])
def test_nothing_due_is_a_zero_that_can_be_trained(track: Any) -> None:
    """Between the turns of its only term a pipeline has a total of 0, and backward works."""
    x = vector()
    result = Pipeline(l1=Term(eq.l1, every=2))(x, step=1, track=track)
    result.total.backward()
    assert_equal(result.total, 0.0)
    assert result.metrics() == {"total": 0.0, "penalty": 0.0}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("kind", ["tensor", "list", "nested", "after integers"])
def test_all_disabled_is_a_zero_of_the_inputs(kind: str, dtype: torch.dtype) -> None:
    """It has the inputs' dtype and device, and backward works on it and moves nothing."""
    x = torch.ones(2, dtype=dtype, requires_grad=True)
    given: dict[str, Any] = {"x": {"list": [x], "nested": [{"deep": (x,)}]}.get(kind, x)}
    terms = {"off": Term(eq.l1, inputs="x", enabled=False)}
    if kind == "after integers":
        given = {"ids": torch.tensor([1, 2]), **given}
        terms["ids"] = Term(eq.l1, inputs="ids", enabled=False)
    result = Pipeline(**terms)(**given)
    assert result.total.dtype == dtype
    assert result.total.device == x.device
    assert_equal(result.total, 0.0)
    result.total.backward()
    assert x.grad is None or not x.grad.any()


def test_all_disabled_without_gradient_is_a_plain_zero() -> None:
    """Of inputs that require no grad the zero requires none; of no tensor it is a float32 one."""
    off = Pipeline(l1=Term(eq.l1, enabled=False))
    zero = off(torch.ones(2, dtype=torch.float64)).total
    assert (zero.item(), zero.dtype, zero.requires_grad) == (0.0, torch.float64, False)
    assert (off("text").total.item(), off("text").total.dtype) == (0.0, torch.float32)
    assert off(torch.ones(2, device="meta")).total.device.type == "meta"


def test_a_term_that_is_not_differentiable_on_purpose_has_no_graph() -> None:
    """`differentiable=False` evaluates without a graph, and the value still counts."""
    x = vector()
    made: list[bool] = []

    def watching(x: Tensor) -> Tensor:
        made.append(torch.is_grad_enabled())
        return x.square().sum()

    result = Pipeline(l1=Term(eq.l1), watch=Term(watching, differentiable=False, weight=2.0))(x)
    assert made == [False]
    assert_equal(result.total, 6.0 + 28.0)
    assert_equal(slope(result, x), x.sign())
    assert torch.is_grad_enabled()


# Options for one call ----------------------------------------------------------------------------


def test_options_for_one_call_reach_one_term_once() -> None:
    """The named term alone gets them, beside its own, for this call alone."""
    x = vector()
    pipeline = Pipeline(
        a=Term(eq.l2, options={"reduction": "mean"}), b=Term(eq.l2, options={"reduction": "mean"})
    )
    before = pipeline(x).metrics()
    changed = pipeline(x, options={"a": {"scale": 3.0}}).metrics()
    assert changed["a"] == pytest.approx(14.0, rel=1e-15)
    assert changed["b"] == before["b"] == pytest.approx(14 / 3, rel=1e-15)
    assert pipeline(x).metrics() == before
    assert dict(pipeline["a"].options) == {"reduction": "mean"}


def test_options_for_one_call_win() -> None:
    """They replace the term's own of the same name."""
    x = vector()
    pipeline = Pipeline(l2=Term(eq.l2, options={"scale": 2.0, "clip": 1.0}))
    assert_equal(pipeline(x, options={"l2": {"scale": 5.0}}).total, 15.0)


@pytest.mark.parametrize("track", [False, "norms", "gram"])
def test_norms_are_of_the_options_for_one_call(track: Any) -> None:
    """Values and gradient norms use the same options."""
    x = vector()
    result = Pipeline(l2=Term(eq.l2))(x, options={"l2": {"scale": 3.0}}, track=track)
    assert_close(result.gradients.norms["l2"], 6 * x.detach().norm())


# Editing -----------------------------------------------------------------------------------------

EDITED = Pipeline(
    base=Term(F.mse_loss, inputs=("hidden", "wanted")),
    sparsity=Term(eq.l1, inputs="hidden", weight=0.001),
    distill=Term(eq.kl_divergence, inputs=("teacher", "student"), weight=0.1),
)
EDITS: dict[str, tuple[Callable[[Pipeline], Pipeline], str]] = {
    "reweighted": (
        lambda p: p.reweighted(sparsity=0.02, distill=-3),
        "base(hidden, wanted) + 0.02·sparsity(hidden) − 3·distill(teacher, student)",
    ),
    "with_term": (
        lambda p: p.without("base").with_term("more", Term(eq.l2, inputs="hidden")),
        "0.001·sparsity(hidden) + 0.1·distill(teacher, student) + more(hidden)",
    ),
    "without": (lambda p: p.without("base", "distill"), "0.001·sparsity(hidden)"),
    "disable": (
        lambda p: p.disable("sparsity", "base"),
        "0.1·distill(teacher, student)",
    ),
    "disable and enable": (
        lambda p: p.disable("sparsity").enable("sparsity"),
        "base(hidden, wanted) + 0.001·sparsity(hidden) + 0.1·distill(teacher, student)",
    ),
    "renamed": (
        lambda p: p.renamed(distill="kl", sparsity="l1"),
        "base(hidden, wanted) + 0.001·l1(hidden) + 0.1·kl(teacher, student)",
    ),
    "two names swapped": (
        lambda p: p.renamed(distill="sparsity", sparsity="distill"),
        "base(hidden, wanted) + 0.001·distill(hidden) + 0.1·sparsity(teacher, student)",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_returns_a_copy(name: str) -> None:
    """The copy is changed in its place, the original as it was."""
    edit, formula = EDITS[name]
    before, terms = str(EDITED), dict(EDITED.terms)
    edited = edit(EDITED)
    assert edited is not EDITED
    assert str(edited) == formula
    assert str(EDITED) == before
    assert dict(EDITED.terms) == terms


def test_a_term_may_be_called_like_an_argument() -> None:
    """`self` is a name like any other."""
    pipeline = Pipeline(self=Term(eq.l1))
    assert str(pipeline.reweighted(self=2.0)) == "2·self(x)"
    assert str(pipeline.renamed(self="me")) == "me(x)"


def test_an_edited_pipeline_evaluates_as_edited() -> None:
    """Other weights, other names, other terms in what it computes."""
    x = vector()
    pipeline = Pipeline(l1=Term(eq.l1), l2=Term(eq.l2))
    assert_equal(pipeline.reweighted(l1=0.5)(x).total, 17.0)
    assert_equal(pipeline.disable("l2")(x).total, 6.0)
    assert_equal(pipeline.without("l1")(x).total, 14.0)
    assert_equal(pipeline.with_term("mean", Term(lambda x: x.sum()))(x).total, 22.0)
    assert set(pipeline.renamed(l1="sparsity")(x).metrics()) == {
        "total",
        "penalty",
        "sparsity",
        "sparsity_weighted",
        "l2",
        "l2_weighted",
    }


def test_a_pipeline_is_a_collection_of_terms() -> None:
    """By name, in order, counted; and nothing in it can be assigned."""
    assert list(EDITED) == ["base", "sparsity", "distill"]
    assert len(EDITED) == 3
    assert EDITED["sparsity"] is EDITED.terms["sparsity"]
    assert "sparsity" in EDITED
    assert "l1" not in EDITED
    with pytest.raises(TypeError, match="does not support item assignment"):
        EDITED.terms["l1"] = Term(eq.l1)  # type: ignore[index]
    with pytest.raises(AttributeError, match=r"is frozen, got an assignment to 'x'\. Use `rewei"):
        EDITED.x = 1


# Print -------------------------------------------------------------------------------------------


def test_print_shows_the_formula() -> None:
    """Weights, signs, schedules, inputs, and how often: as mathematics."""

    def warming(step: int) -> float:
        return float(step)

    pipeline = Pipeline(
        base=Term(F.cross_entropy, inputs=("student", "labels")),
        plain=Term(eq.l1),
        small=Term(eq.l2, inputs="hidden", weight=1e-3),
        minus=Term(eq.entropy, inputs="student", weight=-0.5),
        ramp=Term(eq.l1, inputs="hidden", weight=schedules.linear(0.0, 0.01, steps=1000)),
        own=Term(eq.l1, inputs="hidden", weight=warming),
        held=Term(eq.l1, inputs="hidden", weight=torch.tensor(0.5)),
        lazy=Term(eq.l2, inputs="weights", weight=0.25, every=16),
        off=Term(eq.l2, enabled=False),
    )
    assert str(pipeline) == (
        "base(student, labels) + plain(x) + 0.001·small(hidden) − 0.5·minus(student)"
        " + linear(0→0.01)·ramp(hidden) + warming·own(hidden) + w·held(hidden)"
        " + [0.25·lazy(weights) every 16 steps]"
    )


def test_print_of_little() -> None:
    """A first negative weight keeps its sign; nothing is 0."""
    assert str(Pipeline(l1=Term(eq.l1, weight=-2.0))) == "-2·l1(x)"
    assert str(Pipeline()) == "0"
    assert str(Pipeline(l1=Term(eq.l1, enabled=False))) == "0"
    assert repr(Pipeline()) == "Pipeline()"


def test_repr_is_the_code_to_make_it() -> None:
    """It evaluates to a pipeline with the same terms."""
    names = {"Pipeline": Pipeline, "Term": Term, "l1": eq.l1, "kl_divergence": eq.kl_divergence}
    pipeline = EDITED.without("base").disable("distill")
    again = eval(repr(pipeline), names)
    assert repr(again) == repr(pipeline)
    assert list(again) == list(pipeline)
    assert again["distill"].inputs == ("teacher", "student")
    assert not again["distill"].enabled
