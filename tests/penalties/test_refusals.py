"""What the penalties refuse, and in which words: what was asked, what came, what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import equipoise as eq

PENALTIES = [
    "l1",
    "l2",
    "elastic_net",
    "output_magnitude",
    "kl_divergence",
    "js_divergence",
    "entropy",
    "sampled_kl",
    "orthogonality",
    "consistency",
    "gradient_penalty",
    "interpolated_gradient_penalty",
]
COMPARING = ["kl_divergence", "js_divergence", "sampled_kl", "consistency"]
"""Penalties of two tensors of one shape."""

ROWS = ["kl_divergence", "js_divergence", "entropy"]
"""Penalties of distributions over the last dimension."""

X = torch.zeros(2, 3)
NAN, INF = float("nan"), float("inf")


def total(x: Tensor) -> Tensor:
    """The simplest function of a batch."""
    return x.sum()


def called(name: str, x: object = X, second: object = None, **options: object) -> object:
    """A penalty on one input, given twice where it takes two."""
    penalty = getattr(eq, name)
    y = x if second is None else second
    if name == "gradient_penalty":
        return penalty(total, x, **options)
    if name == "interpolated_gradient_penalty":
        return penalty(total, x, y, **options)
    return penalty(x, y, **options) if name in COMPARING else penalty(x, **options)


# A name or value in code, then the rule; what came; and a last sentence that says what to do.
THREE_BEATS = re.compile(r"`[^`]+` .+[,;] got .+[.] (Use .+[.]|Did you mean '?\w+'?[?])", re.DOTALL)


def assert_refused(
    call: Callable[[], object], error: type[Exception], asked: str, got: str, do: str
) -> None:
    """The call raises the error, whose message has three beats, each with these words in it."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, eq.EquipoiseError)
    assert THREE_BEATS.fullmatch(message), message
    rule, came = re.split(r"[,;] got ", message, maxsplit=1)
    assert asked in rule
    assert came.startswith(got)
    assert do in came.removeprefix(got)


# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PENALTIES)
def test_a_misspelt_option_is_named_and_corrected(name: str) -> None:
    """An unknown option is a TypeError that lists the options and suggests the near one."""
    assert_refused(
        lambda: called(name, reduktion="sum"),
        eq.UnknownOptionError,
        f"`{name}` takes the options ",
        "'reduktion'",
        "Did you mean 'reduction'?",
    )


@pytest.mark.parametrize("name", PENALTIES)
def test_an_option_like_no_other_is_refused_with_all_there_are(name: str) -> None:
    """Where nothing is near, the message lists every option."""
    with pytest.raises(TypeError, match=r"got 'zzz'\. Use .*'reduction'.*\."):
        called(name, zzz=1)


@pytest.mark.parametrize("name", PENALTIES)
def test_options_are_not_positional(name: str) -> None:
    """One tensor too many is not taken for an option."""
    with pytest.raises(TypeError, match="positional argument"):
        getattr(eq, name)(total, X, X, X)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("value", ["avg", "Mean", None, 1])
def test_an_unknown_reduction_is_refused(name: str, value: object) -> None:
    """Every penalty says which reductions it has."""
    assert_refused(
        lambda: called(name, reduction=value),
        eq.OptionError,
        "`reduction` must be 'sum'",
        repr(value),
        "mean" if isinstance(value, str) else "Use one of them.",
    )


class Choice(NamedTuple):
    """A penalty, an option, a value it cannot have, and the values it can."""

    name: str
    option: str
    value: object
    listed: str
    do: str


