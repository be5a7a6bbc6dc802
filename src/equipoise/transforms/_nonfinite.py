"""Gradients that are not finite: named, and raised, set to zero, skipped, or passed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from equipoise._errors import NonFiniteError, check_choice, check_count, names_its_options
from equipoise._finite import check_finite
from equipoise.transforms._leaves import Leaves
from equipoise.transforms._transform import (
    RECORDED,
    GradientTransform,
    State,
    in_place,
)
from equipoise.transforms._verdict import Check

NonFinite = Literal["propagate", "raise", "zero", "skip"]
"""What a gradient that is not finite does: see `clip_by_global_norm`."""


def check_policy(policy: object) -> None:
    """Refuse what is no policy."""
    check_choice("nonfinite", policy, ("propagate", "raise", "zero", "skip"))


def shown(policy: NonFinite) -> str:
    """How a policy prints among the options of a transform: not at all where it is the default."""
    return "" if policy == "propagate" else f", nonfinite={policy!r}"


def heed(leaves: Leaves, policy: NonFinite) -> None:
    """Do with what is not finite as the policy says; `propagate` is done by who comes next."""
    if policy == "propagate" or not len(leaves):
        return
    if policy == "zero":
        if not _surely_finite(leaves):
            for tensor in leaves.write():
                _finite_entries(tensor)
        return
    bad = _bad(leaves)
    if policy == "skip":
        leaves.checks.append(Check(bad, _names(leaves)))
    elif bad.any().item():
        raise _error(leaves, bad)


def _surely_finite(leaves: Leaves) -> bool:
    """Whether this can be seen without waiting; if so, what was measured may stay."""
    return leaves.norms.free and bool(leaves.norms.total().isfinite().item())


def _bad(leaves: Leaves) -> Tensor:
    """Which leaves hold NaN or inf. Their lengths tell, for the square of no entry overflows."""
    if _surely_finite(leaves):
        return torch.zeros(len(leaves), dtype=torch.bool)
    bad = ~leaves.norms.squares().isfinite()
    return bad if leaves.excused is None else bad & (leaves.excused.to(bad.device) == 0)


def _finite_entries(x: Tensor) -> None:
    real = torch.view_as_real(x) if x.is_complex() else x
    real.masked_fill_(~real.isfinite(), 0)


def _names(leaves: Leaves) -> list[str]:
    return [leaves.names(place) for place in leaves.places]


def _error(leaves: Leaves, bad: Tensor) -> NonFiniteError:
    """The error that says which, how many and where first."""
    named = dict(zip(_names(leaves), leaves.read(), strict=True))
    wrong = {name: named[name] for name, is_bad in zip(named, bad.tolist(), strict=True) if is_bad}
    try:
        check_finite(wrong)
    except NonFiniteError as error:
        return error
    return NonFiniteError(
        f"gradients must be finite, got NaN or inf in {', '.join(wrong)}, in the part of another "
        "process. Use its message to see how many.",
        nan=0,
        inf=0,
    )


@names_its_options
def skip_nonfinite(limit: int | None = None) -> GradientTransform:
    """Skip the optimizer's step if any gradient is NaN or inf: name the tensors, and count.

    Attached to an optimizer, such a step changes nothing: no weight, no moment, no decay. The names
    are logged as a warning of the logger ``equipoise``, and are in ``handle.nonfinite()``. Without
    an optimizer all gradients become 0. ``limit`` makes that many in a row an error.

    It records ``skipped`` (in all) and ``in_a_row``.

    *At the edge:* inf counts as NaN does. Where gradients are on the CPU there is nothing to wait
    for; elsewhere the decision waits for the device once a step, after all links have run. With a
    ``limit``, or without an optimizer's step to skip, it is looked at here. A step skipped by a
    gradient scaler does not come here at all.

    Examples:
        >>> import torch
        >>> from equipoise import transforms
        >>> skip = transforms.skip_nonfinite()
        >>> weight = torch.zeros(2)
        >>> gradient = torch.tensor([1.0, float("nan")])
        >>> grads, state = skip.update([gradient], skip.init([weight]), [weight])
        >>> grads, state["recorded"]["skipped"].item()
        ([tensor([0., 0.])], 1)
    """
    if limit is not None:
        check_count("limit", limit)

    def init(params: Sequence[Tensor]) -> State:
        device = params[0].device if len(params) else torch.device("cpu")
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return {RECORDED: {"skipped": zero, "in_a_row": zero.clone()}}

    def apply(leaves: Leaves, state: State) -> State:
        if not len(leaves):
            return state
        bad = _bad(leaves)
        leaves.checks.append(Check(bad, _names(leaves)))
        counts = state[RECORDED]
        any_bad = bad.any().to(counts["skipped"].device)
        in_a_row = torch.where(any_bad, counts["in_a_row"] + 1, 0)
        if limit is not None and in_a_row.item() >= limit:
            error = _error(leaves, bad)
            raise NonFiniteError(
                f"`skip_nonfinite` may skip fewer than {limit} steps in a row, got "
                f"{int(in_a_row)}: {error}",
                nan=error.nan,
                inf=error.inf,
            )
        return {RECORDED: {"skipped": counts["skipped"] + any_bad, "in_a_row": in_a_row}}

    text = f"skip_nonfinite({'' if limit is None else limit})"
    return in_place(text, init, apply)
