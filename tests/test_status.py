"""docs/status.md names an existing test for each promise, so that no promise can be removed unnoticed."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

TITLE = "## Promises and their tests"


def promises() -> list[tuple[str, str, str]]:
    """Return the rows of the list: the promise, the file of its test, and the name of the test."""
    section = (ROOT / "docs/status.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(tests/[\w/]+\.py)::(test_\w+)` \|$", section, re.MULTILINE)
    # The first two lines are the header and the line that separates it from the rows.
    table_rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(table_rows), [line for line in table_rows if "::" not in line]
    return rows


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file by name; an empty dictionary if the file does not exist."""
    if not path.is_file():
        return {}
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_promise_has_an_existing_test() -> None:
    rows = promises()
    assert [f"{file}::{name}" for _, file, name in rows if name not in functions_of(ROOT / file)] == []


def test_no_promise_is_repeated_or_skipped() -> None:
    rows = promises()
    assert len({promise for promise, _, _ in rows}) == len(rows) > 0
    for _, file, name in rows:
        marks = [ast.unparse(mark) for mark in functions_of(ROOT / file)[name].decorator_list]
        assert not any("skip" in mark or "xfail" in mark for mark in marks), name
