"""Floating-point formats, and formulas run in one of them: what a left fold would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise.spec.scalars import Decision, Number, eigenvalues_up_to_two, left_fold

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format: its name, digits of precision, and smallest positive number 2**lowest."""

    name: str
    digits: int
    lowest: int

    def holds(self, number: Number) -> bool:
        """Whether a number is one of the format's own (the largest ones aside)."""
        exact = Fraction(number)
        if not exact:
            return True
        # The place of the last digit that is 1, and of the first.
        numerator, denominator = abs(exact.numerator), exact.denominator
        last = (numerator & -numerator).bit_length() - denominator.bit_length()
        first = numerator.bit_length() - denominator.bit_length()
        dyadic = not denominator & (denominator - 1)
        return dyadic and last >= self.lowest and first - last < self.digits


FORMATS = {
    "float64": Format("float64", 53, -1074),
    "float32": Format("float32", 24, -149),
    "float16": Format("float16", 11, -24),
    "bfloat16": Format("bfloat16", 8, -133),
}


def optional(module: str) -> Any:  # noqa: ANN401 — a module is whatever it holds
    """A library of the extra `spec`, imported where it is first needed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"The exact layer needs `{module}` for this, which is not installed. "
            "Use `pip install 'equipoise[spec]'`."
        ) from error


class Rounded:
    """The numbers of one format, each operation rounded to it, sums from the left.

    ``float16``, ``float32`` and ``float64`` are NumPy's, ``bfloat16`` that of ml_dtypes.
    """

    def __init__(self, name: str) -> None:
        self.format = FORMATS[name]
        self._numpy = optional("numpy")
        library = optional("ml_dtypes") if name == "bfloat16" else self._numpy
        self._type = getattr(library, name)

    def const(self, number: Number, /) -> np.floating[Any]:
        return self._of(float(number))

    def gt(self, a: np.floating[Any], b: np.floating[Any], /) -> bool:
        return bool(a > b)

    def ite(
        self,
        condition: Decision,
        then: Callable[[], np.floating[Any]],
        otherwise: Callable[[], np.floating[Any]],
    ) -> np.floating[Any]:
        return then() if condition else otherwise()

    def abs(self, x: np.floating[Any], /) -> np.floating[Any]:
        return self._of(abs(x))

    def min(self, a: np.floating[Any], b: np.floating[Any], /) -> np.floating[Any]:
        return min(a, b)

    def max(self, a: np.floating[Any], b: np.floating[Any], /) -> np.floating[Any]:
        return max(b, a)

    def sqrt(self, x: np.floating[Any], /) -> np.floating[Any]:
        return self._of(self._numpy.sqrt(x))

    def exp(self, x: np.floating[Any], /) -> np.floating[Any]:
        return self._of(self._numpy.exp(x))

    def log(self, x: np.floating[Any], /) -> np.floating[Any]:
        return self._of(self._numpy.log(x))

    def sum(self, xs: Iterable[np.floating[Any]], /) -> np.floating[Any]:
        return left_fold(self.const(0), xs)

    def sort(self, xs: Sequence[np.floating[Any]], /) -> list[np.floating[Any]]:
        return sorted(xs)

    def eigenvalues(
        self, matrix: Sequence[Sequence[np.floating[Any]]], /
    ) -> list[np.floating[Any]]:
        """By the closed form, for matrices up to 2×2."""
        return eigenvalues_up_to_two(self, matrix)

    def _of(self, x: object) -> np.floating[Any]:
        number: np.floating[Any] = self._type(x)
        return number
