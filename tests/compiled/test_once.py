"""Weights and shapes compile nothing; copies share what was compiled."""

from __future__ import annotations

import torch
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term, schedules
from tests.compiled.beside import plainly


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
