"""Every gradient transform gives what its definition says, to a derived bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import spec, transforms
from equipoise.spec.percentile import rank
from equipoise.spec.sums import length
from tests.spec.oracle import (
    HALVES,
    assert_agrees,
    assert_decoupled,
    computed_in,
    entries,
    flatten,
    name_of,
    rows,
)

PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = ((3, 5), (7,), (2, 2, 3))


def gradients(dtype: torch.dtype, seed: int = 0, size: float = 3.0) -> list[Tensor]:
    """One for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for shape in SHAPES
    ]


def update(
    transform: Any, grads: Sequence[Tensor], params: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """One step of a transform on copies."""
    params = [torch.zeros_like(g) for g in grads] if params is None else list(params)
    out, _ = transform.update([g.clone() for g in grads], transform.init(params), params)
    return list(out)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All entries, in order, exactly."""
    return torch.cat([t.double().flatten() for t in tensors])


def assert_scaled(
    out: Sequence[Tensor],
    expected: Callable[[spec.Rounding], Sequence[Any]],
    steps: int = 1,
) -> None:
    """What is multiplied by a factor from float64: it and the product are rounded once each.

    The factor is rounded to the type of the product, float32 for half precision, and a half result
    once more to its own.
    """
    dtype = out[0].dtype

    def check() -> None:
        K = spec.Rounding("float64", steps=steps)
        balls = flatten(list(expected(K)))
        if dtype != torch.float64:
            balls = [ball.once_more("float32").once_more("float32") for ball in balls]
        assert_agrees(joined(out).to(dtype), balls, dtype)

    spec.decided(check)


@pytest.mark.parametrize("limit", [1.0, 7.5, -2.0, 0.0, 1e3])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_clip_by_global_norm(limit: float, dtype: torch.dtype) -> None:
    """One factor for all, rounded once and multiplied once."""
    grads = gradients(dtype)
    out = update(transforms.clip_by_global_norm(limit), grads)
    assert_scaled(out, lambda K: spec.clip_by_global_norm(K, entries(K, joined(grads)), limit))


@pytest.mark.parametrize("limit", [1.0, 7.5, 0.0])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_clip_by_norm(limit: float, dtype: torch.dtype) -> None:
    """A factor for each tensor."""
    grads = gradients(dtype)
    out = update(transforms.clip_by_norm(limit), grads)
    assert_scaled(out, lambda K: [spec.clip_by_norm(K, entries(K, g), limit) for g in grads])


@settings(max_examples=60)
@given(
    numbers=st.lists(st.floats(-(2.0**500), 2.0**500, allow_nan=False), min_size=1, max_size=64),
    limit=st.floats(2.0**-100, 2.0**400),
)
def test_clip_by_global_norm_of_any_floats(numbers: list[float], limit: float) -> None:
    """Of any sizes in float64, up to those whose squares overflow, subnormal ones too."""
    grads = [torch.tensor(numbers, dtype=torch.float64)]
    out = update(transforms.clip_by_global_norm(limit), grads)
    # Outside the safe range the squares are those of g over a power of two, which is exact but for
    # entries that are lost below the largest by more than the format's digits.
    assert_scaled(out, lambda K: spec.clip_by_global_norm(K, entries(K, grads[0]), limit))


# The last one fills the digits of float32, and its squares most of those of float64.
TUPLES = [
    (3, 4, 5),
    (5, 12, 13),
    (8, 15, 17),
    (20, 21, 29),
    (2, 3, 6, 7),
    (1, 4, 8, 9),
    (2, 6, 9, 11),
    (5791, 16767840, 16767841),
]
POWERS = [-100, -30, -9, -1, 0, 7, 60]


def test_the_tuples_are_pythagorean() -> None:
    """Their lengths are whole numbers."""
    assert all(sum(x * x for x in sides) == whole * whole for *sides, whole in TUPLES)


def near(at: Tensor) -> list[float]:
    """A number, and three neighbours on either side."""
    limits, below, above = [at.item()], at, at
    for _ in range(3):
        below = torch.nextafter(below, torch.zeros_like(below))
        above = torch.nextafter(above, torch.full_like(above, torch.inf))
        limits += [below.item(), above.item()]
    return limits


def branch(clip: str, limit: float, gradient: Tensor) -> tuple[bool, Tensor]:
    """Whether a clip says that it clipped, and what it gives."""
    transform = getattr(transforms, clip)(limit)
    out, state = transform.update([gradient.clone()], transform.init([gradient]), [gradient])
    return bool(transforms.recorded(state)["clipped_fraction"].item()), out[0]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("clip", ["clip_by_global_norm", "clip_by_norm"])
def test_the_branch_is_that_of_exact_arithmetic(clip: str, dtype: torch.dtype) -> None:
    """Lengths that are whole numbers times powers of two; limits units below, at and above."""
    tried = 0
    for (*sides, whole), power in product(TUPLES, POWERS):
        exact = [x * Fraction(2) ** power for x in (*sides, whole)]
        *g, at = torch.tensor([float(x) for x in exact], dtype=dtype)
        if [x.item() for x in (*g, at)] != exact:
            continue
        for limit in near(at):
            tried += 1
            clips = sum(x * x for x in exact[:-1]) > Fraction(limit) ** 2
            clipped, out = branch(clip, limit, torch.stack(g))
            assert clipped == clips, (exact, limit)
            # In half precision a factor of nearly 1 may round back.
            same = torch.equal(out, torch.stack(g))
            assert same != clips if dtype not in HALVES else same or clips
    assert tried >= 7 * 7 * 4


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("clip", ["clip_by_global_norm", "clip_by_norm"])
def test_a_hair_above_the_limit_is_above(clip: str, dtype: torch.dtype) -> None:
    """One more entry of 2⁻¹⁰ makes a length that was at its limit longer; float32 has it equal."""
    for *sides, whole in TUPLES[:-1]:
        hair = torch.tensor([*sides, 2.0**-10], dtype=dtype)
        assert branch(clip, float(whole), hair)[0], sides
        assert not branch(clip, float(whole), hair[:-1])[0], sides


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_clip_by_value_is_exact(dtype: torch.dtype) -> None:
    """To the bit, with bounds the format has, also crossed ones."""
    grads = gradients(dtype)
    for low, high in [(-1.5, 2.0), (0.25, 0.5), (2.0, -1.0)]:
        out = update(transforms.clip_by_value(low, high), grads)
        exact = spec.clip_by_value(spec.Float(), joined(grads).tolist(), low, high)
        assert joined(out).tolist() == exact


PERCENTAGES: Sequence[int] = range(102)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 29, 101])
def test_clip_by_percentile_is_exact(n: int, dtype: torch.dtype) -> None:
    """To the bit, for every whole percentage, with ties, zeros and signs."""
    values = (torch.arange(n) * 7919 % 23 - 11).to(dtype) / 4
    for pct in PERCENTAGES if dtype == torch.float64 else PERCENTAGES[::9]:
        out = update(transforms.clip_by_percentile(pct), [values])
        assert out[0].tolist() == spec.clip_by_percentile(spec.Float(), values.tolist(), pct)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_clip_by_percentile_of_many_entries(scope: Any) -> None:
    """More entries than are sorted at once, counted over all tensors or in each."""
    grads = [torch.randn(40_000), torch.randn(30_000) * 1e-3]
    for pct in (0, 29, 50.5, 99, 100):
        out = update(transforms.clip_by_percentile(pct, scope=scope), grads)
        parts = [joined(grads)] if scope == "global" else grads
        exact = [spec.clip_by_percentile(spec.Float(), part.tolist(), pct) for part in parts]
        assert joined(out).tolist() == flatten(exact)


@pytest.mark.parametrize("percent", [0, 10, 50, 100, 29.5, 66.75])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_clip_by_norm_history(percent: float, dtype: torch.dtype) -> None:
    """The limit is the percentile of the last lengths, this one among them."""
    transform = transforms.clip_by_norm_history(percent, window=4)
    params = [torch.zeros(2, dtype=dtype)]
    state, norms = transform.init(params), []
    for size in (5.0, 20.0, 10.0, 2.5, 40.0, 15.0, 5.0):
        # Lengths are whole multiples of 5, so that the limit a length is compared with is exact.
        g = torch.tensor([3.0, 4.0], dtype=dtype) * (size / 5)
        norms = [*norms, size][-4:]
        out, state = transform.update([g.clone()], state, params)
        assert_scaled(
            out,
            lambda K, g=g, norms=norms: spec.clip_by_norm_history(
                K, entries(K, g), [K.exactly(x) for x in norms], percent
            ),
        )


@pytest.mark.parametrize("percent", [0.6, 2.4, 66.7, 29.0, 99.99, 29])
def test_a_percentile_of_many_norms_has_the_exact_rank(percent: float) -> None:
    """The last of 1, 2, … n norms is clipped to the norm of that rank: 2.4 is less than 24/10."""
    transform = transforms.clip_by_norm_history(percent, window=600)
    params = [torch.zeros(1, dtype=torch.float64)]
    state = transform.init(params)
    for n in range(1, 601):
        (out,), state = transform.update([torch.tensor([float(n)])], state, params)
        assert round(out.item()) == rank(n, percent) + 1, n


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_clip_by_zscore(dtype: torch.dtype) -> None:
    """The limit is the mean of the last clipped lengths plus so many deviations, this excluded."""
    transform = transforms.clip_by_zscore(1.5, window=4, warmup=2)
    params = [torch.zeros(2, dtype=dtype)]
    state: Any = transform.init(params)
    for size in (5.0, 20.0, 100.0, 10.0, 2.5, 40.0):
        g = torch.tensor([3.0, 4.0], dtype=dtype) * (size / 5)
        # The lengths after clipping are the runtime's own, each within its ball; from them on, the
        # definition's operations are the runtime's, but for a root and a product more in each.
        past = state["norms"][state["norms"].isfinite()].tolist() if state["seen"] > 1 else []
        out, state = transform.update([g.clone()], state, params)

        def expected(K: spec.Rounding, g: Tensor = g, past: list[float] = past) -> list[Any]:
            return spec.clip_by_zscore(K, entries(K, g), [K.exactly(x) for x in past], 1.5)

        assert_scaled(out, expected, steps=8)
        after = transforms.recorded(state)["norm_clipped"]

        def check(expected: Any = expected, after: Any = after) -> None:
            K = spec.Rounding("float64", steps=8)
            assert_agrees(after, [length(K, expected(K))])

        spec.decided(check)


@pytest.mark.parametrize("per", ["unit", "tensor"])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_adaptive_clip(per: Any, dtype: torch.dtype) -> None:
    """Each row next to its weights: all dimensions but the first, whole tensors of one."""
    grads, weights = gradients(dtype), gradients(dtype, seed=1, size=0.5)
    weights[0][1] = 0.0
    out = update(transforms.adaptive_clip(0.1, 0.01, per=per), grads, weights)
    # Lengths are taken in short rows and then of those; x/s is one rounding more, and the factor
    # is rounded before the product.
    K = spec.Rounding(computed_in(dtype), steps=4)

    def check() -> None:
        expected = []
        for g, w in zip(grads, weights, strict=True):
            whole = per == "tensor" or g.dim() < 2
            units = [x.reshape(1, -1) if whole else x.flatten(1) for x in (g, w)]
            clipped = spec.adaptive_clip(
                K, rows(K, units[0]), rows(K, units[1]), factor=0.1, eps=0.01
            )
            expected += flatten(clipped)
        assert_agrees(joined(out).to(dtype), expected, dtype)

    spec.decided(check)


DECAYS: list[tuple[str, dict[str, float]]] = [
    ("add_l2_decay", {"rate": 0.03}),
    ("add_l1_decay", {"rate": 0.03}),
    ("add_elastic_net_decay", {"rate": 0.03, "l1_ratio": 0.3}),
    ("add_elastic_net_decay", {"rate": 0.03, "l1_ratio": 1.0}),
]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(("name", "options"), DECAYS)
def test_decay(name: str, options: dict[str, float], dtype: torch.dtype) -> None:
    """What is added to the gradient; the elastic net adds its two parts one after the other."""
    grads, weights = gradients(dtype), gradients(dtype, seed=1)
    weights[1][2:4] = 0.0
    out = update(getattr(transforms, name)(**options), grads, weights)
    # g + r·b·w + r·a·sign has one rounding of the sum more than the definition, in the type itself.
    K = spec.Rounding(name_of(dtype), steps=2)

    def check() -> None:
        inputs = [entries(K, joined(x)) for x in (grads, weights)]
        assert_agrees(joined(out).to(dtype), getattr(spec, name)(K, *inputs, **options))

    spec.decided(check)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(("name", "options"), DECAYS)
def test_decoupled_decay(name: str, options: dict[str, float], dtype: torch.dtype) -> None:
    """On the weights, at the optimizer's learning rate."""
    before = torch.tensor([1.5, -0.25, 0.0, 3.0], dtype=dtype)
    assert_decoupled(name, options, before, assert_agrees)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_add_noise_follows_its_schedule(dtype: torch.dtype) -> None:
    """The numbers drawn with variance 1 and no decay, times the root of the scheduled variance."""
    grads = gradients(dtype)
    zeros = [torch.zeros_like(g, dtype=torch.promote_types(dtype, torch.float32)) for g in grads]
    plain, fading = transforms.add_noise(1.0, 0.0, seed=3), transforms.add_noise(0.3, 0.55, seed=3)
    drawn, faded = plain.init(zeros), fading.init(grads)
    # √(v/(1+t)^d) is of Python's floats, rounded once to the type of the product; in half precision
    # the sum is rounded to the type itself.
    K = spec.Rounding(computed_in(dtype), steps=2)
    for step in range(3):
        normal, drawn = plain.update([z.clone() for z in zeros], drawn, zeros)
        noisy, faded = fading.update([g.clone() for g in grads], faded, grads)

        def check(step: int = step, normal: Any = normal, noisy: Any = noisy) -> None:
            inputs = [entries(K, joined(x)) for x in (grads, normal)]
            expected = spec.add_noise(K, *inputs, step=step, variance=0.3, decay=0.55)
            assert_agrees(joined(noisy).to(dtype), expected, dtype)

        spec.decided(check)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_centralize(dtype: torch.dtype) -> None:
    """Rows without their mean; one dimension is left as it is."""
    grads = gradients(dtype)
    out = update(transforms.centralize(), grads)
    K = spec.Rounding(computed_in(dtype))

    def check() -> None:
        for g, result in zip(grads, out, strict=True):
            if g.dim() < 2:
                assert torch.equal(result, g)
                continue
            expected = spec.centralize(K, rows(K, g.flatten(1)))
            assert_agrees(result, flatten(expected), dtype)

    spec.decided(check)


CENTRAL: dict[Any, Callable[[Tensor], Tensor]] = {
    0: lambda x: x.permute(1, 2, 0).reshape(-1, x.shape[0]),
    (-1,): lambda x: x.reshape(-1, x.shape[-1]),
    (0, 2): lambda x: x.permute(1, 0, 2).reshape(x.shape[1], -1),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("dims", CENTRAL, ids=str)
def test_centralize_over_other_dimensions(dims: Any, dtype: torch.dtype) -> None:
    """A row is then what those dimensions hold."""
    grad = gradients(dtype)[2]
    (out,) = update(transforms.centralize(dims), [grad])
    K = spec.Rounding(computed_in(dtype))

    def check() -> None:
        expected = spec.centralize(K, rows(K, CENTRAL[dims](grad)))
        assert_agrees(CENTRAL[dims](out), flatten(expected), dtype)

    spec.decided(check)


def test_skip_nonfinite_skips_what_the_definition_skips() -> None:
    """A step with an entry that is no number leaves the weights; another one does not."""
    for bad in (None, float("nan"), float("inf"), -float("inf")):
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        transforms.attach(transforms.skip_nonfinite(), optimizer)
        numbers = [0.5, 0.25 if bad is None else bad]
        weight.grad = torch.tensor(numbers)
        optimizer.step()
        finite: list[float | None] = [0.5, 0.25 if bad is None else None]
        passed = spec.skip_nonfinite(spec.Float(), finite)
        moved = [1.0, 2.0] if passed is None else [1.0 - passed[0], 2.0 - passed[1]]
        assert weight.tolist() == moved


def test_combinators_compute_nothing_of_their_own() -> None:
    """A chain is its links one after the other; an identity, a mask and a part change nothing."""
    grads = gradients(torch.float64)
    first, second = transforms.centralize(), transforms.clip_by_global_norm(1.0)
    apart = update(second, update(first, grads))
    assert all(
        torch.equal(x, y)
        for x, y in zip(update(transforms.chain(first, second), grads), apart, strict=True)
    )
    unchanged = update(transforms.identity(), grads)
    assert all(torch.equal(x, y) for x, y in zip(unchanged, grads, strict=True))


AGREEMENTS: dict[str, Callable[..., None]] = {
    "clip_by_value": test_clip_by_value_is_exact,
    "clip_by_norm": partial(test_clip_by_norm, 1.0),
    "clip_by_global_norm": partial(test_clip_by_global_norm, 7.5),
    "clip_by_percentile": partial(test_clip_by_percentile_is_exact, 3),
    "adaptive_clip": partial(test_adaptive_clip, "unit"),
    "add_l2_decay": partial(test_decay, *DECAYS[0]),
    "add_l1_decay": partial(test_decay, *DECAYS[1]),
    "add_elastic_net_decay": partial(test_decay, *DECAYS[2]),
    "centralize": test_centralize,
}


@pytest.mark.parametrize("name", AGREEMENTS)
def test_compiled_updates_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same agreement, where the compiler made the code of the update."""
    torch.compiler.reset()
    times = 0

    def compiled(
        transform: Any, grads: Sequence[Tensor], params: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        def step(some: list[Tensor], state: Any, weights: list[Tensor]) -> Any:
            return transform.update(some, state, weights)

        nonlocal times
        times += 1
        weights = [torch.zeros_like(g) for g in grads] if params is None else list(params)
        run = torch.compile(step, backend="aot_eager")
        out, _ = run([g.clone() for g in grads], transform.init(weights), weights)
        return list(out)

    monkeypatch.setitem(globals(), "update", compiled)
    if name == "clip_by_percentile":
        monkeypatch.setitem(globals(), "PERCENTAGES", (0, 29, 50, 100))
    AGREEMENTS[name](dtype=torch.float64)
    assert times
