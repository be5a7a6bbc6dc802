"""NaN and inf: each policy does what it says, names the guilty, and touches no other tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import GradientTransform
from tests.transforms.assertions import assert_same_bits, copies, once
from tests.transforms.steps import Run

Clip = Callable[..., GradientTransform]
CLIPS: list[Clip] = [
    lambda **policy: transforms.clip_by_norm(1.0, **policy),
    lambda **policy: transforms.clip_by_global_norm(1.0, **policy),
    lambda **policy: transforms.clip_by_norm_history(0, 3, **policy),
    lambda **policy: transforms.clip_by_zscore(0.5, 3, warmup=1, **policy),
    lambda **policy: transforms.adaptive_clip(0.1, **policy),
]
IDS = ["norm", "global", "history", "zscore", "adaptive"]
each_clip = pytest.mark.parametrize("clip", CLIPS, ids=IDS)
each_bad = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)


def gradients(bad: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three gradients of which the second holds one entry that is not finite."""
    return [
        torch.tensor([[3.0, 4.0]], dtype=dtype),
        torch.tensor([bad, 1.0], dtype=dtype),
        torch.tensor([0.1], dtype=dtype),
    ]


@each_clip
@each_bad
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_propagate_spreads_to_nobody(clip: Clip, bad: float, dtype: torch.dtype) -> None:
    """What is not finite stays where it is; clips of each by itself still clip the others."""
    grads = gradients(bad, dtype)
    params = [torch.full_like(g, 10.0) for g in grads]
    out = once(clip(), grads, params)
    assert_same_bits(out[1], grads[1])
    alone = [once(clip(), [g], [p])[0] for g, p in zip(grads, params, strict=True)]
    together = clip not in (CLIPS[0], CLIPS[4])
    assert_same_bits(out[0], grads[0] if together else alone[0])
    assert_same_bits(out[2], grads[2])


@each_clip
@each_bad
def test_zero_replaces_the_entries(clip: Clip, bad: float) -> None:
    """Entries that are not finite become 0, and the rest is clipped as if they had been."""
    grads, clean = gradients(bad), gradients(0.0)
    params = [torch.full_like(g, 10.0) for g in grads]
    assert_same_bits(once(clip(nonfinite="zero"), grads, params), once(clip(), clean, params))


@each_clip
@each_bad
def test_raise_names_the_tensor(clip: Clip, bad: float) -> None:
    """An error says which gradient, how many entries, and where the first is."""
    grads = gradients(bad)
    word = "1 NaN" if math.isnan(bad) else "1 inf"
    with pytest.raises(
        eq.NonFiniteError,
        match=rf"`gradient 1` must be finite, got {word} among 2 entries, first at index \(0,\)",
    ) as error:
        once(clip(nonfinite="raise"), grads)
    assert (error.value.nan, error.value.inf) == ((1, 0) if math.isnan(bad) else (0, 1))


@each_clip
@each_bad
def test_skip_makes_all_zero_without_an_optimizer(clip: Clip, bad: float) -> None:
    """Where there is no step to skip, every gradient becomes 0; a finite list is clipped."""
    for got in once(clip(nonfinite="skip"), gradients(bad)):
        assert got is not None
        assert not got.any()
    clean = gradients(2.0)
    assert_same_bits(once(clip(nonfinite="skip"), clean), once(clip(), clean))


@pytest.mark.parametrize("policy", ["propagate", "raise", "zero", "skip"])
@each_clip
def test_large_entries_are_finite(clip: Clip, policy: str) -> None:
    """No policy takes gradients for infinite whose squares are, in float32 and in float64."""
    for dtype, large in ((torch.float32, 3e38), (torch.float64, 1e308), (torch.float16, 6e4)):
        grads = [torch.tensor([large, large], dtype=dtype), torch.ones(3, dtype=dtype)]
        params = [torch.full_like(g, 0.5) for g in grads]
        out = once(clip(nonfinite=policy), grads, params)
        assert all(g is not None and g.isfinite().all() and g.any() for g in out)
        assert_same_bits(out, once(clip(), grads, params))


def test_an_infinite_tensor_beside_a_large_one() -> None:
    """In float64 only the guilty is named, not what is merely large beside it."""
    grads = [torch.tensor([x], dtype=torch.float64) for x in (math.nan, 1e200)]
    with pytest.raises(eq.NonFiniteError) as error:
        once(transforms.clip_by_norm(1.0, nonfinite="raise"), grads)
    assert "gradient 0" in str(error.value)
    assert "gradient 1" not in str(error.value)


# skip_nonfinite on an optimizer


