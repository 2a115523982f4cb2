"""Files of an experiment: the one that states it, the directory of its runs, and its results."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.errors import BadInput, nearest, quoted
from common.files import replace_file, writing
from common.json_files import read_json


def read_experiment(file: Path, known: Collection[str], advice: str) -> dict[str, Any]:
    """Return the keys of an experiment's file. Raises BadInput for an unreadable one, and for an unknown key."""
    values: dict[str, Any] = read_json(file, advice=advice)
    for key in values:
        if key not in known:
            raise BadInput(f"{file}: unknown key {quoted(key)}{nearest(key, known)}")
    return values


def output_of(file: Path, output: Path | None) -> Path:
    """Return the directory of an experiment's runs: as given, or beside its file. Raises BadInput."""
    chosen = file.with_suffix("") if output is None else output
    if chosen == file:
        raise BadInput(f"{file}: wanted a name that ends in .json, or --output DIR")
    return chosen


def write_results(output: Path, name: str, markdown: str, record: dict[str, Any]) -> None:
    """Write NAME.md and NAME.json. Raises BadInput where that fails."""
    with writing(output):
        replace_file(output / f"{name}.md", f"{markdown}\n", durable=True)
        replace_file(output / f"{name}.json", json.dumps(record, indent=2) + "\n", durable=True)


def remove_results(output: Path, name: str) -> None:
    """Remove NAME.md and NAME.json of an earlier call, which no longer hold."""
    with writing(output):
        for suffix in ("md", "json"):
            (output / f"{name}.{suffix}").unlink(missing_ok=True)
