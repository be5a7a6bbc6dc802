"""Every gradient transform gives what its definition says, to a derived bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import spec, transforms
from equipoise.spec.decay import decoupled
from tests.spec.oracle import assert_agrees, computed_in, entries, flatten, name_of, rows

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
    out: Sequence[Tensor], expected: Callable[[spec.Rounding], Sequence[Any]]
) -> None:
    """What is multiplied by a factor from float64: it and the product are rounded once each.

    The factor is rounded to the type of the product, float32 for half precision, and a half result
    once more to its own.
    """
    dtype = out[0].dtype

    def check() -> None:
        K = spec.Rounding("float64")
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


TUPLES = [
    (3, 4, 5),
    (5, 12, 13),
    (8, 15, 17),
    (20, 21, 29),
    (2, 3, 6, 7),
    (1, 4, 8, 9),
    (2, 6, 9, 11),
]
POWERS = [-100, -30, -1, 0, 7, 60]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("tuple_", TUPLES, ids=str)
def test_the_branch_is_that_of_exact_arithmetic(
    tuple_: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Lengths that are whole numbers times powers of two; limits units below, at and above."""
    *sides, length = tuple_
    for power in POWERS:
        g = torch.tensor(sides, dtype=dtype) * 2.0**power
        at = torch.tensor(length, dtype=dtype) * 2.0**power
        limits = [at.item()]
        below = above = at
        for _ in range(3):
            below = torch.nextafter(below, torch.zeros_like(below))
            above = torch.nextafter(above, torch.full_like(above, torch.inf))
            limits += [below.item(), above.item()]
        for limit in limits:
            squares = sum(Fraction(x) ** 2 for x in g.tolist())
            clips = squares > Fraction(limit) ** 2
            out = update(transforms.clip_by_global_norm(limit), [g])
            single = update(transforms.clip_by_norm(limit), [g])
            assert (not torch.equal(out[0], g)) == clips, (power, limit)
            assert torch.equal(out[0], single[0])


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_clip_by_value_is_exact(dtype: torch.dtype) -> None:
    """To the bit, with bounds the format has, also crossed ones."""
    grads = gradients(dtype)
    for low, high in [(-1.5, 2.0), (0.25, 0.5), (2.0, -1.0)]:
        out = update(transforms.clip_by_value(low, high), grads)
        exact = spec.clip_by_value(spec.Float(), joined(grads).tolist(), low, high)
        assert joined(out).tolist() == exact


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 29, 101])
def test_clip_by_percentile_is_exact(n: int, dtype: torch.dtype) -> None:
    """To the bit, for every whole percentage, with ties, zeros and signs."""
    values = (torch.arange(n) * 7919 % 23 - 11).to(dtype) / 4
    for pct in range(0, 101, 1 if dtype == torch.float64 else 9):
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


@pytest.mark.parametrize("percent", [0, 10, 50, 100, 29.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
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


def test_clip_by_zscore() -> None:
    """The limit is the mean of the last clipped lengths plus so many deviations, this excluded."""
    transform = transforms.clip_by_zscore(1.5, window=4, warmup=2)
    params = [torch.zeros(2, dtype=torch.float64)]
    state: Any = transform.init(params)
    norms: list[float] = []
    for size in (5.0, 20.0, 100.0, 10.0, 2.5, 40.0):
        g = torch.tensor([3.0, 4.0], dtype=torch.float64) * (size / 5)
        past = norms[-4:] if len(norms) > 1 else []
        out, state = transform.update([g.clone()], state, params)

        def check(g: Tensor = g, past: list[float] = past, out: Any = out) -> None:
            # The lengths after clipping are the runtime's own, each within a few units of exact;
            # from them on, the definition's operations are the runtime's.
            K = spec.Rounding("float64", steps=8)
            expected = spec.clip_by_zscore(K, entries(K, g), [K.exactly(x) for x in past], 1.5)
            assert_agrees(out[0], expected)

        spec.decided(check)
        norms.append(torch.linalg.vector_norm(out[0]).item())


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


@pytest.mark.parametrize(("name", "options"), DECAYS)
def test_decoupled_decay(name: str, options: dict[str, float]) -> None:
    """On the weights, at the optimizer's learning rate: w − η·decay."""
    weight = torch.nn.Parameter(torch.tensor([1.5, -0.25, 0.0, 3.0], dtype=torch.float64))
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.3)
    transforms.attach(getattr(transforms, name)(**options, decoupled=True), optimizer)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    # w·(1 − η·r·b) − η·r·a·sign: the factor of the decay is made of up to three products, and the
    # difference from 1 is rounded at the size of w.
    K = spec.Rounding("float64", steps=3)

    def check() -> None:
        w = entries(K, before)
        decay = getattr(spec, name)(K, [K.const(0)] * len(w), w, **options)
        assert_agrees(weight, decoupled(K, w, decay, 0.3))

    spec.decided(check)


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
