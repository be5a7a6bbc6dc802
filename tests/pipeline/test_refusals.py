"""What is refused: when a term is built, when a pipeline is built or edited, when it is called."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Pipeline, Term, schedules, tracking
from tests.penalties.assertions import assert_equal

Make = Callable[[], object]
X = torch.tensor([1.0, -2.0])


def shows(make: Make, error: type[Exception], message: str) -> Any:
    """A refusal as a test parameter."""
    return pytest.param(make, error, message)


# Terms -------------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """A penalty with one option."""

    def forward(self, x: Tensor, *, power: float = 2.0) -> Tensor:
        return x.pow(power).sum()


TERMS = [
    shows(
        lambda: Term(nn.MSELoss, inputs=("a", "b")),
        eq.InputTypeError,
        r"`penalty` must be a module, got its class MSELoss\. Use `MSELoss\(\)`",
    ),
    shows(lambda: Term("l1"), eq.InputTypeError, r"`penalty` must be callable, got str\. Use a"),
    shows(
        lambda: Term(eq.entropy, options={"mod": "bonus"}),
        eq.OptionError,
        r"`entropy` takes the options .*; got 'mod'\. Did you mean 'mode'\?",
    ),
    shows(
        lambda: Term(functools.partial(eq.l2, clop=1.0)),
        eq.OptionError,
        r"`l2` takes the options .*; got 'clop'\. Did you mean 'clip'\?",
    ),
    shows(
        lambda: Term(Narrow(), options={"pow": 3}),
        eq.OptionError,
        r"`Narrow` takes the options x, power; got 'pow'\. Did you mean 'power'\?",
    ),
    shows(
        lambda: Term(lambda x: x, options={"y": 1}),
        eq.OptionError,
        r"`<lambda>` takes the options x; got 'y'\. Use 'x'\.",
    ),
    shows(
        lambda: Term(eq.kl_divergence),
        eq.OptionError,
        r"`kl_divergence` must be callable with 1 input\(s\) .* argument: 'q'\. Use `inputs` to",
    ),
    shows(
        lambda: Term(eq.l1, inputs=("a", "b")),
        eq.OptionError,
        r"`l1` must be callable with 2 input\(s\) and the options \[\], got: too many positional",
    ),
    shows(
        lambda: Term(lambda x, y: x + y, inputs=("a", "b"), options={"y": 1}),
        eq.OptionError,
        r"with 2 input\(s\) and the options \['y'\], got: multiple values for argument 'y'",
    ),
    *[
        shows(
            lambda weight=weight: Term(eq.l1, weight=weight),
            eq.OptionError,
            r"`weight` must be a finite number, got",
        )
        for weight in (math.nan, math.inf, -math.inf, "0.1", None, 1 + 2j)
    ],
    shows(
        lambda: Term(eq.l1, weight=torch.tensor(1j)),
        eq.OptionError,
        r"`weight` must be a real number, got torch\.complex64\. Use `\.abs\(\)` or `\.real`",
    ),
    shows(
        lambda: Term(eq.l1, weight=torch.ones(2)),
        eq.OptionError,
        r"`weight` must be a scalar, got a tensor of shape \(2,\)\. Use one term for each",
    ),
    *[
        shows(
            lambda every=every: Term(eq.l1, every=every),
            eq.OptionError,
            r"`every` must be a whole number of steps, at least 1, got .*\. Use 4, say",
        )
        for every in (0, -1, 2.5, math.nan, "2", None, True)
    ],
    *[
        shows(
            lambda name=name: Term(eq.l1, inputs=name),
            eq.OptionError,
            rf"must not be base, options, step, track, .* got '{name}'\. Use another name",
        )
        for name in ("base", "step", "track", "options")
    ],
    *[
        shows(
            lambda name=name: Term(eq.l1, inputs=(name,)),
            eq.OptionError,
            r"`inputs` must be names that can be keywords, got .*\. Use 'hidden', say",
        )
        for name in ("", "a b", "1st", "a-b", 3, None)
    ],
    *[
        shows(
            lambda names=names: Term(eq.consistency, inputs=names),
            eq.OptionError,
            r"`inputs` must be a name or a sequence of names, .* got (set|int)\. Use \('teacher'",
        )
        for names in ({"a", "b"}, 3)
    ],
    shows(
        lambda: Term(eq.l1, options=["scale"]),  # type: ignore[arg-type]
        eq.OptionError,
        r"`options` must be a mapping from names to values, got list\. Use \{'scale'",
    ),
    *[
        shows(
            lambda name=name: Term(eq.l1, **{name: "no"}),
            eq.OptionError,
            rf"`{name}` must be True or False, got 'no'\. Use one of them, without quotes",
        )
        for name in ("enabled", "differentiable", "rescale")
    ],
    shows(
        lambda: Term(eq.l1, inputs=()),
        eq.OptionError,
        r"`inputs` must name at least one input, got none\. Use None for the only one",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), TERMS)
def test_a_term_that_cannot_be_is_refused_when_it_is_built(
    make: Make, error: type[Exception], message: str
) -> None:
    """Options, weights, inputs and steps are checked before the first call."""
    with pytest.raises(error, match=message):
        make()


def test_settings_of_a_term_are_named() -> None:
    """There is no positional setting, and an unknown one is Python's own error."""
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        Term(eq.l1, "hidden")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieght'"):
        Term(eq.l1, wieght=1.0)  # type: ignore[call-arg]


