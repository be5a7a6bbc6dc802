"""Agreement on large inputs and on random ones, and where the compiler made the code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spec.cases import cases, draw
from tests.spec.oracle import Case, assert_gradient_agrees, assert_value_agrees

CASES = {case.id: case for case in cases()}
ONE_LINERS = [
    "l1",
    "l2-center=mean",
    "l2-clip=0.7-clip_mode=huber",
    "elastic_net-l1_ratio=0.3",
    "output_magnitude-dim=-1",
    "kl_divergence-from_logits=True",
    "js_divergence",
    "entropy-mode=bonus",
    "sampled_kl-estimator=k3",
    "consistency-metric=mse",
    "consistency-metric=cosine",
    "consistency-metric=kl",
]


@pytest.mark.parametrize("name", ONE_LINERS)
def test_four_thousand_entries_in_float64(name: str) -> None:
    """An error of one part in 10¹² of the sum of sizes would show."""
    tensors = draw(CASES[name], "plain", torch.float64, (4, 1024))
    assert_value_agrees(CASES[name], tensors)
    assert_gradient_agrees(CASES[name], tensors)


# What is laid out by the shape of the input, or whose masks have one of their own, stays apart.
ANY_SHAPE = [
    case
    for case in CASES.values()
    if case.penalty != "orthogonality"
    and not any(isinstance(option, torch.Tensor) for option in case.options.values())
]


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("case", ANY_SHAPE, ids=lambda case: case.id)
def test_one_number_and_three_dimensions(case: Case, shape: tuple[int, ...]) -> None:
    """A row of one entry is a row, and rows lie along the last dimension of however many."""
    tensors = draw(case, "plain", torch.float64, shape)
    assert_value_agrees(case, tensors)
    assert_gradient_agrees(case, tensors)


def numbers(width: int, largest: float) -> st.SearchStrategy[float]:
    """Any float of a width, up to a size whose square does not overflow; also very small ones."""
    return st.floats(-largest, largest, width=width, allow_nan=False, allow_subnormal=True)


ENTRYWISE = [
    Case(name, options, CASES["l1"].layout, 4)
    for name, options in [
        ("l1", {}),
        ("l1", {"reduction": "mean", "scale": 0.1}),
        ("l2", {}),
        ("l2", {"center": "mean"}),
        ("l2", {"center": 0.1, "clip": 0.3, "clip_mode": "huber"}),
        ("elastic_net", {"l1_ratio": 0.3}),
    ]
]


@pytest.mark.parametrize("case", ENTRYWISE, ids=lambda case: case.id)
@settings(max_examples=40)
@given(data=st.data())
def test_any_floats(case: Case, data: st.DataObject) -> None:
    """Up to 64 numbers of any size, subnormal ones too, in float64 and float32."""
    width, dtype, largest = data.draw(
        st.sampled_from([(64, torch.float64, 2.0**500), (32, torch.float32, 2.0**50)])
    )
    x = torch.tensor(data.draw(st.lists(numbers(width, largest), max_size=64)), dtype=dtype)
    assert_value_agrees(case, [x])
    assert_gradient_agrees(case, [x])


@pytest.mark.parametrize("name", ["kl_divergence-from_logits=True", "js_divergence", "entropy"])
@settings(max_examples=25)
@given(data=st.data())
def test_any_logits(name: str, data: st.DataObject) -> None:
    """Logits up to 80 apart, in float64 and float32."""
    case = CASES[name]
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8)))
    numbers = st.lists(
        st.floats(-40, 40, width=32), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    )
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    tensors = [
        torch.tensor(data.draw(numbers), dtype=dtype).reshape(shape).log_softmax(-1)
        for _ in range(case.inputs)
    ]
    assert_value_agrees(case, tensors)
    assert_gradient_agrees(case, tensors)


COMPILED = [
    "l1",
    "l2-center=mean-clip=0.7",
    "kl_divergence-from_logits=True",
    "js_divergence",
    "entropy-mode=bonus",
    "consistency-metric=cosine",
    "orthogonality-mode=hard",
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_agrees(name: str) -> None:
    """One graph, forward and backward, whose result lies in the same balls."""
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(case.runtime, fullgraph=True, backend="aot_eager")
    tensors = draw(case, "plain", torch.float64)
    assert_value_agrees(case, tensors, run=compiled)
    assert_gradient_agrees(case, tensors, run=compiled)


@pytest.mark.parametrize("name", ["l1", "kl_divergence-from_logits=True"])
def test_fused_code_agrees(name: str) -> None:
    """The loops that the compiler generates give results in the same balls."""
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(case.runtime, fullgraph=True)
    tensors = draw(case, "plain", torch.float32)
    assert_value_agrees(case, tensors, run=compiled)
    assert_gradient_agrees(case, tensors, run=compiled)
