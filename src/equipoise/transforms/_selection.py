"""Some of a model's parameters, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from equipoise._errors import InputError, InputTypeError


class Selection:
    """Some of a model's parameters: for `masked` and `partition`, and as input of a penalty.

    Iterating gives the chosen parameters that require grad, each once however often the model uses
    it. ``a & b``, ``a | b`` and ``~a`` select again.

    *At the edge:* parameters are known by identity, so select after whatever replaces them
    (``fully_shard``, `torch.nn.Module.to_empty`). Frozen parameters are chosen as well, so that a
    mask holds when they are thawed, but are left out of iterating, length and names.

    Examples:
        >>> import torch
        >>> from equipoise.transforms import select
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> select.no_bias_or_norm(model)
        no_bias_or_norm: 0.weight
        >>> len(~select.no_bias_or_norm(model))
        3
    """

    def __init__(self, text: str, every: Mapping[str, Tensor], chosen: Mapping[str, bool]) -> None:
        self.text = text
        self._every = dict(every)
        self._chosen = dict(chosen)
        self._by_identity = {id(param): chosen[name] for name, param in every.items()}

    def covers(self, param: Tensor) -> bool:
        """Whether this parameter is chosen."""
        chosen = self._by_identity.get(id(param))
        if chosen is None:
            raise InputError(
                "parameters must be of the model that was selected from, got one of shape "
                f"{tuple(param.shape)} that is not. Use `select` on the model as it is trained, "
                "after it was moved or sharded."
            )
        return chosen

    @property
    def named(self) -> dict[str, Tensor]:
        """The chosen parameters that require grad, by name."""
        return {
            name: param
            for name, param in self._every.items()
            if self._chosen[name] and param.requires_grad
        }

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.named.values())

    def __len__(self) -> int:
        return len(self.named)

    def __and__(self, other: Selection) -> Selection:
        return self._joined("&", other, lambda a, b: a and b)

    def __or__(self, other: Selection) -> Selection:
        return self._joined("|", other, lambda a, b: a or b)

    def __invert__(self) -> Selection:
        opposite = {name: not chosen for name, chosen in self._chosen.items()}
        return Selection(f"~{self.text}", self._every, opposite)

    def _joined(self, sign: str, other: Selection, rule: Callable[[bool, bool], bool]) -> Selection:
        if not isinstance(other, Selection):
            raise InputTypeError(
                f"`{sign}` joins selections, got {type(other).__name__}. Use `select.by_name`, say."
            )
        if self._by_identity.keys() != other._by_identity.keys():
            raise InputError(
                f"`{sign}` joins selections of one model, got {self.text} and {other.text} of two. "
                "Use the same model for both."
            )
        both = {name: rule(chosen, other._chosen[name]) for name, chosen in self._chosen.items()}
        return Selection(f"({self.text} {sign} {other.text})", self._every, both)

    def __repr__(self) -> str:
        return f"{self.text}: {', '.join(self.named) or 'nothing'}"


Question = Callable[[str, Tensor, nn.Module], bool]
"""Whether to choose a parameter: by its name, itself, and the module that holds it."""


def selected(text: str, model: nn.Module, question: Question) -> Selection:
    """The parameters of a model for which the answer is yes, each under its first name.

    A parameter that is tied has several names and modules, and is chosen by any of them.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"`model` must be a torch.nn.Module, got {type(model).__name__}. Use the model itself."
        )
    every: dict[str, Tensor] = {}
    chosen: dict[str, bool] = {}
    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{own}" if path else own
            under = first.setdefault(id(param), name)
            every[under] = param
            chosen[under] = chosen.get(under, False) or bool(question(name, param, module))
    return Selection(text, every, chosen)
