"""What equipoise computes, defined once: plain Python over any scalar, each with its derivative.

The runtime is fast and is checked against this; the two share no code, and this imports neither
torch nor the rest of equipoise. A definition takes a context of scalars first:

| context      | its scalars | for |
|--------------|-------------|-----|
| `Float`      | Python's floats | reading along |
| `Rational`   | fractions | exact values, where there is no root or exponential |
| `Ball`       | arb balls (python-flint) | real numbers with rigorous error bounds |
| `Rounding`   | balls of all admissible float results | bounds for the runtime |
| `Rounded`    | numpy and ml_dtypes | what a left fold in one format gives |
| `Symbols`    | z3 | statements about all numbers |

``python -m equipoise.spec`` prints what is claimed of these definitions, how sure each claim is,
and checks it again.
"""

from equipoise.spec.agreement import consistency, consistency_grad
from equipoise.spec.balls import Ball, Enclosure, Rounding, decided
from equipoise.spec.clipping import (
    adaptive_clip,
    adaptive_clip_grad,
    clip_by_global_norm,
    clip_by_global_norm_grad,
    clip_by_norm,
    clip_by_norm_grad,
    clip_by_value,
    clip_by_value_grad,
)
from equipoise.spec.decay import (
    COMBINATORS,
    add_elastic_net_decay,
    add_elastic_net_decay_grad,
    add_l1_decay,
    add_l1_decay_grad,
    add_l2_decay,
    add_l2_decay_grad,
    add_noise,
    add_noise_grad,
    centralize,
    centralize_grad,
    skip_nonfinite,
    skip_nonfinite_grad,
)
from equipoise.spec.divergence import kl_divergence, kl_divergence_grad
from equipoise.spec.formats import Rounded
from equipoise.spec.magnitude import (
    elastic_net,
    elastic_net_grad,
    l1,
    l1_grad,
    l2,
    l2_grad,
    output_magnitude,
    output_magnitude_grad,
)
from equipoise.spec.mixture import js_divergence, js_divergence_grad
from equipoise.spec.percentile import (
    clip_by_norm_history,
    clip_by_norm_history_grad,
    clip_by_percentile,
    clip_by_percentile_grad,
    clip_by_zscore,
    clip_by_zscore_grad,
)
from equipoise.spec.sampled import sampled_kl, sampled_kl_grad
from equipoise.spec.scalars import (
    Float,
    InfiniteError,
    Rational,
    Scalars,
    UndecidedError,
    UnsupportedError,
)
from equipoise.spec.smoothness import (
    gradient_penalty,
    gradient_penalty_grad,
    interpolated_gradient_penalty,
    interpolated_gradient_penalty_grad,
)
from equipoise.spec.structure import orthogonality, orthogonality_grad
from equipoise.spec.symbols import Symbols
from equipoise.spec.uncertainty import entropy, entropy_grad

__all__ = [
    "Ball",
    "COMBINATORS",
    "Enclosure",
    "Float",
    "InfiniteError",
    "Rational",
    "Rounded",
    "Rounding",
    "Scalars",
    "Symbols",
    "UndecidedError",
    "UnsupportedError",
    "adaptive_clip",
    "adaptive_clip_grad",
    "add_elastic_net_decay",
    "add_elastic_net_decay_grad",
    "add_l1_decay",
    "add_l1_decay_grad",
    "add_l2_decay",
    "add_l2_decay_grad",
    "add_noise",
    "add_noise_grad",
    "centralize",
    "centralize_grad",
    "clip_by_global_norm",
    "clip_by_global_norm_grad",
    "clip_by_norm",
    "clip_by_norm_grad",
    "clip_by_norm_history",
    "clip_by_norm_history_grad",
    "clip_by_percentile",
    "clip_by_percentile_grad",
    "clip_by_value",
    "clip_by_value_grad",
    "clip_by_zscore",
    "clip_by_zscore_grad",
    "consistency",
    "consistency_grad",
    "decided",
    "elastic_net",
    "elastic_net_grad",
    "entropy",
    "entropy_grad",
    "gradient_penalty",
    "gradient_penalty_grad",
    "interpolated_gradient_penalty",
    "interpolated_gradient_penalty_grad",
    "js_divergence",
    "js_divergence_grad",
    "kl_divergence",
    "kl_divergence_grad",
    "l1",
    "l1_grad",
    "l2",
    "l2_grad",
    "orthogonality",
    "orthogonality_grad",
    "output_magnitude",
    "output_magnitude_grad",
    "sampled_kl",
    "sampled_kl_grad",
    "skip_nonfinite",
    "skip_nonfinite_grad",
]
