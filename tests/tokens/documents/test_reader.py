"""Every record format gives the same documents in units of any size; bad records are counted and shown."""

import gzip
import io
import json
import random
import resource
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.conftest import slow
from tests.tokens.documents.reading import GOOD, TEXTS, documents, flipped, read, write_all_formats
from tests.tokens.gpt2 import reference
from tokens.documents import compressed, text_file
from tokens.documents.reader import Reader
from tokens.documents.text_file import LONGEST_LINE

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("unit_bytes", [1, 7, 100, 5000])
def test_unit_size_does_not_change_records(tmp_path: Path, unit_bytes: int) -> None:
    draw = random.Random(unit_bytes)
    texts = TEXTS + ["ä\n" * draw.choice([0, 1, 5, 100]) + str(number) for number in range(60)]
    for path in write_all_formats(tmp_path, texts):
        assert documents(path, unit_bytes=unit_bytes) == texts, path


@pytest.mark.parametrize("unit_bytes", [1, 1 << 24])
def test_byte_order_marks_are_not_part_of_texts(tmp_path: Path, unit_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n', encoding="utf-8-sig")
    for suffix in ("txt", "md", "py"):
        (tmp_path / f"b.{suffix}").write_text("one two", encoding="utf-8-sig")
    (tmp_path / "c.txt").write_text("", encoding="utf-8-sig")
    pieces, _ = read(tmp_path, unit_bytes=unit_bytes)
    assert {piece.head for piece in pieces} == {"one two", ""}
    assert documents(tmp_path, unit_bytes=unit_bytes) == ["one two"] * 4 + [""]


def test_a_long_record_is_one_document_in_pieces(tmp_path: Path) -> None:
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


WHITE = json.dumps({"text": "a" + " \n" * 250_000}).encode() + b"\n"
BROKEN = {
    "line.jsonl": (GOOD + b"{'text': 1}\n" + GOOD, ": byte 17: not JSON: ", 2),
    "field.jsonl": (
        GOOD + b'{"body": "x"}\n' + GOOD,
        ": byte 17: no text field: no 'text'; the record has body; pass --t",
        2,
    ),
    "null.jsonl": (GOOD + b'{"text": null}\n' + GOOD, ": byte 17: null text: got NoneType, wanted a string", 2),
    "list.jsonl": (GOOD + b"[1]\n" + GOOD, ": byte 17: no text field: got list, wanted one object per line", 2),
    "cut.jsonl.gz": (gzip.compress(GOOD * 1000)[:-20], ": damaged file: Compressed file ended", None),
    "cut.jsonl.zst": (zstandard.ZstdCompressor().compress(GOOD * 1000)[:-5], "the Zstandard stream is truncated", None),
    "no.jsonl.zst": (b"plain text\n", ": after line 0: damaged file: not a Zstandard stream", 0),
    "no.parquet": (b"PAR1 is not enough", ": damaged file: not readable as Parquet", 0),
    "deep.jsonl": (GOOD + b'{"text": ' + b"[" * 100_000 + b"\n" + GOOD, ": byte 17: not JSON: maximum recursion", 2),
    "white.jsonl": (GOOD + WHITE + GOOD, ": byte 17: no text: 500,000 or more characters of white space", 2),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_records_are_counted_and_the_rest_is_read(tmp_path: Path, name: str) -> None:
    data, message, readable = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(data)
    pieces, reader = read(path)
    [problem] = reader.problems.first
    assert f"{problem.where}: {problem.kind}: {problem.detail}".startswith(str(path))
    assert message in f"{problem.where}: {problem.kind}: {problem.detail}"
    assert problem.documents == 1
    assert readable is None or [piece.text for piece in pieces] == ["fine"] * readable


@pytest.mark.parametrize("unit_bytes", [1, 30, 1 << 24])
@pytest.mark.parametrize("kind", COMPRESS)
def test_an_overlong_line_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, unit_bytes: int
) -> None:
    monkeypatch.setattr(Reader, "longest_line", 40)
    monkeypatch.setattr(text_file, "LINE_BLOCK_BYTES", 7)
    longest, too_long = (json.dumps({"text": "x" * length}).encode() + b"\n" for length in (27, 28))
    assert len(longest) == 40
    content = [longest, too_long, longest, b"[" * 500 + b"\n", longest, b"[" * 300]
    (tmp_path / f"a.jsonl{kind}").write_bytes(COMPRESS[kind](b"".join(content)))
    pieces, reader = read(tmp_path / f"a.jsonl{kind}", unit_bytes=unit_bytes)
    assert [piece.text for piece in pieces] == ["x" * 27] * 3
    assert [(problem.kind, problem.documents) for problem in reader.problems.first] == [("line too long", 1)] * 3
    places = ["byte 40", "byte 121", "byte 662"] if kind == "" else ["line 2", "line 4", "line 6"]
    wheres = [problem.where for problem in reader.problems.first]
    assert wheres == [f"{tmp_path}/a.jsonl{kind}: {place}" for place in places]
    assert sum(problem.lost_bytes for problem in reader.problems.first) == (41 + 501 + 300 if kind == "" else 0)


def test_huge_integers_do_not_lose_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": %s, "text": "x"}\n' % ("1" * 5000))
    assert documents(tmp_path / "a.jsonl") == ["x"]


@pytest.mark.parametrize("suffix", ["jsonl", "json.gz", "jsonl.zst", "parquet"])
def test_a_file_without_records_is_reported(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(b"")
    blank = {"jsonl": b"\n\n", "json.gz": gzip.compress(b"\n"), "jsonl.zst": zstandard.compress(b"")}
    (tmp_path / f"b.{suffix}").write_bytes(blank.get(suffix, b""))
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "b.parquet")
    pieces, reader = read(tmp_path)
    assert pieces == []
    problems = [(problem.kind, problem.documents, problem.lost_bytes) for problem in reader.problems.first]
    assert problems == [("empty file", 0, 0)] * 2


def test_lone_surrogates_are_replaced_as_by_tiktoken(tmp_path: Path) -> None:
    for half, second_half in ((b"\\ud83d", b"\\ude00"), (b"\xed\xa0\xbd", b"\xed\xb8\x80")):  # escaped, raw
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "half %b and whole %b%b"}\n' % (half, half, second_half))
        [piece], reader = read(tmp_path / "a.jsonl")
        assert piece.text == "half \ufffd and whole 😀"
        assert reference().encode_ordinary(piece.text) == reference().encode_ordinary("half \ud83d and whole 😀")
        assert [(problem.kind, problem.documents) for problem in reader.problems.first] == [("lone surrogate", 0)]


