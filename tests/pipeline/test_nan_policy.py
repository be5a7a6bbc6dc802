"""What a term's NaN or inf does to the total is the term's choice."""

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import Pipeline, Term


def bad(x: Tensor) -> Tensor:
    """NaN in value and gradient."""
    return (x - 5).sqrt().sum()


def good(x: Tensor) -> Tensor:
    """Fine everywhere."""
    return x.square().sum()


def evaluated(policy: str, **options: object) -> tuple[eq.Evaluation, Tensor]:
    """A term that fails beside one that does not."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    pipeline = Pipeline(good=Term(good), bad=Term(bad, weight=0.5, nan_policy=policy))  # type: ignore[arg-type]
    return pipeline(x, **options), x  # type: ignore[arg-type]


def test_propagate_is_the_default() -> None:
    """Without a policy NaN reaches the total and every gradient."""
    assert Term(bad).nan_policy == "propagate"
    result, x = evaluated("propagate")
    result.total.backward()
    assert result.total.isnan()
    assert x.grad is not None
    assert x.grad.isnan().all()


@pytest.mark.parametrize("track", [False, "norms", "gram"])
def test_skip_leaves_the_other_terms_alone(track: object) -> None:
    """A skipped term contributes 0 and gradient 0, and its value is reported as it is."""
    result, x = evaluated("skip", track=track)
    result.total.backward()
    assert result.total.item() == 5.0
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0]
    metrics = result.metrics()
    assert metrics["bad"] != metrics["bad"]
    assert metrics["bad_weighted"] == 0
    if track:
        assert metrics["bad_grad_norm_weighted"] == 0
        assert metrics["total_grad_norm"] == pytest.approx(20**0.5)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_skip_leaves_a_weight_that_learns_alone(fault: float) -> None:
    """The weight of a skipped term gets gradient 0; NaN and both infinities are skipped."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = torch.tensor(0.5, requires_grad=True)
    broken = Term(lambda x: fault * x.sum(), weight=weight, nan_policy="skip")
    result = Pipeline(good=Term(good), bad=broken)(x)
    result.total.backward()
    assert result.total.item() == 5.0
    assert weight.grad is not None
    assert weight.grad.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0]


def test_skip_lets_finite_values_through() -> None:
    """Where nothing is wrong a term with the policy trains as without it, bit for bit."""
    gradients = []
    for policy in ("skip", "propagate"):
        x = torch.tensor([7.0, 9.0], requires_grad=True)
        Pipeline(bad=Term(bad, weight=0.3, nan_policy=policy))(x).total.backward()  # type: ignore[arg-type]
        gradients.append(x.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_raise_names_the_term() -> None:
    """The error says which term it was, and what it found."""
    with pytest.raises(eq.NonFiniteError, match="`bad` must be finite, got 1 NaN"):
        evaluated("raise")


def test_one_policy_for_all() -> None:
    """`with_nan_policy` gives a copy in which every term has it."""
    pipeline = Pipeline(base=Term(good), bad=Term(bad))
    skipping = pipeline.with_nan_policy("skip")
    assert [term.nan_policy for term in skipping.terms.values()] == ["skip", "skip"]
    assert [term.nan_policy for term in pipeline.terms.values()] == ["propagate", "propagate"]


def test_a_base_can_be_skipped() -> None:
    """A base that is NaN is left out of the total like any other term."""
    x = torch.tensor([1.0], requires_grad=True)
    result = Pipeline(base=Term(bad), good=Term(good)).with_nan_policy("skip")(x)
    result.total.backward()
    assert result.total.item() == 1.0
    assert x.grad is not None
    assert x.grad.item() == 2.0


def test_an_unknown_policy_is_refused() -> None:
    """A misspelt policy is an error that suggests the near one."""
    with pytest.raises(eq.OptionError, match=r"`nan_policy` must be .* Did you mean 'skip'"):
        Term(bad, nan_policy="skipp")  # type: ignore[arg-type]


def test_a_policy_needs_the_host_or_a_probe() -> None:
    """Inside a functional transform only `propagate` is possible, and the error says so."""
    pipeline = Pipeline(bad=Term(bad, nan_policy="skip"))
    with pytest.raises(eq.OptionError, match="must be 'propagate' inside a compiled function"):
        torch.func.grad(lambda x: pipeline(x).total)(torch.ones(2))
