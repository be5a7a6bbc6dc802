"""Deliberate faults in formulas of the runtime, and the agreement that finds each.

``python -m tests.spec.mutants`` puts in one after the other and says whether it is found. Nothing
is written to disk: a function gets the code that its changed source compiles to, and its own back.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from tests.spec import test_one_pass as one_pass
from tests.spec import test_transforms as t
from tests.spec.cases import cases, draw, kinds
from tests.spec.oracle import assert_gradient_agrees, assert_value_agrees
from tests.spec.test_smoothness import (
    test_gradient_penalty,
    test_interpolated_gradient_penalty,
)

CASES = {case.id: case for case in cases()}


@dataclass(frozen=True)
class Mutant:
    """A fault: in which function, which text becomes which, and what has to notice."""

    what: str
    function: str
    old: str
    new: str
    agreement: Callable[[], None]

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """The runtime with this fault."""
        module, _, name = self.function.rpartition(":")
        function = inspect.unwrap(attrgetter(name)(import_module(f"equipoise.{module}")))
        before = function.__code__
        function.__code__ = self._code(function)
        try:
            yield
        finally:
            function.__code__ = before

    def _code(self, function: FunctionType) -> Any:
        source = textwrap.dedent(inspect.getsource(function))
        source = source[source.index("def ") :]
        if source.count(self.old) != 1:
            raise LookupError(f"{self.function} has {self.old!r} {source.count(self.old)} times")
        namespace = dict(function.__globals__)
        changed = source.replace(self.old, self.new)
        flags = function.__code__.co_flags
        exec(compile(changed, self.function, "exec", flags & 0x1000000, True), namespace)
        return namespace[function.__name__].__code__


def agrees(name: str) -> Callable[[], None]:
    """The agreement of one case, in float64, on all its kinds of input."""

    def run() -> None:
        for kind in kinds(CASES[name]):
            tensors = draw(CASES[name], kind, torch.float64)
            assert_value_agrees(CASES[name], tensors)
            assert_gradient_agrees(CASES[name], tensors)

    return run


def history() -> None:
    """Clipping by a history, in float64."""
    t.test_clip_by_norm_history(10, torch.float64)


def gradient_penalty(**options: Any) -> Callable[[], None]:
    """A gradient penalty, in float64."""
    return lambda: test_gradient_penalty(options, torch.float64)


def by_kernels(name: str) -> Callable[[], None]:
    """What the fused kernels make of a case, in float32, whichever input moves."""
    (case,) = (case for case in one_pass.FUSED if case.id == name)

    def run() -> None:
        tensors = draw(case, "plain", torch.float32)
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            one_pass.ask_the_kernels(patch)
            for moving in range(case.inputs):
                one_pass.assert_pipeline_agrees(one_pass.pipeline_of(case), case, tensors, [moving])

    return run


def all_terms_compiled() -> None:
    """Several terms from one compiled function, in float64: each differentiated there."""
    with pytest.MonkeyPatch.context() as patch:
        one_pass.compile_quickly(patch)
        patch.setattr("equipoise.fast._formulas.Formulas.of", lambda *_: None)
        one_pass.assert_all_terms_agree(one_pass.pipeline_of_terms().compiled(), torch.float64)


def all_terms_by_formulas() -> None:
    """The same, their gradients by formulas."""
    with pytest.MonkeyPatch.context() as patch:
        one_pass.compile_quickly(patch)
        one_pass.assert_all_terms_agree(one_pass.pipeline_of_terms().compiled(), torch.float64)


def in_float64(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test of transforms, in float64."""
    return lambda: test(*arguments, dtype=torch.float64)


