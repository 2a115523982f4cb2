"""Held-out splits: by the hash of a document's text alone, or cut from the end of the train stream."""

import random
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.tokens.preparing import jsonl, texts_of, tokens_of, write


@pytest.mark.parametrize("unit_bytes", [30, 1 << 24])
def test_the_last_documents_are_validation_and_test(tmp_path: Path, unit_bytes: int) -> None:
    source = jsonl(tmp_path / "a.jsonl", [str(number) for number in range(10)])
    write(tmp_path / "out", source, validation_fraction=0.2, test_fraction=0.1, unit_bytes=unit_bytes)
    splits = {split: "".join(texts_of(tmp_path / "out", split)) for split in ("train", "validation", "test")}
    assert splits == {"train": "0123456", "validation": "78", "test": "9"}


def test_a_lone_document_is_cut_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    for kind in ("tail", "hash"):
        write(tmp_path / kind, tmp_path / "a.txt", split=kind, validation_fraction=0.1, test_fraction=0.05)
        lengths = [len(tokens_of(tmp_path / kind, split)) for split in ("train", "validation", "test")]
        assert lengths == [85, 10, 5]


@pytest.mark.parametrize("texts", [["x" * 500, "y" * 500], ["x" * 500, "y"], ["x", "y" * 500]])
def test_far_more_than_asked_is_held_out_by_no_split(tmp_path: Path, texts: list[str]) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["", *texts, ""])
    for seed in range(3):
        with pytest.raises(BadInput, match=r"would hold out .* of the tokens, .*--split tail.*; nothing was written"):
            write(tmp_path / "out", source, split="hash", split_seed=seed, validation_fraction=0.0005)
    write(tmp_path / "out", source, split="tail", validation_fraction=0.01)
    train, held_out = (tokens_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert "".join(map(chr, train + held_out)) == "\u0100".join(["", *texts, "", ""])
    assert len(held_out) in (round(0.01 * len(train)), round(0.01 * len(train)) + 1, len(texts[-1]) + 2)
    assert chr(held_out[0]) in texts[-1]


def test_empty_documents_take_no_part_in_a_split(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x" * 1000)
    (tmp_path / "texts" / "empty.txt").write_text("")
    for kind in ("hash", "tail"):
        write(tmp_path / kind, tmp_path / "texts", split=kind, validation_fraction=0.01)
        assert tokens_of(tmp_path / kind, "validation") == [*b"x" * 9, 256, 256]
    source = jsonl(tmp_path / "a.jsonl", ["", "a", "", "b", "", "c", "", "d", ""])
    write(tmp_path / "out", source, validation_fraction=0.25, test_fraction=0.25)
    splits = [texts_of(tmp_path / "out", split) for split in ("train", "validation", "test")]
    assert splits == [["", "a", "", "b", ""], ["c", ""], ["d", ""]]


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
