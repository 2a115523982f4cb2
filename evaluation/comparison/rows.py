"""Rows of the comparison: each model's stored results, cost and recipe. No model is loaded."""

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

# Raised by a result of another form.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@attrs.frozen(kw_only=True)
class Row:
    label: str  # unique in the table
    title: str  # in its results
    home: Path
    results: list[EvaluationResult]  # oldest first
    reference: str = ""  # as on the command line
    tokenizer: str | None = None  # its identity, or name; None: unknown
    vocabulary_size: int = 0  # of the tokenizer, with the special tokens that fine-tuning has added
    cost: RunCost | None = None  # None, as the following, where there is no checkpoint of ours
    validation_loss: float | None = None
    seed: int | None = None
    recipe: str | None = None  # equal for runs that differ at most in their seed and in keys that change no result
    changes: list[str] = attrs.field(factory=list)  # of settings in the recipe, while the run was trained
    weights: WeightsIdentity | None = None  # None: no result has a hash of them
    notes: list[str] = attrs.field(factory=list)  # on results that are left out, or of unknown weights


def read_rows(references: Sequence[str]) -> list[Row]:
    """Return the rows of models; of a run, the checkpoint measured last. Raises BadInput without results."""
    return distinct([_read(reference) for reference in references])


def distinct(found: Sequence[Row]) -> list[Row]:
    """Return each row once, those of equal titles under different labels."""
    rows: list[Row] = []
    for row in found:
        if not any((row.home, row.title) == (other.home, other.title) for other in rows):
            rows.append(row)
    titles = [row.title for row in rows]
    return [attrs.evolve(row, label=f"{row.home}: {row.title}") if titles.count(row.title) > 1 else row for row in rows]


def _read(reference: str) -> Row:
    home = home_of(reference)
    results = [result for found in read_results(home, _structured) for result in found]
    chosen = choose_weights(reference, home, results)
    if not chosen.results:
        command = shlex.join(["python", "evaluate.py", "loss", reference])
        others = f"; {chosen.superseded}" if chosen.superseded else ""
        raise BadInput(
            f"{home / EVALUATIONS}: no comparable results of {reference}{others}; measure it first: {command}"
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
        notes=chosen.notes + _given_tokenizers(chosen),
    )
    if (state := _state(home, title)) is None:
        return row
    changes = [one for one in state.config.changes if one.key not in PLUMBING_KEYS]
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
    """Results of one model: those of the weights that its name stands for now."""

    title: str
    weights: WeightsIdentity | None  # None: no result of it has a hash
    results: list[EvaluationResult]  # oldest first; those without a hash come before the others
    superseded: str  # on results of other weights under the same name; "" without any
    notes: list[str]


def choose_weights(reference: str, home: Path, results: Sequence[EvaluationResult]) -> ChosenResults:
    """Choose the results of the model that was measured last, or of the checkpoint that `reference` is.

    Results of other weights are left out, although they have the same name: the run was trained again since, or the
    directory or the model of the hub was replaced. Results of the same weights count under any name. A result without
    a hash counts by its name.
    """
    titles = dict.fromkeys(result.model for result in reversed(results))  # measured last first
    now = {title: identity_on_disk(home, title) for title in titles}
    for title in titles:  # what is not on this disk any more is what was measured last under that name
        if now[title] is None:
            now[title] = next((one.weights for one in reversed(results) if one.model == title and one.weights), None)
    path = Path(reference)
    if path.is_dir() and path.resolve() != home.resolve():  # a checkpoint
        titles = {title: None for title in titles if title.endswith(f" {path.resolve().name}")}
        if (digest := files_sha256(path)) is not None and not titles:  # it was measured under another name
            same = WeightsIdentity(files_sha256=digest)
            titles = {one.model: None for one in reversed(results) if one.weights and same.is_same(one.weights)}
    named = [one for one in results if one.model in titles]
    left_out = [one for one in named if _is_other(one.weights, now[one.model])]
    measured = [one for one in named if not _is_other(one.weights, now[one.model])]
    superseded = _superseded(left_out)
    if not measured:
        return ChosenResults(title="", weights=None, results=[], superseded=superseded, notes=[])
    title = measured[-1].model
    weights = now[title]
    for one in reversed(measured):  # the hash of the values, too, which results of answers may have alone
        if weights is not None and one.weights is not None and weights.is_same(one.weights):
            weights = one.weights
            break
    unknown = [one for one in results if one.weights is None and one.model == title]
    of_them = [one for one in results if one.weights and weights and one.weights.is_same(weights)]
    mine = [one for one in left_out if one.model == title]
    notes = [f"{title}: {_superseded(mine)}"] if mine else []
    if unknown:
        names = ", ".join(dict.fromkeys(one.evaluation for one in unknown))
        notes.append(f"{title}: weights unknown: stored without a hash of them, so possibly of other ones: {names}")
    return ChosenResults(
        title=title, weights=weights if of_them else None, results=unknown + of_them, superseded=superseded, notes=notes
    )


