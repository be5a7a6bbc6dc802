"""`check_finite`: what it finds, what it says, and that it waits once."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise as eq

NAN, INF = math.nan, math.inf
ADVICE = "Use `torch.autograd.set_detect_anomaly(True)` to find the operation that made it."


def refusal(x: object, **options: str) -> eq.NonFiniteError:
    """The error that `x` raises."""
    with pytest.raises(eq.NonFiniteError) as caught:
        eq.check_finite(x, **options)
    return caught.value


def assert_says(x: object, sentence: str, **options: str) -> None:
    """The message is this sentence and the advice."""
    assert str(refusal(x, **options)) == f"{sentence}. {ADVICE}"


# Finding -----------------------------------------------------------------------------------------

kinds = st.sampled_from([0.0, 1.5, -2.0, NAN, INF, -INF])


@given(entries=st.lists(kinds, max_size=12))
def test_it_raises_if_and_only_if_something_is_not_finite(entries: list[float]) -> None:
    """NaN and infinities of either sign are counted apart; everything else passes."""
    nan = sum(map(math.isnan, entries))
    inf = sum(map(math.isinf, entries))
    x = torch.tensor(entries)
    if nan or inf:
        assert (refusal(x).nan, refusal(x).inf) == (nan, inf)
    else:
        assert eq.check_finite(x) is None


@given(
    entries=st.lists(kinds, min_size=12, max_size=12).filter(
        lambda e: not all(map(math.isfinite, e))
    )
)
def test_the_first_index_is_the_first(entries: list[float]) -> None:
    """The index in the message is the first in row-major order, in all dimensions."""
    x = torch.tensor(entries).reshape(2, 3, 2)
    first = next(i for i, e in enumerate(entries) if not math.isfinite(e))
    index = (first // 6, first // 2 % 3, first % 2)
    assert f"among 12 entries, first at index {index}." in str(refusal(x))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3),
        torch.zeros(()),
        torch.empty(0),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.tensor([1 + 2j]),
        torch.tensor([torch.finfo(torch.float32).max]),
        [],
        {},
        [torch.ones(2), torch.empty(0), torch.tensor([1])],
        {"a": torch.ones(2)},
    ],
    ids=str,
)
def test_what_is_finite_passes(x: object) -> None:
    """Finite numbers of every type, integers, bools, empty tensors, and nothing at all."""
    assert eq.check_finite(x) is None


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_every_inexact_type_is_looked_at(dtype: torch.dtype) -> None:
    """One NaN and two infinities are counted in every floating-point and complex type."""
    error = refusal(torch.tensor([NAN, 1.0, INF, -INF]).to(dtype))
    assert (error.nan, error.inf) == (1, 2)


def test_a_complex_number_is_finite_when_both_parts_are() -> None:
    """A NaN or an infinity in either part counts."""
    x = torch.complex(torch.tensor([1.0, 1.0, NAN]), torch.tensor([1.0, INF, 1.0]))
    error = refusal(x)
    assert (error.nan, error.inf) == (1, 1)
    assert "first at index (1,)" in str(error)


def test_views_are_looked_at_as_they_are() -> None:
    """Transposed, strided and expanded tensors have counts and index of what they show."""
    x = torch.zeros(2, 3)
    x[0, 2] = NAN
    assert "among 6 entries, first at index (2, 0)" in str(refusal(x.mT))
    assert "1 NaN among 2 entries, first at index (1,)" in str(refusal(x[0, 1:]))
    assert refusal(x[0].expand(4, 3)).nan == 4
    eq.check_finite(x[:, ::4])


def test_what_requires_a_gradient_may_be_checked() -> None:
    """Parameters pass through unchanged, and no graph is made."""
    x = torch.tensor([1.0, NAN], requires_grad=True)
    assert refusal(2 * x).nan == 1
    assert x.grad is None


def sparse(indices: list[list[int]], values: list[Any]) -> Tensor:
    """A sparse tensor of the shape [5, 3]."""
    return torch.sparse_coo_tensor(indices, values, (5, 3), check_invariants=True)


SPARSE = {
    "a number each": sparse([[3, 1, 3], [0, 2, 0]], [1.0, INF, NAN]),
    "a row each": sparse([[3, 1]], [[NAN, 2, 3], [4, -INF, 0]]),
}


@pytest.mark.parametrize("x", SPARSE.values(), ids=SPARSE)
def test_a_sparse_tensor_is_looked_at_as_the_dense_one(x: Tensor) -> None:
    """Counts and the index of a sparse gradient are those of the whole, however it is stored."""
    assert str(refusal(x)) == str(refusal(x.to_dense()))
    assert str(refusal(x.requires_grad_())) == str(refusal(x.detach().to_dense()))


def test_a_sparse_tensor_that_holds_nothing_is_finite() -> None:
    """Without a stored entry there is nothing to look at, beside others or alone."""
    nothing = sparse([[], []], [])
    eq.check_finite([nothing, torch.ones(2)])
    eq.check_finite(nothing)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits_can_hold_a_nan(dtype: torch.dtype) -> None:
    """What torch itself cannot ask about is looked at in float32."""
    assert refusal(torch.tensor([1.0, NAN, 2.0]).to(dtype)).nan == 1
    eq.check_finite(torch.ones(3).to(dtype))


# Saying ------------------------------------------------------------------------------------------


def test_one_tensor_is_called_x_or_by_its_name() -> None:
    """The message has the name, the counts, the number of entries, the index and the advice."""
    x = torch.tensor([1.0, NAN, INF])
    rest = "must be finite, got 1 NaN and 1 inf among 3 entries, first at index (1,)"
    assert_says(x, f"`x` {rest}")
    assert_says(x, f"`loss` {rest}", name="loss")


def test_only_what_is_there_is_counted_aloud() -> None:
    """NaN alone and infinities alone are named alone; a number has the index ()."""
    assert_says(
        torch.tensor([[0.0, NAN], [NAN, 0.0]]),
        "`x` must be finite, got 2 NaN among 4 entries, first at index (0, 1)",
    )
    assert_says(
        torch.tensor(-INF), "`x` must be finite, got 1 inf among 1 entries, first at index ()"
    )


def test_the_error_reaches_another_process() -> None:
    """Pickled, as between processes, it keeps its message and its counts."""
    error = refusal(torch.tensor([NAN, INF, INF]))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.nan, copy.inf) == (str(error), 1, 2)


def test_several_tensors_are_numbered() -> None:
    """A list says which, skips what is finite, and adds up the counts."""
    several = [torch.ones(2), torch.tensor([NAN]), torch.tensor([1]), torch.tensor([0.0, INF])]
    sentence = (
        "`x[1]` must be finite, got 1 NaN among 1 entries, first at index (0,); "
        "`x[3]` has 1 inf among 2 entries, first at index (1,)"
    )
    assert_says(several, sentence)
    assert_says(iter(several), sentence)
    assert_says(several, sentence.replace("x[", "grads["), name="grads")
    error = refusal(several)
    assert (error.nan, error.inf) == (1, 1)


def test_a_mapping_names_its_tensors() -> None:
    """The parameters of a model are found by their names."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    eq.check_finite(dict(model.named_parameters()))
    with torch.no_grad():
        model[1].weight[0, 2] = INF
    assert_says(
        dict(model.named_parameters()),
        "`1.weight` must be finite, got 1 inf among 3 entries, first at index (0, 2)",
    )


