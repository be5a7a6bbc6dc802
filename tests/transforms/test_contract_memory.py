"""In place where it is attached: no copies of gradients but of a few at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equipoise import transforms
from tests.transforms.members import MEMBERS, Member
from tests.transforms.test_contract_device import MODULES

SIZE = 1 << 16
NUMBER = 64


class Held(TorchDispatchMode):
    """The most bytes that new tensors have held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def most_held(member: Member, dtype: torch.dtype) -> float:
    """At one time of a step, in gradients; all entries are equal, so that none is left out soon."""
    generator = torch.Generator().manual_seed(2)
    params = [
        nn.Parameter(torch.randn(256, SIZE // 256, generator=generator).to(dtype))
        for _ in range(NUMBER)
    ]
    optimizer = torch.optim.SGD(params, lr=0.1)
    transforms.attach(transforms.chain(member.make()), optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    with Held() as held:
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (optimizer,), {})
    return held.most / (SIZE * dtype.itemsize)


OURS = [m for m in MEMBERS if "user" not in m.id and m.id != "snapshot-peak"]


@pytest.mark.parametrize("where", ["here", "as on a device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("member", OURS, ids=lambda m: m.id)
def test_a_step_copies_few_gradients_at_a_time(
    member: Member, dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 gradients no step holds copies of more than a few, whatever it measures.

    Four are looked at side by side in one buffer; of one by itself digits, flags and wider types.
    """
    if where != "here":
        for module in MODULES:
            if hasattr(module, "looking_is_free"):
                monkeypatch.setattr(module, "looking_is_free", lambda _device: False)
    assert most_held(member, dtype) < 12
