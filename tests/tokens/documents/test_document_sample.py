"""A sample is spread over all sources and has the requested size, or contains everything if the sources are smaller."""

import re
from pathlib import Path

import attrs
import pytest

from tests.tokens.documents.reading import SETTINGS
from tests.tokens.preparing import jsonl
from tokens.documents import document_sample as sample_module
from tokens.documents.document_sample import DocumentSample
from tokens.documents.reader import Reader
from tokens.documents.sources import resolve_sources
from tokens.prepare.plan import make_plan


def sample_of(*names: Path, most_bytes: int, unit_bytes: int = 2000) -> DocumentSample:
    plan = make_plan(resolve_sources([*map(str, names)]), attrs.evolve(SETTINGS, unit_bytes=unit_bytes))
    return DocumentSample(Reader(plan.inputs, "text"), plan.units, plan.unit_bytes, most_bytes)


def test_a_sample_is_spread_evenly_and_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "PLACES", 10)
    names = [jsonl(tmp_path / f"{n}.jsonl", [f"{n}{number:04} word ö" for number in range(2000)]) for n in "ab"]
    sample = sample_of(*names, most_bytes=1000)
    text = "".join(sample.texts())
    assert (sample.text_bytes, sample.is_whole) == (1000, False)
    assert 990 <= len(text.encode()) <= 1000  # a two-byte character is left out if only one of its bytes fits
    counts = [text.count(name) for name in "ab"]
    assert abs(counts[0] - counts[1]) <= 2
    numbers = [int(digits) for digits in re.findall(r"a(\d{4})", text)]
    assert min(numbers) < 100 and max(numbers) > 1500
    again = sample_of(*names, most_bytes=1000)
    assert "".join(again.texts()) == text


def test_small_sources_are_read_completely(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 200_000)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"short {number} ")
    for most_bytes in (1_000_100, 1 << 30):
        sample = sample_of(tmp_path, most_bytes=most_bytes, unit_bytes=100_000)
        assert len("".join(sample.texts())) == 1_000_040
        assert (sample.documents, sample.is_whole) == (6, True)
    short = sample_of(tmp_path, most_bytes=1_000_039, unit_bytes=100_000)
    assert 1_000_000 < len("".join(short.texts())) <= 1_000_039 and not short.is_whole
