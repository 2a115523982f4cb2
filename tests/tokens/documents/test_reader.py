"""Every input format gives the same documents, however it is cut into units; what is bad is counted and named."""

import errno
import gzip
import io
import json
import os
import random
import re
import resource
import time
from pathlib import Path

import attrs
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from common.errors import BadInput
from tests.conftest import shared
from tests.tokens.tokenizer.test_tokenizer import reference
from tokens.documents import compressed, lines, problems, text_file
from tokens.documents.extent import Extent
from tokens.documents.lines import LONGEST_LINE
from tokens.documents.reader import Piece, Reader
from tokens.documents.sources import look_up, resolve_sources
from tokens.documents.text_file import PIECE_BYTES
from tokens.prepare.plan import PrepareSettings, UnitPlan, make_plan

TEXTS = ["first", "second document\nof two lines", "", "vierte: äöü 日本"]
SETTINGS = PrepareSettings(
    text_field="text",
    tokenizer="bytes",
    fingerprint="",
    vocabulary_size=257,
    end_of_text_id=256,
    split="hash",
    split_seed=0,
    validation_fraction=0.0,
    test_fraction=0.0,
    unit_bytes=1 << 24,
)


def read(*names: str | Path, unit_bytes: int = 1 << 24, text_field: str = "text") -> tuple[list[Piece], Reader]:
    """Return the pieces of all units, and the reader with what was wrong."""
    settings = attrs.evolve(SETTINGS, unit_bytes=unit_bytes, text_field=text_field)
    plan = make_plan(resolve_sources([str(name) for name in names]), settings)
    reader = Reader(plan.inputs, text_field)
    return [piece for unit in plan.units for piece in reader.read(unit)], reader


def documents(*names: str | Path, unit_bytes: int = 1 << 24, text_field: str = "text") -> list[str]:
    texts, text = [], ""
    pieces, reader = read(*names, unit_bytes=unit_bytes, text_field=text_field)
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


def test_every_record_format_holds_the_same_documents(tmp_path: Path) -> None:
    for path in write_all_formats(tmp_path):
        assert documents(path) == TEXTS, path


@pytest.mark.parametrize("unit_bytes", [1, 7, 100, 5000])
def test_records_are_the_same_in_units_of_any_size(tmp_path: Path, unit_bytes: int) -> None:
    draw = random.Random(unit_bytes)
    texts = ["ä\n" * draw.choice([0, 1, 5, 100]) + str(number) for number in range(60)]
    for path in write_all_formats(tmp_path, texts):
        assert documents(path, unit_bytes=unit_bytes) == texts, path


@pytest.mark.parametrize("unit_bytes", [5000, 70_000])
def test_a_text_file_is_cut_at_the_same_places_in_units_of_any_size(tmp_path: Path, unit_bytes: int) -> None:
    from tests.tokens.tokenizer.test_tokenizer import reference

    text = (
        shared("wikitext2.txt").read_text()[:150_000] + "中文\uff0c文本。\n北京 大学。\u3000全角 \u00a0x \u2003 y" * 500
    )
    (tmp_path / "a.txt").write_text(text)
    assert documents(tmp_path / "a.txt", unit_bytes=unit_bytes) == [text]
    pieces, _ = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
    assert len(pieces) >= 3
    assert len({piece.head for piece in pieces}) == 1  # by which all of a document's pieces find the same split
    ids = [token for piece in pieces for token in reference().encode_ordinary(piece.text)]
    assert ids == reference().encode_ordinary(text)


def test_bytes_that_are_no_text_are_cut_like_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "_too_many", lambda *_: False)
    draw = random.Random(0)
    data = bytes(draw.choice(b"ab \n\xc3\xa4\xe3\x80\x80\xff\xe2\xf0\x9f") for _ in range(5_000))
    (tmp_path / "a.txt").write_bytes(data)
    for unit_bytes in (7, 1000):
        pieces, reader = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
        assert "".join(piece.text for piece in pieces) == data.decode(errors="replace")
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        lost = len(data) - len(data.decode(errors="ignore").encode())
        assert reader.problems.lost_bytes == lost


