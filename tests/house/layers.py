"""Which module may import which: the layers, and a checker over a package's folder.

Imports point down, or sideways without a cycle. A facade is a package's `__init__`: it re-exports
for users, and no leaf imports it. The checker reads the files and runs none of them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# From the bottom to the top, by the first name below the package. The package itself is above all.
LAYERS = (
    {"_types", "_errors"},
    {"_numerics", "_finite", "_logspace", "_context", "_host", "_probes", "_edges", "_table"},
    {"penalties", "transforms", "kernels"},
    {
        "schedules",
        "_term",
        "_inputs",
        "_base",
        "_gradients",
        "_figures",
        "_recorder",
        "_evaluation",
        "fast",
        "_run",
        "_config",
        "_track",
        "_pipeline",
    },
    {"tracking", "balance"},
    {"training", "integrations"},
)
# Definitions in plain Python: shares nothing with the runtime, in either direction.
ISLAND = "spec"
FOREIGN_TO_ISLAND = {"torch"}
# (importer, imported) that stay apart though their layers would allow it.
APART = {("transforms", "penalties")}
# One file a host library, which users import and nothing else does.
FOR_USERS_ONLY = "integrations"
# The tests that are true for type checkers alone.
TYPING_ONLY = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


@dataclass(frozen=True)
class Import:
    """One import statement's reach: a module of the package, or a foreign one."""

    importer: str
    target: str
    line: int
    typing_only: bool

    def fault(self, why: str) -> str:
        """This import as a line of the report."""
        return f"{self.importer}:{self.line} imports {self.target}: {why}"


def violations(folder: Path) -> list[str]:
    """Every breach of the layers in the package at `folder`, one line each."""
    files = modules(folder)
    package = folder.name
    imports = [found for name in files for found in imports_of(name, files)]
    strays = [f"{name}: in no layer" for name in files if _rank(name) is None]
    faults = [
        found.fault(why)
        for found in imports
        if (why := _misdirected(found, package, files) or _facade(found, files))
    ]
    return strays + faults + _cycle(imports, files)


def modules(folder: Path) -> dict[str, Path]:
    """The modules of the package at `folder`: dotted name to file."""
    paths = sorted(folder.rglob("*.py"))
    return {_dotted(path.relative_to(folder.parent)): path for path in paths}


def imports_of(name: str, files: dict[str, Path]) -> Iterator[Import]:
    """What module `name` imports, at its head, inside functions, and for type checkers."""
    tree = ast.parse(files[name].read_text(encoding="utf-8"))
    for_types = {id(node) for node in _nodes_for_types(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in _targets(node, name, files):
                yield Import(name, target, node.lineno, id(node) in for_types)


def _dotted(path: Path) -> str:
    """The name Python imports a file by."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _nodes_for_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything inside an `if TYPE_CHECKING:`."""
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and ast.unparse(block.test) in TYPING_ONLY:
            for statement in block.body:
                yield from ast.walk(statement)


def _targets(node: ast.Import | ast.ImportFrom, name: str, files: dict[str, Path]) -> Iterator[str]:
    """The modules that one statement of module `name` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    module = _absolute(node, name, files)
    for alias in node.names:
        submodule = f"{module}.{alias.name}"
        yield submodule if submodule in files else module


def _absolute(node: ast.ImportFrom, name: str, files: dict[str, Path]) -> str:
    """The module an import names, with its leading dots resolved from module `name`."""
    if not node.level:
        return node.module or ""
    up = node.level - (files[name].name == "__init__.py")
    parts = name.split(".")[: len(name.split(".")) - up]
    return ".".join([*parts, node.module] if node.module else parts)


def _area(module: str) -> str:
    """The first name below the package, empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def _rank(module: str) -> int | None:
    """The layer of a module, counted from the bottom; none if the table lacks it."""
    area = _area(module)
    if area == "":
        return len(LAYERS)
    if area == ISLAND:
        return 0
    return next((rank for rank, layer in enumerate(LAYERS) if area in layer), None)


def _misdirected(found: Import, package: str, files: dict[str, Path]) -> str | None:
    """Why the direction of an import is wrong, if it is."""
    here, there = _area(found.importer), _area(found.target)
    if found.target.split(".")[0] != package:
        abroad = here == ISLAND and found.target.split(".")[0] in FOREIGN_TO_ISLAND
        return f"{ISLAND} is an island" if abroad else None
    if found.target not in files:
        return "no such module"
    if (here == ISLAND) != (there == ISLAND):
        return f"{ISLAND} is an island"
    if there == FOR_USERS_ONLY and not _own_facade(found, files):
        return f"{FOR_USERS_ONLY} are for users only"
    if (here, there) in APART:
        return "they stay apart"
    return _upwards(found)


def _own_facade(found: Import, files: dict[str, Path]) -> bool:
    """Whether a package's `__init__` imports one of its own files."""
    is_facade = files[found.importer].name == "__init__.py"
    return is_facade and found.target.startswith(f"{found.importer}.") and "." in found.importer


def _upwards(found: Import) -> str | None:
    low, high = _rank(found.importer), _rank(found.target)
    if low is None or high is None or low >= high:
        return None
    return f"up from layer {low} to layer {high}"


def _facade(found: Import, files: dict[str, Path]) -> str | None:
    """Why a leaf reaches through a facade, if it does."""
    leaf = files[found.importer].name != "__init__.py"
    if leaf and found.target in files and files[found.target].name == "__init__.py":
        return "a leaf imports a facade"
    return None


def _cycle(imports: list[Import], files: dict[str, Path]) -> list[str]:
    """One cycle among imports that run, if there is any."""
    graph: dict[str, set[str]] = {name: set() for name in files}
    for found in imports:
        if found.target in files and not found.typing_only:
            graph[found.importer].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["cycle: " + " -> ".join(reversed(error.args[1]))]
    return []
