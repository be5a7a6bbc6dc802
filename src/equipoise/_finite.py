"""Whether tensors are finite, and if not, which, how many entries, and where first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise._context import whole
from equipoise._errors import InputTypeError, NonFiniteError, names_its_options


@names_its_options
def check_finite(
    x: Tensor | Iterable[Tensor] | Mapping[str, Tensor], /, *, name: str = "x"
) -> None:
    """Raise `NonFiniteError` if there is NaN or inf; the message names tensor, counts and index.

    ``x`` is a tensor, several, or a mapping from names to tensors, such as
    ``dict(model.named_parameters())``. Waits for the device once, however many there are.

    *At the edge:* +inf and −inf count together. Integers, bools and empty tensors are finite;
    complex numbers are when both parts are. A sparse tensor (COO) is looked at where it holds
    something, and has the index of the whole; nested ones and other layouts are refused.

    Examples:
        >>> import torch, equipoise as eq
        >>> eq.check_finite(torch.ones(3))
        >>> eq.check_finite(torch.tensor([1.0, float("nan"), float("inf")]), name="loss")
        Traceback (most recent call last):
            ...
        equipoise._errors.NonFiniteError: `loss` must be finite, got 1 NaN and 1 inf among 3...
    """
    tensors = _named(x, name)
    found = [f for f in _findings(tensors) if f.nan or f.inf]
    if not found:
        return
    raise NonFiniteError(
        "; ".join(f.in_words(first=i == 0) for i, f in enumerate(found))
        + ". Use `torch.autograd.set_detect_anomaly(True)` to find the operation that made it.",
        nan=sum(f.nan for f in found),
        inf=sum(f.inf for f in found),
    )


@dataclass(frozen=True)
class _Finding:
    name: str
    tensor: Tensor
    nan: int
    inf: int
    first: int

    def in_words(self, *, first: bool) -> str:
        counts = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "inf")) if n]
        asked = f"`{self.name}` must be finite, got" if first else f"`{self.name}` has"
        return (
            f"{asked} {' and '.join(counts)} among {self.tensor.numel()} entries, "
            f"first at index {_index(self.tensor, self.first)}"
        )


def _index(x: Tensor, flat: int) -> tuple[int, ...]:
    """Where the entry of a flat index lies; in a sparse tensor, of a flat index into its values."""
    place = torch.unravel_index(torch.tensor(flat), _stored(x).shape)
    index = tuple(int(i) for i in place)
    return (*x.indices()[:, index[0]].tolist(), *index[1:]) if x.is_sparse else index


def _named(x: Tensor | Iterable[Tensor] | Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    if isinstance(x, Tensor):
        tensors: dict[str, Tensor] = {name: x}
    elif isinstance(x, Mapping):
        tensors = dict(x)
    elif isinstance(x, Iterable):
        tensors = {f"{name}[{i}]": tensor for i, tensor in enumerate(x)}
    else:
        tensors = {name: x}
    for label, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputTypeError(
                f"`{label}` must be a tensor, got {type(tensor).__name__}. {_advice(tensor)}"
            )
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise InputTypeError(
                f"`{label}` must be dense or sparse COO, got {got}. Use `.values()`."
            )
    return tensors


def _advice(x: object) -> str:
    if hasattr(x, "named_parameters"):
        return "Use `dict(model.named_parameters())`."
    if isinstance(x, tuple):
        return "Use `dict(...)` of pairs of a name and a tensor."
    return "Use no entry where there is no gradient." if x is None else "Use `torch.as_tensor`."


def _findings(tensors: dict[str, Tensor]) -> list[_Finding]:
    settled = {n: t.detach().coalesce() if t.is_sparse else t for n, t in tensors.items()}
    inexact = {n: t for n, t in settled.items() if _stored(t).numel() and not _is_exact(t)}
    if not inexact:
        return []
    device = next(iter(inexact.values())).device
    figures = torch.stack([_figures(t).to(device) for t in inexact.values()]).tolist()
    return [
        _Finding(name, tensor, *row)
        for (name, tensor), row in zip(inexact.items(), figures, strict=True)
    ]


def _is_exact(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _stored(x: Tensor) -> Tensor:
    """The entries that a tensor holds: of a sparse one those that may differ from 0."""
    return x.values() if x.is_sparse else x


def _figures(x: Tensor) -> Tensor:
    """Number of NaN, number of infinities, flat index of the first of either."""
    x = _stored(x).detach()
    x = x.float() if x.itemsize == 1 else x  # torch cannot ask every float8 whether it is finite
    bad = whole(~x.isfinite())
    nan = whole(x.isnan().sum())
    return torch.stack([nan, bad.sum() - nan, bad.flatten().to(torch.uint8).argmax()])
