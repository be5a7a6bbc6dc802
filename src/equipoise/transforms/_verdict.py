"""Whether a step is to be skipped: found on the device by any number of links, looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Check:
    """Which gradients are not finite; if any is, the step is skipped."""

    bad: Tensor
    names: Sequence[str]


def guilty(checks: Sequence[Check]) -> list[str]:
    """The names of what is not finite, fetched from the device at once."""
    if not checks:
        return []
    home = checks[0].bad.device
    flags = torch.cat([check.bad.to(home) for check in checks]).tolist()
    names = [name for check in checks for name in check.names]
    return [*dict.fromkeys(name for name, bad in zip(names, flags, strict=True) if bad)]
