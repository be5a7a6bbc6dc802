"""Compiling without generating machine code: the same graph, in a hundredth of the time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.fast import _one_pass


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`aot_eager`, but for tests that ask to generate code; no graph serves two tests."""
    torch.compiler.reset()
    if "generated" not in request.fixturenames:
        compile_ = torch.compile

        def quickly(function: Any, **options: Any) -> Any:
            return compile_(function, **{**options, "backend": "aot_eager"})

        monkeypatch.setattr(_one_pass.torch, "compile", quickly)
    yield
    torch.compiler.reset()


@pytest.fixture
def generated() -> None:
    """Generate machine code, as users do."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of graphs compiled so far."""
    counter = [0]

    def compile_(function: Callable[..., Any], **options: Any) -> Any:
        def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
            counter[0] += 1
            return graph.forward

        return torch._dynamo.optimize(backend, nopython=options["fullgraph"])(function)

    monkeypatch.setattr(_one_pass.torch, "compile", compile_)
    return counter
