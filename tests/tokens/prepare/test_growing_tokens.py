"""Tokens that are read during their preparation are the same as in the finished files."""

import signal
from pathlib import Path

import pytest

from common.errors import BadInput
from common.files import open_locked
from tests.tokens.preparing import CRASH, PREPARE, jsonl, run, succeed, tokens_of, write
from tokens.format.manifest import read_manifest
from tokens.format.token_file import open_split
from tokens.prepare.growing_files import LOCK
from tokens.prepare.growing_tokens import GrowingTokens


def command(tmp_path: Path, *options: str) -> tuple[object, ...]:
    source = tmp_path / "a.jsonl"
    if not source.exists():  # a second command must find the file unchanged
        jsonl(source, [f"document {number} " * 20 for number in range(300)])
    fixed = ("--tokenizer", "bytes", "--unit-bytes", "5000", "--executor", "inline", "--validation-fraction", "0.1")
    return (source, "--output", tmp_path / "out", *fixed, *options)


@pytest.fixture
def third(tmp_path: Path) -> GrowingTokens:
    """A preparation that was killed after its third commit."""
    assert run(CRASH, *command(tmp_path), CRASH_AT="ledger written", CRASH_TIME="3").returncode == -signal.SIGKILL
    return GrowingTokens(tmp_path / "out")


def test_committed_tokens_can_be_read_and_do_not_change(third: GrowingTokens, tmp_path: Path) -> None:
    options, growing = command(tmp_path), third
    early, stream = growing.committed("train"), growing.stream("train")
    held_out = growing.committed("validation")
    assert 0 < held_out < early and not growing.finished
    early_tokens = stream.read(0, early).tolist()
    assert run(CRASH, *options, CRASH_AT="ledger written", CRASH_TIME="3").returncode == -signal.SIGKILL
    assert growing.committed("train") == early  # the number stays the same until `refresh`
    growing.refresh()
    assert growing.committed("train") > early and not growing.finished
    assert "6 of 16 units" in growing.progress()
    middle = stream.read(early - 10, 100).tolist()
    succeed(PREPARE, *options)
    growing.refresh()
    assert growing.finished
    final = tokens_of(tmp_path / "out", "train")
    assert growing.committed("train") == len(final)
    assert stream.read(0, len(final)).tolist() == final
    assert final[:early] == early_tokens
    assert final[early - 10 : early + 90] == middle
    validation = growing.stream("validation").read(0, held_out)
    assert tokens_of(tmp_path / "out", "validation")[:held_out] == validation.tolist()
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest.plan == growing.fingerprint


@pytest.mark.parametrize("options", [(), ("--shard-tokens", "20000")])
def test_partly_renamed_files_can_be_read(tmp_path: Path, options: tuple[str, ...]) -> None:
    whole_command = command(tmp_path, *options)
    assert run(CRASH, *whole_command, CRASH_AT="file named", CRASH_TIME="2").returncode == -signal.SIGKILL
    growing = GrowingTokens(tmp_path / "out")
    lengths = {split: growing.committed(split) for split in ("train", "validation")}
    early = {split: growing.stream(split).read(0, length).tolist() for split, length in lengths.items()}
    succeed(PREPARE, *whole_command)
    final = {split: open_split(tmp_path / "out", split) for split in lengths}
    assert early == {split: stream.read(0, stream.length).tolist() for split, stream in final.items()}


def test_no_token_is_readable_that_may_be_removed(tmp_path: Path) -> None:
    # The hash selects no document for test, so the last document of train is moved there.
    options = command(tmp_path, "--test-fraction", "0.0004")
    assert run(CRASH, *options, CRASH_AT="ledger written", CRASH_TIME="5").returncode == -signal.SIGKILL
    growing = GrowingTokens(tmp_path / "out")
    assert growing.committed("train") == 0
    succeed(PREPARE, *options)
    growing.refresh()
    assert growing.committed("train") == len(tokens_of(tmp_path / "out", "train"))


def test_tail_splits_and_missing_plans_cannot_be_followed(tmp_path: Path) -> None:
    succeed(PREPARE, *command(tmp_path, "--split", "tail"))
    with pytest.raises(BadInput, match="--split tail holds out the last documents"):
        GrowingTokens(tmp_path / "out")
    with pytest.raises(BadInput, match=r"has no plan\.json"):
        GrowingTokens(tmp_path)


def test_a_silent_unlocked_preparation_counts_as_abandoned(
    third: GrowingTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    growing = GrowingTokens(tmp_path / "out")

    def after(seconds: int) -> str | None:
        message = None
        for _ in range(seconds):  # a waiting run calls `abandoned` once per second, too
            clock[0] += 1
            message = growing.abandoned()
        return message

    assert after(59) is None
    (tmp_path / "out" / ".units" / "00000009.train").write_bytes(b"a unit that is being computed")
    assert after(59) is None
    with open_locked(tmp_path / "out" / LOCK, "held"):
        assert after(1000) is None
    message = after(59)
    assert message is not None and "its preparation has ended or hangs" in message and "3 of 16 units" in message
    monkeypatch.setattr("tokens.prepare.growing_tokens.is_held", lambda path: None)  # a disk without locks
    (tmp_path / "out" / ".units" / "00000009.train").unlink()
    assert after(59) is after(1700) is None
    assert after(200) is not None


def test_a_missing_token_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)]), tmp_path / "out"
    write(out, source, split="hash", validation_fraction=0.3)
    (out / "manifest.json").unlink()
    growing = GrowingTokens(out)
    assert len(growing.stream("train").read(0, 10)) == 10
    (out / "train.safetensors").unlink()
    monkeypatch.setattr("tokens.prepare.growing_tokens.NAMING_SECONDS", 0)
    with pytest.raises(BadInput, match=f"{out}: a token file that ledger.jsonl lists is missing; restore it"):
        growing.stream("train").read(0, 10)
