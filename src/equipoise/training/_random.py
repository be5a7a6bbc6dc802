"""The state of the random generators that training draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Of torch's generators, on the CPU and on CUDA devices, and of Python's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on drawing from where `random_state` was taken."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