CHOICES = [
    Choice("l2", "clip_mode", "hubert", "'cap' or 'huber'", "Did you mean 'huber'?"),
    Choice("l2", "center", "median", "'mean'", "Did you mean 'mean'?"),
    Choice("output_magnitude", "norm", "l3", "'rms' or 'l2'", "Use 'rms' or 'l2'."),
    Choice(
        "kl_divergence",
        "direction",
        "forwards",
        "'forward', 'reverse' or 'symmetric'",
        "Did you mean 'forward'?",
    ),
    Choice("js_divergence", "base", 10, "'e' or 2", "Use one of them."),
    Choice("js_divergence", "base", "f", "'e' or 2", "Use 'e' or 2."),
    Choice("js_divergence", "base", "2", "'e' or 2", "Did you mean 2?"),
    Choice("entropy", "mode", "bonsu", "'penalty' or 'bonus'", "Did you mean 'bonus'?"),
    Choice("sampled_kl", "estimator", "k4", "'k1', 'k2' or 'k3'", "Use 'k1'"),
    Choice("sampled_kl", "gradient", "k3", "'same' or 'k2'", "Use 'same' or 'k2'."),
    Choice(
        "orthogonality",
        "mode",
        "softer",
        "'soft', 'hard', 'spectral' or 'srip'",
        "Did you mean 'soft'?",
    ),
    Choice(
        "orthogonality",
        "axis",
        "row",
        "'rows', 'sequence' or 'vocabulary'",
        "Did you mean 'rows'?",
    ),
    Choice(
        "consistency", "metric", "cos", "'mse', 'l1', 'cosine' or 'kl'", "Did you mean 'cosine'?"
    ),
    Choice("consistency", "stop_gradient", "both", "None, 'first' or 'second'", "Use None,"),
    Choice("gradient_penalty", "per", "samples", "'sample' or 'batch'", "Did you mean 'sample'?"),
    Choice("gradient_penalty", "sided", "both", "'two' or 'one'", "Use 'two' or 'one'."),
    Choice("gradient_penalty", "norm", "l3", "'l2', 'l1' or 'linf'", "Use 'l2'"),
    Choice("interpolated_gradient_penalty", "sided", 2, "'two' or 'one'", "Use one of them."),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c.name}-{c.option}-{c.value}")
def test_an_unknown_choice_is_refused_with_the_known_ones(choice: Choice) -> None:
    """An option with a fixed set of values names them all and suggests the near one."""
    assert_refused(
        lambda: called(choice.name, **{choice.option: choice.value}),
        eq.OptionError,
        f"`{choice.option}` must be {choice.listed}",
        repr(choice.value),
        choice.do,
    )


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4)], ids=str)
def test_an_unknown_axis_is_refused_at_any_shape(shape: tuple[int, ...], per_sample: bool) -> None:
    """Also a single row, for which the axis would make no difference, has its axis checked."""
    x = torch.zeros(shape if not per_sample else (2, 3, 4))
    for axis, words in (("bogus", "`axis` must be 'rows'"), (9, "`axis` must be a dimension")):
        assert_refused(
            partial(eq.orthogonality, x, axis=axis, per_sample=per_sample),
            eq.OptionError,
            words,
            repr(axis),
            "Use",
        )


@pytest.mark.parametrize("call", [eq.output_magnitude, partial(eq.consistency, X)])
@pytest.mark.parametrize("dim", [2, -3, 0.5, True])
def test_an_unknown_dimension_is_refused(call: Callable[..., Tensor], dim: object) -> None:
    """Also by a metric that has no use for it."""
    words = "`dim` must be a dimension of the input, which has 2"
    assert_refused(lambda: call(X, dim=dim), eq.OptionError, words, repr(dim), "Use a number from")


@pytest.mark.parametrize("dim", [(0, 1), [0]], ids=str)
def test_rows_lie_along_one_dimension(dim: object) -> None:
    """A row of `consistency` has one dimension, so several are refused."""
    assert_refused(
        lambda: eq.consistency(X, X, metric="cosine", dim=dim),
        eq.OptionError,
        "`dim` must be a dimension of the input",
        repr(dim),
        "Use a number from",
    )


@pytest.mark.parametrize("dim", [(0, 0), (1, -1), [0, 1, -2]], ids=str)
def test_a_dimension_named_twice_is_refused(dim: object) -> None:
    """Counted from the end or not, a norm is taken over a dimension once."""
    assert_refused(
        lambda: eq.output_magnitude(X, dim=dim),
        eq.OptionError,
        "`dim` must name each dimension once",
        repr(dim),
        "Use each number once",
    )


