"""The gradients of one step, on their way through a chain.

Leaves are local, dense tensors: of a DTensor the part that lies here, of a sparse gradient its
values. A transform asks for what it needs (a norm, tensors to write to); what is known already is
not measured again, and a rescaling waits until somebody needs its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise._context import distributed
from equipoise._errors import InputError
from equipoise.transforms._lists import rescale, rescale_each
from equipoise.transforms._norms import Norms
from equipoise.transforms._shards import Shard, local
from equipoise.transforms._verdict import Check

PLAIN = {Tensor, torch.nn.Parameter}

Gradient = Tensor | None
Rate = float | Tensor


@dataclass(eq=False)
class Leaves:
    """Gradients that are there, the parameters they belong to, and what is known of them."""

    all_params: Sequence[Tensor]
    places: list[int]
    """Where in the list of all parameters each leaf stands."""
    originals: list[Tensor]
    tensors: list[Tensor]
    shards: list[Shard | None]
    owned: bool
    """Whether the tensors may be written to; if not, they are copied before."""
    names: Callable[[int], str]
    rate: Callable[[int], Rate | None] | None = None
    """The optimizer's learning rate for a parameter, where there is an optimizer."""
    first_of_step: bool = True
    """False where an optimizer asks for its gradients again within one step."""
    excused: Tensor | None = None
    """Not 0 where a gradient scaler has found inf, and skips the step itself."""
    checks: list[Check] = field(default_factory=list)
    weight_changes: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done to the weights, unless the step is skipped."""
    known: Norms | None = None
    writable: bool = False
    """Whether the tensors are ours by now, each entry with memory of its own."""
    plain: bool = False
    """Whether every leaf is simply the gradient."""
    pending: Tensor | None = None
    """A number to multiply all leaves with, or a vector with one for each."""

    @staticmethod
    def of(
        grads: Sequence[Gradient],
        params: Sequence[Tensor],
        *,
        owned: bool,
        names: Callable[[int], str] | None = None,
    ) -> Leaves:
        """The leaves of a list of gradients in which some may be missing."""
        places = [i for i, grad in enumerate(grads) if grad is not None]
        originals = [grad for grad in grads if grad is not None]
        leaves = Leaves(params, places, originals, [], [], owned, names or _by_number)
        leaves._unpack()
        return leaves

    def _unpack(self) -> None:
        self.tensors, self.shards = self.originals.copy(), [None] * len(self.places)
        self.plain = _are_plain(self.originals)
        if self.plain:
            return
        self.tensors, self.shards = [], []
        self.originals = [
            grad if grad.layout == torch.strided else _coalesced(grad, self.names(place))
            for place, grad in zip(self.places, self.originals, strict=True)
        ]
        for grad in self.originals:
            here, shard = local(grad)
            here = here._values() if here.is_sparse else here  # noqa: SLF001
            here = here.resolve_conj()
            self.tensors.append(here)
            self.shards.append(shard)

    def __len__(self) -> int:
        return len(self.places)

    # Reading

    def read(self) -> list[Tensor]:
        """The tensors, to be looked at."""
        self._settle()
        return self.tensors

    @property
    def norms(self) -> Norms:
        """What is known of the lengths, measured when it is asked for."""
        if self.known is None:
            self.known = Norms.of(self.read, self.shards, self.device)
        return self.known

    @property
    def device(self) -> torch.device:
        """Where figures are kept: at the first leaf."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def params(self, who: str) -> list[Tensor]:
        """The parameter of each leaf, its local part where the leaf is one."""
        mine = [self.all_params[place] for place in self.places]
        if self.plain and {*map(type, mine)} <= PLAIN:
            return mine
        found = []
        for place, original in zip(self.places, self.originals, strict=True):
            param = self.all_params[place].detach()
            if original.is_sparse:
                raise InputError(
                    f"`{who}` needs dense gradients, got a sparse one for {self.names(place)}. "
                    "Use `masked` to leave it out, or `sparse=False` in its module."
                )
            plain = not distributed(original) and not distributed(param)
            found.append(param if plain else local(param, original)[0])
        return found

    # Writing

    def write(self) -> list[Tensor]:
        """The tensors, to be written to in place; what was known of them is forgotten."""
        self._settle()
        self._own()
        self.known = None
        return self.tensors

    def scale(self, factor: Tensor) -> None:
        """Multiply every leaf by a number (0-d), or each by its own (a vector)."""
        self.pending = factor if self.pending is None else self.pending * factor
        if self.known is not None:
            self.known = self.known.scaled(factor)

    def _settle(self) -> None:
        factor, self.pending = self.pending, None
        if factor is None or not self.tensors:
            return
        self._own()
        (rescale_each if factor.dim() else rescale)(self.tensors, factor)

    def _own(self) -> None:
        if self.writable:
            return
        self.writable = True
        for i, tensor in enumerate(self.tensors):
            if not self.owned:
                self.tensors[i] = tensor.clone()
            elif (
                not tensor.is_contiguous() and 0 in tensor.stride()
            ):  # its entries share their memory
                self.tensors[i] = tensor.clone(memory_format=torch.contiguous_format)

    # To and from whole lists

    def finished(self) -> list[Gradient]:
        """Gradients as they came: one for each parameter, sharded or sparse as before."""
        self._settle()
        out: list[Gradient] = [None] * len(self.all_params)
        if self.plain:
            for place, tensor in zip(self.places, self.tensors, strict=True):
                out[place] = tensor
            return out
        parts = zip(self.places, self.originals, self.tensors, self.shards, strict=True)
        for place, original, tensor, shard in parts:
            out[place] = _packed(original, tensor, shard)
        return out

    def take(self, grads: Sequence[Gradient]) -> None:
        """Go on with these gradients, which somebody else has computed."""
        before = dict(enumerate(self.finished()))
        self.places = [i for i, grad in enumerate(grads) if grad is not None]
        self.originals = [
            _kept(before.get(i), grad) if self.owned else grad
            for i, grad in enumerate(grads)
            if grad is not None
        ]
        self.known, self.writable = None, False
        self._unpack()

    def part(self, chosen: Sequence[int]) -> Leaves:
        """Some leaves by themselves, by their place in the list of all parameters."""
        self._settle()
        self._own()
        wanted = set(chosen)
        among = [i for i, place in enumerate(self.places) if place in wanted]
        number = {place: i for i, place in enumerate(chosen)}
        part = Leaves(
            [self.all_params[i] for i in chosen],
            [number[self.places[i]] for i in among],
            [self.originals[i] for i in among],
            [self.tensors[i] for i in among],
            [self.shards[i] for i in among],
            owned=True,
            names=lambda i: self.names(chosen[i]),
            rate=None if self.rate is None else lambda i: self.rate(chosen[i]),  # type: ignore[misc]
            first_of_step=self.first_of_step,
            excused=self.excused,
            checks=self.checks,
            weight_changes=self.weight_changes,
            writable=True,
        )
        if self.known is not None and among:
            part.known = self.known.among(among, part.read, part.device)
        return part

    def put_back(self, part: Leaves, chosen: Sequence[int]) -> None:
        """Take a part's leaves in again, after it was worked on."""
        part._settle()
        mine = dict(zip(self.places, self._columns(), strict=True))
        mine = {place: column for place, column in mine.items() if place not in set(chosen)}
        mine.update(zip((chosen[i] for i in part.places), part._columns(), strict=True))
        self.places = sorted(mine)
        self.originals = [mine[place][0] for place in self.places]
        self.tensors = [mine[place][1] for place in self.places]
        self.shards = [mine[place][2] for place in self.places]
        self.known = None

    def _columns(self) -> list[tuple[Tensor, Tensor, Shard | None]]:
        return list(zip(self.originals, self.tensors, self.shards, strict=True))

    # Judging

    def zero_where_skipped(self) -> None:
        """Without an optimizer there is no step to skip: then all gradients become 0."""
        for check in self.checks:
            skipped = check.bad.any()
            for tensor in self.write():
                tensor.masked_fill_(skipped.to(tensor.device), 0)


