"""Each deliberate fault in the runtime is found by an agreement test."""

import pytest
import torch

from tests.spec.cases import cases, draw
from tests.spec.mutants import MUTANTS, Mutant, found
from tests.spec.oracle import Case, assert_gradient_agrees, assert_value_agrees


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.function} {mutant.what}")
def test_the_fault_is_found(mutant: Mutant) -> None:
    """The agreement holds without the fault, and breaks with it."""
    assert found(mutant)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_every_bound_is_narrow(case: Case) -> None:
    """One part in 10¹¹ more than the runtime gives is outside, in the value and in the gradient."""
    tensors = draw(case, "plain", torch.float64)

    def off(*inputs: torch.Tensor) -> torch.Tensor:
        return case.runtime(*inputs) * (1 + 1e-11)

    with pytest.raises(AssertionError, match="is not in"):
        assert_value_agrees(case, tensors, run=off)
    with pytest.raises(AssertionError, match="is not in"):
        assert_gradient_agrees(case, tensors, run=off)


def test_a_fault_that_does_no_harm_is_not_found() -> None:
    """What computes the same is no fault: a mutant can go unnoticed, and would be reported."""
    first = MUTANTS[0]
    harmless = Mutant("nothing", first.function, first.old, "return 1.0 * scale *", first.agreement)
    assert not found(harmless)


def test_an_assertion_elsewhere_is_no_agreement_that_broke() -> None:
    """What fails inside a library, or inside the fault, is not taken for an agreement's answer."""
    first = MUTANTS[0]
    crash = "raise AssertionError('a crash')\n    return 1.0 * scale *"
    crashing = Mutant("a crash", first.function, first.old, crash, first.agreement)
    with pytest.raises(AssertionError, match="a crash"):
        found(crashing)


def test_a_fault_whose_place_is_gone_is_an_error() -> None:
    """A text that is no longer there, or is there twice, has to be brought up to date."""
    gone = Mutant("nothing", MUTANTS[0].function, "no such text", "", MUTANTS[0].agreement)
    with pytest.raises(LookupError, match="'no such text' 0 times"):
        found(gone)