FLAGS = [
    *((name, flag) for name in ROWS for flag in ("from_logits", "check")),
    ("kl_divergence", "temperature_squared"),
    ("js_divergence", "normalized"),
    ("entropy", "normalize"),
    ("orthogonality", "normalize"),
    ("orthogonality", "per_sample"),
    ("gradient_penalty", "squared"),
    ("interpolated_gradient_penalty", "squared"),
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
@pytest.mark.parametrize("value", ["no", 0, None, torch.tensor(1)], ids=str)
def test_a_flag_is_true_or_false(name: str, flag: str, value: object) -> None:
    """A text such as 'no' would count as True, and a tensor would be waited for."""
    assert_refused(
        lambda: called(name, **{flag: value}),
        eq.OptionError,
        f"`{flag}` must be True or False",
        repr(value),
        "Use one of them",
    )


@pytest.mark.parametrize("name", [*ROWS, "sampled_kl"])
@pytest.mark.parametrize(
    ("denominator", "words", "got"),
    [
        (NAN, "a finite number at least 0", "nan"),
        (-1.0, "a finite number at least 0", "-1.0"),
        ("4", "a finite number at least 0", "'4'"),
        (torch.ones(2), "a number, or a tensor of one", "shape (2,)"),
    ],
    ids=str,
)
def test_a_denominator_is_one_number(name: str, denominator: object, words: str, got: str) -> None:
    """A list of counts would turn the mean into a list of means."""
    assert_refused(
        lambda: called(name, denominator=denominator),
        eq.OptionError,
        f"`denominator` must be {words}",
        got,
        "Use",
    )


class Range(NamedTuple):
    """A penalty, an option, its range in words, and values outside."""

    name: str
    option: str
    wanted: str
    outside: tuple[object, ...]
    others: dict[str, object] = {}  # noqa: RUF012 - a table of constants


RANGES = [
    Range("l2", "clip", "above 0", (0, -1.0, NAN, INF, "1")),
    Range("l2", "center", "", (NAN, INF, [1.0])),
    *(Range(name, "scale", "", (NAN, INF, "1", None)) for name in ("l1", "l2", "elastic_net")),
    Range("elastic_net", "l1_ratio", "at least 0 and at most 1", (-0.1, 1.1, NAN, None)),
    Range("output_magnitude", "target", "", (NAN, INF, "1", None)),
    Range("kl_divergence", "temperature", "above 0", (0, -1.0, NAN, INF, "1", None)),
    Range("kl_divergence", "floor", "at most 0", (0.1, NAN, -INF, "x")),
    Range("kl_divergence", "chunk", "at least 1", (0, -1)),
    Range("js_divergence", "beta", "at least 0 and at most 1", (-0.1, 1.1, NAN, None)),
    Range("js_divergence", "chunk", "at least 1", (0,)),
    Range("entropy", "temperature", "above 0", (0, -1.0, NAN, INF)),
    Range("entropy", "chunk", "at least 1", (0, -3)),
    Range("orthogonality", "sample", "at least 1", (0, -1)),
    Range("gradient_penalty", "target", "", (NAN, INF, None)),
    Range("interpolated_gradient_penalty", "target", "", (NAN,)),
    Range("interpolated_gradient_penalty", "epsilon", "", (NAN, INF, "half")),
]


@pytest.mark.parametrize("case", RANGES, ids=lambda r: f"{r.name}-{r.option}")
def test_a_number_outside_its_range_is_refused(case: Range) -> None:
    """A numeric option that is out of range, no number, NaN or infinite says what it may be."""
    for value in case.outside:
        assert_refused(
            lambda v=value: called(case.name, **{case.option: v}),
            eq.OptionError,
            f"`{case.option}` must be a finite number {case.wanted}".rstrip(),
            repr(value),
            hint_for(value),
        )


def hint_for(value: object) -> str:
    """What to do about a number that is refused."""
    if not isinstance(value, int | float):
        return "Use a number of Python, such as 0.1."
    return "Use one in that range." if math.isfinite(value) else "Use a finite one."


@pytest.mark.parametrize(
    "case",
    [r for r in RANGES if r.option not in {"center", "epsilon"}],
    ids=lambda r: f"{r.name}-{r.option}",
)
def test_a_number_in_a_tensor_is_refused(case: Range) -> None:
    """Options are Python numbers: reading one from a tensor would wait for the device."""
    assert_refused(
        lambda: called(case.name, **{case.option: torch.tensor(1.0)}),
        eq.OptionError,
        f"`{case.option}` must be a Python number",
        "a tensor",
        "Use `.item()`",
    )


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("kl_divergence", "chunk"),
        ("js_divergence", "chunk"),
        ("entropy", "chunk"),
        ("orthogonality", "sample"),
    ],
)
def test_a_number_of_things_is_whole(name: str, option: str) -> None:
    """One and a half rows are refused in our words, not by an operation inside."""
    for value in (1.5, True):
        assert_refused(
            lambda v=value: called(name, **{option: v}),
            eq.OptionError,
            f"`{option}` must be a whole number",
            repr(value),
            "Use",
        )