def test_a_folder_a_glob_and_a_list_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert documents(tmp_path) == ["a.md", "b.txt", "sub/c.py"]
    assert documents(f"{tmp_path}/**/*.py") == ["sub/c.py"]
    assert documents(tmp_path / "b.txt", tmp_path / "a.md") == ["b.txt", "a.md"]


def test_a_long_file_comes_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "wörter und Wörter, " * (3 * PIECE_BYTES // 19)
    path.write_text(text)
    pieces, _ = read(path)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in pieces) < 2 * PIECE_BYTES


def test_text_without_spaces_comes_in_pieces_too(tmp_path: Path) -> None:
    for name, text in (("chinese.txt", "北京大学的学生、都喜欢吃苹果。" * 100_000), ("words.txt", "word\n" * 700_000)):
        (tmp_path / name).write_text(text)
        pieces, _ = read(tmp_path / name)
        assert "".join(piece.text for piece in pieces) == text
        assert len(pieces) >= 3
        assert max(len(piece.text.encode()) for piece in pieces) < 2 * PIECE_BYTES


def test_a_few_bytes_that_are_not_utf8_are_counted_in_units_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(f"eine Straße{', ' * 100} ein Café, ".encode("latin-1") * 100)
    for unit_bytes in (1 << 24, 300):
        pieces, reader = read(path, unit_bytes=unit_bytes)
        assert "".join(piece.text for piece in pieces) == f"eine Stra\ufffde{', ' * 100} ein Caf\ufffd, " * 100
        assert {(problem.kind, problem.documents) for problem in reader.problems.first} == {("not UTF-8", 0)}
        assert reader.problems.lost_bytes == 200


NO_TEXT = {
    "UTF-16 or UTF-32": "\ufeffUnicode text, ".encode("utf-16-le") * 100,
    "UTF-16 or UTF-32: convert it": "\ufeffUnicode text, ".encode("utf-16-be") * 100,
    "UTF-16 or": "\ufeffUnicode text, ".encode("utf-32-le") * 100,
    "NUL bytes": "no byte order mark".encode("utf-16-le") * 100,
    "NUL bytes: no text": b"text, then a page of NULs " * 40 + bytes(4096) + b" and text" * 100,
    "bytes are not UTF-8": "日本語の文章、".encode("utf-16-le") * 100,
    "bytes are not UTF-8: convert": "eine Straße und ein Café, ".encode("latin-1") * 100,
    "NUL bytes: no text, or": bytes(3),
    "NUL bytes: no text, or not in UTF-8": "short".encode("utf-16-be"),
    "1 of its first 1 bytes": b"\xe9",
    "8 of its first 9 bytes are": "Привет мир".encode("cp1251")[1:],
    "17 of its first 1,017 bytes": b"a" * 1000 + b"\xff" * 17,
    "NUL bytes: no text, or not in UTF-8;": b"a" * 1000 + bytes(17),
}


@pytest.mark.parametrize("reason", NO_TEXT)
@pytest.mark.parametrize("unit_bytes", [300, 1 << 24])
def test_a_file_that_is_no_text_is_one_bad_document(tmp_path: Path, reason: str, unit_bytes: int) -> None:
    (tmp_path / "a.txt").write_bytes(NO_TEXT[reason])
    (tmp_path / "b.txt").write_text("the next")
    pieces, reader = read(tmp_path, unit_bytes=unit_bytes)
    assert "".join(piece.text for piece in pieces) == "the next"
    assert {problem.kind for problem in reader.problems.first} == {"no text"}
    assert all(reason in problem.detail for problem in reader.problems.first)
    assert (reader.problems.lost_documents, reader.problems.lost_bytes) == (1, len(NO_TEXT[reason]))


