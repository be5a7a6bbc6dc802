"""One step does what a hand-written loop does, in the same order and to the same bits."""

import copy
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import equipoise as eq
from equipoise import Pipeline, Term, balance, schedules, tracking, transforms
from equipoise.training import TrainStep, capture, parameters
from tests.integrations.processes import in_two_processes

PIPELINE = Pipeline(
    small=Term(eq.l2, inputs="prediction", weight=schedules.linear(0.0, 0.1, steps=10)),
    decay=Term(eq.l2, inputs="weights", weight=1e-2),
)


def loss_fn(prediction: Tensor, target: Tensor) -> Tensor:
    """The task, under the names that a pipeline knows."""
    return F.cross_entropy(prediction, target)


def network(*, dropout: float = 0.0) -> nn.Sequential:
    """A small classifier."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))


def batches(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """The same data for everyone."""
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.randn(size, 4, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def step_of(model: nn.Module, **options: Any) -> TrainStep:
    """A step with Adam and the pipeline above."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return TrainStep(
        model,
        F.cross_entropy,
        PIPELINE,
        optimizer,
        inputs={"weights": parameters(model)},
        **options,
    )


def assert_same(first: nn.Module, second: nn.Module, **tolerance: float) -> None:
    """Both models have the same parameters, by default to the bit."""
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_steps_equal_a_loop_by_hand(autocast: torch.dtype | None) -> None:
    """Losses and parameters of ten steps are those of the loop one would write, bit for bit."""
    model, twin = network(dropout=0.3), network(dropout=0.3)
    step = step_of(model, autocast=autocast, transform=transforms.clip_by_global_norm(0.5))
    torch.manual_seed(9)
    ours = [step(x, y).total.detach() for x, y in batches(10)]

    optimizer = torch.optim.Adam(twin.parameters(), lr=0.05)
    clip = transforms.attach(transforms.clip_by_global_norm(0.5), optimizer)
    torch.manual_seed(9)
    theirs = []
    for number, (x, y) in enumerate(batches(10)):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            out = twin(x)
            result = PIPELINE(
                prediction=out,
                weights=list(twin.parameters()),
                target=y,
                base=loss_fn,
                step=number,
            )
        result.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(result.total.detach())
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert_same(model, twin)
    assert step.handle is not None
    assert step.handle.metrics() == clip.metrics()
    assert step.number == 10


def test_accumulation_equals_the_large_batch_where_terms_are_means() -> None:
    """With means and penalties on weights, 4×2 and 1×8 give the same parameters."""
    pipeline = Pipeline(
        small=Term(eq.l2, inputs="prediction", weight=0.1, options={"reduction": "mean"}),
        decay=Term(eq.l2, inputs="weights", weight=1e-2),
    )
    models = [network().double() for _ in range(2)]
    steps = [
        TrainStep(
            model,
            F.cross_entropy,
            pipeline,
            torch.optim.SGD(model.parameters(), lr=0.1),
            inputs={"weights": parameters(model)},
            accumulate=accumulate,
            transform=transforms.clip_by_global_norm(0.3),
        )
        for model, accumulate in zip(models, (1, 4), strict=True)
    ]
    for x, y in batches(5):
        steps[0](x.double(), y)
        for part in range(4):
            assert steps[1].number == steps[0].number - 1
            steps[1](x[2 * part : 2 * part + 2].double(), y[2 * part : 2 * part + 2])
    # The same sums in another order, in float64.
    assert_same(*models, rtol=1e-12, atol=1e-14)


def test_an_early_update_divides_by_the_calls_there_were() -> None:
    """Two calls of four, then `update`: the gradient is the mean of two."""
    models = network().double(), network().double()
    steps = [
        TrainStep(
            m,
            F.cross_entropy,
            Pipeline(),
            torch.optim.SGD(m.parameters(), lr=0.1),
            accumulate=accumulate,
        )
        for m, accumulate in zip(models, (2, 4), strict=True)
    ]
    for x, y in batches(2):
        for step in steps:
            step(x.double(), y)
    assert steps[1].pending == 2
    steps[1].update()
    steps[1].update()  # nothing is left to do
    assert steps[0].number == steps[1].number == 1
    assert_same(*models, rtol=1e-13, atol=1e-15)


class Branching(nn.Module):
    """Some batches use one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = network().double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        return out + self.rarely(x) if used(x) else out


def used(x: Tensor) -> bool:
    """Whether a batch uses that layer."""
    return bool(x[-1, -1] > 0)


def in_each_process(rank: int, folder: str) -> None:
    """Train as one of two processes, each with every second batch; three make two updates."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Branching(), find_unused_parameters=True)
    step = distributed_step(model, accumulate=2)
    for x, y in batches(6, size=2)[rank::2]:
        step(x.double(), y)
    step.update()
    torch.save([p.detach() for p in model.parameters()], f"{folder}/{rank}.pt")


