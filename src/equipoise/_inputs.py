"""The inputs of a call: which a term reads, and whether those given are the right ones."""

from __future__ import annotations

from collections.abc import Mapping, ValuesView
from itertools import chain
from types import GeneratorType
from typing import Any

from torch import nn

from equipoise._errors import InputError, nearest
from equipoise._term import Term

SINGLE = "x"
"""What the one tensor of a pipeline without named inputs is called."""

LISTED = (GeneratorType, filter, map, chain, ValuesView, nn.ParameterList)
"""What is read into a list: it can be read only once, or torch does not know how to look into it.

Several terms may read `model.parameters()`, or a `filter` of them.
"""


def keys_of(term: Term) -> tuple[str, ...]:
    """The inputs a term reads."""
    return (SINGLE,) if term.inputs is None else term.inputs


def as_given(x: Any, inputs: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """All inputs of a call by name, the one without a name too."""
    if x is not None and SINGLE in inputs:
        raise InputError(f"the input {SINGLE!r} must be given once, got it twice. Use one.")
    given = inputs if x is None else {SINGLE: x, **inputs}
    return {name: list(v) if isinstance(v, LISTED) else v for name, v in given.items()}


def check_inputs(
    terms: Mapping[str, Term], inputs: Mapping[str, Any], *, others: Mapping[str, Term]
) -> None:
    """Refuse an input that is missing for a term, and one that neither these nor others read."""
    for name, term in terms.items():
        for key in keys_of(term):
            if key not in inputs:
                how = "pipeline(x)" if term.inputs is None else f"pipeline({key}=...)"
                raise InputError(
                    f"the term {name!r} reads the input {key!r}, got "
                    f"{', '.join(map(repr, inputs)) or 'none'}. Use `{how}`."
                )
    known = {key for term in (*others.values(), *terms.values()) for key in keys_of(term)}
    for key in inputs:
        if key not in known:
            raise InputError(
                f"the pipeline reads the inputs {', '.join(sorted(known)) or '(none)'}, got "
                f"{key!r}. {nearest(key, known) if known else 'Use terms that read it.'}"
            )
