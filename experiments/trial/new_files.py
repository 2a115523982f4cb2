"""New files of a working tree: which of them a program there needs, because it imports or names them.

A candidate is what its programs do. A new file that nothing refers to (notes, another run, a plot) changes nothing, so
it must not make another candidate.
"""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from common.json_files import read_regular

UNUSED_FOLDERS = ("tests",)  # whose programs no training job runs


def needed_files(root: Path, tracked: Collection[str], new: Sequence[str]) -> list[str]:
    """Return the new files that a tracked Python file, or another new file that is needed, imports or names.

    A name is a string constant with the file's path, or, in the same top-level folder, with the file's own name. All
    paths are relative to `root`.
    """
    waiting = [path for path in tracked if _is_program(path)]
    needed: dict[str, None] = {}
    while waiting:
        sources = {path: _content(root / path) for path in waiting}
        found = [
            path for path in new if path not in needed and any(_refers(*source, path) for source in sources.items())
        ]
        needed |= dict.fromkeys(found)
        waiting = [path for path in found if _is_program(path)]
    return [*needed]


def _is_program(path: str) -> bool:
    return path.endswith(".py") and path.partition("/")[0] not in UNUSED_FOLDERS


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError:  # deleted, or a link to something else
        return b""


def _refers(program: str, source: bytes, path: str) -> bool:
    """Tell whether the source of a program imports or names a file."""
    file, module = PurePosixPath(path), _module(path)
    word = file.name if module is None else module.rpartition(".")[2]
    if word.encode() not in source:  # quickly, for most
        return False
    try:
        words = set(_words(program, ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return True
    same_folder = program.partition("/")[0] == path.partition("/")[0] or "/" not in program + path
    whole_path = re.compile(rf"(?<![\w/.-]){re.escape(path)}(?![\w/-])")
    return any(
        name == module or whole_path.search(name) or (same_folder and PurePosixPath(name).name == file.name)
        for name in words
    )


def _words(program: str, tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a program imports, with those around them, and its string constants."""
    package = program.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
            yield node.value
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from _with_parents(f"{module}.{alias.name}" if module else alias.name)


def _with_parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _module(path: str) -> str | None:
    """Return the name by which Python imports a file; None for a file of another kind."""
    file = PurePosixPath(path)
    if file.suffix != ".py":
        return None
    parts = [*file.parts[:-1], *([] if file.stem == "__init__" else [file.stem])]
    return ".".join(parts) or None
