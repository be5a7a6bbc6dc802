"""The pipeline: named terms, weighted and added up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from equipoise._base import Base, base_term, check_base, check_base_term
from equipoise._config import check_penalties, term_from_config, terms_to_config
from equipoise._errors import InputTypeError, OptionError, nearest
from equipoise._evaluation import Evaluation
from equipoise._inputs import as_given, check_inputs, keys_of
from equipoise._recorder import BASE
from equipoise._run import run
from equipoise._term import (
    NanPolicy,
    Term,
    Weight,
    check_mapping,
    check_options,
    in_formula,
    in_term,
    is_due,
)
from equipoise._track import Observer, Track, level_at
from equipoise.fast._compiler import Compiler

Overrides = Mapping[str, Mapping[str, Any]]
"""Options for one call, by term."""

RESERVED_NAMES = ("total", "penalty")
RESERVED_ENDINGS = ("_weighted", "_grad_norm", "_grad_norm_weighted", "_grad_norm_error")


class Pipeline:
    """Terms with unique names; calling it evaluates them and adds them up.

    Frozen: every edit returns a new pipeline. It keeps no state, so that there is nothing to save;
    ``step`` is an argument of the call. The term named ``base`` is the task loss: its weight is 1,
    and it is no part of the penalty. It may be given at the call instead.

    *At the edge:* without any term and base there is nothing to evaluate, which is an error; with
    every term disabled the total is a zero on the inputs' device. Misspelt names are errors that
    suggest the near one. A failing term's exception says which term it was.

    Examples:
        >>> import torch, equipoise as eq
        >>> pipeline = eq.Pipeline(
        ...     sparsity=eq.Term(eq.l1, inputs="hidden", weight=1e-3),
        ...     distill=eq.Term(eq.kl_divergence, inputs=("teacher", "student"), weight=0.1),
        ... )
        >>> print(pipeline.reweighted(sparsity=0.01))
        0.01·sparsity(hidden) + 0.1·distill(teacher, student)
        >>> eq.Pipeline(l1=eq.Term(eq.l1, weight=0.5))(torch.tensor([1.0, -2.0])).total
        tensor(1.5000)
    """

    __slots__ = ("_compiler", "_terms")
    _terms: dict[str, Term]
    _compiler: Compiler | None

    def __init__(self, /, *nameless: object, **terms: Term) -> None:
        if nameless:
            raise InputTypeError(
                "every term of a pipeline must have a name, got "
                f"{', '.join(type(x).__name__ for x in nameless)} without one. "
                "Use `Pipeline(sparsity=Term(...))`, or `Pipeline(**terms)` for a dictionary."
            )
        for name, term in terms.items():
            _check_name(name)
            _check_term(name, term)
        object.__setattr__(self, "_terms", dict(terms))
        object.__setattr__(self, "_compiler", None)

    @property
    def terms(self) -> Mapping[str, Term]:
        """The terms by name, in order."""
        return MappingProxyType(self._terms)

    def __call__(
        self,
        x: Any = None,  # noqa: ANN401
        /,
        *,
        base: Base | None = None,
        step: int | None = None,
        track: Track = False,
        options: Overrides | None = None,
        **inputs: Any,  # noqa: ANN401
    ) -> Evaluation:
        """Evaluate every enabled term and add them up.

        ``x`` is the one input of terms that name none; ``inputs`` are the named ones: tensors,
        lists of tensors, or any data. ``base`` is a scalar tensor, or a function whose parameters
        are named like inputs. ``track`` is False, ``"norms"`` (or True), ``"gram"``, or a function
        of the step that returns one of these. ``options`` override a term's own for this call:
        ``{"distill": {"temperature": 2.0}}``.

        A base that comes as a tensor costs tracking one partial backward pass, from the base to the
        inputs; as a function it costs nothing more.
        """
        named = as_given(x, inputs)
        overrides = self._overrides(options or {})
        terms = {n: t for n, t in self._terms.items() if t.enabled and is_due(n, t, step)}
        if callable(base) and not isinstance(base, Tensor):
            terms = {BASE: base_term(base, named), **terms}
        check_base(base, again=BASE in self._terms, alone=not self._terms)
        check_inputs(terms, named, others=self._terms)
        result = run(
            terms,
            named,
            base=base if isinstance(base, Tensor) else None,
            step=step,
            level=level_at(track, step),
            overrides=overrides,
            compiler=self._compiler,
        )
        if isinstance(track, Observer):
            track.observe(result.total)
        return result

    # Editing

    def reweighted(self, /, **weights: Weight) -> Pipeline:
        """A copy with other weights: ``pipeline.reweighted(l1=0.02)``."""
        return self._changed({name: {"weight": weight} for name, weight in weights.items()})

    def enable(self, *names: str) -> Pipeline:
        """A copy in which these terms are evaluated."""
        return self._changed({name: {"enabled": True} for name in names})

    def disable(self, *names: str) -> Pipeline:
        """A copy in which these terms are neither evaluated nor reported."""
        return self._changed({name: {"enabled": False} for name in names})

    def with_nan_policy(self, policy: NanPolicy) -> Pipeline:
        """A copy in which a value that is NaN or inf does the same in every term; see `Term`."""
        return self._changed({name: {"nan_policy": policy} for name in self._terms})

    def with_term(self, name: str, term: Term) -> Pipeline:
        """A copy with one more term, at the end."""
        if name in self._terms:
            raise OptionError(
                f"term names must be unique, got {name!r} again. "
                "Use another name, or `without` to take the old one out first."
            )
        return self._with({**self._terms, name: term})

    def without(self, *names: str) -> Pipeline:
        """A copy without these terms."""
        self._check_known(names)
        return self._with({n: t for n, t in self._terms.items() if n not in names})

    def renamed(self, /, **names: str) -> Pipeline:
        """A copy with other names: ``pipeline.renamed(l1="sparsity")``."""
        self._check_known(names)
        new = [names.get(name, name) for name in self._terms]
        if len(set(new)) < len(new):
            raise OptionError(f"term names must be unique, got {new}. Use a name not yet taken.")
        return self._with(dict(zip(new, self._terms.values(), strict=True)))

    def _changed(self, changes: Mapping[str, Mapping[str, Any]]) -> Pipeline:
        self._check_known(changes)
        terms = dict(self._terms)
        for name, settings in changes.items():
            with in_term(name):
                terms[name] = terms[name].with_changes(**settings)
        return self._with(terms)

    def _with(self, terms: Mapping[str, Term]) -> Pipeline:
        return compiled_as(Pipeline(**terms), self._compiler)

    def compiled(self) -> Pipeline:
        """A copy that evaluates all terms in one compiled function, their gradients included.

        Values, norms, with ``track="gram"`` the inner products, and the total gradient come out of
        one pass, before ``total.backward()``, which only scales that gradient. Weights are tensors
        to the compiled function, so that schedules compile nothing; nor does every new shape. The
        evaluation is the same, and so are copies made of it.

        *At the edge:* what cannot be served so is evaluated as without the compiler, and says so in
        the debug log of ``equipoise``: a ``nan_policy``, float16, a differentiable weight, a base
        that is tracked and came as a tensor, terms that draw random numbers or read parameters that
        are no input, data that is no tensor, the second derivative, the gradient of one part of the
        total, a second backward pass through one graph. So is a label that does not exist, in
        torch's own losses; in a function of yours it ends the process, as compiled code does.

        Examples:
            >>> import torch, equipoise as eq
            >>> pipeline = eq.Pipeline(l1=eq.Term(eq.l1, weight=0.5)).compiled()
            >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
            >>> result = pipeline(x, track=True)
            >>> result.total.backward()
            >>> result.metrics()["l1_grad_norm_weighted"], x.grad
            (0.7071067811865476, tensor([ 0.5000, -0.5000]))
        """
        return compiled_as(self, self._compiler or Compiler())

    # Plain data

    def to_config(
        self, *, penalties: Mapping[str, Callable[..., Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """The pipeline as plain data, for a YAML or JSON file.

        Penalties are written by name. ``penalties`` names your own, as for `from_config`: with one
        mapping for both the pipeline comes back as it was.
        """
        known = penalties or {}
        check_penalties(known)
        return terms_to_config(self._terms, known)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, penalties: Mapping[str, Callable[..., Any]] | None = None
    ) -> Pipeline:
        """Read a pipeline from plain data: ``{"sparsity": {"penalty": "l1", "weight": 0.001}}``.

        A penalty is a name of this library, of `torch.nn.functional` (with that prefix), or of
        ``penalties``. A fault is reported with its path: ``sparsity.options: ...``.
        """
        if not isinstance(config, Mapping):
            raise OptionError(
                f"a pipeline must be a mapping from names to terms, got {type(config).__name__}. "
                "Use {'sparsity': {'penalty': 'l1'}}, say."
            )
        known = penalties or {}
        check_penalties(known)
        return cls(**{str(n): term_from_config(str(n), t, known) for n, t in config.items()})

    # Looking

    def __getitem__(self, name: str) -> Term:
        self._check_known([name])
        return self._terms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __str__(self) -> str:
        written = [in_formula(n, t) for n, t in self._terms.items() if t.enabled]
        return re.sub(r"\+ -", "− ", " + ".join(written)) or "0"

    def __repr__(self) -> str:
        lines = "".join(f"    {name}={term!r},\n" for name, term in self._terms.items())
        return f"Pipeline(\n{lines})" if lines else "Pipeline()"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a pipeline is frozen, got an assignment to {name!r}. "
            "Use `reweighted`, `with_term`, `without` and the like, which return a copy."
        )

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._terms, self._compiler is not None)

    # Checking

    def _overrides(self, options: Overrides) -> Overrides:
        check_mapping(options)
        self._check_known(options)
        for name, given in options.items():
            term = self._terms[name]
            with in_term(name):
                check_mapping(given)
                check_options(term.penalty, {**term.options, **given}, len(keys_of(term)))
        return options

    def _check_known(self, names: Mapping[str, Any] | list[str] | tuple[str, ...]) -> None:
        for name in names:
            if name not in self._terms:
                raise OptionError(
                    f"the pipeline has the terms {', '.join(self._terms) or '(none)'}, got "
                    f"{name!r}. {nearest(name, self._terms) if self._terms else 'Use `with_term`.'}"
                )


def compiled_as(pipeline: Pipeline, compiler: Compiler | None) -> Pipeline:
    """A copy that hands its terms to this compiler."""
    copy = Pipeline(**pipeline.terms)
    object.__setattr__(copy, "_compiler", compiler)
    return copy


def _unpickled(terms: dict[str, Term], compiled: bool = False) -> Pipeline:
    return compiled_as(Pipeline(**terms), Compiler() if compiled else None)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise OptionError(
            f"a term's name must consist of letters, digits, '_', '.' and '-', got {name!r}. "
            "Use a name that every logger accepts."
        )
    if name in RESERVED_NAMES or name.endswith(RESERVED_ENDINGS):
        raise OptionError(
            f"a term's name must not be {', '.join(RESERVED_NAMES)} or end in "
            f"{', '.join(RESERVED_ENDINGS)}, which name metrics, got {name!r}. Use another."
        )


def _check_term(name: str, term: object) -> None:
    if not isinstance(term, Term):
        raise InputTypeError(
            f"{name!r} must be a Term, got {type(term).__name__}. Use `Term(...)` around it."
        )
    if name == BASE:
        check_base_term(term)
