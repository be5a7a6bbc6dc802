"""Which Python a definition may use: nothing that a scalar could misunderstand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# The definitions, and the statements about them; scalars and programs decide for themselves.
DEFINITIONS = (
    "agreement",
    "clipping",
    "decay",
    "distributions",
    "divergence",
    "magnitude",
    "mixture",
    "percentile",
    "sampled",
    "smoothness",
    "structure",
    "sums",
    "tracking",
    "uncertainty",
)
BUILTINS = {"abs", "bool", "float", "max", "min", "pow", "round", "sorted", "sum"}
# How many rows there are, and which eigenvalue is outermost, is structure: symbols are refused.
STRUCTURE = {("structure", "_nonzero"), ("structure", "_outermost")}


def breaches(path: Path) -> list[str]:
    """Every use of what no definition may use, one line each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [f"{path.stem}:{line} {what}" for line, what in sorted(_breaches(tree, path.stem))]


def _breaches(tree: ast.Module, stem: str) -> Iterator[tuple[int, str]]:
    for function in _functions(tree):
        if (stem, function.name) not in STRUCTURE:
            yield from _decisions(function)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
            if any(name.partition(".")[0] in ("math", "numpy", "torch") for name in names):
                yield node.lineno, "imports numbers from elsewhere"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in BUILTINS
        ):
            yield node.lineno, f"calls the builtin {node.func.id}"
        if _is_float(node) and not any(node is default for default in _defaults(tree)):
            yield node.lineno, f"has the float {ast.unparse(node)} in a formula"
        if isinstance(node, ast.Compare) and not _harmless(node):
            yield node.lineno, "compares without the context"


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _decisions(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Where Python itself branches on what the context says, or joins and turns that."""
    answers = _named_answers(function)
    for node in ast.walk(function):
        tests: list[ast.expr] = []
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            tests = [node.test]
        if isinstance(node, ast.comprehension):
            tests = node.ifs
        if isinstance(node, ast.BoolOp):
            tests = node.values
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tests = [node.operand]
        for test in tests:
            if any(_asks_the_context(part, answers) for part in ast.walk(test)):
                yield test.lineno, "branches on a comparison of scalars"


def _named_answers(function: ast.FunctionDef) -> set[str]:
    """The names that hold what the context said."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name) and _asks_the_context(node.value.func, set())
    }


def _asks_the_context(node: ast.AST, answers: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in answers
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "K.gt"


def _harmless(node: ast.Compare) -> bool:
    """Identity with None, a choice by name, or a comparison of lengths."""
    if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return True
    sides = [node.left, *node.comparators]
    named = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
    return named or any(ast.unparse(side).startswith("len(") for side in sides)


def _is_float(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def _defaults(tree: ast.AST) -> list[ast.expr | None]:
    """A default of an option is a number the caller may change."""
    return [d for f in _functions(tree) for d in [*f.args.defaults, *f.args.kw_defaults]]
