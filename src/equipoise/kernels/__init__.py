"""Fused kernels behind the definitions: faster on CUDA, the same numbers, and nothing else.

Imported only when a pipeline meets tensors on CUDA. Without this folder the library does the same,
slower.
"""

__all__: list[str] = []