def distributed_step(model: nn.Module, accumulate: int) -> TrainStep:
    """A step whose transform depends on the whole gradient."""
    return TrainStep(
        model,
        F.cross_entropy,
        Pipeline(small=Term(eq.l2, inputs="prediction", options={"reduction": "mean"})),
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        transform=transforms.clip_by_global_norm(0.5),
        accumulate=accumulate,
    )


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Data-parallel gradients are whole in every update, also in one that was cut short."""
    in_two_processes(in_each_process, str(tmp_path))
    last = [used(x) for x, _ in batches(6, size=2)[-2:]]
    assert sorted(last) == [False, True]  # one process has no gradient of the layer
    model = Branching()
    step = distributed_step(model, accumulate=4)
    for x, y in batches(6, size=2):
        step(x.double(), y)
    step.update()
    assert step.number == 2
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for a, b in zip(found, model.parameters(), strict=True):
            # The same sums in another order, in float64.
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)


def test_a_scaler_changes_neither_reports_nor_transforms() -> None:
    """With a gradient scaler reports and clipped steps are those without."""
    plain, scaled = network(), network()
    clip = transforms.clip_by_global_norm(0.1)
    without = step_of(plain, transform=clip, track=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    using = step_of(scaled, transform=clip, track=True, scaler=scaler)
    for x, y in batches(4):
        first, second = without(x, y), using(x, y)
        # A power of two scales without rounding.
        assert first.metrics() == second.metrics()
    assert_same(plain, scaled)


def test_an_overflow_skips_the_update_and_the_scheduler() -> None:
    """What a scaler skips changes nothing, counts as an update, and does not lower the rate."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(
        model,
        F.cross_entropy,
        Pipeline(),
        optimizer,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    ((x, y),) = batches(1)
    step(x, y)
    assert optimizer.param_groups[0]["lr"] == 0.05
    before = [p.detach().clone() for p in model.parameters()]
    step(x * torch.inf, y)
    assert step.number == 2
    assert optimizer.param_groups[0]["lr"] == 0.05
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_model_trains_in_train_mode() -> None:
    """A model left in eval mode is put into train mode, and so is the loss."""
    model = network(dropout=0.5).eval()
    step = step_of(model)
    step.criterion.eval()
    ((x, y),) = batches(1)
    result = step(x, y)
    assert model.training
    assert result.total != result.base


def test_strange_gradients_are_not_used() -> None:
    """What somebody else left in `.grad` is no part of the step."""
    model, twin = network(), network()
    ours, theirs = step_of(model), step_of(twin)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ((x, y),) = batches(1)
    ours(x, y)
    theirs(x, y)
    assert_same(model, twin)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_models_with_several_arguments(form: str) -> None:
    """A tuple is the model's arguments, a mapping its keywords."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.scale * (a - b)

    a, b = torch.tensor([1.0]), torch.tensor([3.0])
    model = Sum()
    step = TrainStep(model, F.mse_loss, Pipeline(), torch.optim.SGD(model.parameters(), lr=0.0))
    result = step((a, b) if form == "tuple" else {"b": b, "a": a}, torch.tensor([0.0]))
    assert result.total == 16.0


def test_captures_feed_the_terms() -> None:
    """A persistent handle gives each step's activations, and their penalty trains."""
    model = network()
    seen = capture(model, hidden="1")
    step = TrainStep(
        model,
        F.cross_entropy,
        Pipeline(activity=Term(eq.l1, inputs="hidden", weight=1.0)),
        torch.optim.SGD(model.parameters(), lr=2e-3),
        inputs=seen,
        track=True,
    )
    sizes = [step(x, y).metrics()["activity"] for x, y in batches(1) * 30]
    assert all(later < earlier for earlier, later in pairwise(sizes[:10]))
    assert sizes[-1] < 0.8 * sizes[0]


def test_a_balancer_sets_the_weights() -> None:
    """After a tracked step the pipeline holds the balancer's weights, for the next step."""
    model = network()
    step = TrainStep(
        model,
        F.cross_entropy,
        Pipeline(small=Term(eq.l2, inputs="prediction", weight=1.0)),
        torch.optim.SGD(model.parameters(), lr=0.0),
        balancer=balance.GradientRatio({"small": 0.5}),
        track=True,
    )
    ((x, y),) = batches(1)
    step(x, y)
    norms = step(x, y).gradients.weighted
    torch.testing.assert_close(norms["small"], 0.5 * norms["base"], rtol=1e-6, atol=0)  # type: ignore[operator]


