"""The table that every transform joins: one entry for each option that changes the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise import schedules, transforms
from equipoise.transforms import GradientTransform

Gradient = Tensor | None
Make = Callable[[], GradientTransform]


@dataclass(frozen=True)
class Member:
    """A transform with options, and what it may be asked."""

    factory: str
    label: str
    make: Make
    breaks: str = ""
    """Why it is no single graph for the compiler; empty where it is one."""
    waits: str = ""
    """Why it looks at values even where that waits for the device; empty where it does not."""
    sparse: bool = True
    """Whether a sparse gradient stays sparse under it; else it is refused."""
    attached: bool = False
    """Whether it needs an optimizer."""

    @property
    def id(self) -> str:
        return f"{self.factory}-{self.label}" if self.label else self.factory


def is_matrix(param: Tensor) -> bool:
    """Whether a parameter has rows."""
    return param.dim() > 1


def kind(param: Tensor) -> str:
    """The label of a parameter for `partition`."""
    return "matrix" if is_matrix(param) else "other"


def flip(
    grads: Sequence[Gradient], state: dict[str, Tensor], _params: Sequence[Tensor]
) -> tuple[list[Gradient], dict[str, Tensor]]:
    """A transform such as a user writes: the other direction, and a count."""
    flipped = [None if grad is None else -grad for grad in grads]
    return flipped, {"calls": state["calls"] + 1}


def flipping() -> GradientTransform:
    """The pair of functions around `flip`."""
    return GradientTransform(
        lambda _params: {"calls": torch.zeros((), dtype=torch.int64)}, flip, "flip()"
    )


def peak(grads: Sequence[Gradient]) -> Tensor:
    """The largest entry among the gradients."""
    peaks = [g.abs().max() for g in grads if g is not None and g.numel()]
    return torch.stack(peaks).max() if peaks else torch.zeros(())


HOST = "its number at this step is asked of a schedule, on the host"
POLICY = "its policy is to raise"


def _clips() -> list[Member]:
    def each(limit: float, policy: str) -> list[Member]:
        breaks = POLICY if policy == "raise" else ""
        return [
            Member(
                "clip_by_norm",
                policy,
                lambda: transforms.clip_by_norm(limit, nonfinite=policy),  # type: ignore[arg-type]
                breaks,
                breaks,
            ),
            Member(
                "clip_by_global_norm",
                policy,
                lambda: transforms.clip_by_global_norm(limit, nonfinite=policy),  # type: ignore[arg-type]
                breaks,
                breaks,
            ),
        ]

    fading = schedules.linear(2.0, 0.25, 4)
    return [
        *(m for policy in ("propagate", "zero", "skip", "raise") for m in each(0.8, policy)),
        Member(
            "clip_by_global_norm",
            "scheduled",
            lambda: transforms.clip_by_global_norm(fading),
            breaks=HOST,
        ),
        Member(
            "clip_by_norm_history", "median", lambda: transforms.clip_by_norm_history(50, window=3)
        ),
        Member(
            "clip_by_norm_history",
            "fraction",
            lambda: transforms.clip_by_norm_history(12.5, window=3),
        ),
        Member(
            "clip_by_norm_history",
            "scheduled",
            lambda: transforms.clip_by_norm_history(schedules.linear(80, 20, 3), window=3),
            breaks=HOST,
        ),
        Member(
            "clip_by_zscore",
            "scheduled",
            lambda: transforms.clip_by_zscore(schedules.linear(0.8, 0.2, 3), window=4, warmup=1),
            breaks=HOST,
        ),
        Member("clip_by_zscore", "", lambda: transforms.clip_by_zscore(0.5, window=4, warmup=1)),
        Member("adaptive_clip", "unit", lambda: transforms.adaptive_clip(0.05), sparse=False),
        Member(
            "adaptive_clip",
            "tensor",
            lambda: transforms.adaptive_clip(0.05, per="tensor"),
            sparse=False,
        ),
    ]


def _values() -> list[Member]:
    return [
        Member("clip_by_value", "", lambda: transforms.clip_by_value(-0.5, 0.7)),
        Member(
            "clip_by_value",
            "scheduled",
            lambda: transforms.clip_by_value(-0.5, schedules.linear(1.0, 0.0, 3)),
            breaks=HOST,
        ),
        Member("clip_by_percentile", "global", lambda: transforms.clip_by_percentile(60)),
        Member(
            "clip_by_percentile",
            "tensor",
            lambda: transforms.clip_by_percentile(62.5, scope="tensor"),
        ),
        Member("centralize", "", transforms.centralize),
        Member("centralize", "dims", lambda: transforms.centralize(0)),
    ]


def _decays() -> list[Member]:
    def both(factory: str, make: Callable[..., GradientTransform]) -> list[Member]:
        return [
            Member(factory, "", make, sparse=False),
            Member(factory, "decoupled", lambda: make(decoupled=True), attached=True),
        ]

    return [
        *both("add_l2_decay", transforms.add_l2_decay),
        *both("add_l1_decay", transforms.add_l1_decay),
        *both("add_elastic_net_decay", transforms.add_elastic_net_decay),
        Member(
            "add_elastic_net_decay",
            "scheduled",
            lambda: transforms.add_elastic_net_decay(0.1, schedules.linear(0.0, 1.0, 3)),
            breaks=HOST,
            sparse=False,
        ),
        Member(
            "add_noise",
            "",
            lambda: transforms.add_noise(0.04, seed=3),
            breaks="its generator is seeded on the host",
            sparse=False,
        ),
    ]


def _others() -> list[Member]:
    return [
        Member("identity", "", transforms.identity),
        Member("skip_nonfinite", "", transforms.skip_nonfinite),
        Member(
            "skip_nonfinite",
            "limit",
            lambda: transforms.skip_nonfinite(3),
            breaks="its limit is to raise",
            waits="its limit is to raise",
        ),
        Member("snapshot", "norm", lambda: transforms.snapshot("length")),
        Member("snapshot", "peak", lambda: transforms.snapshot("peak", peak), sparse=False),
        Member(
            "masked",
            "",
            lambda: transforms.masked(transforms.clip_by_global_norm(0.8), is_matrix),
        ),
        Member("masked", "user", lambda: transforms.masked(flipping(), is_matrix)),
        Member(
            "partition",
            "",
            lambda: transforms.partition(
                {"matrix": transforms.clip_by_norm(0.5), "other": transforms.clip_by_value(-1, 1)},
                kind,
            ),
        ),
        Member("chain", "none", transforms.chain),
        Member(
            "chain",
            "four",
            lambda: transforms.chain(
                transforms.centralize(),
                transforms.clip_by_norm(2.0),
                transforms.snapshot("between"),
                transforms.clip_by_global_norm(1.0),
            ),
        ),
        Member(
            "chain",
            "user",
            lambda: transforms.chain(
                transforms.clip_by_value(-0.5, 0.5), flipping(), transforms.clip_by_norm(0.4)
            ),
        ),
    ]


MEMBERS = [*_clips(), *_values(), *_decays(), *_others()]
FUNCTIONAL = [member for member in MEMBERS if not member.attached]

SHAPES: tuple[tuple[int, ...] | None, ...] = ((3, 4), (4,), None, (), (2, 3, 2, 2), (0, 3), (5, 1))
"""Shapes of parameters; the one without has no gradient."""


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)


def parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same parameters at every call."""
    generator = torch.Generator().manual_seed(11)
    return [_drawn((2,) if s is None else s, dtype, generator) for s in SHAPES]


def gradients(step: int = 0, dtype: torch.dtype = torch.float64) -> list[Gradient]:
    """The gradients of a step, the same at every call."""
    generator = torch.Generator().manual_seed(100 + step)
    return [None if shape is None else _drawn(shape, dtype, generator) for shape in SHAPES]
