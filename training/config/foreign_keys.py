"""Keys of other programs, earlier names, and keys that are gone: translated, or explained in the error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checks import KeyRow, KeyRows
from common.errors import BadInput
from common.other_programs import ForeignKey, foreign_keys
from common.output import Notice, note
from common.text import nearest

# Keys of train.json that are read no more.
_GONE = dict.fromkeys(("on_spike", "spike_window", "spike_zscore"), "steps that are not finite alone are held back")


def hint(section: str, key: str, value: Any, rows: KeyRows, *, overridden: bool) -> str:
    """Return advice for an unknown key: what it likely means in the other file or another program, or the nearest."""
    elsewhere = next((ForeignKey(f"{name}.{key}", "") for name, keys in rows.items() if key in keys), None)
    meant = elsewhere or foreign_keys(rows).get(key)
    if meant is None:
        return nearest(key, rows[section])
    ours, remark = meant
    if remark:
        return f"here it is {ours}, {remark}" if ours else f"there is no such key here: {remark}"
    if overridden:
        return f"did you mean --set {ours}={_shown(value)}?"
    other, _, name = ours.partition(".")
    return f"did you mean '{name}'" + ("?" if other == section else f" of {other}.json?")


def translate(
    model: dict[str, Any], train: dict[str, Any], rows: Mapping[str, KeyRow], files: Mapping[str, Path]
) -> list[Notice | str]:
    """Replace older spellings of gpjt's in place; return a notice for each. Raises BadInput for contradictions.

    `rows` are those of the keys of train.json. Keys are read in their order: that of the micro-batch comes before those
    that are converted with it.
    """
    file = files["train"]
    gone = [key for key in _GONE if train.pop(key, None) is not None]
    notices: list[Notice | str] = [note(f"{file}: {key} is ignored: {_GONE[key]}") for key in gone]
    if "moe" in model:
        raise BadInput(
            f"{files['model']}: key 'moe': mixtures of experts are not GPT-2; Lockstep trains dense models only"
        )
    for key, row in rows.items():
        if row.older is None or row.older.name not in train:
            continue
        older = train.pop(row.older.name)
        try:
            value = row.older.convert(older, train)
        except ValueError as error:
            raise BadInput(f"{file}: {row.older.name}: {error}") from error
        action = "ignored next to" if key in train else "read as"
        value = train.setdefault(key, value)
        notices.append(f"{file}: {row.older.name} {_shown(older)} is {action} {key} {_shown(value)}")
    return notices


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