def _are_plain(grads: Sequence[Tensor]) -> bool:
    """Whether all are what they look like: dense, all here, and as they stand in memory."""
    return (
        {*map(type, grads)} <= {Tensor}
        and {grad.layout for grad in grads} <= {torch.strided}
        and not any(grad.is_conj() for grad in grads if grad.is_complex())
    )


def _by_number(i: int) -> str:
    return f"gradient {i}"


def _coalesced(grad: Tensor, name: str) -> Tensor:
    if grad.layout != torch.sparse_coo:
        raise InputError(
            f"a gradient must be dense or sparse COO, got {grad.layout} for {name}. "
            "Use `.to_sparse_coo()`, or a dense gradient."
        )
    return grad.coalesce()


def _packed(original: Tensor, tensor: Tensor, shard: Shard | None) -> Tensor:
    if shard is not None:
        same = shard.like is original and shard.here is tensor
        return original if same else shard.wrapped(tensor)
    if original.is_sparse and original._values().data_ptr() != tensor.data_ptr():  # noqa: SLF001
        return torch.sparse_coo_tensor(
            original.indices(), tensor, original.shape, is_coalesced=True, check_invariants=False
        )
    return original if original.is_sparse else tensor


def _kept(before: Tensor | None, grad: Tensor) -> Tensor:
    """The memory that was there with the new numbers in it, or a copy of what is new."""
    if before is grad:
        return before
    if before is None or before.is_sparse or grad.is_sparse:
        return grad.clone()
    return before.copy_(grad.clone())  # which may be another view of the same memory