# Pipelines ---------------------------------------------------------------------------------------

L1 = Term(eq.l1)
TWO = Pipeline(sparsity=L1, distill=Term(eq.l2))


def named(name: str) -> Pipeline:
    """A pipeline with one term of this name."""
    return Pipeline(**{name: L1})


PIPELINES = [
    shows(
        lambda: Pipeline([L1]),
        eq.InputTypeError,
        r"every term of a pipeline must have a name, got list without one\. Use `Pipeline\(spars",
    ),
    shows(
        lambda: Pipeline(base=Term(eq.l1, every=2)),
        eq.OptionError,
        r"the base must be evaluated at every step, got every=2\. Use `every` on the other",
    ),
    shows(
        lambda: Pipeline(l1=eq.l1),  # type: ignore[arg-type]
        eq.InputTypeError,
        r"'l1' must be a Term, got function\. Use `Term\(\.\.\.\)` around it",
    ),
    *[
        shows(
            lambda name=name: named(name),
            eq.OptionError,
            rf"must not be total, penalty or end in .*, which name metrics, got '{name}'\. Use an",
        )
        for name in (
            "total",
            "penalty",
            "l1_weighted",
            "l1_grad_norm",
            "l1_grad_norm_weighted",
            "l1_grad_norm_error",
            "total_grad_norm",
        )
    ],
    *[
        shows(
            lambda name=name: named(name),
            eq.OptionError,
            r"must consist of letters, digits, '_', '\.' and '-', got .*every logger accepts",
        )
        for name in ("", "a b", "a/b", "a\n", "a,b")
    ],
    *[
        shows(
            lambda weight=weight: Pipeline(base=Term(eq.l1, weight=weight)),
            eq.OptionError,
            r"the base must have weight 1, got .*\. Use weights on the other terms",
        )
        for weight in (0.5, 0, torch.tensor(1.0), schedules.constant(1.0))
    ],
    shows(
        lambda: TWO.reweighted(base=2.0, sparsity=1.0),
        eq.OptionError,
        r"has the terms sparsity, distill, got 'base'",
    ),
    shows(
        lambda: Pipeline(base=L1).reweighted(base=2.0),
        eq.OptionError,
        r"the base must have weight 1, got 2\.0",
    ),
]

MISSPELT: dict[str, Callable[[str], object]] = {
    "reweighted": lambda name: TWO.reweighted(**{name: 1.0}),
    "enable": TWO.enable,
    "disable": TWO.disable,
    "without": TWO.without,
    "renamed": lambda name: TWO.renamed(**{name: "other"}),
    "item": lambda name: TWO[name],
    "options": lambda name: TWO(X, options={name: {}}),
}

EDITS = [
    shows(
        lambda: TWO.with_term("sparsity", L1),
        eq.OptionError,
        r"term names must be unique, got 'sparsity' again\. Use another name, or `without`",
    ),
    shows(lambda: TWO.with_term("total", L1), eq.OptionError, "must not be total"),
    shows(lambda: TWO.with_term("more", eq.l1), eq.InputTypeError, "'more' must be a Term"),  # type: ignore[arg-type]
    shows(
        lambda: TWO.renamed(sparsity="distill"),
        eq.OptionError,
        r"must be unique, got \['distill', 'distill'\]\. Use a name not yet taken",
    ),
    shows(lambda: TWO.renamed(sparsity="penalty"), eq.OptionError, "must not be total, penalty"),
    shows(lambda: TWO.renamed(sparsity="a b"), eq.OptionError, "must consist of letters"),
    shows(
        lambda: TWO.reweighted(sparsity=math.nan),
        eq.OptionError,
        "`weight` must be a finite number, got nan",
    ),
    shows(
        lambda: Pipeline().without("l1"),
        eq.OptionError,
        r"has the terms \(none\), got 'l1'\. Use `with_term`",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), [*PIPELINES, *EDITS])
