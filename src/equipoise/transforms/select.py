"""Choosing parameters of a model: by name, kind of module, dimensions, or any question.

Examples:
    >>> import torch, equipoise as eq
    >>> from equipoise import transforms
    >>> from equipoise.transforms import select
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    >>> decay = transforms.masked(transforms.add_l2_decay(0.1), select.no_bias_or_norm(model))
    >>> print(decay)
    masked(add_l2_decay(0.1), no_bias_or_norm)
    >>> bool(eq.l2(select.by_name(model, "0.*")) > 0)
    True
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import Tensor, nn

from equipoise._errors import InputError, OptionError, nearest
from equipoise.transforms._selection import Selection, selected

__all__ = ["by_dim", "by_name", "by_type", "everything", "no_bias_or_norm", "where"]


def everything(model: nn.Module) -> Selection:
    """All parameters.

    *At the edge:* a parameter that is used twice counts once.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> select.everything(torch.nn.Linear(2, 3))
        everything: weight, bias
    """
    return selected("everything", model, lambda *_: True)


def by_name(model: nn.Module, *patterns: str) -> Selection:
    """Those whose name matches one of the patterns, in which ``*`` stands for anything.

    *At the edge:* a pattern that matches nothing is an error, for it is misspelt. A tied parameter
    is matched by each of its names.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> select.by_name(torch.nn.Linear(2, 3), "*bias")
        by_name('*bias'): bias
    """
    if not patterns:
        raise OptionError("`by_name` needs at least one pattern, got none. Use '*.weight', say.")
    text = f"by_name({', '.join(map(repr, patterns))})"
    chosen = selected(text, model, lambda name, *_: any(fnmatchcase(name, p) for p in patterns))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"the pattern {pattern!r} must match the name of a parameter, got no match among "
                f"{len(names)}. {nearest(pattern, names)}"
            )
    return chosen


def by_type(model: nn.Module, *types: type[nn.Module]) -> Selection:
    """Those that belong to a module of one of these types.

    *At the edge:* subclasses count; a module's children do not. Types that the model does not have
    choose nothing. A tied parameter belongs to each module that has it.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> select.by_type(model, torch.nn.LayerNorm)
        by_type(LayerNorm): 1.weight, 1.bias
    """
    text = f"by_type({', '.join(kind.__name__ for kind in types)})"
    return selected(text, model, lambda _name, _param, module: isinstance(module, types))


def by_dim(model: nn.Module, *, at_least: int = 0, at_most: int | None = None) -> Selection:
    """Those with so many dimensions: ``by_dim(model, at_least=2)`` are the matrices.

    *At the edge:* both ends count.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> select.by_dim(torch.nn.Linear(2, 3), at_least=2)
        by_dim(at_least=2): weight
    """
    most = "" if at_most is None else f"at_most={at_most}"
    least = f"at_least={at_least}" if at_least or not most else ""
    text = f"by_dim({', '.join(part for part in (least, most) if part)})"
    return selected(
        text,
        model,
        lambda _name, param, _module: (
            at_least <= param.dim() and (at_most is None or param.dim() <= at_most)
        ),
    )


def where(model: nn.Module, question: Callable[[str, Tensor], bool]) -> Selection:
    """Those for which a function of name and parameter says yes.

    *At the edge:* it is asked now, once for each name that a parameter has.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> select.where(torch.nn.Linear(2, 3), lambda name, p: p.numel() > 3)
        where(<lambda>): weight
    """
    text = f"where({getattr(question, '__name__', type(question).__name__)})"
    return selected(text, model, lambda name, param, _module: question(name, param))


def no_bias_or_norm(model: nn.Module) -> Selection:
    """Those that weight decay is meant for: no biases, and nothing in normalization layers.

    *At the edge:* a bias is what is called so (``bias``, ``in_proj_bias``); a normalization layer
    is a module with ``Norm`` in the name of its type, torch's and anyone's.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> select.no_bias_or_norm(model)
        no_bias_or_norm: 0.weight
    """

    def question(name: str, _param: Tensor, module: nn.Module) -> bool:
        return not name.endswith("bias") and "Norm" not in type(module).__name__

    return selected("no_bias_or_norm", model, question)
