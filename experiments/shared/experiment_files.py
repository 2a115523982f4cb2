"""The files of an experiment: the file that describes it, the directory of its runs, and its results."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.checks import unknown_key
from common.errors import BadInput, Problem
from common.files import check_replaceable, replace_file, writing
from common.json_files import read_json
from common.output import note, show
from common.text import LARGEST_INTEGER, quoted
from training.checkpoints.directory import CHECKPOINTS
from training.config.train_config import SET_OPTION, Run, TrainConfig, load_run, normalized_values
from training.data.locate_tokens import locate_tokens
from training.telemetry.metrics_log import LADDER, METRICS, SWEEP, TRIAL, result_files

MOST_SEEDS = 1000
LOSS_DIGITS = 4  # number of decimals of a printed loss
# The bytes that identify the table and the record of each experiment. Hardly any other file contains these bytes.
RESULTS = {
    SWEEP: (b"# Sweep of ", b'"seed_deviation": '),
    LADDER: (b"# Ladder for ", b'"held_out": '),
    TRIAL: (b"# Trial of ", b'"candidate": '),
}


def read_experiment(
    file: Path, known_keys: Collection[str], advice: str, *, removed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the contents of an experiment's file. Raise BadInput if the file cannot be read or has an unknown key.

    `advice` explains what the file must contain. `removed` has the keys that only earlier versions accepted. Its values
    explain why each key was removed and what to use instead.
    """
    values: dict[str, Any] = read_json(file, advice=advice)
    for key in values:
        if removed and key in removed:
            raise BadInput(f"{file}: {key}: {removed[key]}")
        if key not in known_keys:
            raise BadInput(unknown_key(key, known_keys, file))
    return values


def read_seeds(file: Path, seeds: Any, first: int) -> tuple[int, ...]:
    """Return the seeds that the key `seeds` describes. Its value is a list of seeds, or the number of seeds.

    If the value is a number, the seeds are `first`, `first` + 1 and so on. Raise BadInput for anything else.
    """
    if type(seeds) is int and 1 <= seeds <= MOST_SEEDS:
        return tuple(range(first, first + seeds))
    is_list = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed <= LARGEST_INTEGER for seed in seeds)
    if not is_list or not 1 <= len(seeds) <= MOST_SEEDS or len(set(seeds)) < len(seeds):
        raise BadInput(
            f"{file}: seeds: got {quoted(seeds)}, expected a number from 1 to {MOST_SEEDS:,}, or a list of 1 to "
            f"{MOST_SEEDS:,} different whole numbers"
        )
    return tuple(seeds)


def output_of(file: Path, output: Path | None) -> Path:
    """Return the directory of an experiment's runs: --output, or the file's name without .json.

    Raise BadInput if the directory would have the same path as the file.
    """
    directory = file.with_suffix("") if output is None else output
    if directory == file:
        raise BadInput(f"{file}: the name of the file must end in .json; rename it, or pass --output DIR")
    return directory


def check_results(output: Path, name: str) -> None:
    """Raise BadInput if NAME.md or NAME.json is the user's own file instead of the result of an earlier call."""
    for path, sign in zip(result_files(output, name), RESULTS[name], strict=True):
        if path.is_file():
            check_replaceable(path, sign, f"a result of experiment.py {name}", "--output")


def show_results(
    text: Callable[..., str], record: Callable[[], dict[str, Any]], output: Path, name: str, subject: str
) -> None:
    """Write NAME.md and NAME.json, and print the text. The title of NAME.md ends with `subject`.

    The text is printed even if writing fails, because it may be the only copy of the results. The function `text` takes
    a table format of tabulate, which is "simple" by default.
    """
    title = RESULTS[name][0].decode() + subject
    table_file, record_file = result_files(output, name)
    try:
        check_results(output, name)
        write_or_remove(table_file, f"{title}\n\n{text('github')}")
        write_or_remove(record_file, json.dumps(record(), indent=2))
    finally:
        show(*text().split("\n"))
    show("", f"{table_file}: this table")


def write_or_remove(path: Path, text: str | None) -> None:
    """Write a result. If `text` is None, remove the result of an earlier call, because it is no longer valid.

    Raise BadInput if the file cannot be written or removed.
    """
    with writing(path):
        if text is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, f"{text}\n", durable=True)


# These keys determine the tokens and the windows on which the final loss is measured.
FIXED = (
    "train.validation_sequences",
    "train.start_val_token",
    "train.validation_interval",
    "model.vocab_size",
    "model.context_length",
    "train.dataset",
)
# This key of train.json is removed from all runs of an experiment, because otherwise they would share the bucket.
BUCKET = "checkpoints"
Changes = dict[str, Any]  # "train.KEY" or "model.KEY": value
Sections = dict[str, dict[str, Any]]  # "model" and "train": keys and values as in the JSON files


def changed_run(where: str, base: Path, changes: Changes) -> Run:
    """Return the run of a directory with the given changes to its settings.

    Raise BadInput if a setting is invalid. The error names `where` as the place of the setting.
    """

    def located(problem: Problem) -> Problem:
        return replace(problem, where=where) if problem.where == SET_OPTION else problem.at(where)

    try:
        return load_run(base, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    except BadInput as error:
        raise BadInput(*map(located, error.problems)) from error


def write_run_directory(directory: Path, sections: Sections) -> None:
    """Write model.json and train.json, unless they already have these values.

    Raise BadInput as `check_unchanged` does.
    """
    check_unchanged(directory, sections)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for section, values in sections.items():
        path = directory / f"{section}.json"
        if not path.exists() or read_json(path) != values:
            if path.exists():  # the run has not started, because otherwise `check_unchanged` would have raised an error
                size = f"{path.stat().st_size:,} bytes"
                show(note(f"{path}: replaced ({size}), because the experiment's settings have changed"))
            with writing(path):
                replace_file(path, json.dumps(values, indent=4) + "\n", durable=True)


def missing_tokens(file: Path, train: TrainConfig) -> str | None:
    """Return a line about a dataset that cannot be found, or None if all datasets are available.

    Raise BadInput with this line if the number of steps depends on the missing dataset.
    """
    try:
        locate_tokens(train, None, can_override=False)
    except BadInput as error:
        if train.data.min_train_tokens is None:
            raise BadInput(
                f"{file}: {error}; or set min_train_tokens (null means all tokens, so the number of steps depends on "
                "the dataset)"
            ) from error
        return f"{file}: {error}"
    return None


def check_unchanged(directory: Path, sections: Sections, options: Mapping[str, str] | None = None) -> None:
    """Raise BadInput if a run was started with settings that differ from `sections`. The error shows one difference.

    If a setting depends on a command-line option, `options` has this option under the setting's key.
    """
    if not (directory / METRICS).exists() and not (directory / CHECKPOINTS).exists():
        return
    for section, values in sections.items():
        path = directory / f"{section}.json"
        run_values = read_json(path)
        forms = [normalized_values(section, settings) for settings in (run_values, values)]
        for key in sorted({*run_values, *values}):
            if forms[0].get(key) != forms[1].get(key):
                run_value, new_value = (
                    quoted(settings[key]) if key in settings else "absent" for settings in (run_values, values)
                )
                option = (options or {}).get(key)
                why = "" if option is None else f" (which also depends on {option})"
                raise BadInput(
                    f"{path}: this run was started with {key} {run_value}, but the experiment now has "
                    f"{new_value}{why}; "
                    f"change the value back, choose another --output, or move {directory.parent} away"
                )
