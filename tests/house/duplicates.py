"""Finds the same lines written twice, in two files or in two functions of one."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

LONGEST_ALLOWED = 5  # lines of code; what is longer is reported

Line = tuple[int, str]
"""Its number in the file, and its text without what may differ."""
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def duplicates(folder: Path) -> str:
    """A report of every longer run of like lines below `folder`, empty if there is none.

    Imports, exports, signatures, comments and docstrings may repeat.
    """
    seen: dict[tuple[str, ...], str] = {}
    pairs: dict[tuple[int, str], str] = {}
    number = 0
    for path in sorted(folder.rglob("*.py")):
        for piece in pieces(path.read_text(encoding="utf-8")):
            number += 1
            for run in runs(piece):
                place = f"{path.relative_to(folder)}:{run[0][0]}-{run[-1][0]}"
                earlier = seen.setdefault(tuple(text for _, text in run), place)
                if earlier != place:
                    # One line for each pair of places, however long the run is.
                    pairs.setdefault((number, earlier.partition(":")[0]), f"{earlier} ~ {place}")
    return "\n".join(pairs.values())


def runs(piece: list[Line]) -> Iterator[list[Line]]:
    """Every run of lines that is too long to stand twice."""
    length = LONGEST_ALLOWED + 1
    for start in range(len(piece) - length + 1):
        yield piece[start : start + length]


def pieces(text: str) -> Iterator[list[Line]]:
    """The code of a module as that of its functions, then the rest."""
    tree = ast.parse(text)
    code = _code(text, {line for first, last in _ignored(tree) for line in range(first, last + 1)})
    for first, last in _functions(tree):
        yield [line for line in code if first <= line[0] <= last]
        code = [line for line in code if not first <= line[0] <= last]
    yield code


def _code(text: str, ignored: set[int]) -> list[Line]:
    """The lines that hold code, but for those ignored."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    ends: dict[int, int] = {}
    for token in tokens:
        if token.type not in NOT_CODE:
            for row in range(token.start[0], token.end[0] + 1):
                ends[row] = token.end[1] if row == token.end[0] else 10**6
    lines = text.splitlines()
    return [
        (row, lines[row - 1][:end].strip())
        for row, end in sorted(ends.items())
        if row not in ignored and row <= len(lines)
    ]


def _functions(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The lines of every outermost function and method, decorators included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            yield first, node.end_lineno or node.lineno
        else:
            yield from _functions(node)


def _ignored(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """The lines of imports, exports, signatures and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _may_repeat(node):
            yield node.lineno, node.end_lineno or node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.body[0].lineno - 1


def _may_repeat(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom) or _is_export(node) or _is_text(node)


def _is_export(node: ast.AST) -> bool:
    """Whether this is `__all__`, which repeats the names of a package as imports do."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
