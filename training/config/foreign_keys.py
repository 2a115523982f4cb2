"""Translate keys of gpjt's run directories, and write advice for unknown keys, such as those of other programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checks import KeyRow, KeyRows
from common.errors import BadInput
from common.other_programs import ForeignKey, foreign_keys
from common.output import Notice, note
from common.text import nearest

# Keys of train.json that are no longer read, with the reason
_REMOVED_KEYS = dict.fromkeys(
    ("on_spike", "spike_window", "spike_zscore"), "only steps whose loss or gradient is not finite are skipped"
)


def hint(section: str, key: str, value: Any, rows: KeyRows, *, overridden: bool) -> str:
    """Return advice for an unknown key.

    If the key belongs to the other file (model.json or train.json) or to another program, the advice names the key that
    was probably meant. Otherwise, it names the known key with the most similar name.
    """
    misplaced = next((ForeignKey(f"{name}.{key}", "") for name, keys in rows.items() if key in keys), None)
    counterpart = misplaced or foreign_keys(rows).get(key)
    if counterpart is None:
        return nearest(key, rows[section])
    full_name, remark = counterpart
    if remark:
        return f"the corresponding key is {full_name}, {remark}" if full_name else f"Lockstep has no such key: {remark}"
    if overridden:
        return f"did you mean --set {full_name}={_as_text(value)}?"
    key_section, _, name = full_name.partition(".")
    return f"did you mean '{name}'" + ("?" if key_section == section else f" of {key_section}.json?")


def translate(
    model: dict[str, Any], train: dict[str, Any], rows: Mapping[str, KeyRow], files: Mapping[str, Path]
) -> list[Notice | str]:
    """Replace gpjt's older spellings in `model` and `train`, and return a notice for each of them.

    `rows` has the row of each key of train.json. The rows are processed in order, because microbatch_size must be known
    before other keys are converted with it. Raises BadInput if an old and a new key contradict each other, or if `moe`
    is set.
    """
    file = files["train"]
    removed_keys = [key for key in _REMOVED_KEYS if train.pop(key, None) is not None]
    notices: list[Notice | str] = [note(f"{file}: {key} is ignored: {_REMOVED_KEYS[key]}") for key in removed_keys]
    if "moe" in model:
        raise BadInput(
            f"{files['model']}: key 'moe': mixtures of experts are not supported; Lockstep trains only dense models"
        )
    for key, row in rows.items():
        if row.older is None or row.older.name not in train:
            continue
        old_value = train.pop(row.older.name)
        try:
            converted = row.older.convert(old_value, train)
        except ValueError as error:
            raise BadInput(f"{file}: {row.older.name}: {error}") from error
        action = "ignored, because the file has" if key in train else "read as"
        value = train.setdefault(key, converted)
        notices.append(f"{file}: {row.older.name} {_as_text(old_value)} is {action} {key} {_as_text(value)}")
    return notices


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