def everything(model: nn.Module) -> TrainStep:
    """A step with every part that has a state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return TrainStep(
        model,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        PIPELINE.with_term("extra", Term(eq.l1, inputs="prediction", weight=0.3)),
        optimizer,
        inputs={"weights": parameters(model)},
        track=tracking.on_spike(1.01),
        transform=transforms.chain(
            transforms.add_noise(1e-3), transforms.clip_by_norm_history(50, window=5)
        ),
        balancer=balance.GradientShare({"extra": 0.2}),
        scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )


def test_a_saved_state_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    """Twelve steps at once are seven, a file, a new process's objects, and five: bit for bit."""
    data = batches(12)
    model = network(dropout=0.3)
    step = everything(model)
    whole = [step(x, y).total for x, y in data[:7]]
    torch.save(step.state_dict(), tmp_path / "run.pt")
    whole += [step(x, y).total for x, y in data[7:]]

    torch.manual_seed(1234)
    other = network(dropout=0.3)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    again = everything(other)
    again.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True))
    assert again.number == 7
    rest = [again(x, y).total for x, y in data[7:]]
    assert torch.equal(torch.stack(rest), torch.stack(whole[7:]))
    assert_same(model, other)
    assert again.state_dict()["optimizer"].keys() == step.state_dict()["optimizer"].keys()
    assert again.handle is not None
    assert step.handle is not None
    assert again.handle.metrics() == step.handle.metrics()
    assert again.pipeline["extra"].weight == step.pipeline["extra"].weight


def test_a_loaded_state_undoes_what_came_after() -> None:
    """Going back to a state from before the first report, the balanced weights go back too."""
    model = network()
    step = everything(model)
    step.criterion.track = True
    data = batches(4)
    begun = copy.deepcopy(step.state_dict())
    first = [step(x, y).total for x, y in data]
    assert step.pipeline["extra"].weight != 0.3
    step.load_state_dict(begun)
    assert step.pipeline["extra"].weight == 0.3
    assert torch.equal(torch.stack([step(x, y).total for x, y in data]), torch.stack(first))


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "between": (
        lambda: half_done().state_dict(),
        eq.InputError,
        "between updates, got 1 of 4 calls since the last. Use `step.update()` first.",
    ),
    "another": (
        lambda: step_of(network()).load_state_dict(everything(network()).state_dict()),
        eq.InputError,
        "a state must hold criterion, model, number, optimizer, random, got balancer, criterion,",
    ),
    "model": (
        lambda: TrainStep(3, F.mse_loss, Pipeline(), None),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`model` must be a torch.nn.Module, got int. Use",
    ),
    "optimizer": (
        lambda: TrainStep(network(), F.mse_loss, Pipeline(), "adam"),  # type: ignore[arg-type]
        eq.InputTypeError,
        "`optimizer` must be a torch.optim.Optimizer, got str. Use `torch.optim.AdamW(",
    ),
    "closure": (
        lambda: TrainStep(
            network(), F.mse_loss, Pipeline(), torch.optim.LBFGS(network().parameters())
        ),
        eq.InputTypeError,
        "`optimizer` must need no closure, got LBFGS, which computes the loss several times a",
    ),
    "balancer": (
        lambda: step_of(network(), balancer="share"),
        eq.InputTypeError,
        "`balancer` must be a Balancer, got str. Use `balance.GradientShare({'kl': 0.1})`, say.",
    ),
    "balancer alone": (
        lambda: step_of(network(), balancer=balance.GradientRatio({"small": 0.5})),
        eq.OptionError,
        "`track` must say when gradients are measured for the `balancer`, got False. Use `tracking",
    ),
    "autocast": (
        lambda: step_of(network(), autocast="bf16"),
        eq.InputTypeError,
        "`autocast` must be a torch.dtype, got str. Use `torch.bfloat16`.",
    ),
    "scaler": (
        lambda: step_of(network(), scaler=True),
        eq.InputTypeError,
        "`scaler` must be a torch.amp.GradScaler, got bool. Use `torch.amp.GradScaler()`.",
    ),
    "plateau": (
        lambda: step_of(network(), scheduler=plateau()),
        eq.InputTypeError,
        "`scheduler` must go by the number of updates, got a ReduceLROnPlateau, which waits for",
    ),
    "accumulate": (
        lambda: step_of(network(), accumulate=0),
        eq.OptionError,
        "`accumulate` must be a finite number at least 1, got 0",
    ),
}


def plateau() -> ReduceLROnPlateau:
    """A scheduler that waits for a loss."""
    return ReduceLROnPlateau(torch.optim.SGD(network().parameters(), lr=0.1))


def half_done() -> TrainStep:
    """A step that waits for more calls before it updates."""
    step = step_of(network(), accumulate=4)
    step(*batches(1)[0])
    return step


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong use is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()
