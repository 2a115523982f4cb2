"""Parquet: damaged pages and rows are counted, and wrong columns are refused."""

import io
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import BadInput
from tests.tokens.documents.reading import documents, read
from tokens.documents.inputs import Damaged
from tokens.documents.parquet import open_parquet


def test_a_damaged_parquet_page_loses_only_its_row_group(tmp_path: Path) -> None:
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


def test_damaged_text_is_kept_and_wrong_encodings_are_lost(tmp_path: Path) -> None:
    texts = [b"one", b"caf\xe9", "two".encode("utf-16"), b"\xed\xa0\x80", b"three"]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 5, pyarrow.array(texts).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    pieces, reader = read(tmp_path / "a.parquet")
    assert [piece.text for piece in pieces] == ["one", "caf\ufffd", "\ufffd", "three"]
    reported = [(problem.kind, problem.where, problem.documents) for problem in reader.problems.first]
    rows = [f"{tmp_path}/a.parquet: row {row}" for row in (2, 3, 4)]
    assert reported == list(zip(("not UTF-8", "wrong encoding", "lone surrogate"), rows, (0, 1, 0), strict=True))


def test_an_error_about_columns_lists_their_types(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "list": [["x"]],
            "raw": [b"x"],
            "meta": [{"text": "x"}],
            "large": pyarrow.array(["x"], pyarrow.large_string()),
            "view": pyarrow.array(["x"], pyarrow.string_view()),
            "few": pyarrow.array(["x"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    has = "it has list (list<element: string>), raw (binary), meta (struct<text: string>), large (large_string), "
    for name in ("text", "list", "raw", "meta.text"):
        with pytest.raises(BadInput, match=re.escape(f"t.parquet: no text column '{name}'; {has}")):
            documents(tmp_path / "t.parquet", text_field=name)
    for name in ("large", "view", "few"):
        assert documents(tmp_path / "t.parquet", text_field=name) == ["x"]


def test_a_repeated_column_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="has two columns named 'text'; write the file again with only one of them"):
        read(tmp_path / "a.parquet")


def test_errors_of_pyarrow_become_damaged() -> None:
    with pytest.raises(Damaged, match=r"^not a complete Parquet file; download or write the file again"):
        open_parquet(io.BytesIO(b"PAR1" + bytes(100)))
