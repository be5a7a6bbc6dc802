"""Fused paths behind the definitions: faster, the same numbers, and nothing else.

Triton's kernels for tensors on CUDA, and formulas for the compiler everywhere. Imported only when a
pipeline meets a tensor on CUDA, or is compiled. Without this folder the library does the same,
slower.
"""

__all__: list[str] = []
