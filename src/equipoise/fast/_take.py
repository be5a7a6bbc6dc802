"""The one question of a pipeline: can a fast path take these terms, or some of them?

Two are asked: the fused kernels, of tensors on CUDA, and the compiler, of a compiled pipeline.
Neither has to be there. What none takes is evaluated by its plain definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise._probes import tensors_in
from equipoise.fast._ahead import Ahead, Joined, handed_over, join, read

if TYPE_CHECKING:
    from equipoise._recorder import Level, Recorder
    from equipoise._run import Call
    from equipoise.fast._compiler import Compiler


KERNELS_ON = {"cuda"}
"""The devices whose tensors the kernels are asked about; empty to do without."""


def take(
    calls: Mapping[str, Call],
    inputs: Mapping[str, Any],
    recorder: Recorder,
    *,
    base: Tensor | None,
    compiler: Compiler | None,
) -> Joined | None:
    """The terms that a fast path has evaluated, in the graph; None where none could."""
    kernels = any(x.device.type in KERNELS_ON for x in tensors_in(dict(inputs)))
    if compiler is None and not kernels:
        return None
    if recorder.in_graph:
        handed_over("a compiled function or a functional transform is at work")
        return None
    if recorder.level is not None and base is not None and base.requires_grad:
        handed_over("the base is tracked and came as a tensor; give it as a function")
        return None
    keys = {key for call in calls.values() for key in call.keys}
    given = read({key: x for key, x in inputs.items() if key in keys})
    ahead = _by_kernels(calls, given, recorder.level) if kernels else None
    if compiler is not None and (ahead is None or len(ahead.values) < len(calls)):
        ahead = compiler.take(calls, given, recorder.level) or ahead
    if ahead is None:
        return None
    mine = {name: calls[name] for name in ahead.values}
    used = {key for call in mine.values() for key in call.keys}
    return join(ahead, mine, {key: x for key, x in given.items() if key in used}, recorder)


def _by_kernels(
    calls: Mapping[str, Call], inputs: Mapping[str, Any], level: Level | None
) -> Ahead | None:
    try:
        from equipoise.fast._kernels import ask  # noqa: PLC0415 -- only now, and only if there are any
    except ImportError as error:
        handed_over(f"there are no kernels: {error}")
        return None
    return ask(calls, inputs, level)
