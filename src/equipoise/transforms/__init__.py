"""Gradient transforms: composable, on any optimizer.

Examples:
    >>> import torch
    >>> from equipoise import transforms
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> shaping = transforms.chain(transforms.centralize(), transforms.clip_by_global_norm(1.0))
    >>> print(shaping)
    centralize() → clip_by_global_norm(1.0)
    >>> handle = transforms.attach(shaping, optimizer)
    >>> model(torch.full((1, 2), 100.0)).sum().backward()
    >>> optimizer.step()
    >>> sorted(handle.metrics())[-1], handle.metrics()["clip_by_global_norm/norm_clipped"]
    ('clip_by_global_norm/norm_clipped', 1.0)
"""

from equipoise.transforms import select
from equipoise.transforms._adaptive import adaptive_clip
from equipoise.transforms._attach import Handle, attach
from equipoise.transforms._centralize import centralize
from equipoise.transforms._clip_history import clip_by_norm_history, clip_by_zscore
from equipoise.transforms._clip_norm import clip_by_global_norm, clip_by_norm
from equipoise.transforms._clip_value import clip_by_percentile, clip_by_value
from equipoise.transforms._combine import masked, partition
from equipoise.transforms._decay import add_elastic_net_decay, add_l1_decay, add_l2_decay
from equipoise.transforms._noise import add_noise
from equipoise.transforms._nonfinite import skip_nonfinite
from equipoise.transforms._selection import Selection
from equipoise.transforms._snapshot import snapshot
from equipoise.transforms._transform import GradientTransform, chain, identity, recorded

__all__ = [
    "GradientTransform",
    "Handle",
    "Selection",
    "adaptive_clip",
    "add_elastic_net_decay",
    "add_l1_decay",
    "add_l2_decay",
    "add_noise",
    "attach",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_norm_history",
    "clip_by_percentile",
    "clip_by_value",
    "clip_by_zscore",
    "identity",
    "masked",
    "partition",
    "recorded",
    "select",
    "skip_nonfinite",
    "snapshot",
]
