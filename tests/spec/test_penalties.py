"""Every penalty gives what its definition says, in value and gradient, to a derived bound."""

import pytest
import torch

from tests.spec.cases import cases, draw, kinds
from tests.spec.oracle import Case, assert_gradient_agrees, assert_value_agrees

CASES = cases()
PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TRIED = [pytest.param(case, kind, id=f"{case.id}-{kind}") for case in CASES for kind in kinds(case)]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(("case", "kind"), TRIED)
def test_values_and_gradients_are_those_of_the_definition(
    case: Case, kind: str, dtype: torch.dtype
) -> None:
    """Value and gradient lie among those that floating-point arithmetic of the format may give."""
    tensors = draw(case, kind, dtype)
    assert_value_agrees(case, tensors)
    assert_gradient_agrees(case, tensors)
