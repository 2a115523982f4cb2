"""Every input format gives the same documents, and what cannot be read is named by file and line."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from errors import BadInput
from tokens.documents import PIECE_BYTES, read_documents, resolve_sources

TEXTS = ["first", "second document\nof two lines", "", "vierte: äöü 日本"]


def documents(*names: str | Path, text_field: str = "text") -> list[str]:
    texts, text = [], ""
    for piece in read_documents(resolve_sources([str(name) for name in names]), text_field):
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    assert text == ""
    return texts


def write_all_formats(folder: Path) -> list[Path]:
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    half = len(lines) // 2
    frames = [zstandard.ZstdCompressor().compress(part) for part in (lines[:half], lines[half:])]
    (folder / "c.jsonl.zst").write_bytes(b"".join(frames))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "d.parquet", row_group_size=3)
    return sorted(folder.iterdir())


def test_every_record_format_holds_the_same_documents(tmp_path: Path) -> None:
    for path in write_all_formats(tmp_path):
        assert documents(path) == TEXTS, path


def test_a_folder_a_glob_and_a_list_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert documents(tmp_path) == ["a.md", "b.txt", "sub/c.py"]
    assert documents(f"{tmp_path}/**/*.py") == ["sub/c.py"]
    assert documents(tmp_path / "b.txt", tmp_path / "a.md") == ["b.txt", "a.md"]


def test_a_long_file_is_one_document_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "wörter und Wörter, " * (3 * PIECE_BYTES // 19)
    path.write_text(text)
    pieces = list(read_documents(resolve_sources([str(path)]), "text"))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in pieces) < 2 * PIECE_BYTES
    assert pieces[-1].position == path.stat().st_size


def test_text_without_spaces_comes_in_pieces_too(tmp_path: Path) -> None:
    for name, text in (("chinese.txt", "北京大学的学生、都喜欢吃苹果。" * 100_000), ("words.txt", "word\n" * 700_000)):
        (tmp_path / name).write_text(text)
        pieces = list(read_documents(resolve_sources([str(tmp_path / name)]), "text"))
        assert "".join(piece.text for piece in pieces) == text
        assert len(pieces) >= 3
        assert max(len(piece.text.encode()) for piece in pieces) < 2 * PIECE_BYTES


def test_positions_grow_to_the_size_of_the_sources(tmp_path: Path) -> None:
    write_all_formats(tmp_path)
    sources = resolve_sources([str(tmp_path)])
    positions = [piece.position for piece in read_documents(sources, "text")]
    assert positions == sorted(positions)
    assert positions[-1] == sources[0].size_bytes


def test_the_standard_library_is_a_source_in_the_same_order_everywhere() -> None:
    first, again = resolve_sources(["stdlib", "stdlib"])
    assert first.files == again.files
    names = [file.name for file in first.files]
    assert "argparse.py" in names
    assert names != sorted(names)
    assert not any("site-packages" in file.parts or "test" in file.parts for file in first.files)


def broken(folder: Path, kind: str) -> Path:
    good = json.dumps({"text": "fine"}).encode() + b"\n"
    contents = {
        "line.jsonl": good + b"{'text': 1}\n",
        "field.jsonl": good + b'{"body": "x"}\n',
        "null.jsonl": good + b'{"text": null}\n',
        "list.jsonl": good + b"[1]\n",
        "cut.jsonl.gz": gzip.compress(good * 1000)[:-20],
        "cut.jsonl.zst": zstandard.ZstdCompressor().compress(good * 1000)[:-5],
        "no.jsonl.zst": b"plain text\n",
        "no.parquet": b"PAR1 is not enough",
        "x.docx": b"",
    }
    path = folder / kind
    path.write_bytes(contents[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("line.jsonl", "line 2: not JSON"),
        ("field.jsonl", "line 2: no field 'text'; it has body: pass --text-field"),
        ("null.jsonl", "line 2: field 'text': got NoneType, wanted a string"),
        ("list.jsonl", "line 2: no field 'text'; it has list"),
        ("cut.jsonl.gz", "cannot be read: Compressed file ended"),
        ("cut.jsonl.zst", "cannot be read: the Zstandard stream is cut short"),
        ("no.jsonl.zst", "not a Zstandard stream"),
        ("no.parquet", "not readable as Parquet"),
        ("x.docx", "unknown kind of document; wanted a name ending in .txt, .md, .py, .jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, kind: str, message: str) -> None:
    path = broken(tmp_path, kind)
    with pytest.raises(BadInput) as caught:
        documents(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


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
