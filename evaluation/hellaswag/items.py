"""HellaSwag items (a context, four endings, the true one), from a file or from the Hugging Face hub."""

import re
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, quoted
from common.files import sha256
from common.hub_client import download_snapshot
from common.json_files import check_text, read_every_line
from common.structure import structured

PATTERNS = ["*validation*.parquet", "*validation*.jsonl"]  # validation split of a dataset on the hub
ENDINGS = 4


@attrs.frozen(kw_only=True)
class Item:
    """A context and four endings, under the names of rowanz/hellaswag."""

    ctx: str
    endings: list[str]
    label: str  # number of the true one; Parquet has it as text, JSON Lines as a number


@attrs.frozen(kw_only=True)
class Items:
    """Items and their source."""

    file: str
    sha256: str
    items: list[Item]


def read_items(source: str, count: int | None) -> Items:
    """Return the first `count` items, or all, of a file or of OWNER/NAME on the hub.

    Files are JSON Lines or Parquet with the fields of rowanz/hellaswag. Raises BadInput naming what is damaged.
    """
    path, name = Path(source), source
    if not path.is_file():
        path = _download(source)
        name = f"{source} {path.name}"
    rows = _parquet_rows(path) if path.suffix == ".parquet" else read_every_line(path, advice="download the file again")
    if not rows:
        raise BadInput(f"{path}: holds no items; wanted HellaSwag's, one a line")
    if count is not None and count > len(rows):
        raise BadInput(f"--count: got {count:,}, but {path} has {len(rows):,} items")
    items = [_item(row, f"{path}: item {number}") for number, row in enumerate(rows[:count], 1)]
    return Items(file=name, sha256=sha256(path), items=items)


def _item(row: dict[str, Any], where: str) -> Item:
    try:
        item = structured(row | {"label": str(row.get("label", ""))}, Item, unknown_keys=True)
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error
    for text in (item.ctx, *item.endings):
        check_text(text, where)
    if not item.ctx.strip():
        raise BadInput(f"{where}: ctx: got {quoted(item.ctx)}, wanted a text")
    if len(item.endings) != ENDINGS:
        raise BadInput(f"{where}: endings: got {len(item.endings)}, wanted {ENDINGS} texts")
    if item.label not in map(str, range(ENDINGS)):
        wanted = f"wanted 0 to {ENDINGS - 1}; the test split has no labels"
        raise BadInput(f"{where}: label: got {quoted(item.label)}, {wanted}")
    return item


def _parquet_rows(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: damaged: {error}; download the file again") from error


def _download(source: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source, re.ASCII) or source.endswith(".jsonl"):
        raise BadInput(f"{source}: no such file; wanted HellaSwag's items as JSON Lines, or OWNER/NAME on the hub")
    problem = "no such file, and no dataset available on the hub"
    advice = "; pass hellaswag_val.jsonl of github.com/rowanz/hellaswag with --data"
    folder = download_snapshot(source, "dataset", PATTERNS, problem, advice)
    found = sorted(path for pattern in PATTERNS for path in folder.rglob(pattern))
    if len(found) != 1:
        raise BadInput(f"{source}: got {len(found)} files of a validation split, wanted 1; pass a file with --data")
    return found[0]
