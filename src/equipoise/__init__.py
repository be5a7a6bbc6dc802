"""Composable regularization for PyTorch.

Examples:
    >>> import torch, equipoise as eq
    >>> hidden = torch.tensor([[0.5, -2.0], [0.0, 1.0]], requires_grad=True)
    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> loss = 1e-3 * eq.l1(hidden) + 0.1 * eq.entropy(logits, from_logits=True)
    >>> loss.backward()
    >>> hidden.grad
    tensor([[ 0.0010, -0.0010],
            [ 0.0000,  0.0010]])

A penalty is a pure function of tensors: no weight, no state, no waiting for the device, with a
finite value and a finite gradient wherever the mathematics has one.
"""

import importlib
import types
import typing

from equipoise import schedules, tracking, transforms
from equipoise._errors import (
    EquipoiseError,
    GradientError,
    InputError,
    InputTypeError,
    NonFiniteError,
    OptionError,
    UnknownOptionError,
)
from equipoise._evaluation import Evaluation, TermResult
from equipoise._finite import check_finite
from equipoise._gradients import Conflict, Gradients, TermGradient
from equipoise._pipeline import Pipeline
from equipoise._term import Term
from equipoise.penalties import (
    consistency,
    elastic_net,
    entropy,
    gradient_penalty,
    interpolated_gradient_penalty,
    js_divergence,
    kl_divergence,
    l1,
    l2,
    orthogonality,
    output_magnitude,
    sampled_kl,
)
from equipoise.tracking import grad_norm

if typing.TYPE_CHECKING:
    from equipoise import balance, training

__version__ = "0.1.0"

__all__ = [
    "Conflict",
    "EquipoiseError",
    "Evaluation",
    "GradientError",
    "Gradients",
    "InputError",
    "InputTypeError",
    "NonFiniteError",
    "OptionError",
    "Pipeline",
    "Term",
    "TermGradient",
    "TermResult",
    "UnknownOptionError",
    "balance",
    "check_finite",
    "consistency",
    "elastic_net",
    "entropy",
    "grad_norm",
    "gradient_penalty",
    "interpolated_gradient_penalty",
    "js_divergence",
    "kl_divergence",
    "l1",
    "l2",
    "orthogonality",
    "output_magnitude",
    "sampled_kl",
    "schedules",
    "tracking",
    "training",
    "transforms",
]


def __getattr__(name: str) -> types.ModuleType:
    # Loaded when they are asked for: not every use of a penalty trains.
    if name in ("balance", "training"):
        return importlib.import_module(f"equipoise.{name}")
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
