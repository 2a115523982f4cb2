"""The table of all keys of model.json and train.json, as `train.py --keys` prints it."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from common.arguments import described
from common.checks import key_of, row_of
from training.config.dataset_config import DatasetPart
from training.config.train_config import KEYS


def key_table() -> str:
    """Return a table of the keys of model.json, train.json and an entry of `dataset`: meaning, values and default."""
    lines: list[str] = []
    for section, keys in KEYS.items():
        lines += [f"{section}.json:", *_table_rows(keys.values())]
    return "\n".join(
        [*lines, "each entry of dataset in train.json, if dataset is a list:", *_table_rows(attrs.fields(DatasetPart))]
    )


def _table_rows(fields: Iterable["attrs.Attribute[Any]"]) -> Iterator[str]:
    for field in fields:
        row, required = row_of(field), field.default is attrs.NOTHING
        text = f"{explanation(field)}; accepts {row.accepted_values}{' (required)' if required else ''}"
        yield described(key_of(field), text, None if required else json.dumps(field.default))


def explanation(field: "attrs.Attribute[Any]") -> str:
    """Return the meaning of a key, followed by its recommended value and its older name if there are any."""
    row = row_of(field)
    recommended = [] if row.recommended is None else [f"recommended: {json.dumps(row.recommended)}"]
    return "; ".join([row.meaning, *recommended, *([] if row.older is None else [f"older name: {row.older.name}"])])