MUTANTS = [
    Mutant(
        "a factor of 1 + 2⁻⁵⁰",
        "penalties._magnitude:l1",
        "return scale *",
        "return (1 + 2.0**-50) * scale *",
        agrees("l1-reduction=none"),
    ),
    Mutant(
        "float32 in between",
        "_numerics:full_precision",
        "return x if",
        "return x.float().double() if",
        agrees("l2"),
    ),
    Mutant(
        "a sign", "penalties._magnitude:l2", "t - middle", "t + middle", agrees("l2-center=0.3")
    ),
    Mutant(
        "a mean over one too few",
        "_numerics:divide",
        "total / (by or 1)",
        "total / ((by - 1) or 1)",
        agrees("l1-reduction=mean"),
    ),
    Mutant(
        "a slope without its factor",
        "penalties._magnitude:_square",
        "(2 * y - held)",
        "(2 * y.detach() - held)",
        agrees("l2-clip=0.7-clip_mode=huber"),
    ),
    Mutant(
        "a half that belongs to others",
        "penalties._magnitude:_mixed",
        "(1 - ratio) * x.square()",
        "(1 - ratio) * 0.5 * x.square()",
        agrees("elastic_net-l1_ratio=0.3"),
    ),
    Mutant(
        "an epsilon under the root",
        "_numerics:vector_norm",
        "squares).sqrt()",
        "squares + 1e-12).sqrt()",
        agrees("output_magnitude-dim=-1"),
    ),
    Mutant(
        "a divergence turned round",
        "_logspace:divergence",
        "_finite(log_p - held",
        "_finite(held - log_p",
        agrees("kl_divergence"),
    ),
    Mutant(
        "a temperature turned over",
        "_logspace:log_probabilities",
        "x / temperature if",
        "x * temperature if",
        agrees("kl_divergence-temperature=2.7"),
    ),
    Mutant(
        "the other share of the mixture",
        "_logspace:log_mixture",
        "math.log1p(-beta)",
        "math.log(beta)",
        agrees("js_divergence-beta=0.2"),
    ),
    Mutant(
        "the sign of the entropy",
        "_logspace:entropy_of",
        "(-log_p.exp()",
        "(log_p.exp()",
        agrees("entropy"),
    ),
    Mutant(
        "a sum over rows for one over columns",
        "_logspace:symmetric_divergence",
        ".sum(-1)",
        ".mean(-1)",
        agrees("consistency-metric=kl"),
    ),
    Mutant(
        "the ratio turned over",
        "penalties._sampled:_estimate",
        "torch.expm1(log_ratio)",
        "torch.expm1(-log_ratio)",
        agrees("sampled_kl-estimator=k3"),
    ),
    Mutant(
        "a distance without its half",
        "penalties._consistency:_cosine_distance",
        "half = 0.5 *",
        "half = 1.0 *",
        agrees("consistency-metric=cosine"),
    ),
    Mutant(
        "the diagonal counted",
        "penalties._orthogonality:_off_diagonal",
        ".triu(1)",
        ".triu(0)",
        agrees("orthogonality-mode=soft-normalize=False"),
    ),
    Mutant(
        "a norm of sizes for one of squares",
        "penalties._smoothness:_lengths",
        "else vector_norm(rows, -1)",
        "else rows.abs().sum(-1)",
        gradient_penalty(),
    ),
    Mutant(
        "an epsilon in the clip",
        "transforms._norms:_factor",
        ".sqrt(), 1.0)",
        ".sqrt().add(1e-6), 1.0)",
        in_float64(t.test_clip_by_global_norm, 1.0),
    ),
    Mutant(
        "a missing root",
        "transforms._norms:_factor",
        ".sqrt(), 1.0)",
        ", 1.0)",
        in_float64(t.test_clip_by_norm, 1.0),
    ),
    Mutant(
        "a limit with its sign",
        "transforms._norms:Norms._over",
        "abs(limit)",
        "limit",
        in_float64(t.test_clip_by_global_norm, -2.0),
    ),
    Mutant(
        "an index rounded up",
        "transforms._clip_value:_index",
        "// (of * 100)",
        "// (of * 100) + 1",
        in_float64(t.test_clip_by_percentile_is_exact, 29),
    ),
    Mutant(
        "the sign of the decay",
        "transforms._decay:_add",
        "alpha=rate * (1 - l1_ratio)",
        "alpha=-rate * (1 - l1_ratio)",
        in_float64(t.test_decay, *t.DECAYS[0]),
    ),
    Mutant(
        "a mean over all dimensions",
        "transforms._centralize:_dims",
        "range(1, x.dim())",
        "range(0, x.dim())",
        in_float64(t.test_centralize),
    ),
    Mutant(
        "a limit without its least",
        "transforms._adaptive:_factors",
        "w.clamp(min=least)",
        "w",
        in_float64(t.test_adaptive_clip, "unit"),
    ),
    Mutant(
        "a window that forgets",
        "transforms._clip_history:_entered",
        "torch.where(here & finite,",
        "torch.where(finite,",
        history,
    ),
    Mutant(
        "single precision near the limit",
        "transforms._norms:_near",
        "<= BAND",
        "< -BAND",
        lambda: t.test_a_hair_above_the_limit_is_above("clip_by_global_norm", torch.float32),
    ),
    Mutant(
        "the other end of the line between",
        "penalties._smoothness:interpolated_gradient_penalty",
        "torch.lerp(reference.to(x.dtype), x,",
        "torch.lerp(x, reference.to(x.dtype),",
        lambda: test_interpolated_gradient_penalty({}, torch.float64),
    ),
    Mutant(
        "a gradient taken from the sum of the others",
        "fast._one_pass:_together",
        "before + gradient",
        "before - gradient",
        all_terms_compiled,
    ),
    Mutant(
        "a gradient without its weight",
        "fast._one_pass:_pulled",
        "pull(weight.to(value.dtype).expand(()))",
        "pull(torch.ones_like(value))",
        all_terms_compiled,
    ),
    Mutant(
        "an entropy left out of its gradient",
        "kernels._formulas:_entropy",
        "u + value.unsqueeze(-1)",
        "u",
        all_terms_by_formulas,
    ),
    Mutant(
        "the divergence of all entries, not of its own",
        "kernels._formulas:_divergence",
        "slope = p * torch.where(infinite, 0.0, q).sum(-1, keepdim=True) - q",
        "slope = p - 0.999999 * q",
        all_terms_by_formulas,
    ),
    Mutant(
        "a mixture's part of the other",
        "kernels._formulas:_mixture",
        "p * (beta * log_p - own.unsqueeze(-1))",
        "p * (beta * log_q - own.unsqueeze(-1))",
        all_terms_by_formulas,
    ),
    Mutant(
        "a square without its 2",
        "kernels._formulas:_evaluated",
        "2 * two * weight",
        "two * weight",
        all_terms_by_formulas,
    ),
]

