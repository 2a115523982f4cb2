"""Compare the whole text of every message with tests/messages.json.

Most tests check the fields of an error, or a part of its text, so that a message can be reworded without touching ten
tests. The whole text is checked once: tests/messages.json lists the messages by the module that writes them, each with
a test in which it occurs. After such a test, this plugin compares the lines of all errors, notes and warnings that the
test has caused, in this process or in a subprocess, with the listed message.

After rewording a message, copy the new text from the failure into tests/messages.json. For a new message, add a line
with a test that causes it.
"""

import difflib
import functools
import json
import re
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput, UsageError
from common.output import Notice

MESSAGES = Path(__file__).with_suffix(".json")
ROOT = str(Path(__file__).parent.parent)
# These parts differ each time that a test runs: the path of its temporary folder, and the ports that it uses.
TEMPORARY = re.compile(r"[^\s'\":=(]*/pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?(/[\w-]*\d+)?")
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
SCRIPT = re.compile(r"^[a-z_]+\.py: ")  # an error on stderr begins with the name of the script

_passed = pytest.StashKey[bool]()
_lines: set[str] = set()  # all lines of messages since the test began


def normalized(line: str) -> str:
    """Return a line of a message, or the id of a test, without the parts that differ between two runs or machines."""
    line = TEMPORARY.sub("TMP", line).replace(ROOT, "ROOT")
    return SCRIPT.sub("", PORT.sub("PORT", line))


@functools.cache
def messages_by_test() -> dict[str, list[str]]:
    """Return the listed messages of each test, by the test's id."""
    by_test: dict[str, list[str]] = {}
    for messages in json.loads(MESSAGES.read_text()).values():
        for message in messages:
            by_test.setdefault(message["test"], []).append(message["text"])
    return by_test


def _record_lines(kind: type, lines_of: Callable[[Any], list[str]]) -> None:
    """Make each new object of a class record its lines."""
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        _lines.update(lines_of(self))

    kind.__init__ = init  # type: ignore[misc]


_record_lines(BadInput, lambda error: [*error.lines])
_record_lines(UsageError, lambda error: [str(error)])
_record_lines(Notice, lambda notice: [str(notice)])
_record_lines(
    subprocess.CompletedProcess,
    lambda process: process.stderr.splitlines() if isinstance(process.stderr, str) else [],
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Store whether a test has passed, for the fixture below."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def whole_messages(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test has passed, make it fail if one of its listed messages now has a different text.

    A test that was skipped, for example because a package is missing, has written no messages.
    """
    _lines.clear()
    yield
    if not request.node.stash.get(_passed, False):
        return
    test = normalized(request.node.nodeid)  # the parameters of a test may contain the path of the repository
    lines = {normalized(line) for line in _lines} if test in messages_by_test() else set()
    for text in messages_by_test().get(test, ()):
        if text not in lines:
            similar = difflib.get_close_matches(text, lines, n=1, cutoff=0.0)
            pytest.fail(f"tests/messages.json lists for this test\n  {text}\nand the most similar line is\n  {similar}")
