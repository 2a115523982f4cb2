"""The rows of a comparison: each model's stored results, cost and recipe. Models are not loaded."""

import json
import os
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput
from common.json_files import is_number
from evaluation.command_line import COMMANDS
from evaluation.shared.model_location import ModelLocation, home_of
from evaluation.shared.results import EvaluationResult, RunCost, cost_of, read_results
from evaluation.shared.significance import CONFIDENCE
from evaluation.shared.weights import WeightsIdentity
from evaluation.shared.weights_on_disk import files_sha256, identity_on_disk
from tokens.tokenizer.hugging_face_files import read_tokenizer_files
from tokens.tokenizer.loading import identity
from training.checkpoints.compatibility import RESOLVED_KEYS
from training.checkpoints.directory import LINKS, STATE, checkpoints_of
from training.checkpoints.lookup import checkpoint_titled, linked_step
from training.checkpoints.run_record import RunRecord, SettingChange, describe_changes
from training.checkpoints.saved_state import SavedState, read_state
from training.config.train_config import PLUMBING_KEYS, recipe
from training.telemetry.metrics_log import EVALUATIONS

# Exceptions that reading a stored result raises if the result does not have the expected structure.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@attrs.frozen(kw_only=True)
class Row:
    """A model in the comparison."""

    label: str  # the model's name in the table; unique
    title: str  # the model's name in its results
    home: Path
    results: list[EvaluationResult]  # oldest first
    reference: str = ""  # the model as it is named on the command line
    tokenizer: str | None = None  # identity of the tokenizer, or its name; None: unknown
    vocabulary_size: int = 0  # size of the tokenizer, including special tokens that fine-tuning has added
    # Without a Lockstep checkpoint, the next four fields are None.
    cost: RunCost | None = None
    validation_loss: float | None = None
    seed: int | None = None
    recipe: str | None = None  # the same for runs that differ only in their seed and in keys that do not affect results
    changes: list[str] = attrs.field(factory=list)  # changes to recipe settings during training
    weights: WeightsIdentity | None = None  # None: no result has a hash
    notes: list[str] = attrs.field(factory=list)  # notes on results that are left out or whose weights are unknown


def read_rows(references: Sequence[str]) -> list[Row]:
    """Return the rows of models. The row of a run describes the checkpoint that was measured last.

    Raises BadInput if a model has no results.
    """
    return distinct([_read_row(reference) for reference in references])


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without duplicates, and give rows with equal titles different labels."""
    unique: list[Row] = []
    for row in rows:
        if not any((row.home, row.title) == (earlier.home, earlier.title) for earlier in unique):
            unique.append(row)
    titles = [row.title for row in unique]
    return [
        attrs.evolve(row, label=f"{row.home}: {row.title}") if titles.count(row.title) > 1 else row for row in unique
    ]


def _read_row(reference: str) -> Row:
    """Return the row of a model. Raises BadInput if it has no results that can be compared."""
    home = home_of(reference)
    results = [result for line_results in read_results(home, _parse_results) for result in line_results]
    chosen = choose_weights(reference, home, results)
    if not chosen.results:
        command = shlex.join(["python", "evaluate.py", "loss", reference])
        superseded = f"; {chosen.superseded}" if chosen.superseded else ""
        raise BadInput(
            f"{home / EVALUATIONS}: no comparable results of {reference}{superseded}; measure it first: {command}"
        )
    title = chosen.title
    tokenizer, vocabulary_size = _tokenizer(home)
    row = Row(
        label=title,
        title=title,
        home=home,
        results=chosen.results,
        reference=reference,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        weights=chosen.weights,
        notes=chosen.notes + _tokenizer_notes(chosen),
    )
    if (state := _state(home, title)) is None:
        return row
    changes = [change for change in state.config.changes if change.key not in PLUMBING_KEYS]
    return attrs.evolve(
        row,
        cost=cost_of(ModelLocation(home, home, home), state.position),
        validation_loss=state.position.validation_loss,
        seed=state.config.train.random_seed,
        recipe=_recipe(state.config, _position(home, state), changes),
        changes=describe_changes(changes),
    )


@attrs.frozen(kw_only=True)
class ChosenResults:
    """The results of the weights that a model's name now refers to."""

    title: str
    weights: WeightsIdentity | None  # None: none of the results has a hash
    results: list[EvaluationResult]  # oldest first, except that all results without a hash are at the beginning
    superseded: str  # a note on results that have the same name but other weights; "" if there are none
    notes: list[str]


