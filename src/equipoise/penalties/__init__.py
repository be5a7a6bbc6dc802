"""Penalties: pure functions of tensors. No weight, no state, no waiting for the device.

|                         | |
|-------------------------|---|
| how large               | `l1`, `l2`, `elastic_net`, `output_magnitude` |
| how far apart           | `kl_divergence`, `js_divergence`, `sampled_kl`, `consistency` |
| how uncertain           | `entropy` |
| how far from orthogonal | `orthogonality` |
| how steep               | `gradient_penalty`, `interpolated_gradient_penalty` |
"""

from equipoise.penalties._consistency import consistency
from equipoise.penalties._divergence import js_divergence, kl_divergence
from equipoise.penalties._entropy import entropy
from equipoise.penalties._magnitude import elastic_net, l1, l2, output_magnitude
from equipoise.penalties._orthogonality import orthogonality
from equipoise.penalties._sampled import sampled_kl
from equipoise.penalties._smoothness import gradient_penalty, interpolated_gradient_penalty

__all__ = [
    "consistency",
    "elastic_net",
    "entropy",
    "gradient_penalty",
    "interpolated_gradient_penalty",
    "js_divergence",
    "kl_divergence",
    "l1",
    "l2",
    "orthogonality",
    "output_magnitude",
    "sampled_kl",
]
