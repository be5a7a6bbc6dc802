"""What every balancer keeps: bad reports, states, raw values, devices, processes."""

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, balance, schedules
from equipoise.balance import Balancer, GradientRatio
from tests.balance.networks import along, around, descended, evaluated, numbers, pipeline_of

LOSSES = {
    "base": lambda x: around([3.0, 4.0])(x) + 1.0,
    "kl": lambda x: around([1.0, -1.0], 2.0)(x) + 1.0,
}
MAKE: dict[str, Callable[[], Balancer]] = {
    "share": lambda: balance.GradientShare({"kl": 0.3}),
    "ratio": lambda: balance.GradientRatio({"kl": 2.0}, decay=0.5),
    "gradnorm": lambda: balance.GradNorm(["base", "kl"], lr=0.1),
    "gram": lambda: balance.from_gram(lambda gram: gram.diagonal().rsqrt(), decay=0.5),
}
ALL = pytest.mark.parametrize("kind", MAKE)
POINTS = [[0.0, 0.0], [0.5, -0.5], [2.0, 1.0], [-1.0, 1.5]]


def trained(balancer: Balancer, points: list[list[float]]) -> Pipeline:
    """The pipeline after reports at these points."""
    pipeline = pipeline_of(LOSSES, kl=0.5)
    for x in points:
        pipeline = balancer.update(evaluated(pipeline, x), pipeline)
    return pipeline


def assert_same_state(first: Balancer, second: Balancer) -> None:
    """Weights and memory are equal to the bit."""
    one, two = first.state_dict(), second.state_dict()
    assert one["weights"] == two["weights"]
    assert one["memory"].keys() == two["memory"].keys()
    for key, tensor in one["memory"].items():
        assert torch.equal(tensor, two["memory"][key])


@ALL
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_a_report_that_does_not_hold_changes_nothing(kind: str, bad: float) -> None:
    """NaN, inf or zero gradients leave weights and memory alone, and later ones still count."""
    balancer, twin = MAKE[kind](), MAKE[kind]()
    pipeline = trained(balancer, POINTS[:3])
    trained(twin, POINTS[:3])
    broken = pipeline_of(
        {**LOSSES, "kl": lambda x: 1.0 + bad * x.sum() if bad else 1.0 + 0.0 * x.sum()}
    )
    balancer.update(evaluated(broken.reweighted(kl=pipeline["kl"].weight)), pipeline)
    assert_same_state(balancer, twin)
    for each in (balancer, twin):
        each.update(evaluated(pipeline, POINTS[3]), pipeline)
    assert_same_state(balancer, twin)


@ALL
def test_a_bad_first_report_leaves_the_weights(kind: str) -> None:
    """Before anything is known, a NaN keeps the weight that the pipeline had."""
    balancer = MAKE[kind]()
    pipeline = pipeline_of({**LOSSES, "kl": lambda x: torch.nan * x.sum()}, kl=0.25)
    assert balancer.update(evaluated(pipeline), pipeline)["kl"].weight == 0.25


@ALL
def test_raw_values_are_reported(kind: str) -> None:
    """A weight changes what a term contributes, not the value that is logged."""
    balancer = MAKE[kind]()
    pipeline = trained(balancer, POINTS)
    metrics = evaluated(pipeline, POINTS[1]).metrics()
    at = torch.tensor(POINTS[1], dtype=torch.float64)
    assert metrics["kl"] == pytest.approx(float(LOSSES["kl"](at)), rel=1e-12)
    weight = numbers(balancer)["kl"]
    assert metrics["kl_weighted"] == pytest.approx(weight * metrics["kl"], rel=1e-6)
    assert weight != 0.5


