"""The split of a document follows from a hash of its text alone."""

import random
from pathlib import Path

import pytest

from tests.tokens.preparing import jsonl, texts_of, write


def test_a_documents_hash_alone_decides_its_split(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2000)]
    rule = {"split": "hash", "validation_fraction": 0.05, "test_fraction": 0.02}
    write(tmp_path / "first", jsonl(tmp_path / "a.jsonl", texts), **rule)
    others = [f"other {number}" for number in range(500)]
    shuffled = random.Random(0).sample(texts + others + texts[:300], len(texts) + len(others) + 300)
    write(tmp_path / "second", jsonl(tmp_path / "b.jsonl", shuffled), unit_bytes=999, **rule)
    for split, share in (("train", 0.93), ("validation", 0.05), ("test", 0.02)):
        first, second = (texts_of(tmp_path / name, split) for name in ("first", "second"))
        assert len(first) == pytest.approx(share * len(texts), rel=0.4)
        assert {text for text in second if text in set(texts)} == set(first)
    write(tmp_path / "third", tmp_path / "a.jsonl", split_seed=1, **rule)
    assert texts_of(tmp_path / "third", "validation") != texts_of(tmp_path / "first", "validation")
