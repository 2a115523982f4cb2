"""Columns of a Parquet file: a text column, or the fields of a conversation."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from common.errors import BadInput
from common.text import in_brackets
from tokens.documents.inputs import Damaged
from tokens.documents.messages import LOSS_FIELDS

if TYPE_CHECKING:
    import pyarrow.parquet

# Forms of a conversation: required fields -> optional fields.
FORMS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): (),
    ("conversations",): (),  # the form of ShareGPT
    ("instruction", "output"): ("input",),  # the form of Alpaca
    ("prompt", "completion"): (),
}
# Fields that change what a conversation means. A record in which one of them has a value is refused.
REFUSED_FIELDS = (
    *("tools", "system", "history", "system_prompt", "functions", "documents"),
    *("image", "images", "audio", "audios", "video", "videos", "chosen", "rejected"),
)
ROWS_BYTES = 1 << 20  # approximate size of the values that are decoded at a time


def open_parquet(stream: BinaryIO) -> "pyarrow.parquet.ParquetFile":
    """Open a Parquet file. Raises Damaged if the file does not have this format."""
    import pyarrow.parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the default pool keeps freed memory
    with _damage("not a complete Parquet file"):
        return pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)


def columns(table: "pyarrow.parquet.ParquetFile", name: str | None) -> list[str]:
    """Return the column `name`. If `name` is None, return the columns from which conversations are read.

    These are all columns whose values decide how a record is read, as for records in JSON Lines.
    """
    names = table.schema_arrow.names
    if name is not None:
        return [name]
    complete = [form for form in FORMS if {*form} <= {*names}]
    # If no form is complete, read the fields of all forms, so that errors can name the fields that a record does have.
    fields = [field for form in complete or FORMS for field in (*form, *FORMS[form])]
    return [field for field in (*fields, *REFUSED_FIELDS, *LOSS_FIELDS) if field in names]


def unread_columns(table: "pyarrow.parquet.ParquetFile") -> list[str]:
    """Return the columns of a file that are not used for conversations."""
    read = columns(table, None)
    return [name for name in table.schema_arrow.names if name not in read]


def check_column(table: "pyarrow.parquet.ParquetFile", name: str | None, path: str) -> None:
    """Raise BadInput unless the file has a text column `name`, or conversations if `name` is None."""
    fields = {field.name: field.type for field in table.schema_arrow}
    if duplicates := [column for column, count in Counter(table.schema_arrow.names).items() if count > 1]:
        raise BadInput(f"{path}: has two columns named '{duplicates[0]}'; write the file again with only one of them")
    required_fields = [field for form in FORMS for field in form]
    if name is None and not fields.keys() & {*required_fields}:
        raise BadInput(f"{path}: has none of the columns {', '.join(required_fields)}; it has {', '.join(fields)}")
    if name is not None and not (name in fields and _is_text(fields[name])):
        columns_text = ", ".join(f"{column} ({kind})" for column, kind in fields.items())
        raise BadInput(f"{path}: no text column '{name}'; it has {columns_text}; pass --text-field")


def group_bytes(table: "pyarrow.parquet.ParquetFile", group: int, name: str | None) -> int:
    """Return the uncompressed size in bytes of `columns` in a row group."""
    chunks = [table.metadata.row_group(group).column(index) for index in range(table.metadata.num_columns)]
    prefixes = tuple(f"{column}." for column in columns(table, name))
    return sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(prefixes))


def values(table: "pyarrow.parquet.ParquetFile", group: int, name: str | None) -> Iterator[list[Any]]:
    """Yield a row group's values in batches. Raises Damaged.

    If a text is not valid UTF-8, the UnicodeDecodeError is yielded in its place.
    """
    count = table.metadata.row_group(group).num_rows
    rows = max(1, min(1 << 16, int(ROWS_BYTES * count / max(1, group_bytes(table, group, name)))))
    with _damage(f"its row group {group} cannot be read"):
        for batch in table.iter_batches(rows, [group], columns(table, name), use_threads=False):
            column = batch.column(0) if name is not None else batch.to_struct_array()
            try:
                batch_values = column.to_pylist()
            except UnicodeDecodeError:
                batch_values = [_value(scalar) for scalar in column]
            yield batch_values


@contextmanager
def _damage(problem: str) -> Iterator[None]:
    """Turn pyarrow's errors for a damaged file into Damaged. System errors, which have an errno, pass through."""
    import pyarrow

    try:
        yield
    except MemoryError:  # pyarrow's MemoryError is also an ArrowException
        raise
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(f"{problem}; download or write the file again{in_brackets(error)}") from error


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    # A column of type null has no values at all; each missing value is counted as a problem later.
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error
