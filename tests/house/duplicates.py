"""Finds the same lines written twice, in two files or in two functions of one."""

import ast
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import dedent

from pylint.checkers.symilar import Symilar

LONGEST_ALLOWED = 5  # lines; the finder reports what is longer


def duplicates(folder: Path) -> str:
    """A report of every longer run of like lines below `folder`, empty if there is none.

    Imports, exports, signatures, comments and docstrings may repeat.
    """
    finder = Symilar(
        min_lines=LONGEST_ALLOWED,
        ignore_comments=True,
        ignore_docstrings=True,
        ignore_imports=True,
        ignore_signatures=True,
    )
    for path in sorted(folder.rglob("*.py")):
        for piece in pieces(path.read_text(encoding="utf-8")):
            finder.append_stream(str(path.relative_to(folder)), io.StringIO(piece))
    with redirect_stdout(io.StringIO()) as report:
        finder.run()
    return report.getvalue().partition("TOTAL")[0].strip()


def pieces(text: str) -> Iterator[str]:
    """A module as its functions, then the rest: each keeps its line numbers in the file."""
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    functions = list(_function_spans(tree))
    for first, last in functions:
        yield "\n" * first + dedent("".join(lines[first:last]))
    for first, last in [*functions, *_export_spans(tree)]:
        lines[first:last] = ["\n"] * (last - first)
    yield "".join(lines)


def _function_spans(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The lines of every outermost function and method, decorators included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            yield first - 1, node.end_lineno or node.lineno
        else:
            yield from _function_spans(node)


def _export_spans(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """The lines of `__all__`, which repeats the names of a package as imports do."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield node.lineno - 1, node.end_lineno or node.lineno
