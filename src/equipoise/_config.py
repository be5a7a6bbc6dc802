"""Terms as plain data, and back: for pipelines that live in a YAML or JSON file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F

from equipoise import schedules
from equipoise._base import check_base_term
from equipoise._errors import OptionError, check_flag, nearest
from equipoise._recorder import BASE
from equipoise._term import (
    DEFAULTS,
    Term,
    check_every,
    check_mapping,
    check_options,
    check_weight,
    names_of,
    penalty_name,
)

Penalties = Mapping[str, Callable[..., Any]]

TORCH = "torch.nn.functional."
SETTINGS = (
    "penalty",
    "inputs",
    "weight",
    "options",
    "enabled",
    "differentiable",
    "every",
    "rescale",
    "nan_policy",
)

FLAGS = ("enabled", "differentiable", "rescale")


def check_penalties(penalties: object) -> None:
    """Refuse what is no mapping from names to functions."""
    named = isinstance(penalties, Mapping)
    for function in penalties.values() if named else [penalties]:  # type: ignore[attr-defined]
        if not named or not callable(function):
            raise OptionError(
                "`penalties` must be a mapping from names to functions, got "
                f"{type(function).__name__}. Use {{'mine': mine}}, say."
            )


def terms_to_config(terms: Mapping[str, Term], penalties: Penalties) -> dict[str, dict[str, Any]]:
    """All terms as plain data; what is written under one name must be one penalty."""
    config = {name: term_to_config(name, term, penalties) for name, term in terms.items()}
    known: dict[str, Callable[..., Any]] = {}
    for name, term in terms.items():
        called = config[name]["penalty"]
        if known.setdefault(called, term.penalty) != term.penalty:
            raise OptionError(
                f"{name}.penalty: penalties must have names of their own to be written to a file, "
                f"got two that are called {called!r}. Use `penalties={{'mine': function}}`."
            )
    return config


def term_to_config(name: str, term: Term, penalties: Penalties) -> dict[str, Any]:
    """A term's settings as plain data; those at their default are left out."""
    with _at(name, "penalty"):
        config: dict[str, Any] = {"penalty": _penalty_to_name(term.penalty, penalties)}
    if term.inputs is not None:
        config["inputs"] = list(term.inputs)
    if not (isinstance(term.weight, float) and term.weight == 1.0):
        with _at(name, "weight"):
            config["weight"] = _weight_to_plain(term.weight)
    if term.options:
        with _at(name, "options"):
            config["options"] = {key: _plain(key, value) for key, value in term.options.items()}
    for setting in SETTINGS[SETTINGS.index("enabled") :]:
        if getattr(term, setting) != DEFAULTS[setting]:
            config[setting] = getattr(term, setting)
    return config


def term_from_config(name: str, config: object, penalties: Penalties) -> Term:
    """The term that plain data describes; a fault is reported with its path."""
    settings = _settings(name, config)
    with _at(name, "penalty"):
        penalty = _penalty_from_name(settings.pop("penalty", None), penalties)
    with _at(name, "inputs"):
        names = names_of(settings.get("inputs"))
    with _at(name, "weight"):
        if isinstance(settings.get("weight"), str):
            raise OptionError(
                f"`weight` must be a finite number, got the text {settings['weight']!r}. "
                "Use 0.001 or 1.0e-3, say: YAML takes 1e-3 for a text."
            )
        if isinstance(settings.get("weight"), Mapping):
            settings["weight"] = schedules.from_config(settings["weight"])
        check_weight(settings.get("weight", 1.0))
    with _at(name, "options"):
        check_mapping(settings.get("options"))
        check_options(penalty, settings.get("options") or {}, 1 if names is None else len(names))
    with _at(name, "every"):
        check_every(settings.get("every", 1))
    for flag in FLAGS:
        with _at(name, flag):
            check_flag(flag, settings.get(flag, True))
    with _at(name, "nan_policy"):
        term = Term(penalty, **settings)
    if name == BASE:
        with _at(name):
            check_base_term(term)
    return term


def _settings(name: str, config: object) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise OptionError(
            f"{name}: a term must be a mapping of settings, got {type(config).__name__}. "
            "Use {'penalty': 'l1', 'weight': 0.001}, say."
        )
    for setting in config:
        if setting not in SETTINGS:
            raise OptionError(
                f"{name}.{setting}: a term has the settings {', '.join(SETTINGS)}; got "
                f"{setting!r}. {nearest(str(setting), SETTINGS)}"
            )
    return dict(config)


@contextmanager
def _at(*path: str) -> Iterator[None]:
    """Let an option's error begin with the path of what is wrong."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{'.'.join(path)}: {error}") from error


def _built_in() -> dict[str, Callable[..., Any]]:
    # By name and only now: the pipeline itself knows no penalty.
    module = importlib.import_module("equipoise.penalties")
    return {name: getattr(module, name) for name in module.__all__}


def _penalty_from_name(name: object, penalties: Penalties) -> Callable[..., Any]:
    known = {**_built_in(), **penalties}
    if isinstance(name, str) and name.startswith(TORCH):
        function = getattr(F, name.removeprefix(TORCH), None)
        if callable(function) and not name.removeprefix(TORCH).startswith("_"):
            return function  # type: ignore[no-any-return]
    if not isinstance(name, str) or name not in known:
        raise OptionError(
            f"a penalty must be known by name, got {name!r}. {nearest(str(name), known)} "
            f"Functions of torch are written {TORCH}name, your own go into `penalties=`."
        )
    return known[name]


def _penalty_to_name(penalty: Callable[..., Any], penalties: Penalties) -> str:
    given = next((name for name, function in penalties.items() if function == penalty), None)
    if given is not None:
        return given
    name = penalty_name(penalty)
    if getattr(F, name, None) is penalty:
        return TORCH + name
    if isinstance(penalty, partial) or not name.isidentifier():
        raise OptionError(
            "a penalty must be a function with a name to be written to a file, got "
            f"{type(penalty).__name__} {name}. Use `penalties={{'mine': function}}` to give it one."
        )
    if {**_built_in(), **penalties}.get(name, penalty) is not penalty:
        raise OptionError(
            "a penalty of your own must have a name of its own to be written to a file, got "
            f"{name!r}, which is another's. Use `penalties={{'mine': function}}`."
        )
    return name


def _weight_to_plain(weight: object) -> object:
    if isinstance(weight, schedules.Schedule):
        return weight.to_config()
    return _plain("weight", weight)


def _plain(key: str, value: object) -> object:
    if isinstance(value, float):
        return float(value)  # of numpy, which is no plain one
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(key, item) for k, item in value.items()}
    raise OptionError(
        f"`{key}` must be plain data to be written to a file, mappings with keys of text, got "
        f"{type(value).__name__}. "
        "Use numbers, text and lists, or give it at the call: `pipeline(..., options=...)`."
    )
