"""Every input format gives the same documents, however it is cut into units; what is bad is counted and named."""

import gzip
import json
import random
from pathlib import Path

import attrs
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from errors import BadInput
from tests.conftest import shared
from tokens.documents import PIECE_BYTES, Piece, Reader
from tokens.sources import look_up, resolve_sources
from tokens.unit_plan import Settings, UnitPlan, make_plan

TEXTS = ["first", "second document\nof two lines", "", "vierte: äöü 日本"]
SETTINGS = Settings(
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
    assert reader.problems == []
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
    from tests.tokens.test_tokenizer import reference

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


def test_bytes_that_are_no_text_are_cut_like_text(tmp_path: Path) -> None:
    draw = random.Random(0)
    data = bytes(draw.choice(b"ab \n\xc3\xa4\xe3\x80\x80\xff\xe2\xf0\x9f") for _ in range(5_000))
    (tmp_path / "a.txt").write_bytes(data)
    for unit_bytes in (7, 1000):
        assert documents(tmp_path / "a.txt", unit_bytes=unit_bytes) == [data.decode(errors="replace")]


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
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_counted_and_named_and_the_rest_is_read(tmp_path: Path, name: str) -> None:
    data, message, readable = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(data)
    pieces, reader = read(path)
    [problem] = reader.problems
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
    [problem] = reader.problems
    assert problem.where == f"{path}: after row 100"
    assert problem.documents == 100


def test_lone_surrogates_become_what_tiktoken_makes_of_them(tmp_path: Path) -> None:
    from tests.tokens.test_tokenizer import reference

    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d and whole \\ud83d\\ude00"}\n')
    [piece], reader = read(tmp_path / "a.jsonl")
    assert piece.text == "half \ufffd and whole 😀"
    assert reference().encode_ordinary(piece.text) == reference().encode_ordinary("half \ud83d and whole 😀")
    [problem] = reader.problems
    assert (problem.kind, problem.documents) == ("lone surrogate", 0)


def test_files_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.docx").write_bytes(b"")
    with pytest.raises(BadInput, match=r"x\.docx: unknown kind of document; wanted a name ending in \.txt, \.md"):
        resolve_sources([str(tmp_path / "x.docx")])


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "url": ["y"]}), tmp_path / "t.parquet")
    with pytest.raises(BadInput, match="no column 'text'; it has body, url: pass --text-field"):
        documents(tmp_path / "t.parquet")
    assert documents(tmp_path / "t.parquet", text_field="body") == ["x"]


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
