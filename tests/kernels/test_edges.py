"""Impossible entries, rows that do not count, NaN, and memory that nobody has written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

import equipoise as eq
from equipoise import Term
from tests.kernels.exactly import Inputs, assert_exact, exactly, fused, relative
from tests.kernels.terms import BASE, CASES, SIZES, entropy, js, kl

# The interpreter computes with NumPy, which warns where IEEE arithmetic goes on.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF = torch.inf


def drawn(rows: int = 4, width: int = 600) -> dict[str, Tensor]:
    """Random logits, others to compare them with, and labels."""
    labels = torch.randint(width, (rows,))
    return {"x": torch.randn(rows, width), "y": torch.randn(rows, width), "labels": labels}


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", ["sizes", "all", "base alone", "symmetric"])
@pytest.mark.parametrize("width", [1, 600, 1024])
def test_everything_is_written(name: str, width: int) -> None:
    """No output depends on what the memory held before."""
    assert_exact(CASES[name], drawn(3, width))


def test_shared_impossible_entries() -> None:
    """−inf on both sides contributes 0 with gradient 0."""
    inputs = drawn()
    gone = torch.rand(4, 600) < 0.3
    gone[torch.arange(4), inputs["labels"]] = False
    inputs = {**inputs, "x": inputs["x"].masked_fill(gone, -INF)}
    inputs["y"] = inputs["y"].masked_fill(gone, -INF)
    terms = {**BASE, **entropy(), **kl(), **js()}
    assert_exact(terms, inputs)
    assert fused(terms, inputs).gradient[gone].eq(0).all()


DIRECTIONS: dict[str, Mapping[str, Term]] = {
    "forward": kl(),
    "reverse": kl(direction="reverse"),
    "symmetric": kl(direction="symmetric"),
    "x first": kl("x", "y"),
    "js": js(beta=0.3),
}


@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_impossible_on_one_side(name: str, side: str) -> None:
    """Infinite where the definition says so, and everywhere the same finite gradient."""
    inputs = drawn()
    inputs[side][1, 3:9] = -INF
    terms = {**entropy(weight=0.0), **DIRECTIONS[name]}
    found, true = fused(terms, inputs), exactly(terms, inputs)
    values = torch.stack([true.values[n] for n in found.names])
    torch.testing.assert_close(found.values.double(), values, rtol=1e-5, atol=1e-6)
    assert found.gradient.isfinite().all()
    assert relative(found.gradient, true.total) <= 1e-6


@pytest.mark.parametrize("side", ["x", "y", "both"])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_row_in_which_nothing_is_possible(name: str, side: str) -> None:
    """All entries −inf: the value and the gradient of the definition, which are no NaN."""
    inputs = drawn()
    for key in ("x", "y") if side == "both" else (side,):
        inputs[key][2] = -INF
    terms = {**entropy(), **DIRECTIONS[name]}
    found, true = fused(terms, inputs), exactly(terms, inputs)
    values = torch.stack([true.values[n] for n in found.names])
    torch.testing.assert_close(found.values.double(), values, rtol=1e-5, atol=1e-6)
    assert relative(found.gradient, true.total) <= 1e-6


@pytest.mark.parametrize("weights", [False, True])
def test_masked_rows_may_hold_anything(weights: bool) -> None:
    """NaN and inf under the mask change neither value nor gradient."""
    inputs = drawn()
    inputs["x"][1], inputs["y"][1], inputs["y"][3, 0] = torch.nan, torch.inf, torch.nan
    mask = torch.tensor([True, False, True, False])
    mask = torch.tensor([0.5, 0.0, 2.0, 0.0]) if weights else mask
    terms = {**entropy(mask=mask), **kl(mask=mask), **js(mask=mask)}
    assert_exact(terms, inputs)
    assert fused(terms, inputs).gradient[1].eq(0).all()


def test_an_empty_mask() -> None:
    """No row counts: value and gradient are 0."""
    mask = torch.zeros(4, dtype=torch.bool)
    found = fused({**kl(mask=mask), **js(mask=mask)}, drawn())
    assert found.values.eq(0).all()
    assert found.gradient.eq(0).all()


def test_a_denominator_on_the_device() -> None:
    """A global count replaces the mask's own."""
    mask, count = torch.tensor([True, False, True, True]), torch.tensor(11.0)
    assert_exact(kl(mask=mask, denominator=count), drawn())


@pytest.mark.parametrize("shape", [(600,), (4, 600)])
def test_support(shape: tuple[int, ...]) -> None:
    """Entries that do not exist may hold anything, and receive no gradient."""
    inputs = drawn()
    support = torch.rand(shape) < 0.7
    inputs["x"] = torch.where(support, inputs["x"], torch.nan)
    inputs["y"] = torch.where(support, inputs["y"], torch.inf)
    terms = {**entropy(support=support), **kl(support=support), **js(support=support)}
    assert_exact(terms, inputs)


def test_ignored_labels() -> None:
    """They count neither in the mean nor in the gradient."""
    inputs = drawn()
    inputs["labels"][1], inputs["labels"][2] = -100, 7
    assert_exact(BASE, inputs)
    other = {"base": Term(F.cross_entropy, inputs=("x", "labels"), options={"ignore_index": 7})}
    inputs["labels"][1] = 5
    assert_exact(other, inputs)


def test_only_ignored_labels() -> None:
    """As in torch: the mean of nothing is NaN, its gradient 0."""
    inputs = drawn()
    inputs["labels"][:] = -100
    found = fused(BASE, inputs)
    assert found.values.isnan().all()
    assert found.gradient.eq(0).all()


def test_a_label_that_does_not_exist() -> None:
    """It poisons the value: nothing here can raise."""
    inputs = drawn()
    inputs["labels"][1] = 600
    assert fused(BASE, inputs).values.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_seen(bad: float) -> None:
    """A row with one has no value and no gradient; the other rows keep theirs."""
    inputs = drawn()
    terms = {**entropy(), **kl(), **js()}
    good = fused(terms, inputs)
    inputs["x"][2, 5] = bad
    found = fused(terms, inputs)
    assert found.values.isnan().all()
    assert found.squares.isnan().all()
    assert found.gradient[2].isnan().all()
    others = torch.tensor([0, 1, 3])
    torch.testing.assert_close(found.gradient[others], good.gradient[others], rtol=0, atol=0)


def test_nothing_but_zeros() -> None:
    """The kinks of the sizes: gradient 0, and the magnitude's value target²."""
    inputs: Inputs = {"x": torch.zeros(2, 300)}
    found = fused(SIZES, inputs)
    assert found.gradient.eq(0).all()
    assert found.values[found.names.index("rms")] == 0.25


def test_weight_zero_leaves_out_what_is_infinite() -> None:
    """As in the plain definition: it is reported, and contributes neither value nor gradient."""
    inputs = drawn()
    inputs["x"][0, 0] = -INF
    terms = {**entropy(), **kl(weight=0.0), "l2": Term(eq.l2, inputs="x", weight=0.0)}
    found = fused(terms, inputs)
    assert found.values[found.names.index("kl")] == INF
    assert found.contributions.isfinite().all()
    assert found.gradient.isfinite().all()


def test_divergences_are_never_negative() -> None:
    """Of a distribution with itself, and with one that differs in the last digits."""
    for spread in (0.0, 1e-7, 1e-6):
        inputs = drawn(32, 100)
        inputs["y"] = inputs["x"] * (1 + spread * torch.randn(32, 100))
        assert fused({**kl(), **js()}, inputs).values.ge(0).all()
