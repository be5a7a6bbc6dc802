"""Real optimizers: each steps with the transformed gradients, as if they had been computed so."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

import equipoise as eq
from equipoise import transforms
from tests.transforms.assertions import assert_same_bits
from tests.transforms.members import gradients, parameters

Make = Callable[[list[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda ps: Adam(ps, lr=0.1, amsgrad=True),
    "AdamW": lambda ps: AdamW(ps, lr=0.1, weight_decay=0.1),
    "RMSprop": lambda ps: RMSprop(ps, lr=0.1, centered=True),
    "Adagrad": lambda ps: Adagrad(ps, lr=0.1),
    "foreach": lambda ps: Adam(ps, lr=0.1, foreach=True),
    "fused": lambda ps: Adam(ps, lr=0.1, fused=True),
    "fused SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "rate in a tensor": lambda ps: Adam(ps, lr=torch.tensor(0.1)),
}


def shaping() -> transforms.GradientTransform:
    """A chain with a state, links of the library and one of a user."""
    halve = transforms.GradientTransform(
        lambda _params: {}, lambda gs, s, _ps: ([None if g is None else g / 2 for g in gs], s)
    )
    return transforms.chain(
        transforms.centralize(),
        halve,
        transforms.clip_by_norm_history(50, 3),
        transforms.add_noise(0.01),
        transforms.add_l2_decay(0.01),
    )


def by_hand(make: Make, steps: int) -> list[Tensor]:
    """Weights where a pure update is applied to the gradients before every step."""
    params = [nn.Parameter(p) for p in parameters()]
    optimizer, transform = make(params), shaping()
    state = transform.init(params)
    for step in range(steps):
        grads, state = transform.update(gradients(step), state, params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_transformed_gradients(name: str) -> None:
    """Attached, the weights after four steps are those of transforming by hand, bit by bit."""
    params = [nn.Parameter(p) for p in parameters()]
    optimizer = OPTIMIZERS[name](params)
    transforms.attach(shaping(), optimizer)
    for step in range(4):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
    assert_same_bits([p.detach() for p in params], by_hand(OPTIMIZERS[name], 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_removed_it_is_as_it_was(name: str) -> None:
    """After `remove` steps, state dict and pickle are those of an optimizer never touched."""
    touched, never = ([nn.Parameter(p) for p in parameters()] for _ in range(2))
    one, other = OPTIMIZERS[name](touched), OPTIMIZERS[name](never)
    handle = transforms.attach(shaping(), one)
    handle.remove()
    handle.remove()
    assert "removed" in repr(handle)
    for step in range(2):
        for params, optimizer in ((touched, one), (never, other)):
            for param, grad in zip(params, gradients(step), strict=True):
                param.grad = grad
            optimizer.step()
    assert_same_bits([p.detach() for p in touched], [p.detach() for p in never])
    assert_same_bits(one.state_dict(), other.state_dict())
    assert_same_bits(pickle.loads(pickle.dumps(one)).state_dict(), other.state_dict())


def test_after_an_error_nothing_stays_attached() -> None:
    """The handle is a context: it leaves the optimizer as it was, also after an error."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    with (
        pytest.raises(RuntimeError, match="mine"),
        transforms.attach(transforms.clip_by_norm(1.0), optimizer),
    ):
        raise RuntimeError("mine")
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert_same_bits(weight.detach(), torch.tensor([-3.0, -4.0]))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_come_without_the_transform(how: str) -> None:
    """Hooks do not survive copying: attach to the copy, and load the state that it carries."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    transforms.attach(transforms.clip_by_norm(1.0), optimizer)
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    (param,) = twin.param_groups[0]["params"]
    param.grad = torch.tensor([3.0, 4.0])
    twin.step()
    assert_same_bits(param.detach(), torch.tensor([-3.0, -4.0]))
    assert "gradient_transforms" not in twin.state_dict()
    transforms.attach(transforms.clip_by_norm(1.0), twin)
    twin.load_state_dict(optimizer.state_dict())
    twin.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-3.6, -4.8]))


class Resumable:
    """Steps of any optimizer, by a closure where it needs one."""

    def __init__(self, make: Make) -> None:
        self.params = [nn.Parameter(p) for p in parameters()]
        self.optimizer = make(self.params)
        self.handle = transforms.attach(shaping(), self.optimizer)

    def steps(self, *numbers: int) -> None:
        for number in numbers:

            def closure(number: int = number) -> float:
                for param, grad in zip(self.params, gradients(number), strict=True):
                    param.grad = None if grad is None else grad + 0.1 * param.detach()
                return 1.0

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()


@pytest.mark.parametrize("name", [*OPTIMIZERS, "LBFGS"])
def test_any_optimizer_resumes_bit_by_bit(name: str) -> None:
    """Saved after two steps and loaded into a new run, two more give what four in a row give."""
    make = OPTIMIZERS.get(name, lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3))
    straight, first, second = Resumable(make), Resumable(make), Resumable(make)
    straight.steps(0, 1, 2, 3)
    first.steps(0, 1)
    file = io.BytesIO()
    torch.save([[p.detach() for p in first.params], first.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for param, weight in zip(second.params, weights, strict=True):
            param.copy_(weight)
    second.optimizer.load_state_dict(state)
    second.steps(2, 3)
    assert_same_bits([p.detach() for p in second.params], [p.detach() for p in straight.params])
    assert_same_bits(second.optimizer.state_dict(), straight.optimizer.state_dict())
    second.handle.remove()
    assert "gradient_transforms" not in second.optimizer.state_dict()


def quadratic(weight: Tensor) -> Tensor:
    """A narrow valley with its floor at (1, −2)."""
    target = weight.new_tensor([1.0, -2.0])
    return ((weight - target) * weight.new_tensor([1.0, 5.0])).square().sum()


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_transforms_every_evaluation(search: str | None) -> None:
    """LBFGS calls its closure often; each time it is the transformed gradient that it gets."""

    def run(attached: bool) -> tuple[Tensor, int]:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=5, line_search_fn=search)
        clip = transforms.clip_by_norm(3.0)
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = quadratic(weight)
            loss.backward()
            if not attached:
                out, _ = clip.update([weight.grad], clip.init([weight]), [weight])
                weight.grad = out[0]
            return loss

        handle = transforms.attach(clip, optimizer) if attached else None
        optimizer.step(closure)
        if handle is not None:
            handle.remove()
            assert "gradient_transforms" not in optimizer.state_dict()
        return weight.detach(), calls

    (weight, calls), (expected, expected_calls) = run(True), run(False)
    assert_same_bits(weight, expected)
    assert calls == expected_calls > 1


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_is_followed(keyword: bool) -> None:
    """With a closure the transform sees what the closure computes, not what was there before it.

    So do trainers that put zeroing and backward into `optimizer.step(closure)`.
    """
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    handle = transforms.attach(
        transforms.chain(transforms.snapshot("norm"), transforms.clip_by_norm(1.0)), optimizer
    )
    weight.grad = torch.tensor([1000.0, 0.0])  # of the step before

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (weight * torch.tensor([3.0, 4.0])).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert loss == 0.0
    assert handle.metrics()["norm"] == 5.0
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]), rtol=1e-7, atol=0)


def test_a_closure_whose_gradient_is_not_finite() -> None:
    """A skipped evaluation hides its gradients from that step only; the next finds its own."""
    weight, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.LBFGS([weight, unused], lr=0.1, max_iter=3)
    handle = transforms.attach(transforms.skip_nonfinite(), optimizer)
    factor = [float("nan")]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * factor[0]).sum()
        loss.backward()
        return loss.detach().nan_to_num()

    optimizer.step(closure)
    assert_same_bits(weight.detach(), torch.ones(1))
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    assert handle.metrics()["skip_nonfinite/skipped"] >= 1
    factor[0] = 1.0
    optimizer.step(closure)
    assert weight.item() < 1.0
    assert unused.grad is None


class Twice(Optimizer):
    """Evaluates twice, as a search along a line does, and steps by the second."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        loss = closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad)
        return loss