@pytest.mark.parametrize("name", ["orthogonality", "interpolated_gradient_penalty"])
@pytest.mark.parametrize("value", [3, "cpu"])
def test_a_seed_is_no_generator(name: str, value: object) -> None:
    """A number in its place is named, with the generator that it seeds."""
    assert_refused(
        lambda: called(name, generator=value),
        eq.OptionError,
        "`generator` must be a torch.Generator",
        repr(value),
        "Use `torch.Generator().manual_seed(...)`.",
    )


@pytest.mark.parametrize("beta", [0, 1, 0.0, 1.0])
def test_the_ends_of_beta_need_the_normalized_divergence(beta: float) -> None:
    """At β = 0 and 1 the plain divergence is 0 for everything, which nobody can mean."""
    assert_refused(
        lambda: eq.js_divergence(X, X, beta=beta),
        eq.OptionError,
        "`beta` must lie between 0 and 1, where the divergence is not always 0",
        repr(beta),
        "Use `normalized=True`",
    )


def test_huber_needs_a_clip() -> None:
    """A Huber penalty without the point where its line begins is refused."""
    assert_refused(
        lambda: eq.l2(X, clip_mode="huber"),
        eq.OptionError,
        "`clip_mode='huber'` needs the point where the line begins",
        "clip=None",
        "Use `clip=1.0`.",
    )


@pytest.mark.parametrize("name", [*ROWS, "sampled_kl"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_denominator_belongs_to_the_mean(name: str, reduction: str) -> None:
    """With another reduction a denominator would do nothing, so it is refused."""
    assert_refused(
        lambda: called(name, reduction=reduction, denominator=3),
        eq.OptionError,
        "`denominator` belongs to reduction='mean'",
        f"reduction={reduction!r}",
        "Use reduction='mean'",
    )


@pytest.mark.parametrize("name", ["gradient_penalty", "interpolated_gradient_penalty"])
def test_a_squared_norm_has_no_side(name: str) -> None:
    """R1 has no target, so there is no one side of it."""
    assert_refused(
        lambda: called(name, squared=True, sided="one"),
        eq.OptionError,
        "`squared=True` has no target",
        "sided='one'",
        "Use one of the two.",
    )


def test_orthogonality_is_a_number() -> None:
    """There is nothing per entry to return, so `reduction="none"` is refused."""
    assert_refused(
        lambda: eq.orthogonality(X, reduction="none"),
        eq.OptionError,
        "`reduction` must be 'sum' or 'mean'",
        "'none'",
        "Use 'sum' or 'mean'.",
    )


# Tensors -----------------------------------------------------------------------------------------


def argument(name: str) -> str:
    """What a penalty calls its first tensor."""
    named = {"kl_divergence": "p", "js_divergence": "p", "entropy": "p", "consistency": "a"}
    return {**named, "sampled_kl": "logp"}.get(name, "x")


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64], ids=str)
def test_what_holds_no_real_numbers_is_refused(name: str, dtype: torch.dtype) -> None:
    """Integers, bools and complex numbers have no gradient here; the message says the dtype."""
    assert_refused(
        lambda: called(name, torch.ones(2, 3, dtype=dtype)),
        eq.InputTypeError,
        f"`{argument(name)}` must hold real floating-point numbers",
        str(dtype),
        "Use `.abs()` or `torch.view_as_real`." if dtype.is_complex else "Use `.float()`.",
    )


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("x", [3.0, None], ids=str)
def test_what_is_no_tensor_is_refused(name: str, x: object) -> None:
    """A number or None is named by its type, in every penalty."""
    assert_refused(
        lambda: called(name, x),
        eq.InputTypeError,
        f"`{argument(name)}` must be a tensor",
        type(x).__name__,
        "Use",
    )


