"""The progress of a preparation is shown, and reports of damage name the damaged files."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.tokens.documents.reading import flipped
from tests.tokens.preparing import CRASH, PREPARE, jsonl, run, succeed, write
from tokens.prepare import verify as audit
from tokens.prepare.verify import verify


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Shards of 2,000 tokens, prepared in five units with about ninety documents each."""
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(450)])
    size = source.stat().st_size // 5
    options = ("--tokenizer", "bytes", "--unit-bytes", str(size), "--shard-tokens", "2000")
    succeed(PREPARE, source, "--output", tmp_path / "out", "--validation-fraction", "0.1", *options)
    return tmp_path / "out"


def test_damage_is_reported_with_its_sources(sharded: Path) -> None:
    shards = sorted(sharded.glob("train-*.safetensors"))
    assert len(shards) == 3
    with shards[0].open("r+b") as file:
        file.write(b"?")  # damages the header
    with shards[2].open("r+b") as file:
        file.truncate(shards[2].stat().st_size - 2)
    path = sharded / "validation.safetensors"
    path.write_bytes(flipped(path.read_bytes(), 4097))
    with pytest.raises(BadInput) as error_info:
        verify(str(sharded))
    message = str(error_info.value)
    assert f"{shards[0]}: " in message
    assert "validation.safetensors: damaged: got sha256 " in message
    source = sharded.parent / "a.jsonl"
    assert f"tokens 0 to 129 of validation, made from unit 0: {source} (bytes 0 to " in message, message
    assert f" of train, made from unit 4: {source} (bytes " in message
    assert "unit 1" not in message and "unit 2" not in message


def test_changes_to_ledger_or_plan_are_detected(sharded: Path) -> None:
    ledger, plan = sharded / "ledger.jsonl", sharded / "plan.json"
    ledger_text = ledger.read_text()
    ledger.write_text(ledger_text.replace('"digest": "', '"digest": "0', 1))
    with pytest.raises(BadInput, match=r"ledger\.jsonl: damaged: tokens 0 to \d+ of \w+, made from unit 0: "):
        verify(str(sharded))
    for line in (ledger_text.replace('"parts"', '"qarts"', 1), ledger_text.replace('"index"', '"jndex"', 1)):
        ledger.write_text(line)
        with pytest.raises(BadInput, match=r"ledger\.jsonl: damaged: line 2: (parts|index|jndex|qarts): "):
            verify(str(sharded))
    ledger.write_text(ledger_text)
    assert "all unchanged" in verify(str(sharded))[0]
    plan.write_text(plan.read_text().replace('"split_seed": 0', '"split_seed": 1'))
    with pytest.raises(BadInput, match=r"plan\.json: damaged: its content does not have the fingerprint "):
        verify(str(sharded))


def test_status_shows_the_progress(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 100 + [None] * 1)  # type: ignore[list-item]
    options = ("--tokenizer", "bytes", "--unit-bytes", "200", "--executor", "inline")
    command = (source, "--output", tmp_path / "out", *options)
    run(CRASH, *command, CRASH_AT="ledger written", CRASH_TIME="4")
    done = succeed(PREPARE, "status", tmp_path / "out")
    assert "not complete, last commit" in done.stdout
    assert "units      4 of" in done.stdout
    succeed(PREPARE, *command)
    done = run(PREPARE, "status", tmp_path / "out")
    assert f"{tmp_path / 'out'}: complete" in done.stdout
    assert '{"null text": 1}, 1 document lost' in done.stdout
    assert run(PREPARE, "status", tmp_path).returncode == 1


def test_status_lists_the_tokens_of_a_tail_split(tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = write(out, jsonl(tmp_path / "a.jsonl", ["text"] * 10), split="tail", validation_fraction=0.2)
    assert [manifest.files[f"{split}.safetensors"].tokens for split in ("train", "validation")] == [40, 10]
    assert audit.status(str(out))[-2:] == ["  train      40 tokens", "  validation 10 tokens"]


@pytest.mark.parametrize("name", ["plan.json", "ledger.jsonl"])
@pytest.mark.parametrize(
    "content", [b'{"a": ' * 100_000, b"[1]", b"\xff", b'{"cut": 3}', b'{"parts": {"train": {"tokens": "5"}}}', b"{}"]
)
def test_a_damaged_plan_or_ledger_is_one_error_line(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["text"] * 20))
    path = tmp_path / "out" / name
    path.write_bytes((path.read_bytes() if name == "ledger.jsonl" else b"") + content + b"\n")
    with pytest.raises(BadInput, match=rf"{name}: damaged: "):
        audit.status(str(tmp_path / "out"))


def test_damage_is_traced_despite_a_cut_tail(tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(450)]), tmp_path / "out"
    write(out, source, unit_bytes=1000, split="tail", validation_fraction=0.1)
    assert "all unchanged" in verify(str(out))[0]
    units = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()[1:4]]
    before = sum(unit["parts"]["train"]["tokens"] for unit in units)
    train = out / "train.safetensors"
    train.write_bytes(flipped(train.read_bytes(), 4096 + 2 * before + 1))
    message = rf"train\.safetensors: damaged: got sha256 .*of train, made from unit 3: {source} \("
    with pytest.raises(BadInput, match=message):
        verify(str(out))


@pytest.mark.parametrize("name", ["manifest.json", "ledger.jsonl"])
def test_a_loop_of_links_is_an_error(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    write(out, jsonl(tmp_path / "a.jsonl", ["text"] * 20))
    (out / name).unlink()
    (out / name).symlink_to(name)
    with pytest.raises(BadInput, match=name):
        audit.status(str(out))