# Of what the kernels are told; where there is no Triton there are none.
KERNEL_MUTANTS = [
    Mutant(
        "a divergence turned round in the kernels",
        "kernels._recognise:_kl",
        '"to" if first else "from"',
        '"from" if first else "to"',
        by_kernels("kl_divergence-from_logits=True"),
    ),
    Mutant(
        "a mean over the last dimension for one over all",
        "kernels._recognise:_magnitude",
        "x.numel() ** -0.5",
        "x.shape[-1] ** -0.5",
        by_kernels("output_magnitude"),
    ),
    Mutant(
        "the share of the wrong side",
        "kernels._recognise:_js",
        "own = 1 - beta if",
        "own = beta if",
        by_kernels("js_divergence-from_logits=True-beta=0.2-base=2"),
    ),
]
MUTANTS += KERNEL_MUTANTS if one_pass.TRITON else []


def found(mutant: Mutant) -> bool:
    """Whether the agreement that holds without the fault breaks with it."""
    mutant.agreement()
    with mutant.put_in():
        try:
            mutant.agreement()
        except AssertionError as error:
            # An assertion of a library is an error, and no agreement that broke.
            *_, (frame, _) = walk_tb(error.__traceback__)
            if Path(frame.f_code.co_filename).parent != Path(__file__).parent:
                raise
            return True
    return False


def main() -> int:
    """Try all of them; how many were not found."""
    missed = 0
    for mutant in MUTANTS:
        is_found = found(mutant)
        missed += not is_found
        print(f"{'found ' if is_found else 'MISSED'} {mutant.function}: {mutant.what}")  # noqa: T201
    return missed


if __name__ == "__main__":
    sys.exit(main())