def test_nuls_behind_the_first_bytes_of_a_long_text_cost_the_words_around_them(tmp_path: Path) -> None:
    good = "some words and more " * 20_000
    (tmp_path / "a.txt").write_text(good + "".join(f"word{number}\0x and " for number in range(4_000)) + good)
    for unit_bytes in (1 << 24, 100_000):
        pieces, reader = read(tmp_path / "a.txt", unit_bytes=unit_bytes)
        assert "".join(piece.text for piece in pieces) == good[:-1] + " and" * 4_000 + " " + good
        assert (reader.problems.lost_documents, {problem.kind for problem in reader.problems.first}) == (0, {"no text"})
        assert reader.problems.lost_bytes == sum(len(f" word{number}\0x") for number in range(4_000))


DAMAGED = {  # content, the text that is left, bytes lost
    "a short text in Latin-1": (
        "Das Café, ein kleiner Artikel".encode("latin-1"),
        "Das Caf\ufffd, ein kleiner Artikel",
        1,
    ),
    "16 bytes": (b"one two " * 5 + b"\xff" * 16, "one two " * 5 + "\ufffd" * 16, 16),
    "one NUL": (b"one two " * 2 + b"th\0ree" + b" four" * 9, "one two one two" + " four" * 9, 7),
    "16 NULs": (b"one two " * 5 + bytes(16) + b" x", "one two " * 4 + "one two x", 17),
    "one NUL of a long text": (
        b"some words and " * 50_000 + b"a\0b and" * 1,
        "some words and " * 49_999 + "some words and and",
        4,
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_little_damage_at_the_beginning_of_a_text_does_not_lose_the_text(tmp_path: Path, name: str) -> None:
    content, text, lost_bytes = DAMAGED[name]
    (tmp_path / "a.txt").write_bytes(content)
    for unit_bytes in (1 << 24, max(10, len(content) // 5)):
        pieces, reader = read(tmp_path, unit_bytes=unit_bytes)
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends_document for piece in pieces].count(True) == 1
        assert (reader.problems.lost_documents, reader.problems.lost_bytes) == (0, lost_bytes)


@pytest.mark.parametrize("unit_bytes", [1, 1 << 24])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, unit_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n', encoding="utf-8-sig")
    for suffix in ("txt", "md", "py"):
        (tmp_path / f"b.{suffix}").write_text("one two", encoding="utf-8-sig")
    (tmp_path / "c.txt").write_text("", encoding="utf-8-sig")
    pieces, _ = read(tmp_path, unit_bytes=unit_bytes)
    assert {piece.head for piece in pieces} == {"one two", ""}
    assert documents(tmp_path, unit_bytes=unit_bytes) == ["one two"] * 4 + [""]


def test_millions_of_bad_lines_are_counted_in_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b"x\n" * 50_000 + b'{"' + b'a": 1, "' * 50_000 + b'b": 1}\n')
    pieces, reader = read(tmp_path / "a.jsonl.gz")
    assert pieces == []
    assert len(reader.problems.first) == problems.EXAMPLES + 1
    assert max(len(problem.detail) for problem in reader.problems.first) <= problems.DETAIL_CHARACTERS
    assert reader.problems.summary()["problems"] == {"not JSON": 50_000, "no text field": 1}
    assert reader.problems.lost_documents == 50_001


def test_a_line_that_was_packed_a_thousandfold_is_left_out_in_linear_time_and_constant_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as writer:
            for _ in range(200):
                writer.write(b"x" * (1 << 20))
        file.write(zstandard.compress(b"\n" + GOOD))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    pieces, reader = read(tmp_path / "a.jsonl.zst")
    assert ([piece.text for piece in pieces], len(reader.problems.first)) == (["fine"], 1)
    assert time.process_time() - began < 5  # it was quadratic: 15 s and more
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * LONGEST_LINE / 1024


def test_a_parquet_file_that_could_not_be_planned_is_damaged_even_if_it_can_be_read_now(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    reader = Reader((look_up(str(path)),), "text")
    assert list(reader.read((Extent(0, 0, 0),))) == []
    [problem] = reader.problems.first
    assert (problem.kind, problem.lost_bytes) == ("damaged file", path.stat().st_size)


def test_a_long_record_comes_in_pieces_of_one_document(tmp_path: Path) -> None:
    text = "Some words, and 123 more; " * 100_000
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "b"}) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [text, "b"]}), tmp_path / "b.parquet")
    encode = reference().encode_ordinary
    for source in (path, tmp_path / "b.parquet"):
        pieces = list(read(source)[0])
        *long, last, short = pieces
        assert len(long) >= 2 and max(len(piece.text) for piece in pieces) <= 1 << 20
        assert "".join(piece.text for piece in [*long, last]) == text and last.ends_document and short.text == "b"
        assert not any(piece.ends_document for piece in long)
        assert {piece.head for piece in [*long, last]} == {text[: 1 << 16]}
        assert [token for piece in [*long, last] for token in encode(piece.text)] == encode(text)