@pytest.mark.parametrize("unit_bytes", [*slow(1), 7, 100, 5000, 1 << 24])
@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n## ", "é日"])
def test_unit_size_does_not_change_separated_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, unit_bytes: int
) -> None:
    monkeypatch.setattr(text_file, "TEXT_PIECE_BYTES", 50)  # so that separators cross the edges of blocks
    draw = random.Random(unit_bytes)
    texts = ["ä\n<| é|" * draw.choice([1, 5, 100]) + str(number) for number in range(40)]
    content = separator.join(["", *texts[:20], " \n", "", *texts[20:], "\n"])
    path = tmp_path / "a.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(content, encoding=encoding)
        assert documents(path, unit_bytes=unit_bytes, separator=separator) == texts
    path.write_text("alone")
    assert documents(path, unit_bytes=unit_bytes, separator=separator) == ["alone"]
    (tmp_path / "records").mkdir()
    for records in write_all_formats(tmp_path / "records", ["whole", content]):
        assert documents(records, unit_bytes=unit_bytes, separator=separator) == ["whole", *texts]


@pytest.mark.parametrize("unit_bytes", [40, 1 << 24])
def test_a_spelled_out_end_of_text_is_reported(tmp_path: Path, unit_bytes: int) -> None:
    text = "some words and" * 3 + "<|endoftext|>" + "more words"
    (tmp_path / "a.txt").write_text(text * 2)
    for path in (tmp_path / "a.txt", *write_all_formats(tmp_path, ["x", text])):
        pieces, reader = read(path, unit_bytes=unit_bytes)
        assert "<|endoftext|>" in "".join(piece.text for piece in pieces)
        problem = reader.problems.first[0]
        assert (problem.kind, problem.documents) == ("<|endoftext|> in a text", 0)
        assert "start over with --separator '<|endoftext|>'" in problem.detail


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le", "latin-1", "NUL"])
def test_records_in_another_encoding_are_reported(tmp_path: Path, kind: str, encoding: str) -> None:
    lines = "".join(json.dumps({"text": f"Straße {number}"}, ensure_ascii=False) + "\n" for number in range(300))
    data = lines.replace("ß", "\0").encode() if encoding == "NUL" else lines.encode(encoding)
    (tmp_path / f"a.jsonl{kind}").write_bytes(COMPRESS[kind](data))
    pieces, reader = read(tmp_path / f"a.jsonl{kind}")
    if encoding == "latin-1":  # bad bytes are replaced, as in a text file
        assert [piece.text for piece in pieces] == [f"Stra\ufffde {number}" for number in range(300)]
        assert {(problem.kind, problem.lost_bytes) for problem in reader.problems.first} == {("not UTF-8", 1)}
    else:
        assert pieces == []
        assert {problem.kind for problem in reader.problems.first} == {"wrong encoding"}
        assert reader.problems.lost_documents >= 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "jsonl.zst"])
