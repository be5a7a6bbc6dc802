"""Stable pieces that penalties are made of: precision, masks, reductions and norms.

Each function states its value and its gradient where the textbook formula has none. Nothing here
waits for the device. Everything may be differentiated twice, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from equipoise._context import (
    as_distributed_as,
    compiling,
    distributed,
    inside_transform,
    whole,
)
from equipoise._errors import (
    InputError,
    InputTypeError,
    OptionError,
    check_choice,
    check_fits,
    check_number,
    check_tensor,
)
from equipoise._types import Dims, Reduction, Tensors

# On the CPU: the float64 copy of one chunk, 2¹⁵ × 8 bytes, stays in the cache; and torch works on
# it with one thread, where more would wait for one another longer than they work.
CHUNK = 1 << 15


def full_precision(x: Tensor) -> Tensor:
    """Float16 and bfloat16 as float32; float32 and float64 as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def filled_as(x: Tensor, number: float) -> Tensor:
    """A number as a tensor like ``x``, made on its device: copied there, it would be waited for."""
    return as_distributed_as(x, torch.full((), number, dtype=x.dtype, device=x.device))


def select(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` where the mask is not zero, else 0: NaN or inf under the mask does no harm.

    The selection comes *before* any computation. Multiplying by the mask afterwards would keep a
    NaN value, and would turn an infinite derivative into a NaN gradient.
    """
    return x if mask is None else torch.where(mask != 0, x, 0.0)


def check_mask(name: str, mask: object, shape: torch.Size) -> None:
    """Refuse a mask that is no tensor, is complex, or does not broadcast to the shape."""
    if not isinstance(mask, Tensor) or mask.is_complex():
        got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputTypeError(
            f"`{name}` must be a bool tensor or one of non-negative weights, got {got}. "
            "Use True or 1 for what counts."
        )
    check_fits(name, mask, shape)


def pieces(
    name: str, x: Tensors, mask: Tensors | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """One tensor or many, in full precision and with 0 under the mask; and the mask of each."""
    tensors = [x] if isinstance(x, Tensor) else list(_iterated(name, x))
    if not tensors:
        raise InputError(
            f"`{name}` must hold at least one tensor, got an empty iterable. "
            "Use `list(...)`: a generator such as `model.parameters()` can be read only once."
        )
    masks: list[Tensor | None] = [None] * len(tensors)
    if mask is not None:
        masks = [mask] if isinstance(x, Tensor) else list(_iterated("mask", mask))  # type: ignore[list-item]
    if len(masks) != len(tensors):
        raise InputError(
            f"`mask` must hold one mask for each of the {len(tensors)} tensors of `{name}`, "
            f"got {len(masks)}. Use `torch.ones(())` where everything counts."
        )
    for i, (tensor, tensor_mask) in enumerate(zip(tensors, masks, strict=True)):
        label = name if isinstance(x, Tensor) else f"{name}[{i}]"
        check_tensor(label, tensor)
        if tensor_mask is not None:
            check_mask(label.replace(name, "mask", 1), tensor_mask, tensor.shape)
    selected = [select(full_precision(t), m) for t, m in zip(tensors, masks, strict=True)]
    return selected, masks


def _iterated(name: str, value: Tensors) -> Iterable[Tensor]:
    if isinstance(value, Tensor | str) or not isinstance(value, Iterable):
        hint = "`model.parameters()`" if hasattr(value, "parameters") else "a list of tensors"
        raise InputTypeError(
            f"`{name}` must be a tensor or an iterable of tensors, one for each of the inputs, "
            f"got {type(value).__name__}. Use {hint}."
        )
    return value


def reduce(
    values: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    *,
    reduction: Reduction,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Weigh each value by its mask and bring all of them together, as if they were one vector.

    The values must already be finite under the mask (`select`). ``"mean"`` divides by the sum of
    the masks, or by ``denominator``; over nothing it is 0 with zero gradient. ``"none"`` keeps the
    shape of a single tensor and flattens several into one vector.
    """
    check_choice("reduction", reduction, ("sum", "mean", "none"))
    if denominator is not None and reduction != "mean":
        raise OptionError(
            f"`denominator` belongs to reduction='mean', got reduction={reduction!r}. "
            "Use reduction='mean', or divide the result yourself."
        )
    if isinstance(denominator, Tensor) and denominator.numel() != 1:
        raise OptionError(
            f"`denominator` must be a number, or a tensor of one, got shape "
            f"{tuple(denominator.shape)}. Use `.sum()`."
        )
    if denominator is not None and not isinstance(denominator, Tensor):
        check_number("denominator", denominator, low=0.0)
    weighted = [v if m is None else v * m.to(v.dtype) for v, m in zip(values, masks, strict=True)]
    if reduction == "none":
        return weighted[0] if len(weighted) == 1 else torch.cat([w.flatten() for w in weighted])
    total = add([w.sum() for w in weighted])
    if reduction == "sum":
        return total
    if isinstance(denominator, Tensor):
        denominator = denominator.reshape(())
    return divide(total, count(values, masks) if denominator is None else denominator)


def add(scalars: Sequence[Tensor]) -> Tensor:
    """The sum of scalars that may lie on several devices, on the device of the first."""
    first, *others = scalars
    for other in others:
        first = first + other.to(first.device)
    return first


def count(values: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Tensor | int:
    """How much counts: the number of entries, or the sum of the masks over them."""
    numbers = sum(v.numel() for v, m in zip(values, masks, strict=True) if m is None)
    weights = [
        m.to(v.dtype).expand(v.shape).sum()
        for v, m in zip(values, masks, strict=True)
        if m is not None
    ]
    return add(weights) + numbers if weights else numbers


def divide(total: Tensor, by: Tensor | float) -> Tensor:
    """``total / by``; 0 with zero gradient where ``by`` is 0 because nothing was counted."""
    if isinstance(by, Tensor):
        return total / torch.where(by == 0, 1, by).to(total)
    return total / (by or 1)


def vector_norm(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Euclidean norm; at the zero vector 0, with first and second derivative 0.

    The entries are scaled by the largest of them, so that squares neither overflow nor vanish. A
    vector of nothing but subnormal numbers counts as zero.
    """
    y, scale = _scaled(x, dim)
    squares = y.square().sum(_dims(x, dim), keepdim=True)
    zero = squares == 0
    length = scale * torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())
    # A sum over one number, for a distributed tensor of torch 2.11 cannot squeeze several dims.
    return length if keepdim else length.sum(_dims(x, dim))


def unit(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``x / ‖x‖`` along a dimension, and which vectors are not zero.

    The zero vector stays zero, with first and second derivative 0.
    """
    y, _ = _scaled(x, dim)
    squares = y.square().sum(dim, keepdim=True)
    zero = squares == 0
    length = torch.where(zero, 1.0, squares).sqrt()
    return torch.where(zero, 0.0, y / length), ~zero


def _dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None or dim in ((), []):
        return tuple(range(x.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _scaled(x: Tensor, dim: Dims) -> tuple[Tensor, Tensor]:
    # The scale is a constant to autograd: ‖x‖ = s‖x/s‖ holds for every fixed s, so that all its
    # derivatives are those of ‖x‖.
    if x.numel() == 0:
        return x, x.new_ones(())
    sizes = x.detach().abs()
    # A process that holds no part of a distributed tensor has no largest entry, but it has a sum,
    # which serves as well.
    largest = (sizes.sum if distributed(x) else sizes.amax)(_dims(x, dim), keepdim=True)
    # Below the smallest normal number the inverse overflows, and with it every derivative. Such
    # entries stay as they are: their squares are 0, so that the vector counts as zero.
    usable = largest.isfinite() & (largest >= torch.finfo(x.dtype).tiny)
    scale = torch.where(usable, largest, 1.0)
    return x / scale, scale


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all tensors together, for reports: exact, but not differentiable.

    Squares add up in float64 where the device has it. The relative error stays below 1e-6 for 10⁸
    entries in any grouping, where `torch.linalg.vector_norm` on the CPU loses 4e-2 (measured).
    """
    with torch.no_grad():
        # A sparse gradient may hold an entry in parts, which belong together before the square.
        stored = [t.coalesce().values() if t.is_sparse else t for t in tensors]
        tensors = [real_entries(tensor) for tensor in stored]
        wide = [norm64(tensor) for tensor in tensors]
        device = wide[0].device
        together: Tensor = torch.linalg.vector_norm(torch.stack([w.to(device) for w in wide]))
    is64 = any(tensor.dtype == torch.float64 for tensor in tensors)
    return together.to(torch.float64 if is64 else torch.float32)


def real_entries(x: Tensor) -> Tensor:
    """The entries of any gradient as real numbers: a complex one counts as two."""
    if x.is_nested:
        x = x.values()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def norm64(x: Tensor) -> Tensor:
    if x.device.type == "mps":  # has no float64
        return vector_norm(full_precision(x))
    on_cpu = x.device.type == "cpu" and not (compiling() or inside_transform() or distributed(x))
    if on_cpu and x.dtype != torch.float64 and x.numel() > CHUNK:
        return norm_on_cpu(x.flatten())
    length: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return whole(length)


def norm_on_cpu(x: Tensor) -> Tensor:
    """A norm from float64 sums, without the float64 copy that ``dtype=`` makes of all of it.

    Float32 is first added in rows of 128, which takes a tenth of the time and has lost less than
    1e-6 if no square that matters was too large or too small: the length itself says whether. For
    that the entries have to lie side by side.
    """
    if x.dtype == torch.float32:
        x = x.contiguous()
        rows = torch.split(x, x.numel() // 128 * 128)
        norms = [torch.linalg.vector_norm(rows[0].view(-1, 128), dim=1), *rows[1:]]
        length: Tensor = torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
        # Squares below 1.2e-38 round badly: n of them are 1e-7 of the sum from here on. To look at
        # a number costs nothing on the CPU, where nothing has to be waited for.
        if 4e-16 * x.numel() ** 0.5 < cast("float", length.tolist()) < torch.inf:
            return length
    parts = [torch.linalg.vector_norm(c, dtype=torch.float64) for c in torch.split(x, CHUNK)]
    return torch.linalg.vector_norm(torch.stack(parts))  # type: ignore[no-any-return]
