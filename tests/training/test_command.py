"""The command lines of train.py and find_batch_size.py."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from common.arguments import parse
from common.errors import UsageError
from training.command import FindCommand, TrainCommand
from training.telemetry.budget import Budget


def parsed(*words: str, script: str = "train.py", kind: Any = TrainCommand) -> Any:
    return parse(script, kind, words)


def test_options_of_a_job_have_types() -> None:
    command = parsed(
        *("r", "--set", "a=1", "--set=b=2", "--token-files", "t", "--follow", "--device=cpu"),
        *("--max-steps", "3", "--price-per-hour", "14.32", "--max-usd", "5", "--max-hours", "0.5", "--hash-every", "2"),
        "--allow-numerics-drift",
    )
    options = command.options
    assert (command.run, command.overrides, options.token_files) == (Path("r"), ("a=1", "b=2"), Path("t"))
    assert (options.follow, options.device, options.max_steps) == (True, "cpu", 3)
    assert (options.price_per_hour, options.budget) == (14.32, Budget(max_hours=0.5, max_usd=5.0))
    assert (options.hash_every, options.allow_numerics_drift) == (2, True) and command.trains
    replay = parsed("r", "--replay", "3", "5")
    assert replay.options.replay == (3, 5) and not replay.trains  # it writes nothing
    assert parsed("r", "--resume", "never").options.resume == "never"


def test_false_flag_selects_no_mode() -> None:
    assert parsed("r", "--plan=false", "--device=cpu", "--dry-run=no").trains
    assert parsed("r", "--look", "3", "--rank", "0", "--write=0").rank == 0


def test_defaults_train_and_resume() -> None:
    command = parsed("r")
    assert command.trains and command.options.resume == "auto" and command.options.budget == Budget()
    assert not any((command.dry_run, command.plan, command.options.follow))
    for words in (["--dry-run", "--world-size", "8"], ["--plan", "--machine=a", "--machine=b"]):
        assert not parsed("r", *words).trains
    assert parsed("r", "--plan", "--machine=a", "--machine", "b").machine == ("a", "b")


def find_parsed(*words: str) -> FindCommand:
    return parsed(*words, script="find_batch_size.py", kind=FindCommand)


def test_options_of_a_search_or_prediction() -> None:
    assert find_parsed("r") == FindCommand(Path("r"))
    words = ("--world-size", "2", "--device", "cpu", "--set=a=1", "--write")
    expected = FindCommand(Path("r"), world_size=2, device="cpu", overrides=("a=1",), write=True)
    assert find_parsed("r", *words) == expected
    prediction = find_parsed("r", "--predict", "l4,mine", "--machines", "m.json")
    assert (prediction.predict, prediction.machines) == ("l4,mine", Path("m.json"))
    assert find_parsed("r", "--probe", '{"a": 1}').probe == '{"a": 1}'  # the search starts its workers with this option


def test_help_hides_the_option_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        find_parsed("--help")
    text = capsys.readouterr().out
    assert "--predict GPU,..." in text and "--probe" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "2"], "--world-size goes with --dry-run"),
        (["--machines", "x"], "--machines goes with --plan, not with training"),
        (["--machine", "x"], "--machine goes with --plan, not with training"),
        (["--nodes", "2", "--node-link", "50"], "--nodes goes with --plan"),
        (["--plan", "--then", "true"], "--then goes with training"),
        (["--then", ""], "--then: got '', wanted a shell command; see"),
        (["--then", " \t"], r"--then: got ' \t', wanted a shell command; see"),
        (["--max-steps", "1.5"], "--max-steps: got '1.5', wanted an integer"),
        (["--plan", "--nodes", "2"], "--nodes and --node-link must be given together"),
        (["--plan", "--node-link", "2"], "--nodes and --node-link must be given together"),
        (["--replay", "1", "2", "--resume", "never"], "--resume goes with training, --dry-run, --plan or"),
        (
            ["--look", "2", "--resume", "best"],
            "--resume goes with training, --dry-run, --plan or --preflight, not with",
        ),
        (["--plan", "--resume", "never"], "--resume with --plan needs --init-from"),
        (
            ["--preflight", "--init-from", "m", "--token-files", "t"],
            "--token-files and --init-from with --preflight need",
        ),
        (["--find-max-microbatch", "--token-files", "t"], "--token-files with --find-max-microbatch needs --like"),
        (["--preflight", "--max-steps", "3"], "--max-steps goes with training or --dry-run, not with --preflight; see"),
        (["--plan", "--device", "cpu"], "--device goes with training, --dry-run, --preflight, --find-max-microbatch, "),
        (["--replay", "1", "2", "--max-hours", "3"], "--max-hours goes with training or --dry-run, not with --replay"),
        (["--max-usd", "1"], "--max-usd needs --price-per-hour: the price of the machine; see"),
        (["--plan", "--max-usd", "3"], "--max-usd goes with training or --dry-run, not with --plan; see"),
        (["--plan", "--world-size", "2"], "--world-size goes with --dry-run, not with --plan; see"),
        (
            ["--price-per-hour", "$14"],
            "--price-per-hour: got '$14', wanted a number above 0 up to 1e+09, such as 14.32",
        ),
        (["--max-hours", "nan"], "--max-hours: got 'nan', wanted a number above 0 up to 1e+06, such as 3.5"),
        (["--dry-run", "--world-size", "1048577"], "--world-size: got '1048577', wanted an integer"),
        (["--began", "1"], "--began: unknown option"),
        (["--predict", "l4", "--write"], "--write goes with a search, not with --predict"),
        (["--device", "cpu", "--machines", "m.json"], "--machines goes with --predict, not with a search"),
        (["--device", "cpu", "--world-size", "0"], "--world-size: got '0', wanted an integer of at least 1"),
    ],
)
def test_wrong_command_line_is_refused(words: list[str], message: str) -> None:
    is_search = "--predict" in words or words[0] == "--device"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        find_parsed("r", *words) if is_search else parsed("r", *words)


INSTEAD: dict[str, list[str]] = {
    **{"--dry-run": [], "--plan": [], "--preflight": [], "--find-max-microbatch": []},
    **{"--look": ["3"], "--replay": ["1", "2"]},
}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(INSTEAD, 2)])
def test_mutually_exclusive_options_are_refused(first: str, second: str) -> None:
    with pytest.raises(UsageError, match=r"^--\S+ and --\S+ exclude each other") as raised:
        parse("train.py", TrainCommand, ["runs/x", first, *INSTEAD[first], second, *INSTEAD[second]])
    assert first in str(raised.value) and second in str(raised.value)


def test_keys_option_must_be_alone() -> None:
    with pytest.raises(UsageError, match="--keys takes no RUN and no other option"):
        parse("train.py", TrainCommand, ["runs/x", "--keys"])


def test_prediction_takes_no_device() -> None:
    with pytest.raises(UsageError, match="--device goes with a search, not with --predict"):
        parse("find_batch_size.py", FindCommand, ["runs/x", "--predict", "a100-40gb", "--device", "cpu"])