def test_a_gradient_that_was_skipped_is_not_used_later() -> None:
    """A closure that leaves a parameter out does not bring back its gradient of before."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = Twice([first, second], {})
    transforms.attach(transforms.skip_nonfinite(), optimizer)

    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(1)
        loss = (first * float("nan")).sum() if len(calls) == 1 else (second * 2.0).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) == 2
    assert first.grad is None
    assert (first.item(), second.item()) == (1.0, -1.0)


def test_parameter_groups_and_schedulers() -> None:
    """Groups keep their rates, and a scheduler its course; one norm is over all groups."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = SGD([{"params": [first]}, {"params": [second], "lr": 10.0}], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    transforms.attach(transforms.clip_by_global_norm(1.0), optimizer)
    for _ in range(2):
        first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(first.detach(), torch.tensor([-0.9]))
    torch.testing.assert_close(second.detach(), torch.tensor([-12.0]))


def test_groups_added_later() -> None:
    """Parameters of a group that is added after attaching take part from then on."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = SGD([first], lr=1.0)
    handle = transforms.attach(
        transforms.chain(transforms.clip_by_norm_history(100), transforms.clip_by_global_norm(1.0)),
        optimizer,
    )
    first.grad = torch.tensor([3.0])
    optimizer.step()
    optimizer.add_param_group({"params": [second], "lr": 10.0})
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    torch.testing.assert_close(second.detach(), torch.tensor([-8.0]))
    assert handle.metrics()["clip_by_norm_history/norm"] == 5.0


def test_groups_added_later_where_parameters_were_listed() -> None:
    """A mask given as a list says that it is too short; a function answers for the new ones."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = SGD([first], lr=1.0)
    clip = transforms.clip_by_norm(1.0)
    handle = transforms.attach(transforms.masked(clip, [True]), optimizer)
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    with pytest.raises(
        eq.InputError, match="`where` must say yes or no to each of the 2 parameters, got 1 answers"
    ):
        optimizer.step()
    handle.remove()
    transforms.attach(transforms.masked(clip, lambda p: p is second), optimizer)
    optimizer.step()
    assert (first.item(), second.item()) == (-3.0, -1.0)