def test_a_pipeline_that_cannot_be_is_refused_when_it_is_built(
    make: Make, error: type[Exception], message: str
) -> None:
    """Names are unique and fit for metrics, terms are terms, the base weighs 1."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", ["l1", "kl.student-teacher", "größe", "base", "total_", "_x"])
def test_names_that_every_logger_accepts(name: str) -> None:
    """Letters of any alphabet, digits, and three marks."""
    assert list(named(name)) == [name]


@pytest.mark.parametrize("edit", MISSPELT)
def test_a_misspelt_name_suggests_the_near_one(edit: str) -> None:
    """Everywhere a term is named; a name like no other lists them all."""
    for wrong, hint in (
        ("sparsty", r"Did you mean 'sparsity'\?"),
        ("distil", r"Did you mean 'distill'\?"),
        ("zzz", r"Use 'sparsity' or 'distill'\."),
    ):
        message = rf"has the terms sparsity, distill, got '{wrong}'\. {hint}"
        with pytest.raises(eq.OptionError, match=message):
            MISSPELT[edit](wrong)


# Calls -------------------------------------------------------------------------------------------

NAMED = Pipeline(kl=Term(eq.kl_divergence, inputs=("teacher", "student")), l1=L1)
LAZY = Pipeline(lazy=Term(eq.l1, every=4))


def returning(value: Any) -> Pipeline:
    """A pipeline with a term that returns this."""
    return Pipeline(odd=Term(lambda _: value))


CALLS = [
    shows(
        lambda: NAMED(X, teacher=X),
        eq.InputError,
        r"the term 'kl' reads the input 'student', got 'x', 'teacher'\. Use `pipeline\(student=",
    ),
    shows(
        lambda: NAMED(teacher=X, student=X),
        eq.InputError,
        r"the term 'l1' reads the input 'x', got 'teacher', 'student'\. Use `pipeline\(x\)`",
    ),
    shows(
        TWO,
        eq.InputError,
        r"the term 'sparsity' reads the input 'x', got none\. Use `pipeline\(x\)`",
    ),
    shows(
        lambda: NAMED(X, teacher=X, student=X, studnt=X),
        eq.InputError,
        r"reads the inputs student, teacher, x, got 'studnt'\. Did you mean 'student'\?",
    ),
    shows(
        lambda: Pipeline(l1=Term(eq.l1, inputs="hidden"))(X, hidden=X),
        eq.InputError,
        r"reads the inputs hidden, got 'x'\. Use 'hidden'",
    ),
    shows(
        lambda: Pipeline()(X, base=X.sum()),
        eq.InputError,
        r"reads the inputs \(none\), got 'x'\. Use terms that read it",
    ),
    shows(
        lambda: TWO(X, x=X),
        eq.InputError,
        r"the input 'x' must be given once, got it twice\. Use one",
    ),
    shows(
        Pipeline(),
        eq.InputError,
        r"must have a term or a base to evaluate, got neither\. Use `Pipeline\(l1=Term\(eq\.l1\)",
    ),
    shows(
        lambda: Pipeline(base=L1)(X, base=X.sum()),
        eq.InputError,
        r"must be given once, got a term and an argument\. Use `pipeline\.without\('base'\)`",
    ),
    shows(
        lambda: Pipeline(base=Term(eq.l1, enabled=False))(X, base=lambda x: x.sum()),
        eq.InputError,
        r"must be given once, got a term and an argument",
    ),
    shows(
        lambda: TWO(X, base=X),
        eq.InputError,
        r"`base` must be a scalar, got shape \(2,\)\. Use `\.mean\(\)`",
    ),
    shows(
        lambda: TWO(X, base=torch.tensor(1j)),
        eq.InputTypeError,
        r"`base` must be a real number, got torch\.complex64\. Use `\.abs\(\)`",
    ),
    shows(
        lambda: TWO(X, base=3.0),  # type: ignore[arg-type]
        eq.InputTypeError,
        r"`base` must be a scalar tensor or a function, got float\. Use the task loss",
    ),
    shows(
        lambda: TWO(X, base=lambda logits: logits.sum()),
        eq.InputError,
        r"parameters must be named like inputs \(x\), got logits\. Use `lambda x: ",
    ),
    shows(
        lambda: TWO(X, base=lambda: 2 * X.sum()),
        eq.InputError,
        r"parameters must be named like inputs \(x\), got none",
    ),
    shows(
        lambda: TWO(X, track="norm"),  # type: ignore[arg-type]
        eq.OptionError,
        r"`track` must be False, True, 'norms' or 'gram', got 'norm'\. Did you mean 'norms'\?",
    ),
    shows(
        lambda: TWO(X, track=lambda _: "all"),  # type: ignore[arg-type, return-value]
        eq.OptionError,
        r"`track` must be .*, got 'all'",
    ),
    shows(
        lambda: TWO(X, options={"sparsity": {"mean": True}}),
        eq.OptionError,
        r"`l1` takes the options .*; got 'mean'",
    ),
    shows(
        lambda: Pipeline(own=Term(Narrow(), enabled=False), l1=L1)(X, options={"own": {"pow": 3}}),
        eq.OptionError,
        r"`Narrow` takes the options x, power; got 'pow'\. Did you mean 'power'\?",
    ),
    shows(
        lambda: Pipeline(warm=Term(eq.l1, weight=schedules.warmup(1.0, steps=5)))(X),
        eq.OptionError,
        r"weight of 'warm' is a function of the step and needs one, got step=None\. Use `pipeline",
    ),
    shows(
        lambda: LAZY(X),
        eq.OptionError,
        r"the term 'lazy' with every=4 needs the step, got step=None\. Use `pipeline\(\.\.\., step",
    ),
    *[
        shows(
            lambda track=track: TWO(X, track=track),
            eq.OptionError,
            r"`track` must be False, True, 'norms' or 'gram', got .*\. Use `bool\(\.\.\.\)`",
        )
        for track in (0, 1, torch.tensor(False), lambda _: 0)
    ],
    *[
        shows(
            lambda step=step: LAZY(X, step=step),
            eq.OptionError,
            r"`step` must be a (finite|Python) number",
        )
        for step in ("4", -4, math.nan, torch.tensor(4))
    ],
    shows(
        lambda: returning(X)(X),
        eq.InputError,
        r"the term 'odd' must return a scalar, got shape \(2,\)\. Use reduction='mean', or `\.sum",
    ),
    shows(
        lambda: returning(X[:0])(X),
        eq.InputError,
        r"the term 'odd' must return a scalar, got shape \(0,\)",
    ),
    shows(
        lambda: returning((X.sum(), {"each": X}))(X),
        eq.InputError,
        r"the term 'odd' must return a scalar as metric 'each', got shape \(2,\)",
    ),
    shows(
        lambda: returning(3.0)(X),
        eq.InputTypeError,
        r"must return a scalar tensor, or that and a mapping of metrics, got float\. Use a",
    ),
    *[
        shows(
            lambda returned=returned: returning(returned)(X),
            eq.InputTypeError,
            rf"must return a scalar tensor, or that and a mapping of metrics, got {types}\. Use a",
        )
        for returned, types in (
            ((X.sum(), None), "Tensor, NoneType"),
            ((X.sum(), X.sum()), "Tensor, Tensor"),
            ((X.sum(), {}, 1), "Tensor, dict, int"),
            ({"loss": X.sum()}, "dict"),
            ((), "tuple"),
        )
    ],
    shows(
        lambda: returning((X.sum(), {"note": "text"}))(X),
        eq.InputTypeError,
        r"the term 'odd' must return numbers as metrics, got str as 'note'\. Use `float\(",
    ),
    shows(
        lambda: returning((X.sum(), {"phase": torch.tensor(1j)}))(X),
        eq.InputTypeError,
        r"the term 'odd' must return a real number as metric 'phase', got torch\.complex64\. Use",
    ),
    shows(
        lambda: returning((1j * X).sum())(X),
        eq.InputTypeError,
        r"the term 'odd' must return a real number, got torch\.complex64\. Use `\.abs\(\)`",
    ),
    shows(
        lambda: TWO(X, options=["sparsity"]),  # type: ignore[arg-type]
        eq.OptionError,
        r"`options` must be a mapping from names to values, got list",
    ),
    shows(
        lambda: TWO(X, options={"sparsity": 2.0}),  # type: ignore[dict-item]
        eq.OptionError,
        r"`options` must be a mapping from names to values, got float",
    ),
    shows(
        lambda: TWO(X, track=tracking.every, step=5),
        eq.OptionError,
        r"`track` must be a level or a function of the step, got .*`track=tracking\.every\(100\)`",
    ),
    shows(
        lambda: returning(None)(X),
        eq.InputTypeError,
        r"the term 'odd' must return a scalar tensor, .* got NoneType",
    ),
    shows(
        lambda: TWO("text"),
        eq.InputTypeError,
        r"`x` must be a tensor or an iterable of tensors|`x\[0\]` must be a tensor, got str",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), CALLS)
def test_a_call_that_cannot_be_is_refused(make: Make, error: type[Exception], message: str) -> None:
    """Missing and unknown inputs, a missing step, two bases, results that are no scalar."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("track", [False, "norms"])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError, KeyError, RuntimeError, eq.InputError, AssertionError]
)
def test_a_failing_term_keeps_its_error_and_says_its_name(
    error: type[Exception], track: Any
) -> None:
    """The exception is the penalty's own, of its own type, with a note of which term it was."""
    raised = error("something of mine")

    def failing(_: Tensor) -> Tensor:
        raise raised

    pipeline = Pipeline(fine=L1, broken=Term(failing), never=Term(eq.l2))
    with pytest.raises(error, match="something of mine") as caught:
        pipeline(X.clone().requires_grad_(), track=track)
    assert caught.value is raised
    assert caught.value.__notes__ == ["in the term 'broken'"]