class Model(nn.Module):
    """Two named parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.second = nn.Parameter(torch.tensor([[3.0]]))


def spoilt(model: Model, bad: float = math.nan) -> None:
    """Gradients of which the second is not finite."""
    model.first.grad = torch.tensor([0.5, -0.5])
    model.second.grad = torch.tensor([[bad]])


def test_a_skipped_step_changes_nothing() -> None:
    """No weight, no moment, no count, no decay of either kind; the gradients are still there."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
    shaping = transforms.chain(
        transforms.skip_nonfinite(), transforms.add_l2_decay(0.1, decoupled=True)
    )
    handle = transforms.attach(shaping, optimizer, names=model)
    spoilt(model, 1.0)
    optimizer.step()
    weights = copies([p.detach() for p in model.parameters()])
    before = {k: v for k, v in optimizer.state_dict().items() if k != "gradient_transforms"}
    before = transforms._saved.copied(before)
    spoilt(model)
    optimizer.step()
    assert_same_bits([p.detach() for p in model.parameters()], weights)
    after = {k: v for k, v in optimizer.state_dict().items() if k != "gradient_transforms"}
    assert_same_bits(after, before)
    assert_same_bits(model.first.grad, torch.tensor([0.5, -0.5]))
    assert model.second.grad is not None
    assert model.second.grad.isnan().all()
    assert handle.nonfinite() == {"second": 1}
    assert handle.metrics() == {"skip_nonfinite/skipped": 1.0, "skip_nonfinite/in_a_row": 1.0}
    spoilt(model, 1.0)
    optimizer.step()
    assert handle.metrics() == {"skip_nonfinite/skipped": 1.0, "skip_nonfinite/in_a_row": 0.0}
    assert not torch.equal(model.first.detach(), weights[0])  # type: ignore[arg-type]


def test_names_of_what_was_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Names come from the model, from the optimizer's own, or say group and shape."""
    model = Model()
    plain = list(model.parameters())
    groups = [{"params": plain[:1]}, {"params": plain[1:]}]
    cases = [
        (torch.optim.SGD(plain, lr=0.1), model, "second"),
        (torch.optim.SGD(plain, lr=0.1), {"mine": model.second}, "mine"),
        (torch.optim.SGD([*model.named_parameters()], lr=0.1), None, "second"),
        (torch.optim.SGD(groups, lr=0.1), None, "parameter 0 of group 1, (1, 1)"),
    ]
    for optimizer, names, expected in cases:
        spoilt(model)
        with transforms.attach(transforms.skip_nonfinite(), optimizer, names=names) as handle:
            with caplog.at_level(logging.WARNING, logger="equipoise"):
                optimizer.step()
            assert handle.nonfinite() == {expected: 1}
        assert caplog.messages[-1] == f"skipped a step: gradients are not finite in {expected}"


def test_giving_up_after_some_in_a_row() -> None:
    """With `limit=3` the third in a row is an error that names the tensor; a good step resets."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    transforms.attach(transforms.skip_nonfinite(limit=3), optimizer, names=model)
    for bad in (math.nan, math.inf, 1.0, math.nan, math.inf):
        spoilt(model, bad)
        optimizer.step()
    spoilt(model)
    with pytest.raises(
        eq.NonFiniteError,
        match="`skip_nonfinite` may skip fewer than 3 steps in a row, got 3: `second` must be fin",
    ):
        optimizer.step()


@pytest.mark.parametrize("limit", [0, -1, 1.5, "3"])
def test_a_limit_that_is_none(limit: object) -> None:
    """A limit below 1, or no whole number, is refused."""
    with pytest.raises(eq.OptionError, match="`limit` must be"):
        transforms.skip_nonfinite(limit)  # type: ignore[arg-type]


def test_a_part_may_skip_the_whole() -> None:
    """`skip_nonfinite` for some parameters skips the step for all, and does not look at others."""
    model = Model()
    guarded = transforms.masked(transforms.skip_nonfinite(), lambda p: p.dim() == 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = transforms.attach(guarded, optimizer, names=model)
    spoilt(model)
    optimizer.step()
    assert_same_bits(model.first.detach(), torch.tensor([1.0, 2.0]))
    assert handle.nonfinite() == {"second": 1}
    model.first.grad, model.second.grad = torch.tensor([math.nan, 1.0]), torch.tensor([[1.0]])
    optimizer.step()
    assert_same_bits(model.second.detach(), torch.tensor([[2.0]]))
    assert model.first[0].isnan()


def test_a_skipped_step_with_momentum_and_two_handles() -> None:
    """The second transform of two sees nothing in a skipped step, and remembers nothing of it."""
    run = Run(transforms.skip_nonfinite(), momentum=0.9)
    second = transforms.attach(transforms.clip_by_norm_history(50, 3), run.optimizer)
    run.step(0)
    before, history = run.weights(), second.state_dict()
    run.params[0].grad = torch.full_like(run.params[0], math.nan)
    run.optimizer.step()
    assert_same_bits(run.weights(), before)
    assert_same_bits(second.state_dict(), history)


def test_value_clips_leave_nan_where_it_is() -> None:
    """Clipping by value and by percentile hold inf like any entry, and NaN stays NaN."""
    grads = [torch.tensor([math.nan, math.inf, -math.inf, 0.5]), torch.ones(2)]
    out = once(transforms.clip_by_value(-1.0, 2.0), grads)
    assert_same_bits(out, [torch.tensor([math.nan, 2.0, -1.0, 0.5]), torch.ones(2)])


def test_centralize_spreads_over_one_unit() -> None:
    """A NaN makes its own row NaN, and no other row and no other tensor."""
    grads = [torch.tensor([[math.nan, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, 2.0]])]
    first, second = once(transforms.centralize(), grads)
    nan = math.nan
    assert_same_bits(first, torch.tensor([[nan, nan], [-1.0, 1.0]]))
    assert_same_bits(second, torch.tensor([[-0.5, 0.5]]))
