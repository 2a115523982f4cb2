"""Text files are cut at the same places in units of any size; anything that is not text is left out and counted."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import shared
from tests.tokens.documents.reading import documents, left_out, read
from tests.tokens.gpt2 import reference, strange_texts
from tokens.documents import text_file
from tokens.documents.reader import Piece
from tokens.documents.text_file import TEXT_PIECE_BYTES, _can_cut, cut_position
from tokens.tokenizer.known import PATTERNS


@pytest.mark.parametrize("unit_bytes", [5000, 70_000])
def test_unit_size_does_not_change_a_text_file(tmp_path: Path, unit_bytes: int) -> None:
    wide = "中文\uff0c文本。\n北京 大学。\u3000全角 \u00a0x \u2003 y"
    text = shared("wikitext2.txt").read_text()[:150_000] + wide * 500
    (tmp_path / "a.txt").write_text(text)
    assert documents(tmp_path / "a.txt", unit_bytes=unit_bytes) == [text]
    pieces, _ = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
    assert len(pieces) >= 3
    assert len({piece.head for piece in pieces}) == 1  # the head decides the split, so all pieces go to the same split
    ids = [token for piece in pieces for token in reference().encode_ordinary(piece.text)]
    assert ids == reference().encode_ordinary(text)


def test_invalid_bytes_are_cut_like_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "_too_many", lambda *_: False)
    draw = random.Random(0)
    data = bytes(draw.choice(b"ab \n\xc3\xa4\xe3\x80\x80\xff\xe2\xf0\x9f") for _ in range(5_000))
    (tmp_path / "a.txt").write_bytes(data)
    for unit_bytes in (7, 1000):
        pieces, reader = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
        assert "".join(piece.text for piece in pieces) == data.decode(errors="replace")
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        lost_bytes = len(data) - len(data.decode(errors="ignore").encode())
        assert reader.problems.lost_bytes == lost_bytes
        assert {(problem.kind, problem.documents) for problem in reader.problems.first} == {("not UTF-8", 0)}


@pytest.mark.parametrize("words", ["wörter und Wörter, ", "北京大学的学生、都喜欢吃苹果。", "word\n"])
def test_a_long_file_is_read_in_small_pieces(tmp_path: Path, words: str) -> None:
    text = words * (4 * TEXT_PIECE_BYTES // len(words.encode()))
    (tmp_path / "a.txt").write_text(text)
    pieces, _ = read(tmp_path / "a.txt")
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in pieces) < 2 * TEXT_PIECE_BYTES


NO_TEXT = {
    "UTF-16 or UTF-32": "\ufeffUnicode text, ".encode("utf-16-le") * 100,
    "UTF-16 or": "\ufeffUnicode text, ".encode("utf-32-le") * 100,
    "NUL bytes": "no byte order mark".encode("utf-16-le") * 100,
    "bytes are not UTF-8": "日本語の文章、".encode("utf-16-le") * 100,
    "bytes are not UTF-8: convert": "eine Straße und ein Café, ".encode("latin-1") * 100,
    "NUL bytes: not text": bytes(3),
    "1 of its first 1 bytes": b"\xe9",
    "17 of its first 1,017 bytes": b"a" * 1000 + b"\xff" * 17,
    "NUL bytes: not text, or not in UTF-8;": b"a" * 1000 + bytes(17),
}


@pytest.mark.parametrize("reason", NO_TEXT)
@pytest.mark.parametrize("unit_bytes", [300, 1 << 24])
def test_a_non_text_file_is_one_bad_document(tmp_path: Path, reason: str, unit_bytes: int) -> None:
    (tmp_path / "a.txt").write_bytes(NO_TEXT[reason])
    (tmp_path / "b.txt").write_text("the next")
    pieces, reader = read(tmp_path, unit_bytes=unit_bytes)
    assert "".join(piece.text for piece in pieces) == "the next"
    assert {problem.kind for problem in reader.problems.first} == {"wrong encoding"}
    assert all(reason in problem.detail for problem in reader.problems.first)
    assert (reader.problems.lost_documents, reader.problems.lost_bytes) == (1, len(NO_TEXT[reason]))


FOURS, MANY = " four" * 9, "some words and " * 49_999
DAMAGED = {  # kind of damage -> content, remaining text, lost bytes
    "a short text in Latin-1": (b"Das Caf\xe9, ein kleiner Artikel", "Das Caf\ufffd, ein kleiner Artikel", 1),
    "16 bytes": (b"one two " * 5 + b"\xff" * 16, "one two " * 5 + "\ufffd" * 16, 16),
    "two NULs": (f"one two one two th\0ree{FOURS} fi\0ve six".encode(), f"one two one two{FOURS} six", 13),
    "16 NULs": (b"one two " * 5 + bytes(16) + b" x", "one two " * 4 + "one two x", 17),
    "one NUL of a long text": (f"{MANY}some words and a\0b and".encode(), f"{MANY}some words and and", 4),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_slight_damage_does_not_lose_a_text(tmp_path: Path, name: str) -> None:
    content, text, lost_bytes = DAMAGED[name]
    (tmp_path / "a.txt").write_bytes(content)
    for unit_bytes in (1 << 24, max(10, len(content) // 5)):
        pieces, reader = read(tmp_path, unit_bytes=unit_bytes)
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends_document for piece in pieces].count(True) == 1
        assert (reader.problems.lost_documents, reader.problems.lost_bytes) == (0, lost_bytes)


@pytest.mark.parametrize("unit_bytes", [3000, 7777, 50_000, 1 << 24])
def test_units_of_any_size_omit_the_same_uncuttable_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(text_file, "TEXT_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(text_file, "LONGEST_PIECE", 20_000)
    monkeypatch.setattr(text_file, "LONGEST_GAP", 5_000)
    for middle in ("x" * 20_001, "x" * 100_000, " " * 5_000, "\n" * 100_000, " " * 6_000 + "," + "\t" * 7_000):
        text = f"{'some words ' * 2_000}before{middle} after! {'more words ' * 2_000}"
        (tmp_path / "a.txt").write_text(text)
        pieces, reader = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
        start = text.index(" before")
        stop = text.index(" after") if "x" in middle else text.index("! more")
        assert "".join(piece.text for piece in pieces) == text[:start] + text[stop:]
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert left_out(reader) == ([f"byte {start}"], 0, stop - start)
        good = text.replace(middle, middle[: 19_000 if "x" in middle else 3_000])
        (tmp_path / "a.txt").write_text(good)
        assert documents(tmp_path / "a.txt", unit_bytes=unit_bytes) == [good]
    (tmp_path / "a.txt").write_text("x" * 50_000)
    (tmp_path / "b.txt").write_text("the next")
    pieces, reader = read(tmp_path, unit_bytes=unit_bytes)
    assert pieces == [Piece("the next", False, "the next"), Piece("", True, "the next")]
    assert left_out(reader) == (["byte 0"], 1, 50_000)


PARTS = "a|b's| |  |\n|\t|12|!?|é|日|、|'ll|'|\u00a0|\x1c|\r\n|½|\u0300|🙂".split("|")  # noqa: SIM905


@given(st.lists(st.sampled_from(PARTS), max_size=40))
def test_cutting_a_text_does_not_change_its_ids(parts: list[str]) -> None:
    text = "".join(parts)
    encode = reference().encode_ordinary
    cut = cut_position(text)
    assert encode(text[:cut]) + encode(text[cut:]) == encode(text)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_no_match_of_any_pattern_spans_a_cut(pattern: str) -> None:
    line_ends = ("\na", ".\nb", "!\n/", " \n ", "\n ", "\t\n", "1\n2", "//\n")
    more = (*line_ends, "'S", "'\u017f", "a\u0301", "ABc's", "x ", " '")
    for text in strange_texts(4_000, more):
        places = [place for place in range(1, len(text) - 1) if _can_cut(text, place, pattern)]
        pieces = [text[begin:end] for begin, end in pairwise([0, *places, len(text)])]
        matches = regex.findall(pattern, text)
        assert "".join(matches) == text
        assert matches == [match for piece in pieces for match in regex.findall(pattern, piece)]


def test_no_cut_divides_an_added_token() -> None:
    added = [{"content": content} for content in ("New York", "end ", " begin", "<think>")]
    structure = json.dumps({"added_tokens": added})
    text = "in New York the end of a begin New Y or <think> x"
    places = [place for place in range(1, len(text) - 1) if _can_cut(text, place, structure)]
    pieces = [text[begin:end] for begin, end in pairwise([0, *places, len(text)])]
    # Only neighboring characters are compared, so the "w Y" of "New Y or" is not cut either.
    divided = ("New", "end", "York the")
    assert not any(piece.strip() in divided for piece in pieces)
    assert pieces == ["in", " New York", " the", " end of", " a", " begin", " New Y", " or", " <think>", " x"]


@pytest.mark.parametrize("seed", range(3))
def test_unit_size_does_not_change_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for name, value in (("TEXT_PIECE_BYTES", 64), ("LONGEST_PIECE", 300), ("LONGEST_GAP", 70)):
        monkeypatch.setattr(text_file, name, value)
    draw = random.Random(seed)
    words = ["word ", "a!b ", "é ", "\n", "'s ", ", ", "中文。", "\t\t"]
    words += ["x" * count for count in (5, 290, 299, 300, 301, 900)] + [" " * count for count in (2, 69, 70, 71, 500)]
    (tmp_path / "a.txt").write_text("".join(draw.choices(words, k=100)))
    results = []
    for unit_bytes in (37, 100, 333, 1000, 1 << 24):
        pieces, reader = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
        results.append(("".join(piece.text for piece in pieces), left_out(reader)))
    assert results == [results[0]] * len(results)
    assert results[0][1][2] > 0  # some bytes are left out
