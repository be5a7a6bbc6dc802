"""A compiled pipeline beside the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline

Draw = Callable[[], dict[str, Any]]
"""The same inputs at every call, fresh leaves among them."""


def leaves(inputs: dict[str, Any]) -> list[Tensor]:
    """Everything that requires grad."""
    found = []
    for value in inputs.values():
        items = value if isinstance(value, list) else [value]
        found += [x for x in items if isinstance(x, Tensor) and x.requires_grad]
    return found


def trained(
    pipeline: Pipeline, draw: Draw, *, scale: float = 1.0, **how: Any
) -> tuple[eq.Evaluation, list[Tensor | None]]:
    """One backward pass: the evaluation and the gradients of all leaves."""
    inputs = draw()
    result = pipeline(**inputs, **how)
    (result.total * scale).backward()
    return result, [leaf.grad for leaf in leaves(inputs)]


def assert_as_plain(
    pipeline: Pipeline, draw: Draw, *, within: float = 1e-12, scale: float = 1.0, **how: Any
) -> eq.Evaluation:
    """Total, parts, gradients, report and every printed figure are those of the plain pipeline."""
    result, slopes = trained(pipeline, draw, scale=scale, **how)
    plain, wanted = trained(plainly(pipeline), draw, scale=scale, **how)
    for slope, same in zip(slopes, wanted, strict=True):
        assert slope is not None
        # Where a term detaches an input, autograd has no gradient and `torch.func` has zeros.
        wanted_slope = torch.zeros_like(slope) if same is None else same
        assert slope.dtype == wanted_slope.dtype
        torch.testing.assert_close(slope, wanted_slope, rtol=within, atol=within)
    assert result.total.dtype == plain.total.dtype
    assert result.terms.keys() == plain.terms.keys()
    figures, expected = result.metrics(), plain.metrics()
    assert figures.keys() == expected.keys()
    assert figures == pytest.approx(expected, rel=within, abs=within, nan_ok=True)
    assert result.to_dict().keys() == plain.to_dict().keys()
    for name, term in plain.results.items():
        assert result.results[name].value.requires_grad == term.value.requires_grad
    if plain.has_report and plain.gradients.grams is not None:
        assert result.gradients.errors.keys() == plain.gradients.errors.keys()
        torch.testing.assert_close(
            result.gradients.gram, plain.gradients.gram, rtol=within, atol=within
        )
    return result


def plainly(pipeline: Pipeline) -> Pipeline:
    """The same without the compiler."""
    return Pipeline(**pipeline.terms)


@contextmanager
def hands_over(caplog: pytest.LogCaptureFixture, why: str) -> Iterator[None]:
    """Inside, the plain definition does the work, and the debug log says why."""
    caplog.clear()
    with caplog.at_level("DEBUG", logger="equipoise"):
        yield
    assert any(why in message for message in caplog.messages), caplog.messages


@contextmanager
def serves(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Inside, nothing is handed over."""
    caplog.clear()
    with caplog.at_level("DEBUG", logger="equipoise"):
        yield
    assert [r.message for r in caplog.records if r.name == "equipoise"] == []
