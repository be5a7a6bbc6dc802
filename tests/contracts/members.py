"""The table that every penalty joins: one entry for each option that changes the mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import equipoise as eq

Draw = Callable[[tuple[int, ...]], Tensor]


def real(shape: tuple[int, ...]) -> Tensor:
    """Any numbers, none of them at a kink."""
    return torch.randn(shape, dtype=torch.float64)


def log_probability(shape: tuple[int, ...]) -> Tensor:
    """Logarithms of distributions over the last dimension."""
    return real(shape).log_softmax(-1)


def negative(shape: tuple[int, ...]) -> Tensor:
    """Log-probabilities of single tokens."""
    return -real(shape).abs()


@dataclass(frozen=True)
class Member:
    """A penalty with options, and what it may be called on."""

    penalty: str
    label: str
    call: Callable[..., Tensor]
    draw: Draw
    shapes: tuple[tuple[int, ...], ...]
    empty: float = 0.0
    """The value of an empty input."""
    true_gradient: bool = True
    """Whether autograd's gradient is that of the value, unless an option says otherwise."""
    elementwise: bool = True
    """Whether a 0-d tensor is an input like any other."""
    foreign: bool = False
    """Whether the value is computed by the user's function, in the precision of the input."""

    @property
    def id(self) -> str:
        return f"{self.penalty}-{self.label}" if self.label else self.penalty

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """The same random inputs at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return tuple(self.draw(shape).to(dtype).requires_grad_() for shape in self.shapes)


def _options(options: dict[str, Any]) -> str:
    return "-".join(
        f"{name}={'tensor' if isinstance(value, Tensor) else value}"
        for name, value in options.items()
    )


def _member(
    penalty: str,
    draw: Draw,
    *shapes: tuple[int, ...],
    like: dict[str, Any] | None = None,
    **options: Any,
) -> Member:
    function = getattr(eq, penalty)
    return Member(
        penalty,
        _options(options),
        lambda *tensors: function(*tensors, **options),
        draw,
        shapes,
        **(like or {}),
    )


MATRIX = (3, 4)
SOME_ROWS = torch.tensor([True, False, True])
ROW_WEIGHTS = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
SOME_ENTRIES = torch.tensor(
    [[True, False, True, True], [True, True, False, True], [False, True, True, True]]
)


def _elementwise() -> list[Member]:
    shared = [
        {},
        {"reduction": "mean"},
        {"reduction": "none"},
        {"mask": SOME_ENTRIES},
        {"mask": ROW_WEIGHTS.unsqueeze(-1), "reduction": "mean"},
        {"scale": 0.25},
    ]
    own: dict[str, list[dict[str, Any]]] = {
        "l1": [],
        "l2": [
            {"center": "mean"},
            {"center": "mean", "mask": SOME_ENTRIES},
            {"center": 0.5},
            {"center": torch.linspace(-1, 1, 4, dtype=torch.float64)},
            {"clip": 0.7},
            {"clip": 0.7, "clip_mode": "huber"},
            {"center": "mean", "clip": 0.7},
        ],
        "elastic_net": [{"l1_ratio": 0.0}, {"l1_ratio": 1.0}, {"l1_ratio": 0.3}],
    }
    return [
        _member(name, real, MATRIX, **options)
        for name, extra in own.items()
        for options in [*shared, *extra]
    ]


def _lists() -> list[Member]:
    def on_list(name: str, **options: Any) -> Member:
        function = getattr(eq, name)
        label = "-".join(["list", _options(options)])
        return Member(name, label, lambda *t: function(t, **options), real, (MATRIX, (2,)))

    return [on_list("l1"), on_list("l2", center="mean", reduction="mean"), on_list("elastic_net")]


BY_ROW = {"elementwise": False}


def _magnitudes() -> list[Member]:
    # A norm over nothing is that of the zero vector: the distance from the target remains.
    return [
        _member("output_magnitude", real, MATRIX, like={"empty": 4.0}, target=2.0),
        _member("output_magnitude", real, MATRIX, like={"empty": 1.0}, norm="l2"),
        _member("output_magnitude", real, MATRIX, like=BY_ROW, dim=-1),
        _member("output_magnitude", real, (2, 3, 4), like={**BY_ROW, "empty": 1.0}, dim=(0, 2)),
    ]


ROWS: list[dict[str, Any]] = [
    {},
    {"from_logits": True},
    {"mask": SOME_ROWS},
    {"mask": ROW_WEIGHTS, "from_logits": True},
    {"support": SOME_ENTRIES},
    {"support": SOME_ENTRIES, "mask": SOME_ROWS, "from_logits": True},
    {"chunk": 2},
    {"chunk": 2, "from_logits": True, "support": SOME_ENTRIES, "mask": SOME_ROWS},
    {"reduction": "none"},
    {"reduction": "sum"},
    {"denominator": 5.0},
]


def _distributions() -> list[Member]:
    own: dict[str, list[dict[str, Any]]] = {
        "kl_divergence": [
            {"direction": "reverse"},
            {"direction": "symmetric"},
            {"direction": "symmetric", "from_logits": True, "floor": -1.2},
            {"direction": "reverse", "from_logits": True},
            {"temperature": 2.0},
            {"temperature": 0.5, "temperature_squared": True, "from_logits": True},
            {"floor": -1.2},
            {"floor": -1.2, "from_logits": True},
        ],
        "js_divergence": [
            {"beta": 0.2},
            {"base": 2},
            {"beta": 0.3, "normalized": True},
            {"beta": 0.0, "normalized": True},
            {"beta": 1.0, "normalized": True, "from_logits": True},
        ],
        "entropy": [
            {"mode": "bonus"},
            {"normalize": True},
            {"normalize": True, "support": SOME_ENTRIES, "from_logits": True},
            {"temperature": 2.0},
        ],
    }
    return [
        _member(
            name,
            log_probability,
            *[MATRIX] * (1 if name == "entropy" else 2),
            like=BY_ROW,
            **options,
        )
        for name, extra in own.items()
        for options in [*ROWS, *extra]
    ]


def _samples() -> list[Member]:
    return [
        *(_member("sampled_kl", negative, (5,), (5,), estimator=k) for k in ("k1", "k2", "k3")),
        _member("sampled_kl", negative, (3,), (3,), mask=SOME_ROWS, reduction="sum"),
        _member("sampled_kl", negative, (5,), (5,), like={"true_gradient": False}, gradient="k2"),
    ]


def _pairs() -> list[Member]:
    by_entry = [
        _member("consistency", real, MATRIX, MATRIX, metric=metric, **options)
        for metric in ("mse", "l1")
        for options in ({}, {"mask": SOME_ENTRIES}, {"reduction": "none"})
    ]
    by_row = [
        _member("consistency", log_probability, MATRIX, MATRIX, like=BY_ROW, metric=m, **options)
        for m in ("cosine", "kl")
        for options in ({}, {"mask": SOME_ROWS})
    ]
    # Four columns of no entries are four zero vectors: each has cosine term 1, and divergence 0.
    by_column = [
        _member(
            "consistency",
            log_probability,
            MATRIX,
            MATRIX,
            metric=m,
            dim=0,
            like={**BY_ROW, "empty": empty},
        )
        for m, empty in (("cosine", 1.0), ("kl", 0.0))
    ]
    stopped = _member(
        "consistency", real, MATRIX, MATRIX, like={"true_gradient": False}, stop_gradient="first"
    )
    return [*by_entry, *by_row, *by_column, stopped]


def _matrices() -> list[Member]:
    modes = ("soft", "hard", "spectral", "srip")
    return [
        *(_member("orthogonality", real, (3, 4), like=BY_ROW, mode=m) for m in modes),
        *(
            _member("orthogonality", real, (3, 4), like=BY_ROW, mode=m, normalize=False)
            for m in modes
        ),
        *(
            _member("orthogonality", real, (5, 2), like=BY_ROW, mode=m, reduction="mean")
            for m in modes
        ),
        *(
            _member("orthogonality", real, (2, 3, 4), like=BY_ROW, axis=axis)
            for axis in ("sequence", "vocabulary", 0)
        ),
        _member("orthogonality", real, (2, 3, 4), like=BY_ROW, per_sample=True),
        _member("orthogonality", real, (2, 5, 2), like=BY_ROW, per_sample=True, mode="spectral"),
    ]


def critic(x: Tensor) -> Tensor:
    """A smooth function of a sample, one value each, in any precision."""
    return (x.tanh() * x).flatten(1).sum(-1) if x.dim() > 1 else x.tanh() * x


def _gradients() -> list[Member]:
    variants: list[dict[str, Any]] = [
        {},
        {"target": 0.3, "sided": "one"},
        {"per": "batch"},
        {"norm": "l1"},
        {"norm": "linf"},
        {"squared": True},
        {"reduction": "none"},
    ]
    like = {"foreign": True}

    def one(**options: Any) -> Member:
        return Member(
            "gradient_penalty",
            _options(options),
            lambda x: eq.gradient_penalty(critic, x, **options),
            real,
            (MATRIX,),
            # One norm over an empty batch is the norm of the zero vector.
            empty=1.0 if options.get("per") == "batch" else 0.0,
            **like,
        )

    def two(**options: Any) -> Member:
        return Member(
            "interpolated_gradient_penalty",
            _options(options),
            lambda a, b: eq.interpolated_gradient_penalty(critic, a, b, **options),
            real,
            (MATRIX, MATRIX),
            **like,
        )

    return [*(one(**v) for v in variants), two(epsilon=0.25), two(epsilon=0.25, squared=True)]


MEMBERS = [
    *_elementwise(),
    *_lists(),
    *_magnitudes(),
    *_distributions(),
    *_samples(),
    *_pairs(),
    *_matrices(),
    *_gradients(),
]


def first_of_each() -> list[Member]:
    """One member for each penalty, where trying every option would take too long."""
    return list({member.penalty: member for member in reversed(MEMBERS)}.values())
