"""Pipelines in the trainers that people use, one module a host library; import the one you need.

|                | the host | the extra |
|----------------|----------|-----------|
| `lightning`    | Lightning's ``Trainer``          | ``equipoise[lightning]``    |
| `transformers` | Transformers' ``Trainer``        | ``equipoise[transformers]`` |
| `accelerate`   | Accelerate, in a loop of your own | ``equipoise[accelerate]``   |

In each of them a pipeline becomes an object of the host that is called as the pipeline is. It knows
the step, logs every figure where the host logs, and lets gradients pass through a transform.
"""

__all__: list[str] = []