def choose_weights(reference: str, home: Path, results: Sequence[EvaluationResult]) -> ChosenResults:
    """Choose the results of the model that was measured last, or of the checkpoint that `reference` names.

    Results from other weights are left out, even if they have the same name. The name can be the same if the run has
    been trained again, or if the directory or the model on the hub has been replaced. Results from the same weights are
    used, even if they have another name. A result without a hash is chosen by its name.
    """
    titles = dict.fromkeys(result.model for result in reversed(results))  # the title measured last comes first
    current = {title: identity_on_disk(home, title) for title in titles}
    for title in titles:  # if the weights are no longer on this disk, use the last weights measured under this title
        if current[title] is None:
            weights_of_title = (result.weights for result in reversed(results) if result.model == title)
            current[title] = next((weights for weights in weights_of_title if weights), None)
    path = Path(reference)
    if path.is_dir() and path.resolve() != home.resolve():  # the reference is a checkpoint
        titles = {title: None for title in titles if title.endswith(f" {path.resolve().name}")}
        if (digest := files_sha256(path)) is not None and not titles:  # it was measured under another name
            same = WeightsIdentity(files_sha256=digest)
            titles = {
                result.model: None for result in reversed(results) if result.weights and same.is_same(result.weights)
            }
    candidates = [result for result in results if result.model in titles]
    left_out = [result for result in candidates if _differ(result.weights, current[result.model])]
    measured = [result for result in candidates if not _differ(result.weights, current[result.model])]
    superseded = _superseded_note(left_out)
    if not measured:
        return ChosenResults(title="", weights=None, results=[], superseded=superseded, notes=[])
    title = measured[-1].model
    weights = current[title]
    # Results that come from older answer files have only one of the two hashes. Another result of the same weights may
    # have both.
    for result in reversed(measured):
        if weights is not None and result.weights is not None and weights.is_same(result.weights):
            weights = result.weights
            break
    unidentified = [result for result in results if result.weights is None and result.model == title]
    identified = [result for result in results if result.weights and weights and result.weights.is_same(weights)]
    same_title = [result for result in left_out if result.model == title]
    notes = [f"{title}: {_superseded_note(same_title)}"] if same_title else []
    if unidentified:
        names = ", ".join(dict.fromkeys(result.evaluation for result in unidentified))
        notes.append(f"{title}: weights unknown: these results have no hash and may come from other weights: {names}")
    return ChosenResults(
        title=title,
        weights=weights if identified else None,
        results=unidentified + identified,
        superseded=superseded,
        notes=notes,
    )


def _tokenizer_notes(chosen: ChosenResults) -> list[str]:
    """Return, for each tokenizer that was passed as --tokenizer, a note that names the results measured with it."""
    by_tokenizer: dict[str, dict[str, None]] = {}
    for result in chosen.results:
        if result.given_tokenizer is not None:
            kind, is_other, _ = result.evaluation.partition(" by tokenizer ")
            why = ", which is not the model's own" if is_other else "; the model names no tokenizer"
            by_tokenizer.setdefault(f"{result.given_tokenizer}{why}", {})[kind] = None
    return [
        f"{chosen.title}: measured with --tokenizer {tokenizer}: {', '.join(kinds)}"
        for tokenizer, kinds in by_tokenizer.items()
    ]