@pytest.mark.parametrize(
    ("model", "got", "do"),
    [
        (lambda net: net, "Linear", "Use `model.parameters()`."),
        (lambda net: net.named_parameters(), "tuple", "Use `model.parameters()`, tensors without"),
        (lambda net: net.state_dict(), "str", "Use `model.parameters()`, tensors without"),
    ],
    ids=["module", "named", "state"],
)
@pytest.mark.parametrize("name", ["l1", "l2", "elastic_net"])
def test_a_model_is_not_its_parameters(name: str, model: Any, got: str, do: str) -> None:
    """Each way to hand over a model that is no list of tensors names the one that is."""
    given = model(torch.nn.Linear(2, 3))
    assert_refused(lambda: called(name, given), eq.InputTypeError, "must be a tensor", got, do)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_list_of_numbers_is_refused(name: str) -> None:
    """A list of numbers is no tensor, nor a list of them."""
    assert_refused(
        lambda: called(name, [1.0, 2.0]),
        eq.InputTypeError,
        " must be a tensor",
        "float" if name in {"l1", "l2", "elastic_net", "sampled_kl"} else "list",
        "Use",
    )


@pytest.mark.parametrize("name", [*COMPARING, "interpolated_gradient_penalty"])
def test_the_second_tensor_is_checked_like_the_first(name: str) -> None:
    """A second argument that is no tensor or holds integers is refused under its own name."""
    second = {"kl_divergence": "q", "js_divergence": "q", "sampled_kl": "logq", "consistency": "b"}
    label = second.get(name, "reference")
    for value, words in ((3.0, "must be a tensor"), (X.long(), "must hold real floating-point")):
        assert_refused(
            lambda v=value: called(name, X, v), eq.InputTypeError, f"`{label}` {words}", "", "Use"
        )


@pytest.mark.parametrize("name", [*COMPARING, "interpolated_gradient_penalty"])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (2, 3, 1)], ids=str)
def test_shapes_must_be_equal(name: str, shape: tuple[int, ...]) -> None:
    """Nothing broadcasts between two inputs: what would is nearly always a mistake."""
    assert_refused(
        lambda: called(name, X, torch.zeros(shape)),
        eq.InputError,
        "must have one shape",
        f"(2, 3) and {shape}",
        "Use `.expand_as`",
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_number_is_no_distribution(name: str) -> None:
    """A 0-d tensor has nothing to be a distribution over."""
    assert_refused(
        lambda: called(name, torch.zeros(())),
        eq.InputError,
        "`p` must have a last dimension to be a distribution over",
        "a 0-d tensor",
        "Use `sampled_kl`",
    )


def test_a_number_has_no_rows() -> None:
    """A 0-d tensor cannot be orthogonal to anything."""
    assert_refused(
        lambda: eq.orthogonality(torch.zeros(())),
        eq.InputError,
        "`x` must have at least one dimension",
        "a 0-d tensor",
        "Use `.reshape(1, -1)`",
    )


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4, 5)], ids=str)
def test_samples_need_three_dimensions(shape: tuple[int, ...]) -> None:
    """`per_sample` is for [batch, sequence, features]."""
    assert_refused(
        lambda: eq.orthogonality(torch.zeros(shape), per_sample=True),
        eq.InputError,
        "`per_sample` needs three dimensions",
        str(shape),
        "Use `x.unflatten`",
    )


@pytest.mark.parametrize("axis", [0, -3])
def test_the_batch_is_no_axis_of_a_sample(axis: int) -> None:
    """With `per_sample` the first dimension is taken."""
    assert_refused(
        lambda: eq.orthogonality(torch.zeros(2, 3, 4), per_sample=True, axis=axis),
        eq.OptionError,
        "`axis` must be a dimension of one sample",
        "the batch dimension 0",
        "Use 'sequence' or 'vocabulary'.",
    )


