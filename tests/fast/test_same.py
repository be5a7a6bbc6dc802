"""A compiled pipeline computes what the plain one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term
from tests.contracts.members import MEMBERS, Member
from tests.fast.beside import assert_as_plain, leaves, plainly, serves, trained

LOGITS = {"from_logits": True}
LEVELS = (False, "norms", "gram")


def moved(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A value with a tensor, and a number, to report."""
    return x.square().mean(), {"mean": x.mean(), "entries": x.numel()}


PIPELINE = Pipeline(
    base=Term(F.cross_entropy, inputs=("student", "labels")),
    distill=Term(eq.kl_divergence, inputs=("teacher", "student"), weight=-0.5, options=LOGITS),
    moved=Term(moved, inputs="student", weight=0.25),
    decay=Term(eq.l2, inputs="weights", weight=0.1),
    silent=Term(eq.l1, inputs="student", differentiable=False, weight=2.0),
    off=Term(eq.l1, inputs="student", weight=0.0),
).compiled()


def draw(dtype: torch.dtype = torch.float64, rows: int = 3) -> dict[str, Any]:
    """Several inputs, a list among them, and a teacher that does not learn."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "student": leaf(rows, 4).requires_grad_(),
        "teacher": leaf(rows, 4),
        "labels": torch.arange(rows) % 4,
        "weights": [leaf(2).requires_grad_(), leaf(2, 2).requires_grad_()],
    }


@pytest.mark.parametrize("level", LEVELS)
def test_everything_is_as_plain(level: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Lists, metrics, a base, terms without a gradient and of weight 0: all figures agree."""
    with serves(caplog):
        result = assert_as_plain(PIPELINE, draw, track=level, within=1e-12)
    assert str(result) == str(trained(plainly(PIPELINE), draw, track=level)[0])


@pytest.mark.parametrize("scale", [3.0, 65536.0])
def test_an_upstream_scale_reaches_the_gradient_alone(scale: float) -> None:
    """As with a gradient scaler: gradients are scaled, reported norms are not."""
    assert_as_plain(PIPELINE, draw, track="gram", scale=scale, within=1e-11)


def test_a_gradient_scaler_and_accumulation() -> None:
    """Two micro-batches under a scaler add up as they do without the compiler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sums = []
    for pipeline in (PIPELINE, plainly(PIPELINE)):
        inputs = draw()
        for _ in range(2):
            scaler.scale(pipeline(**inputs).total / 2).backward()
        sums.append([leaf.grad for leaf in leaves(inputs)])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=0)


def test_gradients_reach_the_model_behind() -> None:
    """One input is computed from another: what passes from one to the other is counted once."""
    pipeline = Pipeline(
        a=Term(eq.l2, inputs="hidden", weight=0.3),
        b=Term(lambda h, o: (h.sum() * o.square().sum()).tanh(), inputs=("hidden", "out")),
    )

    def hidden_and_out() -> dict[str, Tensor]:
        x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
        hidden = x.sin()
        return {"x": x, "hidden": hidden, "out": hidden * 2}

    reports, slopes = [], []
    for one in (pipeline.compiled(), pipeline):
        named = hidden_and_out()
        x = named.pop("x")
        result = one(**named, track="gram")
        result.total.backward()
        reports.append(result.metrics())
        slopes.append(x.grad)
    assert reports[0] == pytest.approx(reports[1], rel=1e-12)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_and_half_precision(dtype: torch.dtype) -> None:
    """The gradient has the input's type, and its precision."""
    within = 1e-5 if dtype == torch.float32 else 2e-2
    assert_as_plain(PIPELINE, lambda: draw(dtype), track="norms", within=within)


def test_generated_code_agrees(generated: None) -> None:  # noqa: ARG001
    """The default backend gives the same with its own machine code."""
    # Its exp and log are good to a few units in the last place: 1e-15, over sums of twelve.
    assert_as_plain(PIPELINE, draw, track="gram", within=1e-11)


def test_an_input_read_twice_by_one_term() -> None:
    """Both of its places count, in the gradient and in the norm."""
    pipeline = Pipeline(
        square=Term(lambda a, b: (a * b).sum(), inputs=("x", "x"), weight=0.5),
        entropy=Term(eq.entropy, inputs="x", options=LOGITS),
    ).compiled()
    for level in ("norms", "gram"):
        result = assert_as_plain(pipeline, lambda: {"x": draw()["student"]}, track=level)
        length = torch.linalg.vector_norm(draw()["student"].detach()).item()
        assert result.metrics()["square_grad_norm"] == pytest.approx(2 * length, rel=1e-12)


