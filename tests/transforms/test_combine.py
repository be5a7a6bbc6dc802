"""Chains, masks, groups and snapshots: what runs when, on which gradients, under which name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import transforms
from equipoise.transforms import (
    GradientTransform,
    _leaves,
    _norms,
    chain,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    identity,
    masked,
    partition,
    recorded,
    select,
    snapshot,
)
from tests.transforms.assertions import assert_same_bits, length, once
from tests.transforms.members import flipping

GRADS = [torch.tensor([[3.0, 4.0]]), torch.tensor([12.0])]


def figures(transform: GradientTransform, grads: list[Tensor] = GRADS) -> dict[str, float]:
    """What is recorded of one update."""
    _, state = transform.update(grads, transform.init(grads), grads)
    return {name: figure.item() for name, figure in recorded(state).items()}


def test_the_first_written_runs_first() -> None:
    """Clip, then add; not add, then clip. The printed chain says so."""
    params = [torch.tensor([10.0])]
    clip, decay = clip_by_norm(1.0), transforms.add_l2_decay(1.0)
    assert_same_bits(
        once(chain(clip, decay), [torch.tensor([5.0])], params), [torch.tensor([11.0])]
    )
    assert_same_bits(once(chain(decay, clip), [torch.tensor([5.0])], params), [torch.tensor([1.0])])
    assert str(chain(clip, decay)) == "clip_by_norm(1.0) → add_l2_decay(1.0)"


def test_chains_of_chains() -> None:
    """A chain is associative, and an identity in it changes nothing, to the last bit."""
    a, b, c = transforms.centralize(), clip_by_norm(2.0), clip_by_global_norm(1.0)
    grads = [torch.randn(4, 5), torch.randn(3)]
    expected = once(chain(a, b, c), grads)
    for other in (chain(chain(a, b), c), chain(a, chain(b, c)), chain(identity(), a, b, c)):
        assert_same_bits(once(other, grads), expected)


def test_neighbours_share_norms_and_agree_with_separate_passes() -> None:
    """Four links in a chain give what four separate updates give, figures included."""
    links = [
        snapshot("before"),
        clip_by_norm(2.0),
        snapshot("between"),
        clip_by_global_norm(1.5),
        snapshot("after"),
    ]
    torch.manual_seed(0)
    grads: list[Tensor | None] = [torch.randn(40, 5), torch.randn(300), torch.randn(()), None]
    params = [torch.zeros(()) if g is None else torch.zeros_like(g) for g in grads]
    together = chain(*links)
    out, state = together.update(grads, together.init(params), params)
    apart, lengths = grads, []
    for link in links:
        apart, _ = link.update(apart, link.init(params), params)
        lengths.append(length(*apart))
    for got, expected in zip(out, apart, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    seen = recorded(state)
    for name, i in (("before", 0), ("between", 2), ("after", 4)):
        assert seen[name].item() == pytest.approx(lengths[i], rel=1e-6)


PASSES: dict[str, tuple[GradientTransform, list[str]]] = {
    "norms of all together": (
        chain(
            snapshot("before"),
            clip_by_global_norm(1.0),
            snapshot("after"),
            transforms.clip_by_norm_history(50),
            clip_by_global_norm(0.5),
        ),
        ["total_square", "rescale"],
    ),
    "norms of each": (
        chain(clip_by_norm(0.5), snapshot("between"), clip_by_global_norm(0.3), clip_by_norm(0.1)),
        ["squared_norms", "rescale_each"],
    ),
    "nothing to clip": (
        chain(clip_by_global_norm(1e3), snapshot("same"), transforms.skip_nonfinite()),
        ["total_square", "rescale"],  # which looks at the factor, 1, and leaves it at that
    ),
    "what writes is measured again": (
        chain(clip_by_global_norm(1.0), clip_by_value(-0.01, 0.01), snapshot("after")),
        ["total_square", "rescale", "total_square"],
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_neighbours_read_and_write_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours measure the gradients in one pass, and rescale them in one more."""
    passes: list[str] = []

    def counted(module: Any, function: str) -> None:
        plain = getattr(module, function)

        def call(*args: Any) -> Any:
            passes.append(function)
            return plain(*args)

        monkeypatch.setattr(module, function, call)

    for function in ("total_square", "squared_norms", "exact_total_square"):
        counted(_norms, function)
    for function in ("rescale", "rescale_each"):
        counted(_leaves, function)
    shaping, expected = PASSES[name]
    torch.manual_seed(0)
    figures(shaping, [torch.randn(40, 5), torch.randn(300), torch.randn(())])
    assert passes == expected