def test_a_huge_line_takes_linear_time_and_constant_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    with path.open("wb") as file:
        if kind == "json":
            file.truncate(1 << 30)  # a very long line, as in a file that is one JSON array
            file.seek(0, io.SEEK_END)
        else:  # a quadratic reader (15 s for a fifth of these bytes) would exceed the test's time limit
            with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as writer:
                for _ in range(1000):
                    writer.write(b"x" * (1 << 20))
        file.write(b"\n" + GOOD if kind == "json" else zstandard.compress(b"\n" + GOOD))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces, reader = read(path, unit_bytes=1 << 26)
    assert [piece.text for piece in pieces] == ["fine"]
    assert [problem.kind for problem in reader.problems.first] == ["line too long"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * LONGEST_LINE / 1024


def test_highly_compressed_data_is_unpacked_in_small_parts() -> None:
    packed = io.BytesIO(zstandard.compress((b"x" * ((1 << 20) - 1) + b"\n") * 256))
    tracemalloc.start()
    lines = compressed.decompressed_lines(packed, zstandard=True, longest=text_file.LONGEST_LINE)
    assert sum(len(line or b"") for line, _, _ in lines) == 256 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damage_in_a_compressed_file_loses_its_rest(tmp_path: Path, kind: str) -> None:
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
        if "wrong" not in damage.detail:  # the damaged place was noticed, not only a wrong checksum
            assert len(pieces) <= 2000
            assert behind <= damage.lost_bytes <= behind + 2 * compressed.PACKED_BYTES
            assert damage.lost_bytes > 1


def test_a_wrong_checksum_casts_doubt_on_earlier_lines(tmp_path: Path) -> None:
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(GOOD * 9)
    for name, data in (("a.jsonl.gz", flipped(gzip.compress(GOOD * 9), -8)), ("a.jsonl.zst", flipped(checked, -1))):
        (tmp_path / name).write_bytes(data)
        _, reader = read(tmp_path / name)
        [damage] = reader.problems.first
        assert damage.kind == "damaged file"
        assert damage.detail.endswith("earlier lines may be wrong, too")


def test_a_repeated_field_is_reported(tmp_path: Path) -> None:
    lines = ['{"text": "a", "text": "b"}', '{"a": {"text": "x"}, "text": "\\"text\\""}', '{"text": "c", "b": "text"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pieces, reader = read(tmp_path / "a.jsonl")
    assert [piece.text for piece in pieces] == ['"text"', "c"]
    assert [problem.kind for problem in reader.problems.first] == ["field given twice"]


def test_an_error_about_an_array_asks_for_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}]\n')
    (tmp_path / "b.json").write_text('[\n{"text": "a"},\n{"text": "b"}\n]\n')
    _, reader = read(tmp_path)
    examples = [line for lines in reader.problems.summary()["examples"].values() for line in lines]
    assert any(
        "a.json: byte 0: no text field: got list, wanted one object per line with the field 'text'" in example
        for example in examples
    )
    assert any(
        "b.json: byte 0: not JSON: " in example and example.endswith("; wanted one record per line")
        for example in examples
    )
