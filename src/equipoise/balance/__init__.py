"""Weights from gradient reports: how much of the gradient each term shall have.

| | holds |
|---|---|
| `GradientShare` | each named term's part of the gradient |
| `GradientRatio` | each named term's gradient as a multiple of the base's (as VQGAN's does) |
| `GradNorm` | one rate of training for all terms |
| `from_gram` | any rule from the gradients' inner products to weights, those of TorchJD too |
"""

from equipoise.balance._balancer import Balancer
from equipoise.balance._grad_norm import GradNorm
from equipoise.balance._gram import GramBalancer, from_gram
from equipoise.balance._share import GradientRatio, GradientShare

__all__ = [
    "Balancer",
    "GradNorm",
    "GradientRatio",
    "GradientShare",
    "GramBalancer",
    "from_gram",
]
