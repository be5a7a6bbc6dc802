"""Laws that every penalty on rows of distributions shares: divergences and entropy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equipoise as eq
from tests.penalties.assertions import (
    assert_close,
    assert_equal,
    assert_same_curvature,
    assert_same_function,
    assert_zero_gradients,
)
from tests.penalties.inputs import bools, repeats, spoiled, supports, tensors


class Rows(NamedTuple):
    """A penalty on rows, and how many distributions it compares."""

    penalty: Callable[..., Tensor]
    inputs: int


CASES = {
    "KL": Rows(eq.kl_divergence, 2),
    "reverse KL": Rows(partial(eq.kl_divergence, direction="reverse"), 2),
    "symmetric KL": Rows(partial(eq.kl_divergence, direction="symmetric"), 2),
    "floored KL": Rows(partial(eq.kl_divergence, floor=-3.21), 2),
    "symmetric floored KL": Rows(partial(eq.kl_divergence, direction="symmetric", floor=-3.21), 2),
    "tempered KL": Rows(partial(eq.kl_divergence, temperature=2.0, temperature_squared=True), 2),
    "JS": Rows(eq.js_divergence, 2),
    "skewed JS in bits": Rows(partial(eq.js_divergence, beta=0.3, base=2, normalized=True), 2),
    "entropy": Rows(eq.entropy, 1),
    "normalized entropy": Rows(partial(eq.entropy, normalize=True), 1),
    "tempered entropy bonus": Rows(partial(eq.entropy, mode="bonus", temperature=0.7), 1),
}
NAMES = list(CASES)
COUNTS_ENTRIES = "normalized entropy"
"""Divides by how many entries exist, those of probability 0 included."""

every_case = pytest.mark.parametrize("name", NAMES)
every_reduction = st.sampled_from(["sum", "mean", "none"])
sum_and_mean = st.sampled_from(["sum", "mean"])
few = settings(max_examples=12)

ROWS, VOCABULARY = 4, 5
pairs = tensors(2, ROWS, VOCABULARY, size=4.0)


def drawn(
    name: str, both: Tensor, *, from_logits: bool
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The penalty and as many inputs as it takes: logits, or their log-probabilities."""
    penalty, inputs = CASES[name]
    given_as = both if from_logits else both.log_softmax(-1)
    return partial(penalty, from_logits=from_logits), list(given_as[:inputs])


# Rows --------------------------------------------------------------------------------------------


@every_case
@few
@given(both=pairs, from_logits=st.booleans())
def test_each_row_is_valued_alone(name: str, both: Tensor, from_logits: bool) -> None:
    """Without reduction a row has the value and gradient it has as a single distribution."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    assert_same_function(
        partial(penalty, reduction="none"),
        lambda *xs: torch.stack([penalty(*row) for row in zip(*xs, strict=True)]),
        *inputs,
    )


@every_case
@few
@given(both=pairs, from_logits=st.booleans())
def test_sum_and_mean_are_over_the_rows(name: str, both: Tensor, from_logits: bool) -> None:
    """The sum adds the rows; the mean, which is the default, divides by their number."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    each = penalty(*inputs, reduction="none")
    assert_close(penalty(*inputs, reduction="sum"), each.sum())
    assert_close(penalty(*inputs, reduction="mean"), each.sum() / ROWS)
    assert_close(penalty(*inputs), each.sum() / ROWS)


@every_case
@few
@given(both=pairs, from_logits=st.booleans(), reduction=every_reduction)
def test_leading_dimensions_are_rows(
    name: str, both: Tensor, from_logits: bool, reduction: str
) -> None:
    """[2, 2, vocabulary] is [4, vocabulary], and unreduced it keeps its leading shape."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    folded = penalty(*(x.reshape(2, 2, VOCABULARY) for x in inputs), reduction=reduction)
    flat = penalty(*inputs, reduction=reduction)
    assert_close(folded, flat.reshape(2, 2) if reduction == "none" else flat)


@every_case
@few
@given(both=pairs, from_logits=st.booleans(), order=st.permutations(range(VOCABULARY)))
def test_the_order_of_the_vocabulary_does_not_matter(
    name: str, both: Tensor, from_logits: bool, order: list[int]
) -> None:
    """Permuting the entries of every distribution alike keeps values and permutes gradients."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    assert_same_function(lambda *xs: penalty(*(x[:, order] for x in xs)), penalty, *inputs)


