"""Typed examples of the public API: checked by mypy, never run.

A wrong call carries the error it must give, so that a call which stops being wrong is an unused
ignore, which is an error too.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import schedules, tracking


def sizes(x: Tensor, model: nn.Module) -> None:
    """A penalty of size takes one tensor or several, and gives one."""
    assert_type(eq.l1(x), Tensor)
    assert_type(eq.l1(x, reduction="mean", scale=0.5, mask=x > 0), Tensor)
    assert_type(eq.l1(model.parameters()), Tensor)
    assert_type(eq.l2([x, x], center="mean", clip=1.0, clip_mode="huber"), Tensor)
    assert_type(eq.elastic_net(x, l1_ratio=0.25), Tensor)
    assert_type(eq.output_magnitude(x, norm="l2", dim=-1, reduction="none"), Tensor)
    eq.l1(x, reduction="avg")  # type: ignore[arg-type]
    eq.l1("x")  # type: ignore[arg-type]
    eq.l1(x, "mean")  # type: ignore[call-arg]
    eq.l2(x, center="median")  # type: ignore[arg-type]
    eq.l2(x, lambda_=0.1)  # type: ignore[call-arg]


def distances(p: Tensor, q: Tensor, mask: Tensor) -> None:
    """A divergence takes two tensors; roles and directions are literals."""
    assert_type(eq.kl_divergence(p, q, direction="symmetric", from_logits=True), Tensor)
    assert_type(eq.js_divergence(p, q, base=2, mask=mask), Tensor)
    assert_type(eq.entropy(p, mode="bonus", normalize=True), Tensor)
    assert_type(eq.sampled_kl(p, q, estimator="k1", gradient="k2"), Tensor)
    assert_type(eq.consistency(p, q, metric="cosine", stop_gradient="second"), Tensor)
    eq.kl_divergence(p)  # type: ignore[call-arg]
    eq.kl_divergence(p, q, direction="backward")  # type: ignore[arg-type]
    eq.entropy(p, mode="maximize")  # type: ignore[arg-type]
    eq.sampled_kl(p, q, estimator="k4")  # type: ignore[arg-type]


def structure_and_slope(x: Tensor, critic: nn.Linear, generator: torch.Generator) -> None:
    """What takes a function takes any callable of a tensor, a module too."""
    assert_type(eq.orthogonality(x, mode="spectral", axis="vocabulary"), Tensor)
    assert_type(eq.gradient_penalty(critic, x, per="batch", sided="one"), Tensor)
    assert_type(eq.interpolated_gradient_penalty(critic, x, x, generator=generator), Tensor)
    assert_type(eq.grad_norm(lambda x: x.square().sum(), x), Tensor)
    eq.orthogonality(x, mode="hardest")  # type: ignore[arg-type]
    eq.gradient_penalty(x, x)  # type: ignore[arg-type]


def composition(x: Tensor, model: nn.Module) -> None:
    """Terms take any callable, weights and schedules; a pipeline gives an evaluation."""
    ramp = schedules.linear(0.0, 0.1, steps=10)
    pipeline = eq.Pipeline(
        sparsity=eq.Term(eq.l1, inputs="x", weight=ramp, every=4),
        own=eq.Term(lambda x: x.sum(), inputs=("x",), weight=x.sum(), options={}),
        decay=eq.Term(eq.l2, inputs="weights", nan_policy="skip"),
    )
    result = pipeline(x=x, weights=model.parameters(), step=3, track=tracking.every(10))
    assert_type(result, eq.Evaluation)
    assert_type(result.total, Tensor)
    assert_type(result.metrics(), dict[str, float])
    assert_type(result.gradients.dominant(), str)
    assert_type(pipeline.reweighted(own=0.5).without("decay"), eq.Pipeline)
    assert_type(tracking.parameter_gradients(result, model.parameters()), eq.Gradients)
    assert_type(tracking.History(window=10).means(last=5), dict[str, float])
    eq.Term(eq.l1, inputs=3)  # type: ignore[arg-type]
    eq.Term(eq.l1, wieght=0.1)  # type: ignore[call-arg]
    eq.Term(eq.l1, nan_policy="ignore")  # type: ignore[arg-type]
    eq.Pipeline(l1=eq.l1)  # type: ignore[arg-type]
    pipeline(x=x, track="norm")  # type: ignore[arg-type]
