"""Decay: gradients of weight penalties, added to the gradient or applied to the weights.

Three ways shrink a weight, and their factors differ:

- *in the loss*: ``Term(eq.l2, weight=λ/2)`` has the gradient ``λ·w``;
- *coupled*, ``add_l2_decay(λ)``: the same ``λ·w``, added to the gradient, which an adaptive
  optimizer then divides by its second moment;
- *decoupled*, ``add_l2_decay(λ, decoupled=True)``: ``w ← w − lr·λ·w`` beside the optimizer's step,
  as AdamW does it.

For plain SGD all three are one. The functions `equipoise.l2` and `elastic_net` have no ½, so that
their weight is *half* of the rate here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise._errors import GradientError, names_its_options
from equipoise.transforms._amounts import Amount, Amounts
from equipoise.transforms._leaves import Leaves, Rate
from equipoise.transforms._lists import batches
from equipoise.transforms._shards import local
from equipoise.transforms._transform import GradientTransform, State, in_place


@names_its_options
def add_l2_decay(rate: Amount = 0.01, *, decoupled: bool = False) -> GradientTransform:
    """``g + rate · w``; decoupled: ``w − lr·rate·w``, untouched by the optimizer's preconditioner.

    Decoupled it is AdamW's, to the last bit: ``w · (1 − lr·rate)`` before the step, with the
    learning rate of the parameter's group at that moment. The same as the term
    ``Term(eq.l2, weight=rate/2)`` only where the optimizer is plain SGD.

    *At the edge:* parameters without a gradient are left alone, as all optimizers do. Decoupled
    needs an optimizer, so it is refused by `update`, and happens once a step, however often a
    closure is called. Coupled, sparse gradients are refused, for they would become dense.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> decay = transforms.add_l2_decay(0.1)
        >>> weight = torch.tensor([2.0, -1.0])
        >>> decay.update([torch.zeros(2)], decay.init([weight]), [weight])[0]
        [tensor([ 0.2000, -0.1000])]
    """
    return _decay("add_l2_decay", Amounts(rate=rate), 0.0, decoupled=decoupled)


@names_its_options
def add_l1_decay(rate: Amount = 0.001, *, decoupled: bool = False) -> GradientTransform:
    """``g + rate · sign(w)``; decoupled: ``w − lr·rate·sign(w)``.

    *At the edge:* sign(0) is 0, so that a weight of zero stays; of a complex weight it is
    ``w/|w|``. Otherwise as `add_l2_decay`.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> decay = transforms.add_l1_decay(0.5)
        >>> weight = torch.tensor([2.0, -1.0, 0.0])
        >>> decay.update([torch.zeros(3)], decay.init([weight]), [weight])[0]
        [tensor([ 0.5000, -0.5000,  0.0000])]
    """
    return _decay("add_l1_decay", Amounts(rate=rate), 1.0, decoupled=decoupled)


@names_its_options
def add_elastic_net_decay(
    rate: Amount = 0.01, l1_ratio: Amount = 0.5, *, decoupled: bool = False
) -> GradientTransform:
    """``g + rate · (a·sign(w) + (1−a)·w)`` with ``a = l1_ratio``; decoupled as `add_l2_decay`.

    *At the edge:* the ends are `add_l1_decay` and `add_l2_decay`; outside [0, 1] is refused. The
    penalty `equipoise.elastic_net` has no ½ at its squares: there it is ``a·sign w + 2(1−a)·w``.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> decay = transforms.add_elastic_net_decay(1.0, 0.5)
        >>> weight = torch.tensor([2.0])
        >>> decay.update([torch.zeros(1)], decay.init([weight]), [weight])[0]
        [tensor([1.5000])]
    """
    amounts = Amounts({"l1_ratio": (0.0, 1.0)}, rate=rate, l1_ratio=l1_ratio)
    return _decay("add_elastic_net_decay", amounts, decoupled=decoupled)


def _decay(
    name: str, amounts: Amounts, ratio: float | None = None, *, decoupled: bool
) -> GradientTransform:
    def apply(leaves: Leaves, state: State) -> State:
        now, state = amounts.at(state)
        rate, l1_ratio = now if ratio is None else (*now, ratio)
        if decoupled:
            _beside_the_step(leaves, name, rate, l1_ratio)
        else:
            _add(leaves.write(), leaves.params(name), rate, l1_ratio)
        return state

    options = ", decoupled=True" if decoupled else ""
    return in_place(f"{name}({amounts}{options})", amounts.init, apply)


def _add(grads: list[Tensor], params: list[Tensor], rate: float, l1_ratio: float) -> None:
    # Signs are copies: as many at a time as take the room of one tensor.
    for batch in batches(grads):
        some, weights = [grads[i] for i in batch], [params[i] for i in batch]
        if l1_ratio < 1:
            torch._foreach_add_(some, weights, alpha=rate * (1 - l1_ratio))
        if l1_ratio > 0:
            # Without a name, so that they are gone before the next are made.
            torch._foreach_add_(some, [w.sgn() for w in weights], alpha=rate * l1_ratio)


def _beside_the_step(leaves: Leaves, name: str, rate: float, l1_ratio: float) -> None:
    if leaves.rate is None:
        raise GradientError(
            f"`{name}(decoupled=True)` changes weights at the learning rate of an optimizer, got "
            "no optimizer. Use `attach(transform, optimizer)`, or `decoupled=False`."
        )
    if not leaves.first_of_step:
        return
    for place in leaves.places:
        learning_rate = leaves.rate(place)
        if learning_rate is None:
            raise GradientError(
                f"`{name}(decoupled=True)` needs the learning rate of every parameter, got a "
                "group without 'lr'. Use an optimizer that has one, or `decoupled=False`."
            )
        weight = local(leaves.all_params[place].detach())[0]
        leaves.weight_changes.append(_change(weight, learning_rate, rate, l1_ratio))


def _change(weight: Tensor, lr: Rate, rate: float, l1_ratio: float) -> Callable[[], None]:
    def change() -> None:
        sign = weight.sgn() if l1_ratio > 0 else None
        if l1_ratio < 1:
            weight.mul_(1 - lr * (rate if l1_ratio == 0 else rate * (1 - l1_ratio)))
        if sign is not None:
            weight.sub_(sign.mul_(lr * rate * l1_ratio))

    return change
