"""Preparing token files: what is written, what is refused, and what is left behind."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.conftest import shared
from tests.tokens.preparing import PREPARE, files_of, jsonl, run, texts_of, tokens_of, write
from tokens.format.manifest import read_manifest
from tokens.prepare import prepare as prepare_module
from tokens.prepare.prepare import locked
from tokens.tokenizer.tokenizer import fingerprint, load_tokenizer


def test_documents_are_joined_by_the_end_of_text_id(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "", "c"]))
    assert tokens_of(tmp_path / "out", "train") == [97, 98, 256, 256, 99, 256]
    assert not (tmp_path / "out" / "validation.safetensors").exists()


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    written = write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "ö"]), validation_fraction=0.5)
    assert read_manifest(tmp_path / "out") == written
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["documents"] == 2
    assert manifest["tokens"] == 6
    assert manifest["text_bytes"] == 4
    assert manifest["tokenizer"] == {
        "name": "bytes",
        "vocabulary_size": 257,
        "end_of_text_id": 256,
        "ranks_file": None,
        "fingerprint": fingerprint(load_tokenizer("bytes")),
    }
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["size_bytes"] == len(data)
        assert entry["max_id"] == 256
        assert entry["tokens"] == len(tokens_of(tmp_path / "out", name.removesuffix(".safetensors")))


def test_too_few_documents_and_none_are_refused(tmp_path: Path) -> None:
    two = jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(BadInput, match="2 documents are too few to hold out 1 for validation and 1 for test"):
        write(tmp_path / "out", two, split="hash", validation_fraction=0.1, test_fraction=0.1)
    with pytest.raises(BadInput, match="the sources hold no document"):
        write(tmp_path / "none", jsonl(tmp_path / "b.jsonl", []))
    assert not list(tmp_path.rglob("[!.]*.safetensors"))


def test_existing_tokens_are_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["kept"]))
    for name in ("plan.json", "ledger.jsonl", "manifest.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(BadInput, match=r"train\.safetensors: exists; pass another --output"):
        write(tmp_path / "out", jsonl(tmp_path / "b.jsonl", ["other"]))
    assert texts_of(tmp_path / "out", "train") == ["kept"]


def test_another_command_does_not_go_on_with_these_tokens(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    write(tmp_path / "out", source, validation_fraction=0.3)
    before = files_of(tmp_path / "out")
    write(tmp_path / "out", source, validation_fraction=0.3)  # complete already
    for change, message in (
        ({"validation_fraction": 0.4}, "validation_fraction: got 0.4, wanted 0.3"),
        ({"text_field": "body"}, "text_field: got body, wanted text"),
        ({"unit_bytes": 1000}, "unit_bytes: got 1000"),
    ):
        with pytest.raises(BadInput, match=message):
            write(tmp_path / "out", source, **{"validation_fraction": 0.3} | change)
    with pytest.raises(BadInput, match=r"a\.jsonl is not among the sources any more"):
        write(tmp_path / "out", jsonl(tmp_path / "b.jsonl", ["x"]), validation_fraction=0.3)
    jsonl(source, ["a", "b", "d"])
    with pytest.raises(BadInput, match=r"a\.jsonl: changed since these tokens were begun"):
        write(tmp_path / "out", source, validation_fraction=0.3)
    assert files_of(tmp_path / "out") == before


@pytest.mark.slow
def test_sources_without_a_readable_document_leave_nothing_behind(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"content": "text"}\n' * 50)
    command = (source, "--output", out, "--tokenizer", "bytes")
    refused = run(PREPARE, *command)
    assert refused.returncode == 1
    said = f"none of the 50 documents of the sources could be read: {source}: byte 0: no text field: no 'text'; it has"
    assert said in refused.stderr.splitlines()[-1] and "nothing was written" in refused.stderr
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert run(PREPARE, *command, "--text-field", "content").returncode == 0


def test_finished_tokens_that_are_gone_are_not_called_complete(tmp_path: Path) -> None:
    command = (jsonl(tmp_path / "a.jsonl", ["text"] * 20), "--output", tmp_path / "out", "--tokenizer", "bytes")
    assert run(PREPARE, *command).returncode == 0
    assert "complete already" in run(PREPARE, *command).stderr
    (tmp_path / "out" / "train.safetensors").unlink()
    gone = run(PREPARE, *command)
    assert gone.returncode == 1 and "train.safetensors: missing, but manifest.json lists it" in gone.stderr
    (tmp_path / "out" / "manifest.json").write_text("{")
    assert "manifest.json: damaged: not JSON" in run(PREPARE, *command).stderr


@pytest.mark.parametrize("name", [".partial-train.safetensors", ".lock", ".units", "tokenizer.tiktoken"])
def test_nothing_is_written_through_links_in_the_output_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 100)
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    if name == ".units":
        victim.mkdir()
    else:
        victim.write_text("precious")
    begin = prepare_module.make_plan

    def plant(*arguments: Any) -> Any:
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(victim)
        return begin(*arguments)

    monkeypatch.setattr(prepare_module, "make_plan", plant)  # after leftovers of an earlier command were deleted
    if name == ".lock":
        (tmp_path / "out" / name).symlink_to(victim)
    write(tmp_path / "out", source, tokenizer=str(shared("gpt2.tiktoken")))
    assert not list(victim.iterdir()) if name == ".units" else victim.read_text() == "precious"
    assert tokens_of(tmp_path / "out", "train") == [5239, 50256] * 100


def test_two_commands_do_not_prepare_the_same_tokens_at_once(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(BadInput, match="another process prepares these tokens"):
        write(tmp_path / "out", source)
    write(tmp_path / "out", source)


@pytest.mark.parametrize(
    ("name", "says"),
    [(".lock", "cannot be written: is a pipe, wanted a regular file"), (".scratch", "cannot be read: is a pipe")],
)
def test_a_pipe_in_an_output_folder_is_not_waited_for(tmp_path: Path, name: str, says: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(BadInput, match=rf"{name}: {says}"):
        write(tmp_path / "out", source)
