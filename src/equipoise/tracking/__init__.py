"""Which term moves the model: when to look, how far down, and what the last steps show.

|                   | |
|-------------------|---|
| when to look      | `every`, `always`, `on_spike`: for ``track=`` of a pipeline's call |
| at one function   | `grad_norm` |
| at the parameters | `parameter_gradients` |
| over many steps   | `History` |
"""

from equipoise.tracking._findings import Finding
from equipoise.tracking._grad_norm import grad_norm
from equipoise.tracking._history import History
from equipoise.tracking._parameters import parameter_gradients
from equipoise.tracking._when import always, every, on_spike

__all__ = [
    "Finding",
    "History",
    "always",
    "every",
    "grad_norm",
    "on_spike",
    "parameter_gradients",
]