# Masks and supports ------------------------------------------------------------------------------


@every_case
@few
@given(both=pairs, keep=bools(ROWS), from_logits=st.booleans(), reduction=sum_and_mean)
def test_masking_a_row_is_deleting_it(
    name: str, both: Tensor, keep: Tensor, from_logits: bool, reduction: str
) -> None:
    """Masked rows, filled with NaN and inf, could as well not be there; no row at all gives 0."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    reduced = partial(penalty, reduction=reduction)
    assert_same_function(
        partial(reduced, mask=keep),
        lambda *xs: reduced(*(x[keep] for x in xs)),
        *(spoiled(x, keep[:, None]) for x in inputs),
    )


@every_case
@few
@given(both=pairs, weights=repeats(ROWS), from_logits=st.booleans(), reduction=sum_and_mean)
def test_a_whole_weight_is_a_repetition(
    name: str, both: Tensor, weights: Tensor, from_logits: bool, reduction: str
) -> None:
    """A row of weight 3 counts as three rows, in value and gradient."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    reduced = partial(penalty, reduction=reduction)
    assert_same_function(
        partial(reduced, mask=weights),
        lambda *xs: reduced(*(x.repeat_interleave(weights.long(), 0) for x in xs)),
        *inputs,
    )


@every_case
@pytest.mark.parametrize("from_logits", [False, True], ids=["log-probabilities", "logits"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_empty_mask_gives_zero(name: str, from_logits: bool, reduction: str) -> None:
    """Where no row counts the value is 0 and so is the gradient, whatever the rows hold."""
    penalty, inputs = drawn(name, torch.zeros(2, ROWS, VOCABULARY), from_logits=from_logits)
    nothing = torch.zeros(ROWS, dtype=torch.bool)
    masked = partial(penalty, mask=nothing, reduction=reduction)
    spoiled_inputs = [spoiled(x, nothing[:, None]) for x in inputs]
    assert_equal(masked(*spoiled_inputs), 0.0)
    assert_zero_gradients(masked, *spoiled_inputs)


@every_case
@few
@given(both=pairs, keep=supports(ROWS, VOCABULARY), from_logits=st.booleans())
def test_what_is_not_supported_is_deleted(
    name: str, both: Tensor, keep: Tensor, from_logits: bool
) -> None:
    """Entries outside the support, filled with NaN and inf, could as well not be there."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)

    def deleted(*xs: Tensor) -> Tensor:
        return torch.stack([penalty(*(x[i][keep[i]] for x in xs)) for i in range(ROWS)])

    assert_same_function(
        partial(penalty, support=keep, reduction="none"),
        deleted,
        *(spoiled(x, keep) for x in inputs),
    )


@every_case
@few
@given(
    both=pairs,
    keep=supports(1, VOCABULARY),
    rows=bools(ROWS),
    from_logits=st.booleans(),
    reduction=sum_and_mean,
)
def test_one_support_serves_all_rows_and_a_mask(
    *, name: str, both: Tensor, keep: Tensor, rows: Tensor, from_logits: bool, reduction: str
) -> None:
    """A support [vocabulary] is one for every row, and deletes beside a mask of rows."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    reduced = partial(penalty, reduction=reduction)
    assert_same_function(
        partial(reduced, support=keep[0], mask=rows),
        lambda *xs: reduced(*(x[rows][:, keep[0]] for x in xs)),
        *(spoiled(x, keep & rows[:, None]) for x in inputs),
    )


@every_case
def test_a_row_without_support_is_zero(name: str) -> None:
    """A row in which no entry exists has value 0 and gradient 0, also from logits."""
    keep = torch.tensor([[True, True, False], [False, False, False]])
    penalty, inputs = drawn(name, torch.ones(2, 2, 3, dtype=torch.float64), from_logits=True)
    values = partial(penalty, support=keep, reduction="none")
    inputs = [spoiled(x, keep) for x in inputs]
    assert_equal(values(*inputs)[1], 0.0)
    assert_zero_gradients(lambda *xs: values(*xs)[1], *inputs)


@pytest.mark.parametrize("name", [name for name in NAMES if name != COUNTS_ENTRIES])
@few
@given(
    both=pairs,
    keep=supports(1, VOCABULARY),
    from_logits=st.booleans(),
    also=st.sampled_from([{}, {"mask": torch.ones(ROWS)}, {"support": torch.ones(VOCABULARY)}]),
)
def test_a_shared_zero_is_deleted(
    name: str, both: Tensor, keep: Tensor, from_logits: bool, also: dict[str, Tensor]
) -> None:
    """Where all distributions are −inf nothing is added: value, gradient and curvature agree."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    zeros = [x.masked_fill(~keep[0], -torch.inf) for x in inputs]

    def deleted(*xs: Tensor) -> Tensor:
        return penalty(*(x[:, keep[0]] for x in xs))

    counted = partial(penalty, **also)
    assert_same_function(counted, deleted, *zeros)
    assert_same_curvature(counted, deleted, *zeros)


# Chunks ------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("chunk", [1, 3, ROWS, ROWS + 5])
@settings(max_examples=6)
@given(
    both=pairs,
    weights=repeats(2, ROWS // 2),
    keep=supports(ROWS, VOCABULARY),
    from_logits=st.booleans(),
    reduction=every_reduction,
)
def test_chunks_give_what_the_whole_gives(
    *,
    name: str,
    chunk: int,
    both: Tensor,
    weights: Tensor,
    keep: Tensor,
    from_logits: bool,
    reduction: str,
) -> None:
    """Rows taken a few at a time have the same value, gradient and second derivative."""
    penalty, inputs = drawn(name, both, from_logits=from_logits)
    shape = (2, ROWS // 2, VOCABULARY)
    whole = partial(penalty, mask=weights, support=keep.reshape(shape), reduction=reduction)
    inputs = [x.reshape(shape) for x in inputs]
    assert_same_function(partial(whole, chunk=chunk), whole, *inputs)
    assert_same_curvature(partial(whole, chunk=chunk), whole, *inputs)


@every_case
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_of_one_distribution_and_of_none(name: str, chunk: int) -> None:
    """A single distribution is one chunk, with a support too; no rows are 0."""
    penalty, inputs = drawn(name, torch.randn(2, 5, dtype=torch.float64), from_logits=True)
    keep = torch.tensor([True, False, True, True, True])
    whole = partial(penalty, support=keep)
    assert_same_function(partial(whole, chunk=chunk), whole, *inputs)
    assert_equal(penalty(*(x.new_zeros(0, 5) for x in inputs), chunk=chunk), 0.0)


@every_case
def test_chunks_keep_nothing_for_the_backward_pass(name: str) -> None:
    """Chunked, autograd keeps no tensor of the size of an input; whole, it does."""
    penalty, inputs = drawn(name, torch.randn(2, 64, 16), from_logits=True)
    assert kept_entries(penalty, *inputs) >= 64 * 16
    assert kept_entries(partial(penalty, chunk=4), *inputs) < 64 * 16


def kept_entries(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """How many entries autograd keeps beside the inputs themselves."""
    fresh = [x.clone().requires_grad_() for x in inputs]
    ours = {x.untyped_storage().data_ptr() for x in fresh}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = function(*fresh)
    assert value.requires_grad
    return sum(size for pointer, size in kept.items() if pointer not in ours)


# Denominators ------------------------------------------------------------------------------------


@every_case
@few
@given(both=pairs, weights=repeats(ROWS), number=st.floats(0.5, 20.0), tensor=st.booleans())
def test_a_denominator_replaces_the_count(
    name: str, both: Tensor, weights: Tensor, number: float, tensor: bool
) -> None:
    """The mean with a denominator, a number or a tensor, is the sum divided by it."""
    penalty, inputs = drawn(name, both, from_logits=True)
    given_as = torch.tensor(number, dtype=torch.float64) if tensor else number
    assert_same_function(
        partial(penalty, mask=weights, denominator=given_as),
        lambda *xs: penalty(*xs, mask=weights, reduction="sum") / number,
        *inputs,
    )


@every_case
def test_a_denominator_of_one_entry_is_a_number(name: str) -> None:
    """A count that came as a tensor of one entry, whatever its shape, leaves a scalar."""
    penalty, inputs = drawn(name, torch.randn(2, ROWS, VOCABULARY), from_logits=True)
    for shape in ((1,), (1, 1)):
        counted = penalty(*inputs, denominator=torch.full(shape, 8))
        assert_equal(counted, penalty(*inputs, denominator=8))


@every_case
@few
@given(both=pairs)
def test_accumulated_parts_give_the_whole(name: str, both: Tensor) -> None:
    """Parts of a batch, each over the number of rows of all, add up to the mean of the whole."""
    penalty, inputs = drawn(name, both, from_logits=True)
    parts = partial(penalty, denominator=ROWS)
    assert_same_function(
        lambda *xs: parts(*(x[:1] for x in xs)) + parts(*(x[1:] for x in xs)), penalty, *inputs
    )


# Logits and temperature --------------------------------------------------------------------------


@every_case
@few
@given(both=pairs, shifts=tensors(2, ROWS, 1))
def test_a_shift_of_the_logits_does_not_matter(name: str, both: Tensor, shifts: Tensor) -> None:
    """Adding a number to all logits of a row changes nothing; the gradient of a row sums to 0."""
    penalty, inputs = drawn(name, both, from_logits=True)

    def shifted(*xs: Tensor) -> Tensor:
        return penalty(*(x + s for x, s in zip(xs, shifts, strict=False)))

    assert_same_function(shifted, penalty, *inputs)


@every_case
@few
@given(both=pairs)
def test_logits_stand_for_their_log_probabilities(name: str, both: Tensor) -> None:
    """`from_logits` is `log_softmax` first, in value and gradient."""
    penalty, inputs = CASES[name]
    assert_same_function(
        partial(penalty, from_logits=True),
        lambda *xs: penalty(*(x.log_softmax(-1) for x in xs)),
        *both[:inputs],
    )


TEMPERED = ("KL", "reverse KL", "symmetric KL", "floored KL", "entropy", "normalized entropy")
temperatures = st.floats(0.5, 4.0)


@pytest.mark.parametrize("name", TEMPERED)
@few
@given(both=pairs, temperature=temperatures)
def test_temperature_divides_the_logits(name: str, both: Tensor, temperature: float) -> None:
    """A temperature T is the distribution of logits divided by T."""
    penalty, inputs = drawn(name, both, from_logits=True)
    assert_same_function(
        partial(penalty, temperature=temperature),
        lambda *xs: penalty(*(x / temperature for x in xs)),
        *inputs,
    )


@pytest.mark.parametrize("name", TEMPERED)
@few
@given(both=pairs, temperature=temperatures)
def test_temperature_renormalises_log_probabilities(
    name: str, both: Tensor, temperature: float
) -> None:
    """Log-probabilities are logits to a temperature: both inputs give one result."""
    penalty, inputs = CASES[name]
    assert_same_function(
        lambda *xs: penalty(*(x.log_softmax(-1) for x in xs), temperature=temperature),
        partial(penalty, from_logits=True, temperature=temperature),
        *both[:inputs],
    )
