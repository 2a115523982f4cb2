"""Files of an experiment: the one that states it, the directory of its runs, and its results."""

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
from training.config.train_config import SET_OPTION, Run, TrainConfig, load_run, one_form
from training.data.locate_tokens import locate_tokens
from training.telemetry.metrics_log import LADDER, METRICS, SWEEP, TRIAL, result_files

MOST_SEEDS = 1000
LOSS_DIGITS = 4  # shown of a loss
# Results by experiment: what every table and every record contains, and hardly another file
RESULTS = {
    SWEEP: (b"# Sweep of ", b'"seed_deviation": '),
    LADDER: (b"# Ladder for ", b'"held_out": '),
    TRIAL: (b"# Trial of ", b'"candidate": '),
}


def read_experiment(
    file: Path, known: Collection[str], advice: str, *, removed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the keys of an experiment's file. Raises BadInput for an unreadable one, and for an unknown key.

    `removed`: keys that earlier versions had, with the reason for their removal and the advice that replaces them.
    """
    values: dict[str, Any] = read_json(file, advice=advice)
    for key in values:
        if removed and key in removed:
            raise BadInput(f"{file}: {key}: {removed[key]}")
        if key not in known:
            raise BadInput(unknown_key(key, known, file))
    return values


def read_seeds(file: Path, seeds: Any, first: int) -> tuple[int, ...]:
    """Return the seeds: a list as it is, a number of them from the first on. Raises BadInput."""
    if type(seeds) is int and 1 <= seeds <= MOST_SEEDS:
        return tuple(range(first, first + seeds))
    whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed <= LARGEST_INTEGER for seed in seeds)
    if not whole or not 1 <= len(seeds) <= MOST_SEEDS or len(set(seeds)) < len(seeds):
        raise BadInput(
            f"{file}: seeds: got {quoted(seeds)}, wanted a number from 1 to {MOST_SEEDS:,}, or a list of as many "
            "different whole numbers"
        )
    return tuple(seeds)


def output_of(file: Path, output: Path | None) -> Path:
    """Return the directory of an experiment's runs: as given, or beside its file. Raises BadInput."""
    chosen = file.with_suffix("") if output is None else output
    if chosen == file:
        raise BadInput(f"{file}: wanted a name that ends in .json, or --output DIR")
    return chosen


def counted(number: int, noun: str) -> str:
    """Return "1 seed", "2 seeds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_results(output: Path, name: str) -> None:
    """Raise BadInput where NAME.md or NAME.json is a file of the user: not a result of an earlier call."""
    for path, sign in zip(result_files(output, name), RESULTS[name], strict=True):
        if path.is_file():
            check_replaceable(path, sign, f"a result of experiment.py {name}", "--output")


def show_results(
    text: Callable[..., str], record: Callable[[], dict[str, Any]], output: Path, name: str, subject: str
) -> None:
    """Write NAME.md, whose title ends with `subject`, and NAME.json; print the text in any case: it may be all.

    `text`: of a form of tabulate's, the simple one by default.
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
    """Write a result, None: remove that of an earlier call, which holds no more. Raises BadInput where that fails."""
    with writing(path):
        if text is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, f"{text}\n", durable=True)


# What decides on which tokens, in which windows, the final loss is measured
FIXED = (
    "train.validation_sequences",
    "train.start_val_token",
    "train.validation_interval",
    "model.vocab_size",
    "model.context_length",
    "train.dataset",
)
BUCKET = "checkpoints"  # key of train.json that no run of an experiment has: all would share the bucket
Changes = dict[str, Any]  # "train.KEY" or "model.KEY": value
Sections = dict[str, dict[str, Any]]  # "model" and "train": keys and values as in the JSON files


def changed_run(where: str, base: Path, changes: Changes) -> Run:
    """Return a run directory with these changes. Raises BadInput that begins with `where` for an invalid value."""

    def placed(problem: Problem) -> Problem:
        return replace(problem, where=where) if problem.where == SET_OPTION else problem.at(where)

    try:
        return load_run(base, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    except BadInput as error:
        raise BadInput(*map(placed, error.problems)) from error


def write_run_directory(directory: Path, sections: Sections) -> None:
    """Write model.json and train.json, or leave those that are there. Raises BadInput as `check_unchanged`."""
    check_unchanged(directory, sections)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for section, values in sections.items():
        path = directory / f"{section}.json"
        if not path.exists() or read_json(path) != values:
            if path.exists():  # of a run that has not begun
                size = f"{path.stat().st_size:,} bytes"
                show(note(f"{path}: replaced ({size}): the experiment now has other values"))
            with writing(path):
                replace_file(path, json.dumps(values, indent=4) + "\n", durable=True)


def missing_tokens(file: Path, train: TrainConfig) -> str | None:
    """Return one line about a dataset that is nowhere, or None. Raises it as BadInput where the steps depend on it."""
    try:
        locate_tokens(train, None, can_override=False)
    except BadInput as error:
        if train.data.min_train_tokens is None:
            raise BadInput(f"{file}: {error}; or set min_train_tokens: null, all tokens, needs them") from error
        return f"{file}: {error}"
    return None


def check_unchanged(directory: Path, sections: Sections, options: Mapping[str, str] | None = None) -> None:
    """Raise BadInput, naming what differs, for results of another recipe; `options`: of the command line, by key."""
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
