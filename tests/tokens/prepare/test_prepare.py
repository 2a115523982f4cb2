"""Preparation of token files: what it writes, what it refuses, and what it leaves behind."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import BadInput
from common.files import open_locked
from tests.conftest import shared
from tests.tokens.gpt2 import reference
from tests.tokens.preparing import COMMAND, PREPARE, files_of, jsonl, succeed, texts_of, tokens_of, write
from tokens.format.manifest import read_manifest
from tokens.prepare import prepare as prepare_module
from tokens.prepare.growing_files import LOCK
from tokens.tokenizer.hugging_face_files import tokenizer_text
from tokens.tokenizer.loading import CHARACTERS, load_tokenizer
from tokens.tokenizer.tokenizer import ByteCoder, byte_pair_tokenizer, fingerprint


def test_an_end_of_text_id_follows_every_document(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "", "c"]))
    assert tokens_of(tmp_path / "out", "train") == [97, 98, 256, 256, 99, 256]
    assert not (tmp_path / "out" / "validation.safetensors").exists()


def test_a_tail_with_an_older_seed_is_resumed(tmp_path: Path) -> None:
    source, tail = jsonl(tmp_path / "a.jsonl", ["ab", "cd", "ef", "gh"]), {"split": "tail", "validation_fraction": 0.5}
    earlier_manifest = write(tmp_path / "out", source, split_seed=5, **tail)
    assert write(tmp_path / "out", source, **tail) == earlier_manifest


def test_a_text_field_needs_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(
        BadInput, match="--text-field content: got 1 file of text, which have no records; omit the option"
    ):
        write(tmp_path / "out", tmp_path / "a.txt", text_field="content")


def test_the_manifest_describes_the_files(tmp_path: Path) -> None:
    returned_manifest = write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "ö"]), validation_fraction=0.5)
    assert read_manifest(tmp_path / "out") == returned_manifest
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest | {"format": 1, "documents": 2, "tokens": 6, "text_bytes": 4} == manifest
    tokenizer = {"name": "bytes", "vocabulary_size": 257, "end_of_text_id": 256, "ranks_file": None}
    assert manifest["tokenizer"] == tokenizer | {"fingerprint": fingerprint(load_tokenizer("bytes"))}
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["size_bytes"] == len(data)
        assert entry["max_id"] == 256
        assert entry["tokens"] == len(tokens_of(tmp_path / "out", name.removesuffix(".safetensors")))


def test_a_character_vocabulary_covers_all_documents(tmp_path: Path) -> None:
    texts = ["ab\r\n\0", *(chr(0x4E00 + number) for number in range(300)), "z\U0001f600", ""]
    source = jsonl(tmp_path / "a.jsonl", texts)
    options = {"tokenizer": "chars", "unit_bytes": 500, "split": "hash", "validation_fraction": 0.1}
    manifests = [write(tmp_path / f"{workers}", source, workers=workers, **options) for workers in (0, 2)]
    assert manifests[0] == manifests[1] and manifests[0].units is not None and manifests[0].units > 5
    record = manifests[0].tokenizer
    assert record.characters == "".join(sorted({*"".join(texts)})) and record.name == "chars"
    assert (record.vocabulary_size, record.end_of_text_id) == (308, 307)
    ids = tokens_of(tmp_path / "0", "train") + tokens_of(tmp_path / "0", "validation")
    decoded_texts = load_tokenizer(CHARACTERS + record.characters).decode(ids).split("<|endoftext|>")
    assert sorted(decoded_texts) == sorted([*texts, ""])
    more = {"tokenizer": str(tmp_path / "0" / "manifest.json")}
    assert write(tmp_path / "more", jsonl(tmp_path / "b.jsonl", ["zab"]), **more).tokenizer == record
    unknown = r"unit 0, from .*c\.jsonl: cannot be encoded: tokenizer chars: 'é' is not one of its"
    with pytest.raises(BadInput, match=unknown):
        write(tmp_path / "unknown", jsonl(tmp_path / "c.jsonl", ["abé"]), **more)
    with pytest.raises(BadInput, match="tokenizer: got bytes, wanted chars:"):
        write(tmp_path / "0", source, **options | {"tokenizer": "bytes"})


def test_links_in_the_output_folder_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, begin = jsonl(tmp_path / "a.jsonl", ["text"] * 100), tmp_path / "out", prepare_module.make_plan
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    out.mkdir()
    folder.mkdir()

    def plant(*arguments: Any) -> Any:
        for name in (".partial-train.safetensors", ".units", "tokenizer.tiktoken"):
            (out / name).unlink(missing_ok=True)
            (out / name).symlink_to(folder if name == ".units" else victim)
        return begin(*arguments)

    # At this point, leftovers of an earlier command have been deleted.
    monkeypatch.setattr(prepare_module, "make_plan", plant)
    (out / ".lock").symlink_to(victim)
    write(out, source, tokenizer=str(shared("gpt2.tiktoken")))
    assert victim.read_text() == "precious" and not list(folder.iterdir())
    assert tokens_of(out, "train") == [5239, 50256] * 100


def test_two_commands_cannot_prepare_the_same_tokens(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    (tmp_path / "out").mkdir()
    refused = pytest.raises(BadInput, match="another process is preparing these tokens")
    with open_locked(tmp_path / "out" / LOCK, "held"), refused:
        write(tmp_path / "out", source)
    write(tmp_path / "out", source)


def begun_by_another_plan(out: Path) -> None:
    path = out / "ledger.jsonl"
    path.write_text(path.read_text().replace('"plan": "', '"plan": "0', 1))


# Each item: a function that changes the output; the options of the next command; the expected error
FINISHED: list[tuple[Callable[[Path], object], dict[str, Any], str]] = [
    (lambda out: None, {"validation_fraction": 0.4}, "validation_fraction: got 0.4, wanted 0.3; repeat that command"),
    (lambda out: None, {"unit_bytes": 1000}, "unit_bytes: got 1000, wanted 16777216"),
    (lambda out: jsonl(out.parent / "a.jsonl", ["a", "b", "d"]), {}, r"a\.jsonl: has changed since this preparation"),
    (lambda out: None, {"sources": ("stdlib",)}, r"a\.jsonl was among its sources, but is missing from yours"),
    (lambda out: (out / "train.safetensors").unlink(), {}, r"train\.safetensors: missing, but manifest\.json lists it"),
    (lambda out: (out / "manifest.json").write_text("{"), {}, r"manifest\.json: damaged: not JSON"),
    (
        lambda out: [(out / name).unlink() for name in ("plan.json", "ledger.jsonl", "manifest.json")],
        {},
        r"\w+\.safetensors: exists; pass another --output",
    ),
    (
        lambda out: ((out / "manifest.json").unlink(), os.truncate(out / "train.safetensors", 4100)),
        {},
        r"\.partial-train\.safetensors: got 4,100 bytes, wanted 4,\d+ as ledger\.jsonl says; pass another",
    ),
    (
        lambda out: ((out / ".lock").unlink(), os.mkfifo(out / ".lock")),
        {},
        r"\.lock: cannot be written: is a pipe, wanted a regular file",
    ),
    (
        lambda out: ((out / "manifest.json").unlink(), begun_by_another_plan(out)),
        {},
        r"ledger\.jsonl: belongs to another plan; pass another --output",
    ),
]


@pytest.mark.parametrize(("damage", "options", "message"), FINISHED)
def test_a_command_that_cannot_resume_is_one_error_line(
    tmp_path: Path, damage: Callable[[Path], object], options: dict[str, Any], message: str
) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", ["a", "b", "c"]), tmp_path / "out"
    fixed = {"validation_fraction": 0.3}
    write(out, source, **fixed)
    write(out, source, **fixed)  # it is already complete
    damage(out)
    before = files_of(out)
    with pytest.raises(BadInput, match=message) as refused:
        write(out, source, **fixed | options)
    assert "\n" not in str(refused.value)
    assert sorted(files_of(out).values()) == sorted(before.values())


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["a", "b"], {"test_fraction": 0.1}, "2 documents are too few to hold out 1 for validation and 1 for test"),
        ([], {}, "the sources contain no documents"),
        (["", ""], {}, "the sources contain no documents"),
        ([None], {}, "all documents in the sources are unreadable .1.: .*: byte 0: null text: got NoneType"),
        (["a", "b", "c"], {"validation_fraction": 0.999}, "the hash selected every document for a held-out split; "),
        (
            ["x"] * 9,
            {"validation_fraction": 0.01},
            "fraction 0.01: a single token is already 5.6% of the 18 tokens; pass .* at least 0.056",
        ),
    ],
)
def test_the_advised_command_works_after_a_failed_split(
    tmp_path: Path, texts: list[Any], options: dict[str, Any], message: str
) -> None:
    fixed = {"split": "hash", "validation_fraction": 0.1}
    with pytest.raises(BadInput, match=f"{message}.*; nothing was written"):
        write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", texts), **fixed | options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    write(tmp_path / "out", jsonl(tmp_path / "b.jsonl", ["a", "b", "c"]), split="tail", validation_fraction=0.3)
    assert texts_of(tmp_path / "out", "train") == ["a", "b"]


def test_an_encoder_failure_names_unit_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # what Python raises for a panic in Rust
        pass

    (tmp_path / "b.txt").write_text("boom")
    encode = ByteCoder.encode
    for error in (PanicException("stack overflow\nmore"), ValueError("Regex error")):

        def fail(coder: ByteCoder, text: str, error: BaseException = error) -> np.ndarray:
            if text == "boom":
                raise error
            return encode(coder, text)

        monkeypatch.setattr(ByteCoder, "encode", fail)
        message = re.escape(f"unit 0, from {tmp_path}/b.txt: cannot be encoded: {str(error).splitlines()[0]}; ")
        with pytest.raises(BadInput, match=message):
            write(tmp_path / "out", tmp_path / "b.txt")


def test_gpt2_tokens_equal_tiktokens_and_include_ranks(corpus: Path, tmp_path: Path) -> None:
    ranks, out = shared("gpt2.tiktoken"), tmp_path / "out"
    text = (corpus / "c.txt").read_text()
    done = succeed(PREPARE, corpus / "c.txt", "--output", out, "--tokenizer", ranks, *COMMAND)
    assert tokens_of(out, "train") + tokens_of(out, "validation") == [*reference().encode_ordinary(text), 50256]
    assert (out / "tokenizer.tiktoken").read_bytes() == ranks.read_bytes()
    tokenizer = json.loads((out / "manifest.json").read_text())["tokenizer"]
    assert tokenizer["ranks_sha256"] == hashlib.sha256(ranks.read_bytes()).hexdigest()
    assert f"{out}: 1 document, " in done.stdout


def test_a_users_ranks_are_never_replaced(tmp_path: Path) -> None:
    out, texts, user_ranks = tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab"]), b"ranks of another tokenizer"
    (tmp_path / "t.json").write_text(tokenizer_text(byte_pair_tokenizer("t", ByteCoder().ranks)))
    (ranks := out / "tokenizer.tiktoken").parent.mkdir()
    ranks.write_bytes(user_ranks)
    with pytest.raises(BadInput, match=r"tokenizer\.tiktoken: exists, and its 26 bytes are not the ranks of"):
        write(out, texts, tokenizer=str(tmp_path / "t.json"))
    with pytest.raises(BadInput, match="nothing was written"):  # this tokenizer has no file of ranks
        write(out, jsonl(tmp_path / "empty.jsonl", []))
    assert ranks.read_bytes() == user_ranks


@pytest.mark.slow
def test_ranks_passed_as_tokenizer_survive_a_failure(tmp_path: Path) -> None:
    (ranks := tmp_path / "out" / "tokenizer.tiktoken").parent.mkdir()
    ranks.write_bytes(content := shared("gpt2.tiktoken").read_bytes())
    with pytest.raises(BadInput, match="nothing was written"):
        write(tmp_path / "out", jsonl(tmp_path / "empty.jsonl", []), tokenizer=str(ranks))
    assert ranks.read_bytes() == content


def test_a_tokenizer_that_cuts_would_change_is_refused(tmp_path: Path) -> None:
    values = json.loads(tokenizer_text(byte_pair_tokenizer("t", ByteCoder().ranks)))
    split: dict[str, Any] = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    split["behavior"] = "MergedWithPrevious"
    level = values["pre_tokenizer"] | {"use_regex": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    texts, path = jsonl(tmp_path / "a.jsonl", ["ab cd"]), tmp_path / "t.json"
    path.write_text(json.dumps(values))
    with pytest.raises(BadInput, match="tokenizer t: its pre_tokenizer attaches the white space in 'b c'"):
        write(tmp_path / "out", texts, tokenizer=str(path))
    split |= {"pattern": {"Regex": r"\s"}, "behavior": "MergedWithNext"}
    path.write_text(json.dumps(values))
    assert write(tmp_path / "out", texts, tokenizer=str(path)).tokens == 6


def test_a_users_hidden_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", ["text"] * 20), tmp_path / "out"
    (out / ".units" / "00000000.train").mkdir(parents=True)
    (out / ".units" / "00000000.train").rmdir()
    theirs = {".units/metric.txt": "km", ".partial-train-of-thought.safetensors": "mine", ".units/si/base.txt": "m"}
    (out / ".units" / "si").mkdir()
    for name, text in theirs.items():
        (out / name).write_text(text)
    for name in (".units/00000007.train", ".units/.00000007.train-host-12", ".partial-train-00003.safetensors"):
        (out / name).write_text("left by a killed command")
    write(out, source)
    assert {name: (out / name).read_text() for name in theirs} == theirs
    assert sorted(path.name for path in (out / ".units").iterdir()) == ["metric.txt", "si"]
    note = f"NOTE: {out / '.partial-train-00003.safetensors'}: deleted 24 bytes of an unfinished preparation"
    assert note in capsys.readouterr().err
    write(out, source)  # the tokens are already complete, so nothing else is deleted
    assert {name: (out / name).read_text() for name in theirs} == theirs
    new_output = tmp_path / "new_output"
    write(new_output, source)
    assert not (new_output / ".units").exists()
