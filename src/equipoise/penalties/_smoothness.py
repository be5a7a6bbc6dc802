"""How steep a function is: penalties on the gradient with respect to an input.

The only penalties that differentiate twice: once inside, to get the gradient, and once more when
the loss is differentiated with respect to the parameters of the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import Node

from equipoise._context import as_distributed_as, compiling, inside_transform
from equipoise._errors import (
    GradientError,
    InputError,
    InputTypeError,
    OptionError,
    check_choice,
    check_fits,
    check_flag,
    check_generator,
    check_number,
    check_same_shape,
    check_tensor,
    names_its_options,
)
from equipoise._numerics import filled_as, full_precision, reduce, vector_norm
from equipoise._types import Reduction, ScalarFunction

Norm = Literal["l2", "l1", "linf"]


@names_its_options
def gradient_penalty(
    fn: ScalarFunction,
    x: Float[Tensor, "..."],
    /,
    *,
    target: float = 1.0,
    per: Literal["sample", "batch"] = "sample",
    sided: Literal["two", "one"] = "two",
    norm: Norm = "l2",
    squared: bool = False,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Squared distance of the gradient's norm from its target: ``mean (‖∂fn/∂xᵢ‖ − target)²``.

    ``fn`` maps the batch to a scalar or to one value a sample, which are summed. Samples must not
    influence one another, and a mean over the batch would divide every gradient by its size.
    ``per="sample"`` takes one norm for each entry of the first dimension, ``"batch"`` one over
    everything; ``norm`` says which: ``"l1"``, Σ|g|, and ``"linf"``, max |g|, beside the Euclidean.
    ``sided="one"`` penalises only norms above the target. ``squared=True`` is ``mean ‖g‖²``,
    without a target (R1; Mescheder et al. 2018).

    The penalty may be differentiated with respect to the parameters of ``fn``, to ``x``, and under
    `torch.compile`, where the gradient is taken inside with `torch.func`: compile the step that
    calls this, not ``fn`` alone.

    *At the edge:* where the gradient is 0 the value is target² with finite first and second
    derivatives. Without samples the value is 0. A function that does not depend on ``x`` is
    refused, and so is one with an operation that has no second derivative (fused attention), by
    name; compiled code cannot be asked and leaves both to torch.

    Examples:
        >>> import torch, equipoise as eq
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> critic = lambda x: x.square().sum(-1) / 2  # gradient norms 5 and 1
        >>> eq.gradient_penalty(critic, x).detach()
        tensor(8.)
    """
    check_choice("per", per, ("sample", "batch"))
    check_choice("sided", sided, ("two", "one"))
    check_choice("norm", norm, ("l2", "l1", "linf"))
    check_number("target", target)
    check_flag("squared", squared)
    if squared and sided == "one":
        raise OptionError(
            "`squared=True` has no target to be on one side of, got sided='one'. "
            "Use one of the two."
        )
    _check_function(fn)
    check_tensor("x", x)
    gradient = full_precision(_input_gradient(fn, x))
    lengths = _lengths(gradient, norm, squared=squared, whole=per == "batch" or x.dim() == 0)
    if squared:
        return reduce([lengths], [None], reduction=reduction)
    excess = lengths - target
    excess = excess.clamp(min=0) if sided == "one" else excess
    return reduce([excess.square()], [None], reduction=reduction)


@names_its_options
def interpolated_gradient_penalty(
    fn: ScalarFunction,
    x: Float[Tensor, "*shape"],
    reference: Float[Tensor, "*shape"],
    /,
    *,
    target: float = 1.0,
    per: Literal["sample", "batch"] = "sample",
    sided: Literal["two", "one"] = "two",
    norm: Norm = "l2",
    squared: bool = False,
    reduction: Reduction = "mean",
    generator: torch.Generator | None = None,
    epsilon: float | Tensor | None = None,
) -> Float[Tensor, "..."]:
    """`gradient_penalty` between two batches, at ``ε·x + (1−ε)·reference`` (WGAN-GP).

    ``ε ~ U[0, 1)`` is drawn anew for every sample, from ``generator`` where one is given, or is
    ``epsilon`` itself (a number, or a tensor that broadcasts to ``x``). Gulrajani et al. 2017.

    *At the edge:* as `gradient_penalty`.

    Examples:
        >>> import torch, equipoise as eq
        >>> fake, real = torch.zeros(4, 2), torch.ones(4, 2)
        >>> critic = lambda x: x.square().sum(-1) / 2
        >>> eq.interpolated_gradient_penalty(critic, fake, real, epsilon=0.5, squared=True).detach()
        tensor(0.5000)
    """
    _check_function(fn)
    check_generator(generator)
    check_same_shape("x", x, "reference", reference)
    between = torch.lerp(reference.to(x.dtype), x, _epsilon(epsilon, generator, x))
    return gradient_penalty(
        fn,
        between,
        target=target,
        per=per,
        sided=sided,
        norm=norm,
        squared=squared,
        reduction=reduction,
    )


