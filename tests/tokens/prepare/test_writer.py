"""A kill at any moment of a commit changes no byte of the token files."""

import re
import signal
from pathlib import Path

import pytest

from tests.conftest import shared
from tests.tokens.preparing import COMMAND, CRASH, PREPARE, files_of, jsonl, kill_again_and_again, run
from tokens.prepare import writer

CRASH_POINTS = (
    "tokens written",
    "ledger written",
    "unit deleted",
    "tail copied",
    "cut noted",
    "tail cut off",
    "headers written",
    "file named",
    "all named",
    "manifest written",
)  # of a commit and of the end, in order


def test_every_crash_point_is_tried() -> None:
    assert set(re.findall(r'reached\("([^"]+)"\)', Path(writer.__file__).read_text())) == set(CRASH_POINTS)


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("split", ["hash", "tail", "hash --shard-tokens 300", "tail --shard-tokens 300"])
def test_a_kill_at_any_moment_of_a_commit_changes_nothing(tmp_path: Path, point: str, split: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    options = ("--tokenizer", "bytes", "--unit-bytes", "1000", "--executor", "inline", "--split", *split.split())
    fractions = ("--validation-fraction", "0.1", "--test-fraction", "0.001")  # no hash falls to test: cut off as well
    command = (source, *options, *fractions)
    assert run(PREPARE, *command, "--output", tmp_path / "straight").returncode == 0
    wanted = files_of(tmp_path / "straight")
    assert len(wanted) == 3 if "shard" not in split else len(wanted) > 5
    for number in ("1", "3") if point in CRASH_POINTS[:3] else ("1",):
        out = tmp_path / f"out{number}"
        killed = run(CRASH, *command, "--output", out, CRASH_AT=point, CRASH_TIME=number)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if point != "manifest written":
            assert not (out / "manifest.json").exists()
        done = run(PREPARE, *command, "--output", out)
        assert done.returncode == 0, done.stderr
        assert files_of(out) == wanted
        left = {path.name for path in out.iterdir()} - {".lock", "plan.json", "ledger.jsonl", "manifest.json"}
        assert left == set(wanted)


@pytest.mark.slow
def test_random_kills_of_anything_under_changing_workers_change_nothing(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    log = kill_again_and_again([str(corpus)], tmp_path / "out", undisturbed, kills=3)
    assert len(log) == 3
    assert files_of(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_random_kills_change_no_shard(corpus: Path, tmp_path: Path) -> None:
    shards = ("--shard-tokens", "100000")
    command = (corpus, "--output", tmp_path / "straight", "--tokenizer", shared("gpt2.tiktoken"), *shards, *COMMAND)
    assert run(PREPARE, *command, "--unit-bytes", "20000", "--split", "tail").returncode == 0
    wanted = files_of(tmp_path / "straight")
    assert len(wanted) > 5
    kill_again_and_again([str(corpus), *shards, "--split", "tail"], tmp_path / "out", wanted, kills=3)
    assert files_of(tmp_path / "out") == wanted
