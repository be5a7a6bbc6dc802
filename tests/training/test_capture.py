"""Captures are the activations themselves, by name, and nothing of them stays."""

import copy
import gc
import re
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise import Pipeline, Term
from equipoise.training import capture

Pair = namedtuple("Pair", ["mean", "spread"])
X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


@dataclass
class Output:
    """What some libraries return."""

    logits: Tensor
    states: tuple[Tensor, ...]


class Net(nn.Module):
    """Two layers; the first may be checkpointed, or be called twice."""

    def __init__(self, *, reentrant: bool | None = None, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.act, self.head = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.act(self.body(x))

        if self.reentrant is None:
            h = inner(x)
        else:
            h = checkpoint(inner, x, use_reentrant=self.reentrant)
        return self.head(self.act(self.body(h)) if self.twice else h)


class Returns(nn.Module):
    """Has an inner module that returns whatever a function makes of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner = Maker(make)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Maker(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def trained(model: nn.Module, hidden: Tensor, out: Tensor) -> list[Tensor]:
    """The gradients of a loss with a penalty on the activations."""
    (out.square().sum() + 0.3 * hidden.square().sum()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def by_hand() -> list[Tensor]:
    """The same without any hook."""
    model = Net()
    hidden = model.body(X)
    return trained(model, hidden, model.head(model.act(hidden)))


@pytest.mark.parametrize("reentrant", [None, False])
def test_a_penalty_on_a_capture_trains_as_by_hand(reentrant: bool | None) -> None:
    """Gradients are those of code that returns the activation, bit for bit, checkpointed or not."""
    model = Net(reentrant=reentrant)
    with capture(model, hidden="body") as seen:
        out = model(X)
        gradients = trained(model, seen["hidden"], out)
        # The checkpoint has run the layer again by now; the capture is still one tensor.
        assert isinstance(seen["hidden"], Tensor)
    for ours, theirs in zip(gradients, by_hand(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_pipeline_reads_captures() -> None:
    """`**seen` gives the names to a pipeline, which tracks gradients at the activation."""
    model = Net()
    pipeline = Pipeline(activity=Term(eq.l2, inputs="hidden", weight=0.3))
    with capture(model, hidden="body") as seen:
        out = model(X)
        result = pipeline(**seen, base=out.square().sum(), track=True)
        hidden = seen["hidden"]
    result.total.backward()
    assert isinstance(hidden, Tensor)
    torch.testing.assert_close(
        result.gradients.weighted["activity"], 0.6 * hidden.norm().double(), rtol=1e-6, atol=0
    )
    ours = [p.grad for p in model.parameters()]
    for mine, theirs in zip(ours, by_hand(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_reentrant_checkpoint_is_refused() -> None:
    """Where activations have no graph, capturing says so and names the way out."""
    seen = capture(Net(reentrant=True), hidden="body")
    model = Net(reentrant=True)
    seen = capture(model, hidden="body")
    x = X.clone().requires_grad_()
    with pytest.raises(eq.GradientError, match=r"'body' inside a reentrant.*use_reentrant=False"):
        model(x)
    with torch.no_grad():  # nobody wants gradients here
        model(x)
    assert not seen["hidden"].requires_grad  # type: ignore[union-attr]


def test_the_output_of_a_reentrant_checkpoint_is_captured() -> None:
    """Behind the checkpoint there is a graph again."""
    model = Net(reentrant=True)
    with capture(model, out="head") as seen:
        out = model(X.clone().requires_grad_())
        assert seen["out"] is out


def test_a_frozen_region_is_no_checkpoint() -> None:
    """What a model computes under `no_grad` on purpose is captured as it is."""

    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.body(x)
            return self.head(h)

    model = Frozen()
    with capture(model, hidden="body") as seen:
        model(X)
        assert not seen["hidden"].requires_grad  # type: ignore[union-attr]


def test_several_calls_give_a_list() -> None:
    """A module used twice in one call of the model gives both activations, in order."""
    model = Net(twice=True)
    seen = capture(model, hidden="body")
    model(X)
    first, second = seen.take()["hidden"]
    assert torch.equal(first, model.body(X))
    assert torch.equal(second, model.body(first.tanh()))
    model(2 * X)  # another call of the model begins anew
    assert len(seen["hidden"]) == 2


def test_a_block_holds_every_call_of_the_model() -> None:
    """Inside a `with` block two calls of the model give a list; outside the last one counts."""
    model = Net()
    with capture(model, hidden="body") as seen:
        model(X)
        model(2 * X)
        assert len(seen["hidden"]) == 2
    later = capture(model, hidden="body")
    model(X)
    model(2 * X)
    assert torch.equal(later["hidden"], model.body(2 * X))  # type: ignore[arg-type]


PARTS = {
    "tuple": (lambda x: (x, 2 * x), (1,), 2.0),
    "nested": (lambda x: (x, (x, 3 * x)), (1, 1), 3.0),
    "mapping": (lambda x: {"a": x, "b": 2 * x}, ("b",), 2.0),
    "mapping, by index": (lambda x: {"a": x, "b": 2 * x}, (1,), 2.0),
    "tuple, from its end": (lambda x: (x, 2 * x, 8 * x), (-1,), 8.0),
    "named tuple": (lambda x: Pair(x, 4 * x), ("spread",), 4.0),
    "dataclass": (lambda x: Output(5 * x, (x,)), ("logits",), 5.0),
    "dataclass, deeper": (lambda x: Output(x, (x, 6 * x)), ("states", 1), 6.0),
    "dataclass, by index": (lambda x: Output(7 * x, (x,)), (0,), 7.0),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_an_output_is_chosen(kind: str) -> None:
    """By index and by name, of tuples, mappings and dataclasses, and inside one another."""
    make, parts, factor = PARTS[kind]
    model = Returns(make)
    with capture(model, h=("inner", *parts)) as seen:
        model(X)
        assert torch.equal(seen["h"], factor * X)  # type: ignore[arg-type]


def test_the_model_itself_has_the_empty_name() -> None:
    """`out=""` captures what the model returns."""
    model = Net()
    with capture(model, out="") as seen:
        assert model(X) is seen["out"]


@pytest.mark.parametrize("end", ["block", "take", "remove"])
def test_nothing_is_kept_alive(end: str) -> None:
    """After the block, `take` or `remove` no activation lives on in the handle or in the model."""
    model = Net()
    seen = capture(model, hidden="body")
    if end == "block":
        with seen:
            model(X).sum().backward()
            alive = weakref.ref(seen["hidden"])
    else:
        model(X).sum().backward()
        alive = weakref.ref(seen["hidden"])
        _ = seen.take() if end == "take" else seen.remove()
        _ = None
    gc.collect()
    assert alive() is None


def test_the_next_call_forgets_the_last() -> None:
    """Without any block a handle keeps one call's activations and no more."""
    model = Net()
    seen = capture(model, hidden="body")
    model(X)
    alive = weakref.ref(seen["hidden"])
    model(X)
    assert alive() is None
    assert isinstance(seen["hidden"], Tensor)


def test_calls_of_a_part_add_up_until_they_are_taken() -> None:
    """Where the model itself is never called, `take` begins anew, and keeps nothing alive."""
    model = Net()
    seen = capture(model, hidden="body")
    for _ in range(2):
        for _ in range(2):
            model.body(X)
        taken = seen.take()["hidden"]
        assert isinstance(taken, list)
        assert len(taken) == 2
        alive = weakref.ref(taken[0])
        del taken
        assert alive() is None


def test_hooks_come_off() -> None:
    """After `remove`, twice or not, the model has no hooks."""
    model = Net()
    seen = capture(model, a="body", b="head")
    seen.remove()
    seen.remove()
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)