def _check_function(fn: object) -> None:
    if not callable(fn):
        raise InputTypeError(
            f"`fn` must be a function of a tensor, got {type(fn).__name__}. "
            "Use the function first, then its argument."
        )


def _epsilon(
    epsilon: float | Tensor | None, generator: torch.Generator | None, x: Tensor
) -> Tensor:
    if epsilon is None:
        shape = (*x.shape[:1], *(1 for _ in x.shape[1:]))
        device = x.device if generator is None else generator.device
        drawn = torch.rand(shape, generator=generator, device=device)
        return as_distributed_as(x, drawn.to(x.device, x.dtype))
    if isinstance(epsilon, Tensor):
        check_fits("epsilon", epsilon, x.shape)
        return epsilon.to(x.device, x.dtype)
    check_number("epsilon", epsilon)
    return filled_as(x, epsilon)


def _input_gradient(fn: ScalarFunction, x: Tensor) -> Tensor:
    """∂ Σ fn(x) / ∂x, which may itself be differentiated."""
    if compiling() or inside_transform():
        inside: Tensor = torch.func.grad(lambda z: _summed(fn(z), z))(x)
        return inside
    if torch.is_inference_mode_enabled():
        # Left for as long as it takes; a copy made outside is no inference tensor.
        with torch.inference_mode(False), torch.no_grad():
            return _input_gradient(fn, x.clone())
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # A copy, for `detach` would lose a tangent of forward-mode differentiation.
        leaf = x if x.requires_grad else x.clone().requires_grad_()
        total = _summed(fn(leaf), leaf)
        gradient = None
        if total.requires_grad:
            (gradient,) = torch.autograd.grad(
                total, leaf, create_graph=differentiable, allow_unused=True
            )
    if gradient is None:
        raise GradientError(
            "`fn` must depend on its argument to have a gradient, got a result that does not. "
            "Use the argument it is called with, and no `.detach()` or `no_grad` inside."
        )
    if differentiable:
        _check_second_derivative(gradient, total, leaf)
    return gradient


def _summed(value: Tensor, x: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputTypeError(
            f"`fn` must return a tensor, got {type(value).__name__}. "
            "Use the first output where there are several."
        )
    if value.numel() not in (1, *x.shape[:1]):
        raise InputError(
            "`fn` must return a scalar or one value for each of the "
            f"{x.shape[:1].numel()} samples, got shape {tuple(value.shape)}. "
            "Use `.sum(-1)` or choose one output."
        )
    return value.sum()


# What autograd calls the nodes that raise when they are differentiated again.
_ONLY_ONCE = ("torch::autograd::NotImplemented", "CompiledFunctionBackwardBackward")


def _check_second_derivative(gradient: Tensor, total: Tensor, leaf: Tensor) -> None:
    """Refuse now, by name, what would fail or be silently lost in the backward pass.

    Asking the graph costs 2 µs a node, a fiftieth of its backward pass (measured).
    """
    guilty = next((n for n in _graph(gradient.grad_fn) if n.name() in _ONLY_ONCE), None)
    if guilty is not None and "Compiled" in guilty.name():
        _refuse_second_derivative(guilty.name())
    elif guilty is not None:
        parents = [parent for parent, _ in guilty.next_functions if parent is not None]
        # The operation itself is the parent from which most of the graph can be reached.
        _refuse_second_derivative(max(parents, key=lambda n: sum(1 for _ in _graph(n))).name())
    for node in _graph(total.grad_fn):
        # Only on the way to the input: elsewhere one derivative is all that is needed.
        if _is_once_differentiable(node) and any(_leads_to(n, leaf) for n in _graph(node)):
            _refuse_second_derivative(node.name())


_ONCE = torch.autograd.function.once_differentiable(lambda _: None).__code__


def _is_once_differentiable(node: Node) -> bool:
    """Whether this is a custom function whose backward is marked so; its gradient has no graph."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    return getattr(backward, "__code__", None) is _ONCE


def _leads_to(node: Node, leaf: Tensor) -> bool:
    return node is leaf.grad_fn or getattr(node, "variable", None) is leaf


def _graph(root: Node | None) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(parent for parent, _ in node.next_functions)


def _refuse_second_derivative(name: str) -> None:
    raise GradientError(
        "`fn` must consist of operations that can be differentiated twice, got "
        f"{name.removesuffix('0').removesuffix('Backward')}. "
        "Use `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` for attention, and for a compiled "
        "model compile the step that calls this penalty instead of the model."
    )


def _lengths(gradient: Tensor, norm: Norm, *, squared: bool, whole: bool) -> Tensor:
    """One norm over everything, or one a sample; or their squares."""
    rows = gradient.flatten() if whole else gradient.reshape(*_samples_by_features(gradient.shape))
    if norm == "l2":
        return rows.square().sum(-1) if squared else vector_norm(rows, -1)
    sizes = rows.abs()
    length = sizes.amax(-1) if norm == "linf" and rows.shape[-1] else sizes.sum(-1)
    return length.square() if squared else length


def _samples_by_features(shape: torch.Size) -> tuple[int, int]:
    return shape[0], shape[1:].numel()
