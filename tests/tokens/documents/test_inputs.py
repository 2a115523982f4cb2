"""Input files that have changed, are missing or cannot be read are refused, and the error names them."""

import errno
import gzip
import io
import os
import random
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.tokens.documents.reading import SETTINGS, read, write_all_formats
from tests.tokens.preparing import jsonl, write
from tokens.documents import inputs
from tokens.documents.reader import Reader
from tokens.documents.sources import resolve_sources
from tokens.prepare.plan import make_plan


def test_changed_and_missing_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        jsonl(tmp_path / "in" / f"{name}.jsonl", ["text"])
    write(tmp_path / "out", tmp_path / "in")
    os.utime(tmp_path / "in" / "a.jsonl", ns=(0, 1))
    with pytest.raises(BadInput, match=r"a\.jsonl: has changed since this preparation started; restore it, or pass"):
        write(tmp_path / "out", tmp_path / "in")
    (tmp_path / "in" / "a.jsonl").unlink()
    with pytest.raises(BadInput, match=r"a\.jsonl: cannot be read: .*; restore it, then rerun the same command"):
        write(tmp_path / "out", tmp_path / "in")


def test_an_unreadable_file_is_not_counted_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all_formats(tmp_path)
    (tmp_path / "e.txt").write_text("text")
    paths = sorted(tmp_path.iterdir())
    units = {path: make_plan(resolve_sources([str(path)]), SETTINGS) for path in paths}

    class Broken(io.FileIO):
        def readinto(self, *_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        read = readinto  # type: ignore[assignment]

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for opened, reason in (
        (lambda path, mode: io.BufferedReader(Broken(path)), "Input/output error"),
        (refuse, "Permission denied"),
    ):
        monkeypatch.setattr(Path, "open", opened)
        for path, plan in units.items():
            with pytest.raises(BadInput, match=rf"{path}: cannot be read: {reason}"):
                list(Reader(plan.inputs, "text").read(plan.units[0]))
        with pytest.raises(BadInput, match=rf"d\.parquet: cannot be read: {reason}"):
            make_plan(resolve_sources([str(tmp_path / "d.parquet")]), SETTINGS)


@pytest.mark.parametrize("change", ["cut", "grown", "touched"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_file_that_changes_during_reading_is_refused(tmp_path: Path, name: str, change: str) -> None:
    path = tmp_path / name
    draw = random.Random(0)
    data = b"".join(b'{"text": "%b"}\n' % draw.randbytes(30).hex().encode() for _ in range(80_000))
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    plan = make_plan(resolve_sources([str(path)]), SETTINGS)
    pieces = Reader(plan.inputs, "text").read(plan.units[0])
    next(pieces)
    if change == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif change == "grown":
        with path.open("ab") as file:
            file.write(b"more")
    else:
        os.utime(path, ns=(1, 1))
    is_truncated = change == "cut" and name != "a.jsonl.gz"
    message = "was truncated while it was being read" if is_truncated else "has changed since this preparation"
    with pytest.raises(BadInput, match=rf"{path}: {message}"):
        list(pieces)


def test_many_bad_lines_need_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b"x\n" * 50_000 + b'{"' + b'a": 1, "' * 50_000 + b'b": 1}\n')
    pieces, reader = read(tmp_path / "a.jsonl.gz")
    assert pieces == []
    summary = reader.problems.summary()
    assert [len(lines) for lines in summary["examples"].values()] == [inputs.EXAMPLES, 1]
    longest = max(len(line) for lines in summary["examples"].values() for line in lines)
    assert longest <= inputs.PROBLEM_CHARACTERS + len(f"{tmp_path}/a.jsonl.gz: line 50001: no text field: ")
    assert summary["problems"] == {"not JSON": 50_000, "no text field": 1}
    assert reader.problems.lost_documents == 50_001