def test_a_second_clip_by_the_same_limit_does_nothing() -> None:
    """After one clip the next neighbour by the same limit finds nothing longer, or by rounding."""
    grads = [torch.randn(50, 3), torch.randn(7)]
    one = once(clip_by_global_norm(0.5), grads)
    two = once(chain(clip_by_global_norm(0.5), clip_by_global_norm(0.5)), grads)
    for got, expected in zip(two, one, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-7, atol=0)


def test_names_of_figures() -> None:
    """Links are called what they print; the second of a name gets a number, snapshots their own."""
    shaping = chain(
        snapshot("raw"),
        clip_by_norm(1.0),
        clip_by_norm(0.5),
        masked(clip_by_global_norm(9.0), [True, False]),
        chain(snapshot("inner")),
    )
    assert list(figures(shaping)) == [
        "raw",
        *(f"clip_by_norm/{n}" for n in ("norm", "norm_clipped", "clipped_fraction")),
        *(f"clip_by_norm_2/{n}" for n in ("norm", "norm_clipped", "clipped_fraction")),
        *(f"clip_by_global_norm/{n}" for n in ("norm", "norm_clipped", "clipped_fraction")),
        "chain/inner",
    ]


def test_names_never_collide() -> None:
    """A snapshot called as a numbered link would be does not share its state."""
    shaping = chain(
        snapshot("clip_by_norm_2"), clip_by_norm(1.0), clip_by_norm(0.5), snapshot("recorded")
    )
    seen = figures(shaping)
    assert len(seen) == 8
    assert seen["clip_by_norm_2"] == 13.0
    assert seen["recorded"] == pytest.approx(2**0.5 / 2)


def test_a_users_pair_is_as_good_as_the_librarys() -> None:
    """Anywhere in a chain, in a mask and in a group, with a state of its own."""
    shaping = chain(clip_by_value(-3.5, 3.5), masked(flipping(), [True, False]), clip_by_norm(1.0))
    state = shaping.init(GRADS)
    for _ in range(2):
        out, state = shaping.update(GRADS, state, GRADS)
    torch.testing.assert_close(
        out[0], torch.tensor([[-3.0, -3.5]]) / length(torch.tensor([3.0, 3.5]))
    )
    assert state["flip"]["calls"].item() == 2
    assert str(shaping) == "clip_by_value(-3.5, 3.5) → masked(flip(), list) → clip_by_norm(1.0)"


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.T,
    "conjugated": lambda g: g.conj(),
    "flipped": lambda g: g.flip(0),
    "expanded": lambda g: g[:1].expand(2, 2),
    "itself": lambda g: g.mul_(2),
    "detached": lambda g: g.detach(),
}