@pytest.mark.parametrize(
    ("x", "name", "got", "do"),
    [
        ([torch.ones(2), 3.0], "x[1]", "float", "`torch.as_tensor`"),
        ("ab", "x[0]", "str", "`torch.as_tensor`"),
        ({"w": None}, "w", "NoneType", "no entry where there is no gradient"),
        (nn.Linear(2, 1), "x", "Linear", "`dict(model.named_parameters())`"),
        (nn.Sequential(nn.Linear(2, 1)), "x[0]", "Linear", "`dict(model.named_parameters())`"),
        (
            nn.Linear(2, 1).named_parameters(),
            "x[0]",
            "tuple",
            "`dict(...)` of pairs of a name and a tensor",
        ),
    ],
    ids=["list", "text", "no gradient", "model", "layers", "named"],
)
def test_what_is_no_tensor_is_refused(x: object, name: str, got: str, do: str) -> None:
    """Something else among the tensors is named by its place and type, with the way out."""
    with pytest.raises(eq.InputTypeError) as caught:
        eq.check_finite(x)
    assert str(caught.value) == f"`{name}` must be a tensor, got {got}. Use {do}."


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: torch.eye(2).to_sparse_csr(), r"layout torch\.sparse_csr"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "a nested tensor",
        ),
    ],
    ids=["rows", "nested"],
)
def test_a_layout_without_an_index_is_refused(make: Callable[[], Tensor], got: str) -> None:
    """Where an entry has no index to report, the message names the tensor that has."""
    message = rf"`x` must be dense or sparse COO, got {got}\. Use `\.values\(\)`\."
    with pytest.raises(eq.InputTypeError, match=message):
        eq.check_finite(make())


def test_an_unknown_option_is_named() -> None:
    """A misspelt option is an error that suggests the near one."""
    with pytest.raises(eq.UnknownOptionError, match=r"got 'nam'\. Did you mean 'name'\?"):
        eq.check_finite(torch.ones(2), nam="loss")


@pytest.mark.parametrize("x", [None, 3.0], ids=str)
def test_neither_tensor_nor_tensors_is_refused(x: object) -> None:
    """A number or None is refused in our words."""
    with pytest.raises(eq.InputTypeError, match=rf"`x` must be a.+ got {type(x).__name__}\. Use "):
        eq.check_finite(x)


# Waiting -----------------------------------------------------------------------------------------

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operations that cannot answer before the device has finished."""


class Waits(TorchDispatchMode):
    """Counts transfers: tensors read with `tolist`, and operations that wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.operations: list[object] = []
        self.lists = 0
        read = Tensor.tolist

        def counted(x: Tensor) -> object:
            self.lists += 1
            with torch._C._DisableTorchDispatch():
                return read(x)

        monkeypatch.setattr(Tensor, "tolist", counted)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the operation, and note it if it waits."""
        if func in WAITING:
            self.operations.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 2, 50])
def test_it_waits_for_the_device_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors there are, all their figures come in one transfer."""
    tensors = [torch.ones(3) for _ in range(number)]
    with Waits(monkeypatch) as waits:
        eq.check_finite(tensors)
    assert waits.lists == 1
    assert waits.operations == []


def test_nothing_to_look_at_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers and empty tensors are finite without a look."""
    with Waits(monkeypatch) as waits:
        eq.check_finite([torch.tensor([1]), torch.empty(0)])
    assert waits.lists == 0
    assert waits.operations == []