def test_a_failing_base_says_its_name() -> None:
    """A function given at the call is the term `base`."""

    def base(x: Tensor) -> Tensor:
        return x @ torch.ones(7)

    with pytest.raises(RuntimeError, match="inconsistent tensor size") as caught:
        TWO(X, base=base)
    assert caught.value.__notes__ == ["in the term 'base'"]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda _: math.nan, "`weight` must be a finite number, got nan"),
        (lambda _: torch.ones(2), r"`weight` must be a scalar, got a tensor of shape \(2,\)"),
        (schedules.constant(1.0), "`step` must be a finite number at least 0, got -1"),
    ],
    ids=["not a number", "not a scalar", "no such step"],
)
def test_a_failing_schedule_says_whose_it_is(weight: Callable[[int], float], message: str) -> None:
    """What a schedule returns is checked as a weight is."""
    with pytest.raises(eq.OptionError, match=message) as caught:
        Pipeline(warm=Term(eq.l1, weight=weight))(X, step=-1)
    assert caught.value.__notes__ == ["in the term 'warm'"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TWO.reweighted(sparsity=0.1, distill=math.nan),
        lambda: TWO.with_nan_policy("propagate").reweighted(distill="high"),
        lambda: TWO(X, options={"sparsity": {}, "distill": {"clop": 1.0}}),
        lambda: TWO(X, options={"distill": 2.0}),
    ],
)
def test_a_wrong_setting_says_of_which_term(make: Make) -> None:
    """Weights and options are given for several terms at once; the note names the guilty one."""
    with pytest.raises(eq.OptionError) as caught:
        make()
    assert caught.value.__notes__ == ["in the term 'distill'"]


def test_inputs_of_disabled_terms_may_be_given_and_may_be_missing() -> None:
    """One call serves a pipeline with terms switched on and off."""
    pipeline = Pipeline(l1=Term(eq.l1, inputs="a"), l2=Term(eq.l2, inputs="b"))
    assert_equal(pipeline.disable("l2")(a=X).total, 3.0)
    assert_equal(pipeline.disable("l2")(a=X, b=X).total, 3.0)
    assert_equal(pipeline(a=X, b=X).total, 8.0)


def test_a_step_is_needed_only_by_what_is_enabled() -> None:
    """Disabled schedules and lazy terms ask for none."""
    pipeline = Pipeline(
        l1=L1,
        warm=Term(eq.l1, weight=schedules.warmup(1.0, steps=5), enabled=False),
        lazy=Term(eq.l1, every=4, enabled=False),
    )
    assert_equal(pipeline(X).total, 3.0)