def test_accumulated_gradients_are_transformed_once() -> None:
    """Only a step transforms: two backwards before it give the clip of their sum."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    transforms.attach(transforms.clip_by_norm(1.0), optimizer)
    (weight * torch.tensor([3.0, 0.0])).sum().backward()
    (weight * torch.tensor([0.0, 4.0])).sum().backward()
    assert_same_bits(weight.grad, torch.tensor([3.0, 4.0]))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("make", [lambda ps: SparseAdam(ps, lr=0.1), lambda ps: SGD(ps, lr=0.1)])
def test_sparse_embeddings(make: Make) -> None:
    """A sparse gradient is clipped as the rows that it holds, and rows not used stay."""

    def run(attached: bool) -> Tensor:
        torch.manual_seed(3)
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = make(list(table.parameters()))
        if attached:
            transforms.attach(transforms.clip_by_global_norm(0.5), optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([1, 4, 1])).square().sum().backward()
            if not attached:
                grad = table.weight.grad
                assert grad is not None
                grad = grad.coalesce()
                length = torch.linalg.vector_norm(grad.values().double())
                factor = min(1.0, 0.5 / length.item())
                table.weight.grad = torch.sparse_coo_tensor(
                    grad.indices(), grad.values() * factor, grad.shape, check_invariants=True
                )
            optimizer.step()
        return table.weight.detach()

    torch.testing.assert_close(run(True), run(False), rtol=1e-6, atol=1e-7)
    torch.manual_seed(3)
    untouched = nn.Embedding(6, 2).weight.detach()[[0, 2, 3, 5]]
    assert_same_bits(run(True)[[0, 2, 3, 5]], untouched)


def test_two_transforms_run_in_the_order_of_attaching() -> None:
    """The first attached runs first, and each has its state in the optimizer's, in that order."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0)
    transforms.attach(transforms.clip_by_value(-1.0, 1.0), optimizer)
    transforms.attach(
        transforms.chain(transforms.add_noise(0.0), transforms.snapshot("n")), optimizer
    )
    weight.grad = torch.tensor([5.0])
    optimizer.step()
    assert weight.item() == -1.0
    states = optimizer.state_dict()["gradient_transforms"]
    assert [list(s["state"]) for s in states] == [["clip_by_value"], ["add_noise", "n"]]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same_bits(optimizer.state_dict()["gradient_transforms"], states)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_step(when: str) -> None:
    """A step compiled before or after attaching transforms its gradients all the same."""
    torch.compiler.reset()
    params = [nn.Parameter(p) for p in parameters()]
    optimizer = SGD(params, lr=0.1)
    clip = transforms.chain(transforms.centralize(), transforms.clip_by_global_norm(0.5))

    def stepping() -> Callable[[], object]:
        return torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[no-any-return]

    step = stepping() if when == "before" else None
    handle = transforms.attach(clip, optimizer)
    step = step or stepping()
    expected = [p.detach().clone() for p in params]
    for number in range(2):
        grads, _ = clip.update(gradients(number), clip.init(params), params)
        for param, grad in zip(params, gradients(number), strict=True):
            param.grad = grad
        step()
        for weight, grad in zip(expected, grads, strict=True):
            if grad is not None:
                weight.sub_(grad, alpha=0.1)
        torch.testing.assert_close([p.detach() for p in params], expected, rtol=1e-12, atol=1e-13)
    assert handle.metrics()["clip_by_global_norm/norm_clipped"] == pytest.approx(0.5, rel=1e-12)


class Wrapper:
    """What trainers put around an optimizer: it has one, and steps it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_a_wrapped_optimizer_is_unwrapped() -> None:
    """Attaching to a wrapper, or to one around that, attaches to the optimizer inside."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    wrapped = Wrapper(Wrapper(optimizer))
    handle = transforms.attach(transforms.clip_by_norm(1.0), wrapped)  # type: ignore[arg-type]
    weight.grad = torch.tensor([3.0, 4.0])
    wrapped.step()
    assert handle.optimizer is optimizer
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_what_is_no_optimizer_is_refused() -> None:
    """Parameters, a model, a transform in the wrong place: each is named."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    with pytest.raises(
        eq.InputTypeError, match=r"`optimizer` must be a torch.optim.Optimizer, got"
    ):
        transforms.attach(transforms.identity(), [weight])  # type: ignore[arg-type]
    with pytest.raises(eq.InputTypeError, match="`transform` must be gradient transforms, got SGD"):
        transforms.attach(optimizer, transforms.identity())  # type: ignore[arg-type]
    with pytest.raises(eq.InputError, match=r"`names` must be a model or a mapping .* got list"):
        transforms.attach(transforms.identity(), optimizer, names=[weight])  # type: ignore[arg-type]
