"""Where people train: activations, parameters, losses, and one honest step.

|              | |
|--------------|---|
| `capture`    | named activations of a model, as inputs of a pipeline |
| `parameters` | parameters by pattern, type or selection, for penalties on weights |
| `wrap_loss`  | a criterion with a pipeline's terms added, for code that expects a criterion |
| `TrainStep`  | train mode, autocast, scaler, accumulation, transforms, tracking: one call |
| `fit`        | epochs of it, with progress, metrics, checkpoints and resume |
"""

from equipoise.training._capture import Captures, capture
from equipoise.training._fit import fit
from equipoise.training._loss import WrappedLoss, wrap_loss
from equipoise.training._parameters import NamedParameters, parameters
from equipoise.training._step import TrainStep

__all__ = [
    "Captures",
    "NamedParameters",
    "TrainStep",
    "WrappedLoss",
    "capture",
    "fit",
    "parameters",
    "wrap_loss",
]
