"""Fast paths: how a pipeline has all its terms evaluated in one pass, and what it does where not.

| | |
|---|---|
| `_take` | the one question a pipeline asks: can a fast path take these terms, or some of them? |
| `_kernels` | the fused kernels, for tensors on CUDA |
| `_compiler` | the compiler, for a compiled pipeline: by `_formulas`, or by `_one_pass` |
| `_fusable` | which terms kernels and formulas know |
| `_ahead` | gradients that were computed with the values, put into the graph |

Whatever a fast path cannot serve is evaluated by its plain definition.
"""

__all__: list[str] = []