def test_the_standard_library_is_a_source_in_the_same_order_everywhere() -> None:
    first, again = resolve_sources(["stdlib", "stdlib"])
    assert first.inputs == again.inputs
    names = [Path(item.path).name for item in first.inputs]
    assert "argparse.py" in names
    assert names != sorted(names)
    folders = [Path(item.path).parts for item in first.inputs]
    assert not any("site-packages" in parts or "test" in parts for parts in folders)


GOOD = json.dumps({"text": "fine"}).encode() + b"\n"
BROKEN = {
    "line.jsonl": (GOOD + b"{'text': 1}\n" + GOOD, ": byte 17: not JSON: ", 2),
    "field.jsonl": (
        GOOD + b'{"body": "x"}\n' + GOOD,
        ": byte 17: no text field: no 'text'; it has body: pass --text",
        2,
    ),
    "null.jsonl": (GOOD + b'{"text": null}\n' + GOOD, ": byte 17: null text: got NoneType, wanted a string", 2),
    "list.jsonl": (GOOD + b"[1]\n" + GOOD, ": byte 17: no text field: no 'text'; it has list", 2),
    "cut.jsonl.gz": (gzip.compress(GOOD * 1000)[:-20], ": damaged file: Compressed file ended", None),
    "cut.jsonl.zst": (zstandard.ZstdCompressor().compress(GOOD * 1000)[:-5], "the Zstandard stream is cut short", None),
    "no.jsonl.zst": (b"plain text\n", ": after line 0: damaged file: not a Zstandard stream", 0),
    "no.parquet": (b"PAR1 is not enough", ": damaged file: not readable as Parquet", 0),
    "deep.jsonl": (GOOD + b'{"text": ' + b"[" * 100_000 + b"\n" + GOOD, ": byte 17: not JSON: maximum recursion", 2),
    "white.jsonl": (
        GOOD + json.dumps({"text": "a" + " \n" * 250_000}).encode() + b"\n" + GOOD,
        ": byte 17: no text: 500,000 characters of white space, or more",
        2,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_counted_and_named_and_the_rest_is_read(tmp_path: Path, name: str) -> None:
    data, message, readable = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(data)
    pieces, reader = read(path)
    [problem] = reader.problems.first
    assert f"{problem.where}: {problem.kind}: {problem.detail}".startswith(str(path))
    assert message in f"{problem.where}: {problem.kind}: {problem.detail}"
    assert problem.documents == 1
    assert readable is None or [piece.text for piece in pieces] == ["fine"] * readable


def test_a_damaged_page_of_a_parquet_file_loses_its_row_group_only(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"document {number} " * 50 for number in range(300)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=100, use_dictionary=False, write_page_checksum=True)
    metadata = pyarrow.parquet.ParquetFile(path).metadata
    column = metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 20] = bytes(20)
    path.write_bytes(data)
    pieces, reader = read(path)
    assert [piece.text for piece in pieces] == texts[:100] + texts[200:]
    [problem] = reader.problems.first
    assert problem.where == f"{path}: after row 100"
    assert problem.documents == 100


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


@pytest.mark.parametrize("unit_bytes", [1, 30, 1 << 24])
@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_a_line_that_is_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, unit_bytes: int
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 40)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 7)
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[kind]
    longest, too_long = (json.dumps({"text": "x" * length}).encode() + b"\n" for length in (27, 28))
    assert len(longest) == 40
    content = [longest, too_long, longest, b"[" * 500 + b"\n", longest, b"[" * 300]
    (tmp_path / f"a.jsonl{kind}").write_bytes(compress(b"".join(content)))
    pieces, reader = read(tmp_path / f"a.jsonl{kind}", unit_bytes=unit_bytes)
    assert [piece.text for piece in pieces] == ["x" * 27] * 3
    assert [(problem.kind, problem.documents) for problem in reader.problems.first] == [("line too long", 1)] * 3
    places = ["byte 40", "byte 121", "byte 662"] if kind == "" else ["line 2", "line 4", "line 6"]
    assert [problem.where for problem in reader.problems.first] == [
        f"{tmp_path}/a.jsonl{kind}: {place}" for place in places
    ]
    assert sum(problem.lost_bytes for problem in reader.problems.first) == (41 + 501 + 300 if kind == "" else 0)


