"""Every derivative in the spec is that of the value beside it: the value, over dual numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flint import arb

from equipoise import spec
from equipoise.spec.balls import Ball
from tests.spec.cases import cases, draw, kinds
from tests.spec.duals import Dual, Duals
from tests.spec.oracle import Case, flatten, lists

# The value of one estimator with the gradient of another, or a side that is stopped, is on purpose.
TRUE = [c for c in cases() if not {"gradient", "stop_gradient"} & c.options.keys()]
TRIED = [
    pytest.param(case, kind, id=f"{case.id}-{kind}")
    for case in TRUE
    for kind in kinds(case)
    if case.options.get("mode") != "srip"
]


class Read:
    """Turns the numbers of a layout into those of another context."""

    def __init__(self, number: Callable[[float], Any]) -> None:
        self.exactly = number


def definition(case: Case, name: str, K: Any, read: Read, tensors: list[torch.Tensor]) -> Any:
    """A definition over any context, its inputs read one by one."""
    data = [case.layout(read, x) for x in tensors]
    options = {name: lists(value, tensors[0]) for name, value in case.options.items()}
    options = {k: v for k, v in options.items() if k not in ("chunk", "dim")}
    return getattr(spec, name)(K, *data, **{**options, **case.listed})


def directions() -> Callable[[], arb]:
    """One number after another, of no particular pattern."""
    generator = torch.Generator().manual_seed(3)
    return lambda: arb(torch.rand((), generator=generator, dtype=torch.float64).item() - 0.5)


def assert_is_derivative(moved: arb, slopes: list[arb], along: list[arb]) -> None:
    """The slope in a direction is the product of the gradient with it, to ten digits or more."""
    product = sum((s * v for s, v in zip(slopes, along, strict=True)), arb(0))
    assert moved.overlaps(product), f"{moved.str(20)} is not {product.str(20)}"
    size = sum((abs(s) for s in slopes), arb(1e-300))
    assert moved.rad() + product.rad() <= size * arb(1e-10)


@pytest.mark.parametrize(("case", "kind"), TRIED)
def test_a_gradient_is_the_derivative_of_its_value(case: Case, kind: str) -> None:
    """In a random direction the value moves by the gradient times the direction."""
    tensors = draw(case, kind, torch.float64)

    def check() -> None:
        after, along = directions(), []

        def moving(x: float) -> Dual:
            along.append(after())
            return Dual(arb(x), along[-1])

        value = definition(case, case.penalty, Duals(), Read(moving), tensors)
        ball = Ball()
        slopes = definition(case, f"{case.penalty}_grad", ball, Read(arb), tensors)
        finite = [
            s
            for s, x in zip(flatten([slopes]), flatten([t.tolist() for t in tensors]), strict=True)
            if x != -torch.inf
        ]
        moved = sum((v.slope for v in flatten([value])), arb(0))
        assert_is_derivative(moved, finite, along)

    spec.decided(check, bits=256)


MATRICES = [[[1.0, 2.0, -1.0], [0.5, 0.25, 3.0]], [[1.0, 0.5], [2.0, -0.25], [-1.0, 3.0]]]


# Two unit rows always have one eigenvalue as far above 1 as the other is below.
@pytest.mark.parametrize(
    ("matrix", "normalize"), [(MATRICES[0], False), (MATRICES[1], False), (MATRICES[1], True)]
)
def test_srip_has_the_slope_of_its_eigenvalue(matrix: list[list[float]], normalize: bool) -> None:
    """For two singular values, whose closed form differentiates itself."""
    after = directions()
    moving = [[Dual(arb(x), after()) for x in row] for row in matrix]
    along = [x.slope for row in moving for x in row]
    value = spec.orthogonality(Duals(), moving, mode="srip", normalize=normalize)
    balls = [[arb(x) for x in row] for row in matrix]
    slopes = spec.orthogonality_grad(Ball(), balls, mode="srip", normalize=normalize)
    assert_is_derivative(value.slope, flatten(slopes), along)


GRADIENTS = [[3.0, -4.0, 0.5], [0.25, 0.5, 0.125], [-1.0, 2.0, 7.0]]
STEEPNESS: list[dict[str, Any]] = [
    {},
    {"sided": "one", "target": 2},
    {"per": "batch"},
    {"norm": "l1"},
    {"norm": "linf", "reduction": "sum"},
    {"squared": True},
    {"squared": True, "norm": "l1"},
    {"reduction": "none"},
]


@pytest.mark.parametrize("options", STEEPNESS, ids=str)
def test_gradient_penalties_have_the_slope_of_their_value(options: dict[str, Any]) -> None:
    """With respect to the gradients they are given, for every norm and side."""
    after = directions()
    moving = [[Dual(arb(x), after()) for x in row] for row in GRADIENTS]
    value = spec.gradient_penalty(Duals(), moving, **options)
    slopes = spec.gradient_penalty_grad(Ball(), [[arb(x) for x in r] for r in GRADIENTS], **options)
    moved = sum((v.slope for v in flatten([value])), arb(0))
    assert_is_derivative(moved, flatten(slopes), [x.slope for row in moving for x in row])


G = [3.0, -4.0, 0.5, -0.25, 1.5]
W = [1.0, -2.0, 0.0, 0.5, -1.5]
PULLBACKS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "clip_by_value": ((-1, 2), {}),
    "clip_by_norm": ((2,), {}),
    "clip_by_global_norm": ((20,), {}),
    "clip_by_percentile": ((50,), {}),
}


@pytest.mark.parametrize("name", PULLBACKS)
def test_a_pullback_is_the_transpose_of_the_derivative(name: str) -> None:
    """v·(J·w) = (Jᵀ·v)·w, with J·w from dual numbers. A percentile is held where it is."""
    arguments, options = PULLBACKS[name]
    after = directions()
    moving = [Dual(arb(x), after()) for x in G]
    along, upstream = [x.slope for x in moving], [after() for _ in G]
    if name == "clip_by_percentile":  # the entry that is the bound stays where it is
        moving[4] = Dual(arb(G[4]), arb(0))
        along[4] = arb(0)
    out = getattr(spec, name)(Duals(), moving, *arguments, **options)
    slopes = getattr(spec, f"{name}_grad")(
        Ball(), [arb(x) for x in G], upstream, *arguments, **options
    )
    moved = sum((o.slope * v for o, v in zip(out, upstream, strict=True)), arb(0))
    assert_is_derivative(moved, slopes, along)


def test_unit_wise_pullbacks_hold_the_weights() -> None:
    """Of adaptive clipping and of clipping by a past: as clipping by a fixed norm."""
    after = directions()
    ball, moving = Ball(), [Dual(arb(x), after()) for x in G]
    along, upstream = [x.slope for x in moving], [after() for _ in G]
    balls, weights = [arb(x) for x in G], [Dual(arb(x), arb(0)) for x in W]
    norms = [5.0, 1.0, 2.0]
    (unit,) = spec.adaptive_clip(Duals(), [moving], [weights], factor=0.5)
    (unit_slopes,) = spec.adaptive_clip_grad(
        ball, [balls], [[arb(x) for x in W]], [upstream], factor=0.5
    )
    still = [Dual(arb(n), arb(0)) for n in norms]
    past = spec.clip_by_norm_history(Duals(), moving, still, 50)
    past_slopes = spec.clip_by_norm_history_grad(ball, balls, upstream, [arb(n) for n in norms], 50)
    usual = spec.clip_by_zscore(Duals(), moving, still, 1)
    usual_slopes = spec.clip_by_zscore_grad(ball, balls, upstream, [arb(n) for n in norms], 1)
    for out, slopes in ((unit, unit_slopes), (past, past_slopes), (usual, usual_slopes)):
        assert any(x.value < y.value for x, y in zip(out, moving, strict=True))
        moved = sum((o.slope * v for o, v in zip(out, upstream, strict=True)), arb(0))
        assert_is_derivative(moved, slopes, along)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("add_l2_decay", {"rate": 0.25}),
        ("add_l1_decay", {"rate": 0.25}),
        ("add_elastic_net_decay", {"rate": 0.25, "l1_ratio": 0.75}),
    ],
)
def test_decay_has_two_pullbacks(name: str, options: dict[str, float]) -> None:
    """One to the gradient and one to the weights, which together are the transpose."""
    after = directions()
    g = [Dual(arb(x), after()) for x in G]
    w = [Dual(arb(x), after()) for x in W]
    upstream = [after() for _ in G]
    out = getattr(spec, name)(Duals(), g, w, **options)
    to_g, to_w = getattr(spec, f"{name}_grad")(Ball(), upstream, **options)
    moved = sum((o.slope * v for o, v in zip(out, upstream, strict=True)), arb(0))
    assert_is_derivative(moved, [*to_g, *to_w], [x.slope for x in [*g, *w]])


def test_what_is_linear_is_its_own_derivative() -> None:
    """Taking the mean out, adding noise that is given, and passing a finite gradient on."""
    after = directions()
    rows = [[Dual(arb(x), after()) for x in row] for row in GRADIENTS]
    upstream = [[after() for _ in row] for row in GRADIENTS]
    out = spec.centralize(Duals(), rows)
    slopes = spec.centralize_grad(Ball(), upstream)
    along = [x.slope for row in rows for x in row]
    pairs = zip(flatten(out), flatten(upstream), strict=True)
    assert_is_derivative(sum((o.slope * v for o, v in pairs), arb(0)), flatten(slopes), along)
    normal = [Dual(arb(1), arb(0))] * 3
    noisy = spec.add_noise(Duals(), rows[0], normal, step=2)
    passed = spec.add_noise_grad(Ball(), upstream[0])
    moved = sum((o.slope * v for o, v in zip(noisy, upstream[0], strict=True)), arb(0))
    assert_is_derivative(moved, passed, [x.slope for x in rows[0]])
    assert spec.skip_nonfinite_grad(spec.Float(), [1.0, 2.0], [3.0, 4.0]) == [3.0, 4.0]
    assert spec.skip_nonfinite_grad(spec.Float(), [1.0, None], [3.0, 4.0]) == [0.0, 0.0]
