"""Items of HellaSwag are read whole, or the damaged one is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import BadInput
from common.files import sha256
from evaluation.hellaswag.items import read_items
from tests.evaluation.hellaswag.written_items import ITEM, write_items


def test_items_are_those_of_the_file_up_to_a_count(tmp_path: Path) -> None:
    data = tmp_path / "items.jsonl"
    rows = write_items(data)
    found = read_items(str(data), 9)
    assert [(item.ctx, item.label) for item in found.items] == [(row["ctx"], str(row["label"])) for row in rows[:9]]
    assert (found.file, found.sha256) == (str(data), sha256(data))
    table = pyarrow.Table.from_pylist([{**row, "label": str(row["label"])} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "items.parquet")
    assert read_items(str(tmp_path / "items.parquet"), 9).items == found.items


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ITEM, '{"ind": 4, '], "line 2: not JSON"),
        ([ITEM, ITEM | {"endings": ["a", "b", "c"]}], "item 2: endings: got 3, wanted 4 texts"),
        ([ITEM | {"label": ""}], "item 1: label: got '', wanted 0 to 3; the test split has no labels"),
        ([ITEM | {"ctx": None}], "item 1: ctx: got None, wanted a string"),
        ([ITEM | {"ctx": " "}], "item 1: ctx: got ' ', wanted a text"),
        ([], "holds no items"),
        ([ITEM] * 4, "--count: got 5, but"),
    ],
    ids=["json", "endings", "label", "null", "ctx", "none", "count"],
)
def test_items_that_cannot_be_scored_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    data = tmp_path / "items.jsonl"
    data.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    with pytest.raises(BadInput) as raised:
        read_items(str(data), 5 if "count" in message else None)
    assert message in str(raised.value)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    (tmp_path / "items.parquet").write_bytes(b"PAR1")
    for name, message in (("items.parquet", "items.parquet: damaged: "), ("a.jsonl", "a.jsonl: no such file; wanted")):
        with pytest.raises(BadInput, match=message):
            read_items(str(tmp_path / name), None)