def test_a_tensor_as_weight() -> None:
    """It is read at every call, and is moved nowhere."""
    weight = torch.tensor(0.5, dtype=torch.float64)
    pipeline = Pipeline(l1=Term(eq.l1, weight=weight), l2=Term(eq.l2)).compiled()
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    assert pipeline(x).total.item() == 6.5
    weight.fill_(2.0)
    result = pipeline(x, track=True)
    result.total.backward()
    assert result.total.item() == 11.0
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, -6.0]


GIVEN_AWAY: dict[str, Any] = {
    "one for two places": lambda a, b: (a + b).square().sum(),
    "a number repeated": lambda a, b: a.sum() + 0 * b.sum(),
}


@pytest.mark.parametrize("penalty", GIVEN_AWAY.values(), ids=GIVEN_AWAY)
@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_gradients_have_memory_of_their_own(penalty: Any, shape: tuple[int, ...]) -> None:
    """What is scaled in place, and then belongs to the user, is nothing that anybody else holds."""
    weight = torch.tensor(2.0, dtype=torch.float64)
    pipeline = Pipeline(
        term=Term(lambda a, b: penalty(a, b).sum(), inputs=("a", "b"), weight=weight)
    ).compiled()

    def ones() -> dict[str, Any]:
        return {k: torch.ones(shape, dtype=torch.float64, requires_grad=True) for k in "ab"}

    assert_as_plain(pipeline, ones, scale=3.0, track="norms")
    assert weight == 2.0
    inputs = ones()
    pipeline(**inputs).total.backward()
    kept = inputs["b"].grad.clone()
    inputs["a"].grad.zero_()
    assert weight == 2.0
    torch.testing.assert_close(inputs["b"].grad, kept)


def test_a_weight_is_not_the_gradient_it_is_equal_to() -> None:
    """The input may be a number: then its gradient is the weight, and yet another tensor."""
    weight = torch.tensor(2.0)
    pipeline = Pipeline(term=Term(lambda x: x, weight=weight)).compiled()
    x = torch.tensor(1.0, requires_grad=True)
    (3 * pipeline(x).total).backward()
    assert x.grad == 6.0
    assert weight == 2.0


def test_a_scale_is_not_rounded_to_half_precision() -> None:
    """A third of a gradient is a third of it, not 0.3340 of it."""
    pipeline = Pipeline(cube=Term(lambda x: x.float().pow(3).sum())).compiled()
    x = (1 + torch.rand(4096)).bfloat16().requires_grad_()
    (pipeline(x).total / 3).backward()
    assert x.grad is not None
    ratio = x.grad.double() / x.detach().double().square()
    assert abs(ratio.mean().item() - 1) < 2e-4  # 0.3340 · 3 is off by 2e-3


def test_options_and_masks_of_one_call() -> None:
    """They go to their term; a tensor among them may differ every time without compiling anew."""
    mask = torch.tensor([True, False, True])
    for kept in (mask, ~mask):
        options = {"distill": {"mask": kept, "temperature": 2.0}}
        assert_as_plain(PIPELINE, draw, track="norms", options=options)


def test_a_base_at_the_call() -> None:
    """A function is one of the terms, a tensor is added to them."""
    pipeline = PIPELINE.without("base").with_term("ce", Term(eq.l1, inputs="labels", enabled=False))

    def base(student: Tensor, teacher: Tensor) -> Tensor:
        return (student - teacher).square().mean()

    result = assert_as_plain(pipeline, draw, base=base, track="gram")
    assert result.gradients.norms["base"] is not None
    slopes = []
    for one in (pipeline, plainly(pipeline)):
        inputs = draw()
        one(**inputs, base=inputs["student"].pow(4).mean()).total.backward()
        slopes.append([leaf.grad for leaf in leaves(inputs)])
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=0)


def _scalar(member: Member) -> bool:
    """Whether it can be a term as it is: scalar, and no function of the user's among its inputs."""
    return "reduction=none" not in member.label


@pytest.mark.parametrize("member", [m for m in MEMBERS if _scalar(m)], ids=lambda m: m.id)
def test_every_member_of_the_contract(member: Member) -> None:
    """Each penalty with each option: value, gradient and norm, compiled and plain."""
    count = len(member.inputs())
    keys = tuple("abc"[:count])
    pipeline = Pipeline(term=Term(member.call, inputs=keys, weight=0.5)).compiled()
    within = 1e-9 if "orthogonality" in member.id else 1e-11
    assert_as_plain(
        pipeline,
        lambda: dict(zip(keys, member.inputs(), strict=True)),
        track="norms",
        within=within,
    )
