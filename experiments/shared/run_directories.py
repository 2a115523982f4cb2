"""Run directories of an experiment: ordinary ones, written once; a changed recipe over existing results is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import BadInput, quoted
from common.files import replace_file, writing
from common.json_files import read_json
from training.checkpoints.directory import CHECKPOINTS
from training.config.train_config import Run, TrainConfig, load_run, one_form
from training.data.locate_tokens import locate_tokens
from training.telemetry.metrics_log import METRICS

BUCKET = "checkpoints"  # key of train.json that no run of an experiment has: all would share the bucket
Changes = dict[str, Any]  # "train.KEY" or "model.KEY": value
Sections = dict[str, dict[str, Any]]  # "model" and "train": keys and values as in the JSON files


def changed_run(where: str, base: Path, changes: Changes) -> Run:
    """Return a run directory with these changes. Raises BadInput that begins with `where` for an invalid value."""
    try:
        return load_run(base, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    except BadInput as error:
        raise BadInput(f"{where}: {str(error).removeprefix('--set: ')}") from error


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


def missing_tokens(file: Path, train: TrainConfig) -> str | None:
    """Return one line, with the experiment's file, about a dataset that is nowhere; None where all are here.

    Raises it as BadInput where even the number of steps depends on its tokens.
    """
    try:
        locate_tokens(train, None, can_give=False)
    except BadInput as error:
        if train.data.min_train_tokens is None:
            raise BadInput(f"{file}: {error}; or set min_train_tokens: null, all tokens, needs them") from error
        return f"{file}: {error}"
    return None


def check_unchanged(directory: Path, sections: Sections, options: Mapping[str, str] | None = None) -> None:
    """Raise BadInput, naming what differs, where the directory has results of another recipe.

    `options`: of the command line, by the keys that follow from them.
    """
    if not (directory / METRICS).exists() and not (directory / CHECKPOINTS).exists():
        return
    for section, values in sections.items():
        path = directory / f"{section}.json"
        there = read_json(path)
        forms = [one_form(section, each) for each in (there, values)]
        for key in sorted({*there, *values}):
            if forms[0].get(key) != forms[1].get(key):
                got, wanted = (quoted(each[key]) if key in each else "absent" for each in (there, values))
                option = (options or {}).get(key)
                why = "" if option is None else f", which follows from {option} as well"
                raise BadInput(
                    f"{path}: {key} is {got}, the experiment now has {wanted}{why}, but this run has begun; change "
                    f"that back, choose another --output, or move {directory.parent} away"
                )