# Masks -------------------------------------------------------------------------------------------

MASKED = ["l1", "l2", "elastic_net", *COMPARING, "entropy"]
BY_ROW = [*ROWS]


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("shape", [(2,), (4, 2, 3), (2, 2, 3), (3, 2)], ids=str)
def test_a_mask_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...]) -> None:
    """A mask that would not broadcast, or would enlarge the input, is refused."""
    fits = (2,) if name in BY_ROW else (2, 3)
    mask = torch.ones((2, 2) if shape == fits else shape)
    assert_refused(
        lambda: called(name, mask=mask),
        eq.InputError,
        f"`mask` must broadcast to the shape {fits}",
        str(tuple(mask.shape)),
        "Use `.unsqueeze`",
    )


@pytest.mark.parametrize("metric", ["cosine", "kl"])
def test_a_mask_of_rows_has_the_shape_of_rows(metric: str) -> None:
    """By row, a mask of entries is refused."""
    assert_refused(
        lambda: eq.consistency(X, X, metric=metric, mask=torch.ones(2, 3)),
        eq.InputError,
        "`mask` must broadcast to the shape (2,)",
        "(2, 3)",
        "Use `.unsqueeze`",
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_support_that_does_not_fit_is_refused(name: str) -> None:
    """A support has the shape of the distributions."""
    assert_refused(
        lambda: called(name, support=torch.ones(2)),
        eq.InputError,
        "`support` must broadcast to the shape (2, 3)",
        "(2,)",
        "Use `.unsqueeze`",
    )


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize(
    "mask", [[True], 1.0, X.to(torch.complex64)], ids=["list", "number", "complex"]
)
def test_a_mask_that_is_no_mask_is_refused(name: str, mask: object) -> None:
    """A mask is a tensor, bool or of weights; the message says what came."""
    assert_refused(
        lambda: called(name, mask=mask),
        eq.InputTypeError,
        "`mask` must be a",
        "torch.complex64" if isinstance(mask, Tensor) else type(mask).__name__,
        "Use",
    )


@pytest.mark.parametrize("center", [torch.zeros(2), torch.zeros(4, 2, 3)], ids=["2", "4x2x3"])
def test_a_center_that_does_not_fit_is_refused(center: Tensor) -> None:
    """A center that would not broadcast, or would enlarge the input, is refused."""
    assert_refused(
        lambda: eq.l2(X, center=center),
        eq.InputError,
        "`center` must broadcast to the shape (2, 3)",
        str(tuple(center.shape)),
        "Use `.unsqueeze`",
    )


def test_an_epsilon_that_does_not_fit_is_refused() -> None:
    """One epsilon a sample is [n, 1], not [n]."""
    assert_refused(
        lambda: called("interpolated_gradient_penalty", epsilon=torch.zeros(2)),
        eq.InputError,
        "`epsilon` must broadcast to the shape (2, 3)",
        "(2,)",
        "Use `.unsqueeze`",
    )


# Iterables ---------------------------------------------------------------------------------------

MANY = ["l1", "l2", "elastic_net", "sampled_kl"]


@pytest.mark.parametrize("name", MANY)
def test_an_exhausted_generator_is_refused(name: str) -> None:
    """`model.parameters()` read twice is empty the second time, which is not a penalty of 0."""
    exhausted = torch.nn.Linear(2, 2).parameters()
    assert len(list(exhausted)) == 2
    for nothing in (exhausted, [], ()):
        assert_refused(
            lambda x=nothing: called(name, x, list(x)),
            eq.InputError,
            f"`{argument(name)}` must hold at least one tensor",
            "an empty iterable",
            "Use `list(...)`",
        )


@pytest.mark.parametrize("name", MANY)
def test_every_tensor_needs_its_mask(name: str) -> None:
    """Two tensors with one mask, or with a single tensor for a mask, are refused."""
    assert_refused(
        lambda: called(name, [X, X], mask=[torch.ones(2, 3)]),
        eq.InputError,
        "`mask` must hold one mask for each of the 2 tensors",
        "1",
        "Use `torch.ones(())`",
    )
    assert_refused(
        lambda: called(name, [X, X], mask=torch.ones(2, 3)),
        eq.InputTypeError,
        "`mask` must be a tensor or an iterable of tensors, one for each of the inputs",
        "Tensor",
        "Use a list of tensors.",
    )


@pytest.mark.parametrize("name", MANY)
def test_the_tensor_that_is_wrong_is_numbered(name: str) -> None:
    """Among several, the message says which."""
    label = argument(name)
    assert_refused(
        lambda: called(name, [X, X.long()]),
        eq.InputTypeError,
        f"`{label}[1]` must hold real floating-point numbers",
        "torch.int64",
        "Use `.float()`.",
    )
    assert_refused(
        lambda: called(name, [X, X], mask=[torch.ones(()), torch.ones(5)]),
        eq.InputError,
        "`mask[1]` must broadcast to the shape (2, 3)",
        "(5,)",
        "Use `.unsqueeze`",
    )


def test_sequences_come_in_pairs() -> None:
    """As many tensors under P as under Q."""
    assert_refused(
        lambda: eq.sampled_kl([X, X], [X]),
        eq.InputError,
        "`logp` and `logq` must hold as many tensors",
        "2 and 1",
        "Use one tensor a sequence in both.",
    )


# Distributions that are none ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_logits_given_as_log_probabilities_are_found_out(name: str) -> None:
    """With `check`, exponentials that do not sum to 1 are refused: the worst row and its sum."""
    x = torch.tensor([[0.5, 0.5], [0.25, 0.25], [2.0, 1.0]]).log()
    assert_refused(
        lambda: called(name, x, check=True),
        eq.InputError,
        "`p` must hold log-probabilities that sum to 1 over the last dimension",
        "a sum of 3 in row 2",
        "Use `from_logits=True` for logits",
    )


@pytest.mark.parametrize("name", ["kl_divergence", "js_divergence"])
def test_the_second_distribution_is_checked_too(name: str) -> None:
    """The message names the side that is wrong."""
    good = torch.tensor([[0.5, 0.5]]).log()
    with pytest.raises(eq.InputError, match=r"`q` must hold .* got a sum of 0\.75 in row 0"):
        called(name, good, torch.tensor([[0.25, 0.5]]).log(), check=True)


@pytest.mark.parametrize("name", ROWS)
def test_nan_is_no_distribution(name: str) -> None:
    """A row with NaN is refused by `check`, as the worst there is."""
    x = torch.tensor([[1.0, 1.0], [float("nan"), 0.0]]).log()
    with pytest.raises(eq.InputError, match="got a sum of nan in row 1"):
        called(name, x, check=True)


@pytest.mark.parametrize("name", ROWS)
def test_token_log_probabilities_are_no_distribution(name: str) -> None:
    """The log-probabilities of sampled tokens do not sum to 1, whose place is `sampled_kl`."""
    tokens = torch.tensor([-0.1, -2.0, -0.3, -1.5, -0.7])
    with pytest.raises(eq.InputError, match=r"sum to 1 over the last dimension, got a sum of 2\.5"):
        called(name, tokens, check=True)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [2, 1000])
