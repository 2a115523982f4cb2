"""Token files hold exactly the documents, are cut where they should be, and are never half there."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from errors import BadInput
from tests.conftest import ROOT, shared
from tokens.tokenizer import ByteTokenizer
from tokens.writer import Fractions, TokenWriter

PREPARE = [sys.executable, "prepare_data.py"]


def write(directory: Path, texts: list[str], validation: float = 0.0, test: float = 0.0) -> dict[str, Any]:
    tokenizer = ByteTokenizer()
    with TokenWriter(directory, tokenizer) as writer:
        for text in texts:
            writer.add(tokenizer.encode(text), ends_document=True)
        return writer.finish(Fractions(validation, test), [])


def tokens_of(directory: Path, split: str) -> list[int]:
    tensors = load_file(directory / f"{split}.safetensors")  # the stock reader
    assert list(tensors) == ["tokens"]
    assert tensors["tokens"].dtype == np.uint16
    return tensors["tokens"].tolist()


def test_documents_are_joined_by_the_end_of_text_id(tmp_path: Path) -> None:
    write(tmp_path / "out", ["ab", "", "c"])
    assert tokens_of(tmp_path / "out", "train") == [97, 98, 256, 256, 99, 256]
    assert not (tmp_path / "out" / "validation.safetensors").exists()


def test_the_last_documents_are_validation_and_test(tmp_path: Path) -> None:
    texts = [str(number) for number in range(10)]
    write(tmp_path / "out", texts, validation=0.2, test=0.1)
    splits = {
        split: bytes(t for t in tokens_of(tmp_path / "out", split) if t < 256).decode()
        for split in ("train", "validation", "test")
    }
    assert splits == {"train": "0123456", "validation": "78", "test": "9"}


def test_a_lone_document_is_cut_by_tokens(tmp_path: Path) -> None:
    write(tmp_path / "out", ["x" * 99], validation=0.1, test=0.05)
    lengths = [len(tokens_of(tmp_path / "out", split)) for split in ("train", "validation", "test")]
    assert lengths == [85, 10, 5]


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "out", ["ab", "c"], validation=0.5)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["documents"] == 2
    assert manifest["tokens"] == 5
    assert manifest["tokenizer"] == {
        "name": "bytes",
        "vocabulary_size": 257,
        "end_of_text_id": 256,
        "ranks_file": None,
    }
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["size_bytes"] == len(data)
        assert entry["max_id"] == 256
        assert entry["tokens"] == len(tokens_of(tmp_path / "out", name.removesuffix(".safetensors")))


def test_too_few_documents_and_none_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2 documents are too few to hold out 1 for validation and 1 for test"):
        write(tmp_path / "out", ["a", "b"], validation=0.1, test=0.1)
    with pytest.raises(BadInput, match="the sources hold no document"):
        write(tmp_path / "out", [])
    assert list((tmp_path / "out").iterdir()) == []


def test_existing_tokens_are_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "out", ["kept"])
    with pytest.raises(BadInput, match=r"train\.safetensors: exists; pass another --output"):
        write(tmp_path / "out", ["other"])
    assert tokens_of(tmp_path / "out", "train") == [*b"kept", 256]


def test_killed_in_the_middle_leaves_no_final_name_and_a_second_try_succeeds(tmp_path: Path) -> None:
    source, out = tmp_path / "big.jsonl", tmp_path / "out"
    line = json.dumps({"text": "some text to be read " * 50}) + "\n"
    source.write_text(line * 60_000)
    command = [*PREPARE, str(source), "--output", str(out), "--tokenizer", "bytes"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = out / ".partial-train.safetensors"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 100_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert [path.name for path in out.iterdir() if not path.name.startswith(".partial-")] == []
    source.write_text(line * 3)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json",
        "train.safetensors",
        "validation.safetensors",
    ]


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (4, 64):
        source = tmp_path / f"{megabytes}.txt"
        with source.open("w") as file:
            for number in range(megabytes * 1024):
                file.write(f"line {number:<8}" + "of a file that is one document " * 33 + "\n")
        code = (
            "import resource, sys; sys.argv[0] = 'prepare_data.py'; import prepare_data; status = prepare_data.main(); "
            "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(status)"
        )
        command = [
            sys.executable,
            "-c",
            code,
            str(source),
            "--output",
            str(tmp_path / f"out{megabytes}"),
            "--tokenizer",
            "bytes",
        ]
        output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        peaks.append(int(output.split("peak ")[1]))
    assert peaks[1] < peaks[0] + 20, f"peak MiB for 4 and 64 MiB of input: {peaks}"


def test_prepared_gpt2_tokens_are_tiktokens_and_carry_their_ranks(tmp_path: Path) -> None:
    from tests.tokens.test_tokenizer import reference

    text = shared("tinyshakespeare.txt").read_text()
    ranks = shared("gpt2.tiktoken")
    out = tmp_path / "out"
    command = [*PREPARE, str(shared("tinyshakespeare.txt")), "--output", str(out), "--tokenizer", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert tokens_of(out, "train") + tokens_of(out, "validation") == [*reference().encode_ordinary(text), 50256]
    assert (out / "tokenizer.tiktoken").read_bytes() == ranks.read_bytes()
    assert f"{out}: 1 documents, " in done.stdout


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text " * 100_000)
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
        "import prepare_data; sys.exit(prepare_data.main())"
    )
    command = [sys.executable, "-c", code, str(source), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert list((tmp_path / "out").iterdir()) == []