def test_copies_of_the_model_are_not_captured() -> None:
    """An averaged copy that runs in the same step adds nothing."""
    model = Net()
    seen = capture(model, hidden="body")
    twin = copy.deepcopy(model)
    model(X)
    twin(X)
    assert isinstance(seen["hidden"], Tensor)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_models(fullgraph: bool) -> None:
    """Captured before its first call, a compiled model gives the same activation in every call."""
    torch.compiler.reset()
    model, plain = Net(), Net()
    seen = capture(model, hidden="body")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for factor in (1.0, 2.0, 3.0):
        out = compiled(factor * X)
        hidden = seen["hidden"]
        torch.testing.assert_close(hidden, plain.body(factor * X))
    gradients = trained(model, hidden, out)  # type: ignore[arg-type]
    inner = plain.body(3 * X)
    expected = trained(plain, inner, plain.head(plain.act(inner)))
    torch.testing.assert_close(gradients, expected)


def test_a_compiled_model_captured_too_late_says_so() -> None:
    """Hooks that a compiled model does not call leave an error, not an old tensor."""
    torch.compiler.reset()
    model = torch.compile(Net(), backend="aot_eager")
    model(X)
    seen = capture(model, hidden="body")
    model(X)
    with pytest.raises(eq.InputError, match=r"no call of 'body'.*before the first call"):
        seen["hidden"]