@pytest.mark.parametrize("place", ["alone", "masked", "after a clip"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_users_pair_may_return_views(view: str, place: str) -> None:
    """A view of the gradient it was given is taken for what it shows, attached and by hand."""
    grad = torch.tensor([[1 + 2j, 3j], [5.0, 7 - 1j]])

    def change(grads: list[Tensor], state: Any, _params: Any) -> Any:
        return [VIEWS[view](g) for g in grads], state

    pair = GradientTransform(lambda _params: {}, change)
    wide = clip_by_value(-100.0, 100.0)
    shaping = {
        "alone": pair,
        "masked": masked(pair, [True]),
        "after a clip": chain(wide, pair, wide),
    }[place]
    expected = VIEWS[view](grad.clone()).resolve_conj().clone()
    if view != "itself":
        got = once(shaping, [grad])[0]
        assert got is not None
        assert_same_bits(got.resolve_conj(), expected)
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    transforms.attach(shaping, optimizer)
    weight.grad = grad.clone()
    optimizer.step()
    assert_same_bits(weight.detach(), -expected)


def test_a_users_pair_may_drop_and_add_gradients() -> None:
    """`None` for a gradient leaves the parameter alone; a tensor for `None` is taken."""

    def swap(grads: list[Tensor | None], state: Any, _params: Any) -> Any:
        return grads[::-1], state

    pair = GradientTransform(lambda _params: {}, swap)
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    transforms.attach(chain(clip_by_norm(5.0), pair, clip_by_norm(1.0)), optimizer)
    first.grad = torch.tensor([7.0])
    optimizer.step()
    assert (first.item(), second.item()) == (0.0, -1.0)
    assert first.grad is None


def test_a_users_pair_that_returns_the_wrong_shapes() -> None:
    """Too few gradients, or one of another shape, are refused before anything is changed."""
    for wrong, message in (
        (lambda grads: grads[:1], "`grads` must hold one gradient or None for each of the 2"),
        (
            lambda grads: [grads[0].flatten(), grads[1]],
            r"`grads\[0\]` must have the shape \(1, 2\)",
        ),
    ):
        pair = GradientTransform(lambda _ps: {}, lambda gs, s, _ps, wrong=wrong: (wrong(gs), s))
        with pytest.raises(eq.InputError, match=message):
            once(chain(pair), list(GRADS))


# masks and groups


class Net(nn.Module):
    """A matrix, biases, a normalization, one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.outer = nn.Linear(2, 2, bias=False)
        self.outer.weight = self.inner.weight


def names(selection: transforms.Selection) -> list[str]:
    """What is chosen."""
    return list(selection.named)


def test_selecting() -> None:
    """By name, type, dimension, question; negated and joined; a shared weight counts once."""
    net = Net()
    every = ["inner.weight", "inner.bias", "norm.weight", "norm.bias"]
    assert names(select.everything(net)) == every
    assert names(select.by_name(net, "*.weight")) == ["inner.weight", "norm.weight"]
    assert names(select.by_type(net, nn.LayerNorm)) == ["norm.weight", "norm.bias"]
    assert names(select.by_dim(net, at_least=2)) == ["inner.weight"]
    assert names(select.by_dim(net, at_most=1)) == every[1:]
    assert names(select.where(net, lambda n, p: "bias" in n and p.numel() == 2)) == [
        "inner.bias",
        "norm.bias",
    ]
    assert names(select.no_bias_or_norm(net)) == ["inner.weight"]
    weights, norms = select.by_name(net, "*.weight"), select.by_type(net, nn.LayerNorm)
    assert names(weights & norms) == ["norm.weight"]
    assert names(weights | norms) == ["inner.weight", "norm.weight", "norm.bias"]
    assert names(~weights & ~norms) == ["inner.bias"]
    assert repr(weights & norms) == "(by_name('*.weight') & by_type(LayerNorm)): norm.weight"


def test_a_selection_is_input_of_a_penalty() -> None:
    """The chosen parameters are an iterable of tensors, of those that require grad."""
    net = Net()
    chosen = select.no_bias_or_norm(net)
    torch.testing.assert_close(eq.l2(chosen), net.inner.weight.square().sum())
    net.inner.weight.requires_grad_(False)
    assert len(chosen) == 0
    assert chosen.covers(net.inner.weight)


def test_misspelt_selections() -> None:
    """A pattern without a match suggests a name; a foreign parameter and no model are named."""
    net = Net()
    with pytest.raises(eq.InputError, match=r"'inner.wieght' must match .* 'inner.weight'"):
        select.by_name(net, "inner.wieght")
    with pytest.raises(eq.OptionError, match="`by_name` needs at least one pattern"):
        select.by_name(net)
    with pytest.raises(eq.InputTypeError, match=r"`model` must be a torch.nn.Module, got list"):
        select.everything([net])  # type: ignore[arg-type]
    with pytest.raises(eq.InputTypeError, match="`&` joins selections, got str"):
        select.everything(net) & "all"  # type: ignore[operator]
    with pytest.raises(eq.InputError, match=r"`\|` joins selections of one model"):
        select.everything(net) | select.everything(Net())
    foreign = masked(clip_by_norm(1.0), select.everything(net))
    with pytest.raises(eq.InputError, match="must be of the model that was selected from"):
        foreign.init([torch.zeros(2)])


@pytest.mark.parametrize("where", ["selection", "function", "list"])
def test_masked_is_the_transform_of_a_part(where: str) -> None:
    """The chosen gradients are transformed by themselves; the others keep their bits."""
    net = Net()
    params = list(net.parameters())
    chosen = [p.dim() > 1 for p in params]
    mask: Any = {
        "selection": select.by_dim(net, at_least=2),
        "function": lambda p: p.dim() > 1,
        "list": chosen,
    }[where]
    grads = [torch.randn_like(p) * 9 for p in params]
    out = once(masked(clip_by_global_norm(1.0), mask), grads, params)
    part = once(clip_by_global_norm(1.0), [g for g, c in zip(grads, chosen, strict=True) if c])
    for got, g, c in zip(out, grads, chosen, strict=True):
        assert_same_bits(got, part.pop(0) if c else g)


@pytest.mark.parametrize("labels", ["selections", "function", "list"])
def test_partition_gives_each_group_its_own(labels: str) -> None:
    """One transform a group; groups do not see each other's norms."""
    net = Net()
    params = list(net.parameters())
    by_hand = ["matrix" if p.dim() > 1 else "other" for p in params]
    matrices = select.by_dim(net, at_least=2)
    given: Any = {
        "selections": {"matrix": matrices, "other": ~matrices},
        "function": lambda p: "matrix" if p.dim() > 1 else "other",
        "list": by_hand,
    }[labels]
    grads = [torch.randn_like(p) * 9 for p in params]
    groups = partition({"matrix": clip_by_global_norm(1.0), "other": clip_by_value(-1, 1)}, given)
    out = once(groups, grads, params)
    for got, g, label in zip(out, grads, by_hand, strict=True):
        single = clip_by_global_norm(1.0) if label == "matrix" else clip_by_value(-1, 1)
        assert_same_bits(got, once(single, [g])[0])


def test_refusals() -> None:
    """Wrong masks, labels and links say what was asked, what came, and what to write."""
    net = Net()
    params = list(net.parameters())
    clip = clip_by_norm(1.0)
    everything = select.everything(net)
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: masked(clip, [True]).init(params),
            eq.InputError,
            "each of the 4 parameters, got 1",
        ),
        (lambda: masked(clip, "all").init(params), eq.InputTypeError, "`where` must be .* got str"),  # type: ignore[arg-type]
        (lambda: masked(torch.relu, [True]), eq.InputTypeError, "`transform` must be gradient"),  # type: ignore[arg-type]
        (
            lambda: chain(clip, clip_by_norm),
            eq.InputTypeError,
            "`transforms` must be .* got function",
        ),  # type: ignore[arg-type]
        (
            lambda: partition({"a": clip}, lambda _p: "b").init(params),
            eq.OptionError,
            "every parameter must have a label among 'a', got 'b' for parameter 0 of shape",
        ),
        (
            lambda: partition({"a": clip}, ["a"]).init(params),
            eq.InputError,
            "one label for each of",
        ),
        (
            lambda: partition({"a": clip}, {"b": everything}),
            eq.OptionError,
            "`labels` must be selections for 'a', got 'b'",
        ),
        (
            lambda: partition({"a": clip, "b": clip}, {"a": everything, "b": everything}).init(
                params
            ),
            eq.OptionError,
            "every parameter must be in one selection, got 'a' and 'b'|'a' or 'b'",
        ),
        (
            lambda: partition([clip], ["a"]),
            eq.InputTypeError,
            "`transforms` must be a mapping .* list",
        ),  # type: ignore[arg-type]
        (lambda: partition({"a": clip}, "a"), eq.InputTypeError, "`labels` must be .* got str"),
        (lambda: partition({"a": clip}, {"a": [True]}), eq.InputTypeError, "`labels` .* got list"),  # type: ignore[dict-item]
        (lambda: once(clip, [torch.ones(2)], [torch.ones(3)]), eq.InputError, r"the shape \(3,\)"),
        (lambda: once(clip, [torch.ones(2)], []), eq.InputError, "each of the 0 parameters, got 1"),
        (lambda: clip.update(torch.ones(2), {}, torch.ones(2)), eq.InputTypeError, "got a tensor"),
        (
            lambda: once(clip, [torch.ones(2, dtype=torch.int64)]),
            eq.InputTypeError,
            r"`grads\[0\]` must be floating-point or complex, got torch.int64. Use `.float\(\)`",
        ),
        (lambda: snapshot(""), eq.OptionError, "`name` must be a word, got ''"),
        (
            lambda: once(snapshot("x", lambda gs: gs[0]), [torch.ones(2)]),
            eq.InputError,
            r"the figure 'x' must be a real scalar, got torch.float32 of shape \(2,\). Use `.norm",
        ),
        (
            lambda: once(snapshot("x", lambda _gs: torch.tensor(1j)), [torch.ones(2)]),
            eq.InputError,
            r"must be a real scalar, got torch.complex64 of shape \(\)",
        ),
        (
            lambda: once(snapshot("x", lambda _gs: None), [torch.ones(2)]),  # type: ignore[arg-type, return-value]
            eq.InputError,
            "must be a real scalar, got NoneType",
        ),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()


def test_generators_are_read_once_and_well() -> None:
    """`model.parameters()` may be given to `init` as it is; `update` asks for a list by name."""
    net = Net()
    params = list(net.parameters())
    for make in (clip_by_norm, transforms.clip_by_norm_history, transforms.adaptive_clip):
        transform = make(1.0) if make is not transforms.clip_by_norm_history else make()
        state = transform.init(net.parameters())  # type: ignore[arg-type]
        assert_same_bits(state, transform.init(params))
        with pytest.raises(
            eq.InputTypeError, match="`grads` and `params` must be lists of tensors"
        ):
            transform.update([None] * 4, state, net.parameters())  # type: ignore[arg-type]


def test_snapshots_measure_where_they_stand() -> None:
    """A figure is of the gradients between its neighbours, and any scalar will do."""
    shaping = chain(
        snapshot("largest", lambda gs: max(g.abs().max() for g in gs if g is not None)),
        clip_by_value(-1.0, 1.0),
        snapshot("count", len),
        snapshot("norm"),
    )
    assert figures(shaping) == {"largest": 12.0, "count": 2.0, "norm": pytest.approx(3**0.5)}


def test_metrics_are_numbers() -> None:
    """`handle.metrics()` is a flat dictionary of floats, zeros before the first step."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = transforms.attach(clip_by_global_norm(1.0), optimizer, names={"w": weight})
    names = [f"clip_by_global_norm/{n}" for n in ("norm", "norm_clipped", "clipped_fraction")]
    assert handle.metrics() == dict.fromkeys(names, 0.0)
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert handle.metrics() == dict(zip(names, (5.0, 1.0, 1.0), strict=True))
    assert all(type(figure) is float for figure in handle.metrics().values())


def test_centralize_over_chosen_dims() -> None:
    """Minus the mean over the named dimensions, in float32 for half precision; no vectors."""
    g = torch.randn(3, 4, 5, dtype=torch.float64)
    for dims, axes in ((None, (1, 2)), (0, (0,)), (-1, (2,)), ((0, 2), (0, 2))):
        out = once(transforms.centralize(dims), [g])[0]  # type: ignore[arg-type]
        torch.testing.assert_close(out, g - g.mean(axes, keepdim=True), rtol=1e-14, atol=1e-15)
    vector = torch.randn(5)
    assert_same_bits(once(transforms.centralize(), [vector])[0], vector)
    half = torch.full((1, 4096), 30.0, dtype=torch.float16)
    assert_same_bits(once(transforms.centralize(), [half])[0], torch.zeros_like(half))
    # The mean of neighbours lies between them, where half precision has no number.
    neighbours = torch.tensor([[1.0, 1.0 + 2.0**-10]], dtype=torch.float16)
    apart = torch.tensor([[-(2.0**-11), 2.0**-11]], dtype=torch.float16)
    assert_same_bits(once(transforms.centralize(), [neighbours])[0], apart)
    with pytest.raises(eq.InputError, match=r"must be dimensions of every gradient .* got \(3,\)"):
        once(transforms.centralize(3), [g])
    with pytest.raises(eq.OptionError, match="`dims` must be one dimension or several, got 'rows'"):
        transforms.centralize("rows")  # type: ignore[arg-type]
    with pytest.raises(eq.OptionError, match=r"`dims` must be one dimension or several, got \(\)"):
        transforms.centralize(())


def test_centralize_is_a_projection() -> None:
    """Twice is once, and every unit sums to zero."""
    g = torch.randn(6, 7, dtype=torch.float64)
    first = once(transforms.centralize(), [g])[0]
    assert first is not None
    torch.testing.assert_close(
        first.sum(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(once(transforms.centralize(), [first])[0], first, rtol=0, atol=1e-15)
