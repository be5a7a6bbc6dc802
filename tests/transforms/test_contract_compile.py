"""A functional update compiles to one graph, once, unless its entry in the table says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.transforms.members import FUNCTIONAL, Gradient, Member, gradients, parameters

ONE_GRAPH = [m for m in FUNCTIONAL if not m.breaks]
SEVERAL = [m for m in FUNCTIONAL if m.breaks]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No graph of one test serves another."""
    torch.compiler.reset()


def compiled(member: Member, **options: Any) -> Any:
    """The update of a member as users compile it: inside a function of theirs."""
    transform = member.make()

    def update(grads: list[Gradient], state: Any, params: list[Tensor]) -> Any:
        return transform.update(grads, state, params)

    return torch.compile(update, backend="aot_eager", **options)


def assert_close(got: Any, expected: Any) -> None:
    """Equal up to the order in which float64 adds up a hundred entries."""
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("member", ONE_GRAPH, ids=lambda m: m.id)
def test_one_graph_compiled_once(member: Member) -> None:
    """The compiled update gives what the plain one does, and is not compiled again for others."""
    transform, params = member.make(), parameters()
    update = compiled(member, fullgraph=True)
    state = transform.init(params)
    out, new = update(gradients(), state, params)
    expected, plain = transform.update(gradients(), state, params)
    assert_close(list(out), list(expected))
    assert_close(new, plain)
    with torch.compiler.set_stance("fail_on_recompile"):
        out, new = update(gradients(1), new, params)
    expected, plain = transform.update(gradients(1), plain, params)
    assert_close(list(out), list(expected))
    assert_close(new, plain)


@pytest.mark.parametrize("member", SEVERAL, ids=lambda m: m.id)
def test_a_graph_that_breaks_is_right(member: Member) -> None:
    """What has to ask the host still gives the same numbers inside compiled code."""
    transform, params = member.make(), parameters()
    update = compiled(member)
    state = plain = transform.init(params)
    for step in range(3):
        out, state = update(gradients(step), state, params)
        expected, plain = transform.update(gradients(step), plain, params)
        assert_close(list(out), list(expected))
        assert_close(state, plain)