def test_a_tensor_changed_in_place_is_refused() -> None:
    """What an in-place activation has overwritten is not what was captured."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    seen = capture(model, hidden="0")
    model(X)
    with pytest.raises(eq.InputError, match=r"'0' returned it.*changed in place.*inplace=False"):
        seen["hidden"]


def test_inference_tensors_are_captured() -> None:
    """Under `inference_mode`, where tensors have no version, captures work."""
    model = Net()
    seen = capture(model, hidden="body")
    with torch.inference_mode():
        model(X)
    assert seen["hidden"].is_inference()  # type: ignore[union-attr]


REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "misspelt": (lambda m: capture(m, h="bodi"), eq.InputError, "Did you mean 'body'?"),
    "far off": (lambda m: capture(m, h="zzz"), eq.InputError, "Use 'body', 'act' or 'head'."),
    "no name": (capture, eq.OptionError, "needs at least one name, got none"),
    "no module": (lambda _: capture(3, h="0"), eq.InputTypeError, "torch.nn.Module, got int"),
    "no path": (lambda m: capture(m, h=3), eq.OptionError, "a module's name, .* got 3. Use"),
    "empty": (lambda m: capture(m, h=()), eq.OptionError, r"a module's name, .* got \(\). Use"),
    "slice": (lambda m: capture(m, h=("body", slice(1))), eq.OptionError, r"part .* slice\(None"),
    "unread": (lambda m: capture(m, h="body")["h"], eq.InputError, "no call of 'body'. Use"),
    "unknown": (lambda m: capture(m, h="body")["hh"], eq.InputError, "Did you mean 'h'?"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """Each wrong call is refused in three beats."""
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=text):
        call(Net())


def test_many_modules_are_not_listed() -> None:
    """Where nothing is near, a large model's modules do not fill the message."""
    model = nn.Sequential(*(nn.Identity() for _ in range(40)))
    with pytest.raises(eq.InputError, match=r"Use a name of `model.named_modules\(\)`"):
        capture(model, h="zzz")


def test_a_removed_handle_says_so() -> None:
    """Reading after the block is another mistake than reading too early."""
    model = Net()
    with capture(model, hidden="body") as seen:
        model(X)
    with pytest.raises(eq.InputError, match="a handle that is removed"):
        seen["hidden"]


@pytest.mark.parametrize(
    ("make", "place", "text"),
    [
        (lambda x: (x, x), "inner", "tuple(0, 1) from 'inner'. Use ('inner', 0) to choose"),
        (lambda x: Output(x, ()), "inner", "Use ('inner', 'logits') to choose"),
        (lambda x: Output(x, ()), ("inner", "states", 1), "returns tuple, got the choice 1"),
        (lambda x: {"a": x}, ("inner", "b"), "returns dict('a', 0), got the choice 'b'"),
        (lambda _: None, "inner", "must be a tensor, got NoneType"),
    ],
    ids=["tuple", "dataclass", "deeper", "mapping", "none"],
)
def test_outputs_that_are_no_tensor(make: Any, place: Any, text: str) -> None:
    """A choice that is missing or wrong is refused with what there is."""
    model = Returns(make)
    with capture(model, h=place), pytest.raises(eq.InputError, match=re.escape(text)):
        model(X)
