"""Run directories of an experiment: ordinary ones, written once; a changed recipe over existing results is refused."""

import json
from pathlib import Path
from typing import Any

from common.errors import BadInput, quoted
from common.files import replace_file, writing
from common.json_files import read_json
from training.checkpoints.disk import CHECKPOINTS
from training.telemetry.metrics_log import METRICS

BUCKET = "checkpoints"  # key of train.json that no run of an experiment has: all would share the bucket
Sections = dict[str, dict[str, Any]]  # "model" and "train": keys and values as in the JSON files


def write_run_directory(directory: Path, sections: Sections) -> None:
    """Write model.json and train.json, or leave those that are there. Raises BadInput as `check_unchanged`."""
    check_unchanged(directory, sections)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for section, values in sections.items():
        path = directory / f"{section}.json"
        if not path.exists() or read_json(path) != values:
            with writing(path):
                replace_file(path, json.dumps(values, indent=4) + "\n", durable=True)


def check_unchanged(directory: Path, sections: Sections) -> None:
    """Raise BadInput, naming what differs, where the directory has results of another recipe."""
    if not (directory / METRICS).exists() and not (directory / CHECKPOINTS).exists():
        return
    for section, values in sections.items():
        path = directory / f"{section}.json"
        there = read_json(path)
        for key in sorted({*there, *values}):
            if there.get(key) != values.get(key):
                got, wanted = (quoted(each[key]) if key in each else "absent" for each in (there, values))
                raise BadInput(
                    f"{path}: {key} is {got}, the experiment now has {wanted}, but this run has begun; change that "
                    f"back, choose another --output, or move {directory.parent} away"
                )