def test_an_array_of_records_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 30)  # no line end anywhere
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces, reader = read(tmp_path / "a.json", unit_bytes=1 << 26)
    assert pieces == [] and [problem.lost_bytes for problem in reader.problems.first] == [1 << 30]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * LONGEST_LINE / 1024


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damage_in_a_compressed_file_costs_what_lies_behind_it(tmp_path: Path, kind: str) -> None:
    draw = random.Random(0)
    lines = b"".join(json.dumps({"text": draw.randbytes(200).hex()}).encode() + b"\n" for _ in range(3000))
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}[kind]
    data = compress(lines)
    place = 2 * len(data) // 3
    for damaged, behind in ((data[:place], 0), (flipped(data, place), len(data) - place)):
        (tmp_path / f"a.jsonl.{kind}").write_bytes(damaged)
        pieces, reader = read(tmp_path / f"a.jsonl.{kind}")
        assert len(pieces) > 1000
        damage = reader.problems.first[-1]
        assert (damage.kind, damage.documents) == ("damaged file", 1)
        if "garbled" not in damage.detail:  # it was found where it is
            assert len(pieces) <= 2000
            assert behind <= damage.lost_bytes <= behind + 2 * compressed.BLOCK_BYTES
            assert damage.lost_bytes > 1


def test_a_wrong_checksum_says_that_the_lines_before_it_may_be_garbled(tmp_path: Path) -> None:
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(GOOD * 9)
    for name, data in (("a.jsonl.gz", flipped(gzip.compress(GOOD * 9), -8)), ("a.jsonl.zst", flipped(checked, -1))):
        (tmp_path / name).write_bytes(data)
        _, reader = read(tmp_path / name)
        [damage] = reader.problems.first
        assert damage.kind == "damaged file"
        assert damage.detail.endswith("lines before it may be garbled")


def test_bytes_that_zlib_refuses_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(GOOD * 1000)
    path.write_bytes(data[:10] + b"\xff" * (len(data) - 10))
    pieces, reader = read(path)
    assert pieces == []
    [damage] = reader.problems.first
    assert (damage.kind, damage.lost_bytes) == ("damaged file", len(data))
    assert damage.detail == "Error -3 while decompressing data: invalid block type"


def test_a_text_that_is_not_utf8_loses_its_row_only(tmp_path: Path) -> None:
    texts = [b"one", b"caf\xe9", b"two", b"\xed\xa0\x80", b"three"]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 5, pyarrow.array(texts).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    pieces, reader = read(tmp_path / "a.parquet")
    assert [piece.text for piece in pieces] == ["one", "two", "three"]
    assert [(problem.kind, problem.documents) for problem in reader.problems.first] == [("not UTF-8", 1)] * 2
    assert [problem.where for problem in reader.problems.first] == [
        f"{tmp_path}/a.parquet: row {row}" for row in (2, 4)
    ]


