"""The command prepare_data.py: exit statuses, messages and memory."""

import re
import sys
from pathlib import Path

import pytest

from common.text import counted
from tests.tokens.preparing import PREPARE, jsonl, run, succeed, texts_of


@pytest.mark.parametrize(
    ("source", "output", "tokenizer", "message"),
    [
        ("a.jsonl", "/dev/null", "bytes", "/dev/null: is not a folder; pass another --output"),
        ("a.jsonl", "a.jsonl/out", "bytes", "written: Not a directory; a file has the name of a folder"),
        ("a.jsonl", "x" * 300, "bytes", "cannot be written: File name too long; choose a shorter name"),
        # The missing input is reported before the unknown tokenizer.
        ("nothing", "out", "unknown", "nothing: no such file, folder or glob"),
        ("x" * 300, "out", "bytes", "cannot be read: "),
    ],
)
def test_an_impossible_path_is_one_error_line(
    tmp_path: Path, source: str, output: str, tokenizer: str, message: str
) -> None:
    jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    done = run(PREPARE, tmp_path / source, "--output", tmp_path / output, "--tokenizer", tokenizer)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert message in done.stderr and "kept" not in done.stderr


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "docs\x1b[2J\udcff"
    folder.mkdir()
    jsonl(folder / "a\x1b]0;title\x07.jsonl", ["text"] * 20 + [None])  # type: ignore[list-item]
    (folder / "other\x1b[8m.png").write_text("")
    for output in (folder / "out", folder / "out"):  # the second time, the output is already complete
        done = run(PREPARE, folder, "--output", output, "--tokenizer", "bytes", "--executor", "inline")
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        shown = done.stdout + done.stderr
        assert "\\x1b[2J" in shown and not {character for character in shown if not character.isprintable()} - {"\n"}


def test_bad_documents_are_reported_and_limited(tmp_path: Path) -> None:
    for bad, status in ((1, 0), (6, 1)):
        source = jsonl(tmp_path / f"{bad}.jsonl", ["text"] * 200 + [None] * bad)  # type: ignore[list-item]
        done = run(PREPARE, source, "--output", tmp_path / f"out{bad}", "--tokenizer", "bytes")
        assert done.returncode == status
        assert (
            f"bad documents: {bad} null text; {counted(bad, 'document')} and 0 bytes of input are left out:"
            in done.stderr
        )
        assert f"{source}: byte 3400: null text: got NoneType, wanted a string" in done.stderr
        assert ("  more examples are in ledger.jsonl" in done.stderr) == (bad > 5)
        assert (tmp_path / f"out{bad}" / "manifest.json").exists()
    with source.open("a") as file:
        file.write('{"text": "\\ud800"}\n')  # this document is repaired, so it does not count as lost
    options = ("--tokenizer", "bytes", "--on-bad-document", "fail")
    done = run(PREPARE, source, "--output", tmp_path / "fail", *options)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"prepare_data.py: {source}: byte 3400: null text: got NoneType")
    assert not list((tmp_path / "fail").glob("[!.]*.safetensors"))


def test_a_preparation_resumes_after_a_full_disk(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text " * 1000] * 100)
    options = (source, "--output", tmp_path / "out", "--tokenizer", "bytes", "--unit-bytes", "50000")
    for executor in (("--executor", "inline"), ("--workers", "2")):  # with --workers 2, a worker may fail first
        full = run(["prlimit", "--fsize=300000", *PREPARE], *options, *executor)
        assert full.returncode == 1 and "Traceback" not in full.stderr
        assert re.search(r"prepare_data.py: \S+/out/\S+: File too large; ", full.stderr.splitlines()[-1]), full.stderr
        advice = "File too large; finished work is kept, so rerun the same command to continue"
        assert advice in full.stderr.splitlines()[-1]
        assert not list((tmp_path / "out").glob("[!.]*.safetensors"))
    done = succeed(PREPARE, *options)
    assert re.search(r"resuming after 2 of 10 units", done.stderr), done.stderr
    assert sum(len(texts_of(tmp_path / "out", split)) for split in ("train", "validation")) == 100


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (8, 64):
        source = tmp_path / f"{megabytes}.txt"
        with source.open("w") as file:
            for number in range(megabytes * 1024):
                file.write(f"line {number:<8}" + "of a file that is one document " * 33 + "\n")
        code = (
            "import resource, sys; sys.argv[0] = 'prepare_data.py'; import prepare_data; status = prepare_data.main(); "
            "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(status)"
        )
        command = [sys.executable, "-c", code]
        options = ("--output", tmp_path / f"out{megabytes}", "--tokenizer", "bytes", "--executor", "inline")
        peaks.append(int(run(command, source, *options).stdout.split("peak ")[1]))
    assert peaks[1] < peaks[0] + 20, f"peak MiB for 8 and 64 MiB of input: {peaks}"