@ALL
def test_states_go_through_files(kind: str) -> None:
    """A state loads with `weights_only=True`, and a new balancer goes on with the same bits."""
    balancer, again = MAKE[kind](), MAKE[kind]()
    pipeline = trained(balancer, POINTS[:2])
    file = io.BytesIO()
    torch.save(balancer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    resumed = again.apply(pipeline_of(LOSSES, kl=0.5))
    assert resumed["kl"].weight == pipeline["kl"].weight
    for x in POINTS[2:]:
        pipeline = balancer.update(evaluated(pipeline, x), pipeline)
        resumed = again.update(evaluated(resumed, x), resumed)
    assert_same_state(balancer, again)


@ALL
def test_a_state_is_a_copy(kind: str) -> None:
    """Updating after `state_dict` does not change what was saved."""
    balancer = MAKE[kind]()
    trained(balancer, POINTS[:2])
    saved = balancer.state_dict()
    before = {n: t.clone() for n, t in (saved["weights"] | saved["memory"]).items()}
    trained(balancer, POINTS)
    for name, tensor in (saved["weights"] | saved["memory"]).items():
        assert torch.equal(tensor, before[name])


@ALL
def test_an_evaluation_that_was_not_tracked_changes_nothing(kind: str) -> None:
    """A loop may hand over every evaluation, however seldom it tracks."""
    balancer, twin = MAKE[kind](), MAKE[kind]()
    pipeline = trained(balancer, POINTS[:2])
    trained(twin, POINTS[:2])
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = pipeline(x)
    result.total.backward()
    after = balancer.update(result, pipeline)
    assert after["kl"].weight == pipeline["kl"].weight
    assert balancer.state_dict()["reports"] == twin.state_dict()["reports"]
    assert_same_state(balancer, twin)


STEADY: dict[str, Callable[[], Balancer]] = {
    "share": lambda: balance.GradientShare({"kl": 0.2}),
    "ratio": lambda: balance.GradientRatio({"kl": 0.25}, decay=0.9),
    "gradnorm": lambda: balance.GradNorm(["base", "kl"], lr=0.02),
    "gram": lambda: balance.from_gram(
        lambda gram: gram.diagonal().rsqrt(), terms=["base", "kl"], decay=0.95
    ),
}


@pytest.mark.parametrize("kind", STEADY)
def test_weights_are_steady_under_noise(kind: str) -> None:
    """Noise of a quarter of the distance between the optima moves a weight by a sixth at most."""
    losses = {"base": around([0.0, 0.0]), "kl": around([1.0, 1.0], 4.0), "c": along([-0.4, -0.4])}
    losses = {name: lambda x, f=f: f(x) + 1.0 for name, f in losses.items()}
    pipeline = pipeline_of(losses)
    at, _, weights = descended(STEADY[kind](), pipeline, [0.5, 0.5], noise=0.1, steps=400)
    late = torch.tensor([now["kl"] for now in weights[200:]])
    assert late.std() < late.mean() / 6
    assert 0 < at.min() < at.max() < 1.1


class Waits(torch.overrides.TorchFunctionMode):
    """Counts the ways in which Python looks at a tensor's number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in {"item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"}:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@ALL
def test_an_update_waits_for_nothing(kind: str) -> None:
    """No number is read from the device, the first time nor later."""
    balancer = MAKE[kind]()
    pipeline = pipeline_of(LOSSES, kl=0.5)
    for x in POINTS:
        result = evaluated(pipeline, x)
        with Waits() as waits:
            pipeline = balancer.update(result, pipeline)
        assert waits.seen == []
    weight = pipeline["kl"].weight
    assert isinstance(weight, Tensor)
    assert (weight.dtype, weight.dim(), weight.requires_grad) == (torch.float32, 0, False)


def test_waiting_is_seen() -> None:
    """The counter above notices a look at a number."""
    with Waits() as waits:
        torch.ones(()).item()
    assert waits.seen == ["item"]


def test_a_term_without_a_gradient_keeps_its_weight(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, with the reason, and the other terms are balanced."""
    losses = {**LOSSES, "dead": lambda x: x.detach().sum()}
    pipeline = pipeline_of(losses, dead=0.7)
    balancer = GradientRatio({"kl": 1.0, "dead": 1.0})
    with caplog.at_level(logging.WARNING, "equipoise"):
        for x in POINTS:
            pipeline = balancer.update(evaluated(pipeline, x), pipeline)
    assert pipeline["dead"].weight == 0.7
    assert isinstance(pipeline["kl"].weight, Tensor)
    (record,) = caplog.records
    assert record.getMessage().startswith("dead keeps its weight: its value has no graph")


def test_a_schedule_goes_on_until_there_is_a_weight() -> None:
    """During the warm start a scheduled weight moves; the balancer then replaces it."""
    pipeline = pipeline_of(LOSSES).reweighted(kl=schedules.linear(0.1, 1.0, steps=10))
    balancer = GradientRatio({"kl": 1.0}, warmup=1)
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for step in range(2):
        result = pipeline(x, step=step, track=True)
        result.total.backward()
        pipeline = balancer.update(result, pipeline)
        assert callable(pipeline["kl"].weight) == (step == 0)


def test_a_schedule_ends_with_a_report_that_does_not_hold() -> None:
    """Nothing waits to see whether it does: the weight stays what it was in that report."""
    losses = {**LOSSES, "kl": lambda x: torch.nan * x.sum()}
    pipeline = pipeline_of(losses).reweighted(kl=schedules.linear(0.0, 1.0, steps=5))
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = pipeline(x, step=2, track=True)
    result.total.backward()
    assert GradientRatio({"kl": 1.0}).update(result, pipeline)["kl"].weight == 0.5


def test_half_precision_keeps_its_type() -> None:
    """A balanced weight does not widen a bfloat16 loss beyond float32."""
    pipeline = pipeline_of({"base": along([3.0, 4.0]), "kl": along([0.0, 2.0])})
    balancer = GradientRatio({"kl": 1.0})
    for _ in range(2):
        x = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
        result = pipeline(x, track=True)
        result.total.backward()
        pipeline = balancer.update(result, pipeline)
        assert result.total.dtype in (torch.bfloat16, torch.float32)
    assert pipeline["kl"].weight == 2.5


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    weights = {}
    torch.manual_seed(rank)
    last = {
        "random": lambda: balance.from_gram(lambda gram: torch.rand(len(gram))),
        "last": lambda: GradientRatio({"kl": 2.0}),
    }
    for kind, make in (MAKE | last).items():
        balancer = make()
        # Each process sees other points, and the second one once a NaN.
        points = [POINTS[rank], POINTS[2 + rank], [torch.nan, 0.0] if rank else POINTS[0]]
        trained(balancer, [*points, POINTS[rank]])
        weights[kind] = numbers(balancer)
    torch.save(weights, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_have_the_same_weights(tmp_path: Path) -> None:
    """Reports differ, weights do not, for every balancer; and they are those of both batches.

    Neither do they where a rule draws random numbers, of which each process has its own.
    """
    mp.spawn(_process, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    at = torch.tensor(POINTS[:2], dtype=torch.float64)
    base, kl = at - at.new_tensor([3.0, 4.0]), 2 * (at - at.new_tensor([1.0, -1.0]))
    assert first["last"]["kl"] == pytest.approx(float(2 * base.norm() / kl.norm()), rel=1e-6)


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "report": (
        lambda: GradientRatio({"kl": 1.0}).update({"kl": 1.0}, pipeline_of(LOSSES)),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`report` must be an evaluation or a gradient report, got dict. Use `balancer.update(res",
    ),
    "pipeline": (
        lambda: GradientRatio({"kl": 1.0}).update(evaluated(pipeline_of(LOSSES)), None),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`pipeline` must be a Pipeline, got NoneType. Use the one that gave the report.",
    ),
    "unknown": (
        lambda: GradientRatio({"kll": 1.0}).update(
            evaluated(pipeline_of(LOSSES)), pipeline_of(LOSSES)
        ),
        eq.OptionError,
        "the pipeline has the terms base, kl, got 'kll'. Did you mean 'kl'?",
    ),
    "state": (
        lambda: GradientRatio({"kl": 1.0}).load_state_dict(
            {
                "kind": "GradientRatio",
                "reports": 1,
                "weights": {"l1": torch.ones(())},
                "memory": {},
            }
        ),
        eq.InputError,
        "a state must be that of the same balancer, of kl, got one of 'l1'. Use the terms",
    ),
    "another's state": (
        lambda: GradientRatio({"kl": 1.0}).load_state_dict(MAKE["gradnorm"]().state_dict()),
        eq.InputError,
        "a state must be that of a GradientRatio, got GradNorm. Use what its `state_dict()` return",
    ),
    "no state": (
        lambda: GradientRatio({"kl": 1.0}).load_state_dict({}),
        eq.InputError,
        "a state must be that of a GradientRatio, got dict. Use what",
    ),
    "no base": (
        lambda: updated(GradientRatio({"kl": 1.0})),
        eq.InputError,
        "GradientRatio({'kl': 1.0}, base='base') measures against the base, got a report of kl, c.",
    ),
    "no base among the terms": (
        lambda: updated(balance.GradNorm(["base", "kl"])),
        eq.InputError,
        "measures against the base, got a report of kl, c. Use `pipeline(..., base=loss)`, a te",
    ),
    "misspelt base": (
        lambda: updated(GradientRatio({"kl": 1.0}, base="cc")),
        eq.OptionError,
        "the pipeline has the terms kl, c, got 'cc'. Did you mean 'c'?",
    ),
}


def updated(balancer: Balancer) -> Pipeline:
    """An update of a pipeline without a base."""
    pipeline = pipeline_of({"kl": LOSSES["kl"], "c": along([1.0, 0.0])})
    return balancer.update(evaluated(pipeline), pipeline)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong use is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_the_edited_pipeline_is_another_one() -> None:
    """A pipeline is frozen: the one that gave the report keeps its weights."""
    pipeline = Pipeline(base=Term(LOSSES["base"]), kl=Term(LOSSES["kl"], weight=0.5))
    after = GradientRatio({"kl": 1.0}).update(evaluated(pipeline), pipeline)
    assert pipeline["kl"].weight == 0.5
    assert after is not pipeline