def _given_tokenizers(chosen: ChosenResults) -> list[str]:
    """Return a note for each tokenizer that was given to measure a model, with the results that it is of."""
    by_tokenizer: dict[str, dict[str, None]] = {}
    for one in chosen.results:
        if one.given_tokenizer is not None:
            kind, is_other, _ = one.evaluation.partition(" by tokenizer ")
            why = ", which is not the model's own" if is_other else "; the model names no tokenizer"
            by_tokenizer.setdefault(f"{one.given_tokenizer}{why}", {})[kind] = None
    return [
        f"{chosen.title}: measured with --tokenizer {tokenizer}: {', '.join(kinds)}"
        for tokenizer, kinds in by_tokenizer.items()
    ]


def _tokenizer(home: Path) -> tuple[str | None, int]:
    """Return what distinguishes the tokenizer of a run or a model directory, None where unknown, and its ids."""
    try:
        if (recorded := ModelLocation(home, home, home).tokenizer) is not None:
            return recorded.identity or recorded.name, recorded.vocabulary_size
        found = read_tokenizer_files(home)
    except BadInput:
        return None, 0
    return (None, 0) if found is None else (identity(found), found.vocabulary_size)


def _is_other(measured: WeightsIdentity | None, now: WeightsIdentity | None) -> bool:
    return measured is not None and now is not None and measured.is_same(now) is False


def _superseded(results: Sequence[EvaluationResult]) -> str:
    """Return on results of other weights how many there are, of which; "" without any."""
    if not results:
        return ""
    hashes = ", ".join(dict.fromkeys(str(one.weights) for one in results))
    return f"results of other weights that had this name are left out: {len(results)}, of {hashes}"


@np.errstate(divide="raise", over="raise", invalid="raise")
def _structured(record: dict[str, Any]) -> list[EvaluationResult] | None:
    """Return the results of a stored line that are whole, none of an unknown evaluation; None where all are damaged."""
    command = COMMANDS.get(record["evaluation"])
    if command is None or command.measures is None:
        return []
    try:
        found = list(import_module(command.measures).read_results(record))
    except UNREADABLE:
        return None
    return list(filter(_is_whole, found)) or (None if found else [])


def _is_whole(result: EvaluationResult) -> bool:
    """Tell whether a result can be shown, and compared, if only with itself.

    Then all its numbers are finite, its error is not negative, and its value lies between its bounds.
    """
    shown: list[float] = []
    try:
        for one in result.measurements:
            _ = one.text
            alike = one.measure.difference([one.sample], [one.sample], CONFIDENCE) if one.measure.difference else None
            ends = (one.error, *(one.bounds or ()), *([] if alike is None else attrs.astuple(alike)))
            shown += [one.value, *(float(end) for end in ends if end is not None)]
            low, high = one.bounds or (one.value, one.value)
            if (one.error or 0) < 0 or not low <= one.value <= high:
                return False
    except UNREADABLE:
        return False
    return bool(shown) and all(map(is_number, shown))


def _state(home: Path, title: str) -> SavedState | None:
    """Return `state.json` of a checkpoint, or None where it has been deleted."""
    path = checkpoint_titled(home, title)
    return read_state(path) if os.path.isfile(path / STATE) else None  # noqa: PTH113  # of any name


def _position(home: Path, state: SavedState) -> int | str:
    """Return the step of a checkpoint, or "end" for the last and the best one of a complete run, whatever its step."""
    latest, best = (linked_step(checkpoints_of(home), link) for link in LINKS)
    step = state.position.step
    return "end" if latest == state.config.steps and step in (latest, best) else step


def _recipe(config: RunRecord, position: int | str, changes: Sequence[SettingChange]) -> str:
    """Return all settings that change a result by more than rounding, except for the seed."""
    keys = recipe(config.model, config.train)
    for key in (*RESOLVED_KEYS, "precision"):  # whose resolved values are in the recipe instead
        del keys["train"][key]
    precision = config.numerics.get("precision", config.train.execution.precision)
    tokens = [  # while they are being written, their plan
        stream.sha256 if stream.sha256 and None not in stream.sha256 else [stream.plan, stream.tokens]
        for stream in config.train_streams
    ]
    known = [keys, precision, config.global_batch_size, [position, config.steps], config.shares, tokens]
    if config.initial_weights is not None:
        known.append(config.initial_weights.sha256)
    known += describe_changes(changes)
    return json.dumps(known, sort_keys=True)
