"""Weights and shapes compile nothing; copies share what was compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.fast.beside import hands_over, plainly, serves


def leaf(*shape: int) -> Tensor:
    """Random numbers that move."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


PIPELINE = Pipeline(l1=Term(eq.l1, weight=0.5), l2=Term(eq.l2, options={"reduction": "mean"}))


def test_a_schedule_compiles_once(counted: list[int]) -> None:
    """Thirty steps of three schedules, one that passes 0 among them: one graph."""
    pipeline = Pipeline(
        base=Term(eq.l2),
        a=Term(eq.l1, weight=schedules.linear(0.0, 1.0, steps=20)),
        b=Term(eq.l1, weight=schedules.cosine(1.0, 0.0, steps=20)),
        c=Term(eq.output_magnitude, weight=schedules.piecewise({0: 0.5, 5: -2.0})),
    ).compiled()
    x = leaf(4)
    for step in range(30):
        result = pipeline(x, step=step, track="norms")
        same = plainly(pipeline)(x, step=step)
        torch.testing.assert_close(result.total, same.total, rtol=1e-13, atol=0)
    assert counted == [1]


def test_shapes_compile_twice(counted: list[int]) -> None:
    """A second shape makes the function general; no further one compiles again."""
    pipeline = PIPELINE.compiled()
    for rows in range(3, 12):
        x = leaf(rows, 5)
        torch.testing.assert_close(pipeline(x).total, PIPELINE(x).total, rtol=1e-13, atol=0)
    assert counted == [2]


def test_a_mask_after_shapes_that_varied(caplog: pytest.LogCaptureFixture) -> None:
    """It is compared with a size that may vary by then, and fits."""
    pipeline = PIPELINE.compiled()
    for rows in (3, 4, 5):
        pipeline(leaf(rows, 5))
    for mask in (torch.tensor([[1.0], [0.0], [2.0]]), torch.ones(1, 5), torch.eye(3, 5)):
        x, options = leaf(3, 5), {"l2": {"mask": mask}}
        with serves(caplog):
            total = pipeline(x, options=options).total
        torch.testing.assert_close(total, PIPELINE(x, options=options).total, rtol=1e-13, atol=0)


def test_copies_share_what_was_compiled(counted: list[int]) -> None:
    """Another weight is no other function; a term less is one."""
    pipeline = PIPELINE.compiled()
    x = leaf(4)
    assert pipeline(x).total == PIPELINE(x).total
    heavier = pipeline.reweighted(l1=3.0)
    torch.testing.assert_close(heavier(x).total, PIPELINE.reweighted(l1=3.0)(x).total)
    assert counted == [1]
    assert pipeline.disable("l1")(x).total == PIPELINE["l2"].penalty(x, reduction="mean")
    assert counted == [2]
    pipeline.enable("l1")(x)
    assert counted == [2]


def test_lambdas_made_anew_compile_once(counted: list[int]) -> None:
    """A base written in the loop is the same function every time."""
    pipeline = PIPELINE.compiled()
    for _ in range(4):
        pipeline(leaf(3), base=lambda x: x.pow(4).sum())
    assert counted == [1]


class Scaled:
    """A penalty with a state."""

    def __init__(self, by: float) -> None:
        self.by = by

    def sum(self, x: Tensor) -> Tensor:
        return self.by * x.sum()


def test_methods_of_several_objects(counted: list[int]) -> None:
    """Each is a function of its own, however often it is looked up."""
    pipeline = PIPELINE.compiled()
    x = leaf(3)
    for penalty in (*(Scaled(2.0), Scaled(3.0)) * 2,):
        total, same = (one(x, base=penalty.sum).total for one in (pipeline, PIPELINE))
        torch.testing.assert_close(total, same, rtol=1e-13, atol=0)
    one = Scaled(4.0)
    before = counted[0]
    for _ in range(4):
        assert pipeline(x, base=one.sum).base == 4.0 * x.sum()
    assert counted[0] == before + 1


def test_what_a_lambda_closes_over_is_bound_again(
    counted: list[int],  # noqa: ARG001
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Afterwards the same code over the first thing is not the function that was compiled."""
    pipeline = PIPELINE.compiled()
    x = leaf(3)

    def step() -> Tensor:
        sign = "+"
        base = pipeline(x, base=lambda x: x.sum() if sign == "+" else -x.sum()).base
        sign = "-"
        assert base is not None
        return base

    assert step() == x.sum()
    with hands_over(caplog, "bound to something else"):
        assert step() == x.sum()


class Batch:
    """A container that torch knows, and that prints as its address."""

    def __init__(self, x: Tensor, sign: int) -> None:
        self.x, self.sign = x, sign


register_pytree_node(Batch, lambda b: ([b.x], b.sign), lambda x, sign: Batch(*x, sign))


def test_containers_of_ones_own(counted: list[int]) -> None:
    """What stands beside the tensors tells functions apart, and nothing else does."""
    pipeline = Pipeline(term=Term(lambda b: b.sign * b.x.sum(), inputs="batch")).compiled()
    x = leaf(3)
    for sign in (1, -1, 1, -1, 1):
        assert pipeline(batch=Batch(x, sign)).total == sign * x.sum()
    assert counted == [2]


def test_many_pipelines_do_not_crowd_one_another_out(counted: list[int]) -> None:
    """More pipelines than one function may be recompiled for: each is still compiled."""
    x = leaf(3)
    for number in range(12):
        pipeline = Pipeline(**{f"t{number}": Term(eq.l2)}).compiled()
        result = pipeline(x)
        assert result.total.grad_fn is not None
        assert "Known" in result.total.grad_fn.name()
    assert counted == [12]


def test_options_that_always_change_are_given_up(counted: list[int]) -> None:
    """No end of variants is compiled; the values stay right."""
    pipeline = Pipeline(t=Term(eq.entropy, options={"from_logits": True})).compiled()
    x = leaf(2, 3)
    for number in range(40):
        options = {"t": {"temperature": 1.5 + number}}
        total = pipeline(x, options=options).total
        torch.testing.assert_close(total, plainly(pipeline)(x, options=options).total)
    assert counted[0] <= 32


def test_the_counter_counts(counted: list[int]) -> None:
    """Another dtype is another graph."""
    pipeline = PIPELINE.compiled()
    pipeline(leaf(3))
    pipeline(leaf(3).detach().float().requires_grad_())
    assert counted == [2]
