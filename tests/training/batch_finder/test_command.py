"""Command line of find_batch_size.py."""

from pathlib import Path

import pytest

from common.arguments import parse
from common.errors import EXIT_USAGE
from training.batch_finder.command import FindCommand


def parsed(*words: str) -> FindCommand:
    command = parse("find_batch_size.py", FindCommand, words)
    assert isinstance(command, FindCommand)
    return command


def test_options_of_a_search_or_prediction() -> None:
    assert parsed("r") == FindCommand(Path("r"))
    words = ("--world-size", "2", "--device", "cpu", "--set=a=1", "--write")
    assert parsed("r", *words) == FindCommand(Path("r"), world_size=2, device="cpu", overrides=("a=1",), write=True)
    predicted = parsed("r", "--predict", "l4,mine", "--machines", "m.json")
    assert (predicted.predict, predicted.machines) == ("l4,mine", Path("m.json"))
    assert parsed("r", "--probe", '{"a": 1}').probe == '{"a": 1}'  # a worker's


def test_help_hides_the_workers_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    assert "--predict GPU,..." in shown and "--probe" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predict", "l4", "--write"], "--write goes with a search, not with --predict"),
        (["--machines", "m.json"], "--machines goes with --predict"),
        (["--world-size", "0"], "--world-size: got '0', wanted a whole number of at least 1, at most 1,048,576"),
    ],
)
def test_a_wrong_line_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("r", *words)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == EXIT_USAGE and line.startswith(f"find_batch_size.py: {said}")
