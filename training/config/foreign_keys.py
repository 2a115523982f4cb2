"""Keys of other programs, and keys that are gone: translated where they mean the same, else a hint in the error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import BadInput, Notice, nearest, note, quoted
from common.other_programs import FOREIGN_KEYS

# Keys of train.json that are read no more.
_GONE = dict.fromkeys(("on_spike", "spike_window", "spike_zscore"), "steps that are not finite alone are held back")


def hint(section: str, key: str, value: Any, keys: Mapping[str, Mapping[str, Any]], *, overridden: bool) -> str:
    """Return advice for an unknown key: what it likely means in the other file or another program, or the nearest."""
    elsewhere = next((f"{name}.{key}" for name, known in keys.items() if key in known), None)
    meant = elsewhere or FOREIGN_KEYS.get(key)
    if meant is None:
        return nearest(key, keys[section])
    ours, _, remark = meant.partition(": ")
    if remark:
        return f"here it is {ours}, {remark}" if ours else f"there is no such key here: {remark}"
    if overridden:
        return f"did you mean --set {ours}={value if isinstance(value, str) else json.dumps(value)}?"
    other, _, name = ours.partition(".")
    return f"did you mean '{name}'" + ("?" if other == section else f" of {other}.json?")


def translate(model: dict[str, Any], train: dict[str, Any], model_file: Path, train_file: Path) -> list[Notice | str]:
    """Replace older spellings of gpjt's in place; return a notice for each. Raises BadInput for contradictions."""
    gone = [key for key in _GONE if train.pop(key, None) is not None]
    notices: list[Notice | str] = [note(f"{train_file}: {key} is ignored: {_GONE[key]}") for key in gone]
    if "moe" in model:
        raise BadInput(f"{model_file}: key 'moe': mixtures of experts are not GPT-2; Lockstep trains dense models only")
    if "minibatch_size" in train:
        size = train.pop("minibatch_size")
        if train.setdefault("microbatch_size", size) != size:
            raise BadInput(
                f"{train_file}: minibatch_size {quoted(size)} is the old name of microbatch_size; keep one of them"
            )
        notices.append(f"{train_file}: minibatch_size {size} is read as microbatch_size")
    if "use_amp" in train:
        use_amp = train.pop("use_amp")
        if type(use_amp) is not bool:
            raise BadInput(f"{train_file}: use_amp: got {quoted(use_amp)}, wanted true or false")
        read = "ignored beside" if "precision" in train else "read as"
        precision = train.setdefault("precision", "auto" if use_amp else "fp32")
        notices.append(f"{train_file}: use_amp {json.dumps(use_amp)} is {read} precision {precision}")
    if "validation_batches" in train:
        batches, size = train.pop("validation_batches"), train.get("microbatch_size")
        if "validation_sequences" in train:
            raise BadInput(f"{train_file}: validation_batches and validation_sequences mean the same; keep the latter")
        if type(batches) is not int or type(size) is not int:
            raise BadInput(
                f"{train_file}: validation_batches: got {quoted(batches)}, wanted a whole number of micro-batches"
            )
        train["validation_sequences"] = batches * size
        notices.append(
            f"{train_file}: validation_batches {batches} of {size} are read as validation_sequences {batches * size}"
        )
    return notices
