"""Helpers for tests of readers: sources in all formats, and the documents and problems that a reader finds."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pyarrow
import pyarrow.parquet
import zstandard

from tokens.documents.inputs import Problems
from tokens.documents.reader import Piece, Reader
from tokens.documents.sources import resolve_sources
from tokens.prepare.command import PrepareCommand
from tokens.prepare.plan import make_plan, settings_of
from tokens.tokenizer.loading import load_tokenizer

TEXTS = ["first", "second document\nof two lines", "", "vierte: äöü 日本"]
SETTINGS = settings_of(
    PrepareCommand(("a",), output="", tokenizer="bytes", validation_fraction=0.0), load_tokenizer("bytes")
)


class Problem(NamedTuple):
    """A problem as a reader reports it."""

    kind: str
    where: str
    detail: str
    documents: int = 1
    lost_bytes: int = 0


class RecordedProblems(Problems):
    """Counts problems, and records every one of them in full, not only a few examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[Problem] = []

    def add(self, *problem: Any, **more: Any) -> None:
        super().add(*problem, **more)
        self.first.append(Problem(*problem, **more))


def read(
    *names: str | Path, unit_bytes: int = 1 << 24, text_field: str = "text", separator: str | None = None
) -> tuple[list[Piece], Any]:
    """Return the pieces of all units, and the reader with the problems that it found."""
    settings = attrs.evolve(SETTINGS, unit_bytes=unit_bytes, text_field=text_field)
    plan = make_plan(resolve_sources([str(name) for name in names]), settings)
    reader = Reader(plan.inputs, text_field, separator)
    reader.problems = RecordedProblems()
    return [piece for unit in plan.units for piece in reader.read(unit)], reader


def documents(*names: str | Path, **options: Any) -> list[str]:
    texts, text = [], ""
    pieces, reader = read(*names, **options)
    assert reader.problems.first == []
    for piece in pieces:
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    assert text == ""
    return texts


def write_all_formats(folder: Path, texts: list[str] = TEXTS) -> list[Path]:
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    half = len(lines) // 2
    frames = [zstandard.ZstdCompressor().compress(part) for part in (lines[:half], lines[half:])]
    (folder / "c.jsonl.zst").write_bytes(b"".join(frames))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "d.parquet", row_group_size=3)
    return sorted(folder.iterdir())


GOOD = json.dumps({"text": "fine"}).encode() + b"\n"


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def left_out(reader: Any) -> tuple[list[str], int, int]:
    problems = reader.problems.first
    assert {problem.kind for problem in problems} == {"no text"}
    return (
        [problem.where.partition(": ")[2] for problem in problems],
        sum(problem.documents for problem in problems),
        sum(problem.lost_bytes for problem in problems),
    )