def test_an_integer_of_any_length_loses_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": %s, "text": "x"}\n' % ("1" * 5000))
    assert documents(tmp_path / "a.jsonl") == ["x"]


@pytest.mark.parametrize("suffix", ["jsonl", "json.gz", "jsonl.zst", "parquet"])
def test_a_file_without_a_record_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(b"")
    blank = {"jsonl": b"\n\n", "json.gz": gzip.compress(b"\n"), "jsonl.zst": zstandard.compress(b"")}
    (tmp_path / f"b.{suffix}").write_bytes(blank.get(suffix, b""))
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "b.parquet")
    pieces, reader = read(tmp_path)
    assert pieces == []
    assert [(problem.kind, problem.documents, problem.lost_bytes) for problem in reader.problems.first] == [
        ("empty file", 0, 0)
    ] * 2


def test_lone_surrogates_become_what_tiktoken_makes_of_them(tmp_path: Path) -> None:
    from tests.tokens.tokenizer.test_tokenizer import reference

    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d and whole \\ud83d\\ude00"}\n')
    [piece], reader = read(tmp_path / "a.jsonl")
    assert piece.text == "half \ufffd and whole 😀"
    assert reference().encode_ordinary(piece.text) == reference().encode_ordinary("half \ud83d and whole 😀")
    [problem] = reader.problems.first
    assert (problem.kind, problem.documents) == ("lone surrogate", 0)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "raw \xed\xa0\xbd, a pair \xed\xa0\xbd\xed\xb8\x80"}\n')
    [piece], reader = read(tmp_path / "b.jsonl")
    assert piece.text == "raw \ufffd, a pair 😀"
    assert [problem.kind for problem in reader.problems.first] == ["lone surrogate"]


def test_files_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.docx").write_bytes(b"")
    with pytest.raises(BadInput, match=r"x\.docx: unknown kind of document; wanted a name ending in \.txt, \.md"):
        resolve_sources([str(tmp_path / "x.docx")])


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "url": ["y"]}), tmp_path / "t.parquet")
    with pytest.raises(BadInput, match="no column 'text'; it has body, url: pass --text-field"):
        documents(tmp_path / "t.parquet")
    assert documents(tmp_path / "t.parquet", text_field="body") == ["x"]


