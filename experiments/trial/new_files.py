"""Find the new files of a working tree that its programs import or name.

A candidate is defined by the behavior of its programs. If no program refers to a new file, such as notes, another run
or a plot, the file does not change this behavior. With or without such a file, the candidate must be the same.
"""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from common.json_files import read_regular

UNUSED_FOLDERS = ("tests",)  # no training job runs programs from these folders


def needed_files(root: Path, tracked: Collection[str], new: Sequence[str]) -> list[str]:
    """Return the new files that are imported or named by a tracked Python file or by another needed new file.

    A program names a file if one of its string constants is the file's path. If the program and the file are in the
    same top-level folder, the file's name without folders is enough. All paths are relative to `root`.
    """
    waiting = [path for path in tracked if _is_program(path)]
    needed: dict[str, None] = {}
    while waiting:
        sources = {path: _content(root / path) for path in waiting}
        matches = [
            path for path in new if path not in needed and any(_refers(*source, path) for source in sources.items())
        ]
        needed |= dict.fromkeys(matches)
        waiting = [path for path in matches if _is_program(path)]
    return [*needed]


def _is_program(path: str) -> bool:
    return path.endswith(".py") and path.partition("/")[0] not in UNUSED_FOLDERS


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError:  # the file was deleted, or is a link
        return b""


def _refers(program: str, source: bytes, path: str) -> bool:
    """Return whether the source of a program imports or names a file."""
    file, module = PurePosixPath(path), _module(path)
    word = file.name if module is None else module.rpartition(".")[2]
    if word.encode() not in source:  # a quick check that is enough for most files
        return False
    try:
        words = set(_words(program, ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return True
    same_folder = program.partition("/")[0] == path.partition("/")[0] or "/" not in program + path
    path_pattern = re.compile(rf"(?<![\w/.-]){re.escape(path)}(?![\w/-])")
    return any(
        name == module or path_pattern.search(name) or (same_folder and PurePosixPath(name).name == file.name)
        for name in words
    )


def _words(program: str, tree: ast.AST) -> Iterator[str]:
    """Yield the string constants of a program, the modules that it imports, and the packages of these modules."""
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
    """Return the name by which Python imports a file, or None if it is not a Python file."""
    file = PurePosixPath(path)
    if file.suffix != ".py":
        return None
    parts = [*file.parts[:-1], *([] if file.stem == "__init__" else [file.stem])]
    return ".".join(parts) or None