def _tokenizer(home: Path) -> tuple[str | None, int]:
    """Return the identity or name of the tokenizer in a run or model directory, and the number of its ids.

    If the tokenizer is unknown, return None and 0.
    """
    try:
        if (recorded := ModelLocation(home, home, home).tokenizer) is not None:
            return recorded.identity or recorded.name, recorded.vocabulary_size
        tokenizer = read_tokenizer_files(home)
    except BadInput:
        return None, 0
    return (None, 0) if tokenizer is None else (identity(tokenizer), tokenizer.vocabulary_size)


def _differ(measured: WeightsIdentity | None, current: WeightsIdentity | None) -> bool:
    """Return whether the measured weights are known to differ from the current ones."""
    return measured is not None and current is not None and measured.is_same(current) is False


def _superseded_note(results: Sequence[EvaluationResult]) -> str:
    """Return a note on results from other weights: their number and the weights' hashes; "" for no results."""
    if not results:
        return ""
    hashes = ", ".join(dict.fromkeys(str(result.weights) for result in results))
    return f"results from other weights that had this name are left out: {len(results)} (weights {hashes})"


@np.errstate(divide="raise", over="raise", invalid="raise")
def _parse_results(record: dict[str, Any]) -> list[EvaluationResult] | None:
    """Return the valid results in a stored line, or None if all of them are damaged.

    The list is empty if the evaluation is unknown or has no measures.
    """
    command = COMMANDS.get(record["evaluation"])
    if command is None or command.measures is None:
        return []
    try:
        results = list(import_module(command.measures).read_results(record))
    except UNREADABLE:
        return None
    return list(filter(_is_valid, results)) or (None if results else [])


def _is_valid(result: EvaluationResult) -> bool:
    """Return whether a result can be shown and compared. To find out, this function compares the result with itself.

    In a valid result, all numbers are finite, no error is negative, and every value is within its bounds.
    """
    shown: list[float] = []
    try:
        for measurement in result.measurements:
            _ = measurement.text
            if measurement.measure.difference:
                difference = measurement.measure.difference([measurement.sample], [measurement.sample], CONFIDENCE)
            else:
                difference = None
            ends = (
                measurement.error,
                *(measurement.bounds or ()),
                *([] if difference is None else attrs.astuple(difference)),
            )
            shown += [measurement.value, *(float(end) for end in ends if end is not None)]
            low, high = measurement.bounds or (measurement.value, measurement.value)
            if (measurement.error or 0) < 0 or not low <= measurement.value <= high:
                return False
    except UNREADABLE:
        return False
    return bool(shown) and all(map(is_number, shown))


def _state(home: Path, title: str) -> SavedState | None:
    """Return `state.json` of a checkpoint, or None if it has been deleted."""
    path = checkpoint_titled(home, title)
    # Unlike Path.is_file, os.path.isfile raises no error for a title that is not a valid file name.
    return read_state(path) if os.path.isfile(path / STATE) else None  # noqa: PTH113


def _position(home: Path, state: SavedState) -> int | str:
    """Return the step of a checkpoint. For the last or best checkpoint of a complete run, return "end" instead."""
    latest, best = (linked_step(checkpoints_of(home), link) for link in LINKS)
    step = state.position.step
    return "end" if latest == state.config.steps and step in (latest, best) else step


def _recipe(config: RunRecord, position: int | str, changes: Sequence[SettingChange]) -> str:
    """Return JSON with all settings that change a result by more than rounding, except the seed."""
    keys = recipe(config.model, config.train)
    for key in (*RESOLVED_KEYS, "precision"):  # the resolved values of these keys are added below
        del keys["train"][key]
    precision = config.numerics.get("precision", config.train.execution.precision)
    tokens = [  # unfinished token files are identified by the plan for preparing them
        stream.sha256 if stream.sha256 and None not in stream.sha256 else [stream.plan, stream.tokens]
        for stream in config.train_streams
    ]
    settings = [keys, precision, config.global_batch_size, [position, config.steps], config.shares, tokens]
    if config.initial_weights is not None:
        settings.append(config.initial_weights.sha256)
    settings += describe_changes(changes)
    return json.dumps(settings, sort_keys=True)