def test_a_column_that_is_no_text_is_named_with_its_type_and_those_that_are(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "text": [["x"]],
            "raw": [b"x"],
            "meta": [{"text": "x"}],
            "large": pyarrow.array(["x"], pyarrow.large_string()),
            "view": pyarrow.array(["x"], pyarrow.string_view()),
            "few": pyarrow.array(["x"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    for name, message in (
        ("text", "column 'text' is list<element: string>, not text; columns of text: large, view, few: pass --text"),
        ("raw", "column 'raw' is binary, not text; columns of text: large, view, few"),
        ("meta.text", "'meta.text' is a part of a column, which cannot be named; columns of text: large, view, few"),
    ):
        with pytest.raises(BadInput, match=re.escape(f"{tmp_path / 't.parquet'}: {message}")):
            documents(tmp_path / "t.parquet", text_field=name)
    for name in ("large", "view", "few"):
        assert documents(tmp_path / "t.parquet", text_field=name) == ["x"]


def test_sources_that_are_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file, folder or glob"):
        resolve_sources([str(tmp_path / "*.txt")])
    with pytest.raises(BadInput, match="a folder without documents"):
        resolve_sources([str(tmp_path)])


def test_an_input_that_is_gone_or_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    item = look_up(str(path))
    plan = UnitPlan(SETTINGS, (), make_plan(resolve_sources([str(path)]), SETTINGS).units, (4,))
    path.write_text("other text")
    with pytest.raises(BadInput, match=r"a\.txt: changed since these tokens were begun: got 10 bytes"):
        list(Reader((item,), "text").read(plan.units[0]))
    path.unlink()
    with pytest.raises(BadInput, match=r"a\.txt: cannot be read: .*No such file"):
        list(Reader((item,), "text").read(plan.units[0]))


def test_a_file_that_the_machine_cannot_read_is_refused_and_never_counted_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    for opened, said in (
        (lambda path, mode: io.BufferedReader(Broken(path)), "Input/output error"),
        (refuse, "Permission denied"),
    ):
        monkeypatch.setattr(Path, "open", opened)
        for path, plan in units.items():
            with pytest.raises(BadInput, match=rf"{path}: cannot be read: \[Errno \d+\] {said}"):
                list(Reader(plan.inputs, "text").read(plan.units[0]))
        with pytest.raises(BadInput, match=rf"d\.parquet: cannot be read: \[Errno \d+\] {said}"):
            make_plan(resolve_sources([str(tmp_path / "d.parquet")]), SETTINGS)


@pytest.mark.parametrize("change", ["cut", "grown", "touched"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str, change: str) -> None:
    path = tmp_path / name
    data = b"".join(json.dumps({"text": random.Random(n).randbytes(30).hex()}).encode() + b"\n" for n in range(80_000))
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
    message = "became shorter while it was read" if change == "cut" and name != "a.jsonl.gz" else "changed since these"
    with pytest.raises(BadInput, match=rf"{path}: {message}"):
        list(pieces)


def left_out(reader: Reader) -> tuple[list[str], int, int]:
    problems = reader.problems.first
    assert {problem.kind for problem in problems} == {"no text"}
    return (
        [problem.where.partition(": ")[2] for problem in problems],
        sum(problem.documents for problem in problems),
        sum(problem.lost_bytes for problem in problems),
    )


@pytest.mark.parametrize("unit_bytes", [3000, 7777, 50_000, 1 << 24])
def test_a_part_of_a_text_without_a_place_to_cut_is_left_out_alike_in_units_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(text_file, "PIECE_BYTES", 1 << 10)
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


@pytest.mark.parametrize("seed", range(8))
def test_any_text_loses_the_same_parts_in_units_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for name, value in (("PIECE_BYTES", 64), ("LONGEST_PIECE", 300), ("LONGEST_GAP", 70)):
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


@pytest.mark.parametrize("unit_bytes", [5000, 1 << 24])
def test_a_file_without_any_place_to_cut_is_no_document_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(text_file, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(text_file, "LONGEST_PIECE", 20_000)
    for byte in (b"x", b" "):
        (tmp_path / "a.txt").write_bytes(byte * 50_000)
        (tmp_path / "b.txt").write_text("the next")
        pieces, reader = read(tmp_path, unit_bytes=unit_bytes)
        assert pieces == [Piece("the next", False, "the next"), Piece("", True, "the next")]
        assert left_out(reader) == (["byte 0"], 1, 50_000)


def test_zstandard_is_decompressed_in_large_parts_unless_they_grow_much(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, parts = random.Random(0), []
    usual = b"".join(draw.randbytes(50).hex().encode() + b"\n" for _ in range(20_000))
    stream = io.BytesIO(
        zstandard.compress(usual) + zstandard.compress(b"x" * (1 << 26)) * 4 + zstandard.compress(b"\n")
    )
    decompress = compressed._ZstandardReader._decompress

    def watched(reader: compressed._ZstandardReader) -> None:
        decompress(reader)
        parts.append((reader._part_bytes, len(reader._lines)))

    monkeypatch.setattr(compressed._ZstandardReader, "_decompress", watched)
    assert sum(line is not None for line, _ in compressed.decompressed_lines(stream, zstandard=True)) == 20_000
    sizes = [size for size, _ in parts]
    large = sizes.index(compressed.MOST_BYTES)
    assert large < 10
    assert sizes.count(compressed.LEAST_BYTES) > 5
    after = sizes.index(compressed.LEAST_BYTES, large)
    assert max(length for _, length in parts[after + 1 :]) <= 11 << 20