def test_rounded_log_probabilities_pass(name: str, dtype: torch.dtype, vocabulary: int) -> None:
    """`check` allows what rounding to a precision makes of a sum of 1, and changes no value."""
    x = torch.randn(4, vocabulary, dtype=torch.float64).log_softmax(-1).to(dtype)
    assert torch.equal(called(name, x, check=True), called(name, x))


@pytest.mark.parametrize("name", ROWS)
def test_the_worst_rounding_passes(name: str) -> None:
    """3075 equal entries have logarithms halfway between two of bfloat16: 1 is off by 3 %."""
    x = torch.zeros(3075, dtype=torch.float64).log_softmax(-1).to(torch.bfloat16)
    assert abs(x.double().exp().sum() - 1) > 0.03
    called(name, x, check=True)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_more_than_a_rounding_is_refused(name: str, dtype: torch.dtype) -> None:
    """A sum that is off by twice the root of the precision's unit is no rounding."""
    too_much = 1 + 2 * torch.finfo(dtype).eps ** 0.5
    x = torch.tensor([0.5 * too_much, 0.5 * too_much], dtype=torch.float64).log().to(dtype)
    with pytest.raises(eq.InputError, match="got a sum of 1"):
        called(name, x, check=True)


@pytest.mark.parametrize("name", ROWS)
def test_only_what_counts_is_checked(name: str) -> None:
    """Rows under the mask and entries outside the support may hold anything; logits too."""
    x = torch.tensor([[0.5, 0.5, 7.0], [float("nan"), 3.0, 7.0]]).log()
    support, mask = torch.tensor([True, True, False]), torch.tensor([True, False])
    wanted = called(name, x, support=support, mask=mask)
    assert torch.equal(called(name, x, support=support, mask=mask, check=True), wanted)
    called(name, 5 * torch.ones(2, 3), from_logits=True, check=True)


