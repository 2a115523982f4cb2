"""Command lines: checked numbers, usage errors of one line, plain help."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import attrs
import pytest

from common.arguments import UsageError, option, parse
from common.checks import integer
from common.errors import EXIT_USAGE


@attrs.frozen(kw_only=True)
class Example:
    """Describe the command."""

    names: Annotated[tuple[str, ...], option("one or more", name="NAME", required=True)] = attrs.field(kw_only=False)
    count: Annotated[int, option("how many", "N", check=integer(1, 10))] = 3
    span: Annotated[tuple[int, int] | None, option("a pair", "FROM TO", check=integer(1))] = None
    marks: Annotated[tuple[str, ...], option("may be repeated", "KEY=VALUE", name="--set")] = ()
    device: Annotated[Literal["cuda", "cpu"] | None, option("where")] = None
    fast: Annotated[bool, option("hurry")] = False

    def __attrs_post_init__(self) -> None:
        if self.fast and self.device is None:
            raise UsageError("--fast needs --device")


def parsed(*words: str) -> Example:
    value = parse("example.py", Example, words, epilog="examples:\n  python example.py\n")
    assert isinstance(value, Example)
    return value


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str], commands: Any = Example) -> str:
    """Return the one line about a wrong command line."""
    with pytest.raises(SystemExit) as ended:
        parse("example.py", commands, words)
    assert ended.value.code == EXIT_USAGE
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert shown.out == "" and line.isprintable()
    return line


def test_a_command_line_becomes_its_class() -> None:
    assert parsed("a", "--count", "4", "b") == Example(("a", "b"), count=4)
    assert parsed("--span", "2", "5", "a").span == (2, 5)
    repeated = parsed("a", "--set", "x=1", "--set=y=2", "--count=1", "--count", "2")
    assert repeated == Example(("a",), marks=("x=1", "y=2"), count=2)
    assert parsed("--", "-a").names == ("-a",)
    assert parsed("a\udcff\x1b").names == ("a\udcff\x1b",)  # bytes of a path that are no UTF-8 survive


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "NAME is missing: one or more; see --help"),
        (["a", "--cuont=1"], "Unknown option: --cuont=1. Did you mean --count?"),
        (["a", "--no-fast"], "Unknown option: --no-fast. Did you mean --fast?"),
        (["a", "--version"], "Unknown option: --version"),
        (["a", "--device", "tpu\x1b[2J"], 'Invalid value "tpu\\x1b[2J" for --device. Choose from: "cuda", "cpu".'),
        (["a", "--set"], "Parameter --set requires an argument"),
        (["a", "--span", "1"], "Parameter --span requires 2 positional arguments. Only got 1"),
        (["a", "--span", "1", "0"], "--span: got '0', wanted an integer of at least 1"),
        (["a", "--count=11"], "--count: got '11', wanted an integer of at least 1, at most 10; see --help"),
        (["a", "--count", ""], "--count: got '', wanted an integer"),
        (["a", "--fast"], "--fast needs --device"),
        (["a", "--\x1b\udcff"], "Unknown option: --\\x1b\\udcff"),
    ],
)
def test_a_usage_error_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(words, capsys).startswith(f"example.py: {said}")


@attrs.frozen
class Other:
    """Do something else."""

    name: Annotated[str, option("what", name="NAME")]


def test_a_first_word_names_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"example": Example, "other": Other}
    assert parse("example.py", commands, ["other", "x"]) == Other("x")
    assert refused([], capsys, commands) == "example.py: COMMAND is missing; known: example, other; see --help"
    assert "unknown command 'othre'; did you mean 'other'?; known: example, other;" in refused(
        ["othre"], capsys, commands
    )
    for words, said in ((["other"], "NAME is missing: what"), (["other", "x", "y"], "['y']")):
        line = refused(words, capsys, commands)
        assert line.startswith("example.py: other: ") and said in line


def test_an_unknown_command_is_refused_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if help is asked for: a script that names a command which has gone must not end with status 0."""
    commands = {f"command-{number}": Example for number in range(20)}
    for words in (["bogus"], ["bogus", "--help"], ["--bogus", "--help"], ["bogus", "-h"]):
        line = refused(words, capsys, commands)
        assert line == f"example.py: unknown command '{words[0]}'; known: {', '.join(commands)}; see --help"


def test_help_is_plain_text_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "  --count N               how many (default: 3)\n" in shown
    assert "  --span FROM TO          a pair\n" in shown and "--device cuda|cpu" in shown
    assert shown.startswith("Usage: example.py") and shown.endswith("\nexamples:\n  python example.py\n")
    assert "Describe the command." in shown
    assert all(len(line) <= 80 and line.isprintable() for line in shown.splitlines())