# Functions ---------------------------------------------------------------------------------------

GRADIENT_PENALTIES = [
    eq.gradient_penalty,
    lambda fn, x: eq.interpolated_gradient_penalty(fn, x, x.clone()),
]
every_gradient_penalty = pytest.mark.parametrize(
    "penalty", GRADIENT_PENALTIES, ids=["plain", "interpolated"]
)


@every_gradient_penalty
@pytest.mark.parametrize(
    ("function", "got"),
    [(lambda _: 3.0, "float"), (lambda x: (x, x), "tuple"), (lambda _: None, "NoneType")],
    ids=["number", "tuple", "nothing"],
)
def test_a_function_returns_a_tensor(
    penalty: Callable[..., Tensor], function: Callable[[Tensor], object], got: str
) -> None:
    """Anything else than a tensor is named by its type."""
    assert_refused(
        lambda: penalty(function, torch.ones(4, 3)),
        eq.InputTypeError,
        "`fn` must return a tensor",
        got,
        "Use the first output",
    )


@every_gradient_penalty
def test_a_function_comes_first(penalty: Callable[..., Tensor]) -> None:
    """A tensor in its place is named, and not called."""
    assert_refused(
        lambda: penalty(X, X),
        eq.InputTypeError,
        "`fn` must be a function of a tensor",
        "Tensor",
        "Use the function first",
    )


@every_gradient_penalty
@pytest.mark.parametrize("shape", [(4, 3), (3,), (0,)], ids=str)
def test_a_function_returns_a_value_a_sample(
    penalty: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    """A scalar or one value a sample: several outputs a sample have no one gradient."""
    assert_refused(
        lambda: penalty(
            lambda x: x[:1, :1].expand(4, 3)[: shape[0], 0].new_zeros(shape), torch.ones(4, 3)
        ),
        eq.InputError,
        "`fn` must return a scalar or one value for each of the 4 samples",
        f"shape {shape}",
        "Use `.sum(-1)`",
    )


def test_a_function_of_a_number_returns_a_number() -> None:
    """Of a 0-d input only a scalar has a gradient penalty, and the refusal is in our words."""
    assert_refused(
        lambda: eq.gradient_penalty(lambda x: x.expand(3), torch.tensor(1.0)),
        eq.InputError,
        "`fn` must return a scalar",
        "shape (3,)",
        "Use",
    )


LEARNED = torch.ones((), requires_grad=True)


@every_gradient_penalty
@pytest.mark.parametrize(
    "function",
    [lambda _: torch.ones(()), lambda _: 2 * LEARNED, lambda x: x.detach().sum()],
    ids=["constant", "parameter", "detached"],
)
def test_a_function_that_ignores_its_input_is_refused(
    penalty: Callable[..., Tensor], function: Callable[[Tensor], Tensor]
) -> None:
    """No gradient is not a gradient of 0: the message says so."""
    assert_refused(
        lambda: penalty(function, torch.ones(4, 3)),
        eq.GradientError,
        "`fn` must depend on its argument",
        "a result that does not",
        "Use the argument it is called with",
    )
