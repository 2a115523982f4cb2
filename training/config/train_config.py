"""Read a run directory's `model.json` and `train.json`: translate older spellings and check every value."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from common.checks import ValueCheck, boolean, checked, integer, key_field, row_of
from common.errors import BadInput, Problem, check_all, problem_of
from common.files import is_folder
from common.json_files import parse_json, read_json
from common.output import Notice, note
from common.text import either, quoted
from model.config import ModelConfig, indivisible_sizes, shard_counts
from model.stock import stock_class
from training.config.key_groups import (
    FIRST_MOMENTUM,
    GROUP_RATES,
    BatchOptions,
    CheckpointOptions,
    DataOptions,
    ExecutionOptions,
    MemoryOptions,
    OptimizationOptions,
    ValidationOptions,
)
from training.config.optimization import optimization_problems

SET_OPTION = "--set"  # if an override causes a problem, this is the problem's `where`
ALL_TOKENS = -1  # min_train_tokens in gpjt's files, if a run reads all tokens
MOST_UNKNOWN = 5  # an error names at most this many unknown keys of a file
_EXPECTED_FILES = "a run directory holds model.json and train.json, each a JSON object"


@attrs.frozen(kw_only=True)
class TrainConfig:
    """The keys of `train.json`. They are grouped here, but flat in the file and in every record of a run."""

    data: DataOptions
    batch: BatchOptions
    optimization: OptimizationOptions
    checkpoints: CheckpointOptions
    validation: ValidationOptions
    log_interval: int = key_field(
        integer(1),
        10,
        meaning="steps between logged steps; only a logged step waits for the GPU",
        similar={"in steps": "logging_steps"},
        plumbing=True,
    )
    require_stock_class: bool = key_field(
        boolean(),
        True,
        meaning="refuse a network that no model class of Hugging Face transformers can compute, because it could not "
        "be exported",
        plumbing=True,
    )
    random_seed: int = key_field(integer(0), 42, meaning="seed for initialization, shuffling and dropout", names="seed")
    execution: ExecutionOptions
    memory: MemoryOptions
    timeout_seconds: int = key_field(
        integer(10, 30 * 86400),
        600,
        meaning="timeout of a collective, in seconds; a rank is considered lost after half that time without a "
        "heartbeat, but at the latest after 60 s",
        plumbing=True,
    )

    # These three fields are only used in error messages.
    file: Path = attrs.field(default=Path("train.json"), eq=False)  # the file that was read
    explicit_keys: tuple[str, ...] = attrs.field(default=(), eq=False)  # keys that were set, even to their default
    # The keys of --set, including those of model.json, in order
    overridden: tuple[str, ...] = attrs.field(default=(), eq=False)

    @classmethod
    def from_keys(
        cls, values: Mapping[str, Any], file: Path = Path("train.json"), overridden: Sequence[str] = ()
    ) -> "TrainConfig":
        """Make a TrainConfig from flat keys. Raises InvalidValue for wrong values, unknown keys and missing keys."""
        remaining, groups = dict(values), {}
        for field in attrs.fields(cls):
            if attrs.has(field.type):
                group_values = {key: remaining.pop(key) for key in attrs.fields_dict(field.type) if key in remaining}
                groups[field.name] = checked(field.type, group_values)
        return checked(cls, remaining, **groups, file=file, explicit_keys=tuple(values), overridden=tuple(overridden))

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Return the settings in a run's record, in which keys are flat. Any version of Lockstep may have written it.

        If that version did not have a key, the key gets its default, which is how that version behaved. Keys that have
        been removed since then are left out. A recorded value that would be refused today is kept, because the run was
        trained with it, and because errors must show it if the run is resumed or compared. Raises ValueError if a key
        without a default is missing or wrong.
        """
        current_keys = {key: value for key, value in values.items() if key in KEYS["train"]}
        refused = {
            key: value
            for key, value in current_keys.items()
            if KEYS["train"][key].default is not attrs.NOTHING and _wrong_value("train", key, value) is not None
        }
        train = cls.from_keys({key: value for key, value in current_keys.items() if key not in refused})
        for group in (train, *(getattr(train, field.name) for field in attrs.fields(cls) if attrs.has(field.type))):
            for key in refused.keys() & attrs.fields_dict(type(group)).keys():
                object.__setattr__(group, key, refused[key])  # safe: nothing else refers to the new object yet
        return train

    def located(self, problem: Problem) -> Problem:
        """Return a copy of the problem that states where the user set the problem's keys."""
        return located(problem, self.file, self.explicit_keys, self.overridden)

    def flat(self) -> dict[str, Any]:
        """Return the keys and values as train.json has them, in the order in which the keys are defined."""
        flat: dict[str, Any] = {}
        for name, value in attrs.asdict(self).items():
            flat |= value if isinstance(value, dict) else {name: value}
        return {key: flat[key] for key in KEYS["train"]}

    def replace(self, **values: Any) -> "TrainConfig":
        return TrainConfig.from_keys(self.flat() | values, self.file, self.overridden)


# The attrs field of each key, by file. The keys of train.json are flat here, in the order of their definitions.
KEYS: dict[str, dict[str, Any]] = {"model": dict(attrs.fields_dict(ModelConfig)), "train": {}}
for _field in attrs.fields(TrainConfig):
    _kind: Any = _field.type
    KEYS["train"] |= attrs.fields_dict(_kind) if attrs.has(_kind) else {_field.name: _field}
for _name in ("file", "explicit_keys", "overridden"):
    del KEYS["train"][_name]
KEY_ROWS = {section: {key: row_of(field) for key, field in keys.items()} for section, keys in KEYS.items()}
PLUMBING_KEYS = frozenset(key for key, row in KEY_ROWS["train"].items() if row.plumbing)
# Values that train better than the defaults, which come from gpjt. docs/run-directory.md has the measurements.
GOOD_RECIPE = {key: row.recommended for key, row in KEY_ROWS["train"].items() if row.recommended is not None}
# Older name of a key, as in gpjt/ddp-base-model-from-scratch -> current name. The second mapping also has the reverse
# direction.
_KEYS_BY_OLDER_NAME = {row.older.name: key for key, row in KEY_ROWS["train"].items() if row.older is not None}
_OTHER_SPELLINGS = _KEYS_BY_OLDER_NAME | {key: older for older, key in _KEYS_BY_OLDER_NAME.items()}


def normalized_values(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `section` ("model" or "train") with their values after reading, including all defaults.

    Unknown keys are kept. If a value is wrong, all values are returned unchanged.
    """
    known_values = {key: value for key, value in values.items() if key in KEYS[section]}
    try:
        if section == "model":
            parsed = attrs.asdict(ModelConfig(**known_values))
        else:
            parsed = TrainConfig.from_keys(known_values).flat()
    except (TypeError, ValueError):
        parsed = {}
    return parsed | {key: value for key, value in values.items() if key not in parsed}


def recipe(model: ModelConfig, train: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return, by file and key, the values that change results by more than rounding errors.

    The seed and plumbing keys are left out. If a key has no effect in combination with the other values, its default is
    returned.
    """
    values: dict[str, dict[str, Any]] = {"model": attrs.asdict(model), "train": train.flat()}
    for section, key in list(_ineffective_keys(**values)):
        values[section][key] = KEYS[section][key].default
    not_recipe = PLUMBING_KEYS | {"random_seed"}
    return values | {"train": {key: value for key, value in values["train"].items() if key not in not_recipe}}


def _ineffective_keys(model: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the section and key of each value that has no effect in combination with the other values."""
    if model["positions"] != "rope":
        yield "model", "rope_base"
    if model["n_layers"] == 1:
        yield "model", "scale_attention_by_inverse_layer"
    for key in GROUP_RATES:
        if train[key] == train["learning_rate"]:
            yield "train", key
    if not (model["norm_gain"] or model["biases"] or model["qkv_bias"]):  # the network has no vectors to train
        yield "train", "vector_learning_rate"
    if train["schedule_learning_rate"] is False:
        yield "train", "warmup_period_percent"
    first = train["muon_first_momentum"]
    rises = train["muon_momentum"] != (FIRST_MOMENTUM if first is None else first)
    if first == FIRST_MOMENTUM or not rises:
        yield "train", "muon_first_momentum"
    if not rises:
        yield "train", "muon_momentum_warmup_steps"


@attrs.frozen(kw_only=True)
class Run:
    """A run directory that has been read and checked."""

    directory: Path
    model: ModelConfig
    train: TrainConfig
    notices: tuple[Notice | str, ...]  # a line for each translated key, and a line about missing recommended keys


def load_run(directory: Path, overrides: Sequence[str]) -> Run:
    """Read a run directory and apply the `overrides` of --set.

    Raises BadInput with all problems at once. Each problem is a line that names the file and the key.
    """
    values = read_files(directory)
    return make_run(directory, directory, values, override(overrides, values))


def read_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of model.json and train.json, as "model" and "train". Raises BadInput if they are invalid."""
    if not is_folder(directory):
        from common.hub_client import nearest_folder  # imported here because most runs do not need it

        near = nearest_folder(str(directory), [Path("runs")], is_run)
        suggestion = "" if near is None else f"did you mean {near}? "
        raise BadInput(
            f"{directory}: no such run directory, wanted a folder with model.json and train.json; {suggestion}"
            "train.py --like RUN writes a new one"
        )
    files = [directory / f"{section}.json" for section in KEYS]
    contents = check_all(*(partial(read_json, file, advice=_EXPECTED_FILES) for file in files))
    return dict(zip(KEYS, contents, strict=True))


def is_run(directory: Path) -> bool:
    """Return whether a folder looks like a run directory. Only its file names are checked."""
    return (directory / "train.json").exists()


def make_run(directory: Path, source: Path, values: dict[str, dict[str, Any]], overridden: Sequence[str]) -> Run:
    """Return the run that these values describe. Older spellings in `values` are replaced in place.

    Error messages refer to files in the folder `source`. Raises BadInput with all problems at once, one line for each.
    """
    if not str(directory).isascii() and str(directory) != os.fsencode(directory).decode(errors="replace"):
        raise BadInput(
            f"{directory}: the name is not UTF-8, so checkpoints in this folder could not be read; rename the folder"
        )
    files = {section: source / f"{section}.json" for section in KEYS}

    def in_place(section: str, problem: Problem) -> Problem:
        return located(problem, files[section], values[section], overridden)

    notices, problems = _translate(values, files, overridden)
    problems += [in_place(section, problem) for section in KEYS for problem in _wrong_values(section, values[section])]
    if problems:
        raise BadInput(*problems)
    with attrs.validators.disabled():  # the values were checked above, so that one error reports all problems
        train = TrainConfig.from_keys(values["train"], files["train"], overridden)
    tied = values["model"].get("tie_weights", KEYS["model"]["tie_weights"].default)
    context_length = values["model"]["context_length"]
    problems += [in_place("train", problem) for problem in contradictions(context_length, tied, train)]
    try:
        with attrs.validators.disabled():
            model = ModelConfig(**values["model"])
        problems += [in_place("train", problem) for problem in unequal_shards(model, train)]
        if train.require_stock_class:
            stock_class(model, str(files["model"]))  # raises BadInput if no class fits
    except ValueError as error:
        problems.append(in_place("model", problem_of(error)))
    except BadInput as error:
        advice = "or set require_stock_class to false in train.json to train it anyway"
        problems += [problem.at("", advice) for problem in error.problems]
    if problems:
        raise BadInput(*problems)
    if missing := {key: value for key, value in GOOD_RECIPE.items() if key not in values["train"]}:
        better = f"trains better with {json.dumps(missing)[1:-1]}"
        notices.append(note(f"{files['train']}: {better}; set a key to any value, even the default, to silence this"))
    return Run(directory=directory, model=model, train=train, notices=tuple(notices))


def located(problem: Problem, file: Path, explicit_keys: Collection[str], overridden: Sequence[str]) -> Problem:
    """Return a copy of the problem that states where the user set the problem's keys.

    If several keys contradict each other, it states where the last of these keys was set, because the file is assumed
    to be valid without --set. `explicit_keys` are the keys of the file and of --set.
    """
    last = next((key for key in reversed(overridden) if key == problem.key or key in problem.other_keys), None)
    if last is None:
        return problem.at(file)
    if problem.key in overridden:
        return problem.at(SET_OPTION)
    if problem.key in explicit_keys:
        return problem.at(f"{SET_OPTION} {last}: {file}")
    return replace(problem, where=f"{SET_OPTION} {last}", text=f"default of {replace(problem, advice='')}")


def _wrong_values(section: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield one problem for all missing keys of a file, and one for each value that is wrong by itself.

    Contradictions between valid values are checked elsewhere.
    """
    required = [key for key, field in KEYS[section].items() if field.default is attrs.NOTHING]
    if missing := [key for key in required if key not in values]:
        yield Problem(
            key=missing[0],
            text=f"key {', '.join(map(quoted, missing))} is missing",
            advice=f"required keys: {', '.join(required)}",
            other_keys=tuple(missing[1:]),
        )
    problems = (_wrong_value(section, key, values[key]) for key in KEYS[section] if key in values)
    yield from (problem for problem in problems if problem is not None)


def _wrong_value(section: str, key: str, value: Any) -> Problem | None:
    """Return the problem with the value of a known key, or None. The values of other keys are not considered."""
    field = KEYS[section][key]
    try:
        field.validator(None, field, field.converter(value) if field.converter else value)
    except ValueError as error:
        return replace(problem_of(error), key=key)
    return None


def _translate(
    values: dict[str, dict[str, Any]], files: dict[str, Path], overridden: Collection[str]
) -> tuple[list[Notice | str], list[Problem]]:
    """Translate older spellings in `values`. Return a notice for each of them, and a problem for each unknown key."""
    notices: list[Notice | str] = []
    if values["train"].get("min_train_tokens") == ALL_TOKENS:
        where = SET_OPTION if "min_train_tokens" in overridden else str(files["train"])
        notices.append(note(f"{where}: min_train_tokens {ALL_TOKENS} is read as null, which means all tokens"))
        values["train"]["min_train_tokens"] = None
    if all(key in KEYS[section] for section in KEYS for key in values[section]):
        return notices, []
    from training.config.foreign_keys import hint, translate

    notices += translate(values["model"], values["train"], KEY_ROWS["train"], files)
    problems: list[Problem] = []
    for section, fields in KEYS.items():
        for key in [key for key in values[section] if key not in fields][:MOST_UNKNOWN]:
            where = SET_OPTION if key in overridden else str(files[section])
            advice = hint(section, key, values[section][key], KEY_ROWS, overridden=key in overridden)
            problems.append(Problem(where=where, key=key, text=f"unknown key {quoted(key)}", advice=advice))
    return notices, problems


def resolve_key(name: str) -> tuple[str, str]:
    """Return the section and the key of "model.KEY", "train.KEY" or just "KEY".

    A key without a section is unambiguous, because no key belongs to both files. An unknown key is assigned to
    train.json.
    """
    section, _, key = name.rpartition(".")
    return section or next((section for section in KEYS if key in KEYS[section]), "train"), key


def spellings(key: str) -> tuple[str, ...]:
    """Return a key of train.json and its older name, if it has one."""
    older = KEY_ROWS["train"][key].older
    return (key,) if older is None else (key, older.name)


def resolve_spelling(name: str) -> tuple[str, str]:
    """Return the section and the key as `resolve_key` does, but replace an older name with the current name."""
    section, key = resolve_key(name)
    return section, _KEYS_BY_OLDER_NAME.get(key, key)


def override(overrides: Sequence[str], values: dict[str, dict[str, Any]]) -> list[str]:
    """Write the values of --set into `values`, and return their keys in order.

    If `values` has one of these keys under its other name, that entry is removed. Raises BadInput if an override is not
    KEY=VALUE, or if a key is set twice.
    """
    overridden: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        section, key = resolve_key(name)
        if not equals or not key or section not in values:
            raise BadInput(f"--set {quoted(text)}: wanted KEY=VALUE, train.KEY=VALUE or model.KEY=VALUE")
        other_spelling = _OTHER_SPELLINGS.get(key, "")
        values[section].pop(other_spelling, None)
        values[section][key] = _parse_override(section, key, value)
        if repeated := [earlier for earlier in overridden if earlier in (key, other_spelling)]:
            first = overrides[overridden.index(repeated[0])]
            texts, expected = f"{quoted(first)} and {quoted(text)}", f"one value for {key}"
            raise BadInput(Problem(where=SET_OPTION, found=texts, expected=expected, advice="give it once"))
        overridden.append(key)
    return overridden


def _parse_override(section: str, key: str, text: str) -> Any:
    """Return the value of a key from the text after --set KEY=. A key for numbers also accepts 1e6, 1_000 or 10M."""
    try:
        value = parse_json(text, kind=None)
    except ValueError:
        value = text  # a bare word is a string
    check = getattr(KEYS[section].get(key), "validator", None)
    # JSON reads 1e6 as a float, which a key for integers refuses.
    if isinstance(check, ValueCheck) and (type(value) is str or (check.kind is int and type(value) is float)):
        return check.number_from(text, otherwise=value)
    return value


def contradictions(context_length: int, tied: bool, train: TrainConfig) -> Iterator[Problem]:
    """Yield a problem for each group of values that are valid individually but contradict each other.

    `tied` is the value of tie_weights.
    """
    data, batch, execution, shards = train.data, train.batch, train.execution, train.execution.shards
    if batch.global_batch_size is not None and batch.global_batch_size % batch.microbatch_size:
        yield Problem(
            key="global_batch_size",
            found=str(batch.global_batch_size),
            expected=f"a multiple of microbatch_size, {batch.microbatch_size}",
            other_keys=("microbatch_size",),
        )
    yield from optimization_problems(train.optimization, tied=tied)
    if data.min_train_tokens is None and not isinstance(data.dataset, str):
        yield Problem(
            key="min_train_tokens",
            found="null (all tokens)",
            expected="a number, because dataset is a list",
            cause="the datasets of a list end at different times",
            advice="set min_train_tokens",
            other_keys=("dataset",),
        )
    if train.validation.patience is not None and train.validation.validation_interval is None:
        yield Problem(
            key="patience",
            found=str(train.validation.patience),
            expected="null, because validation_interval is null",
            cause="no validation loss is measured",
            other_keys=("validation_interval",),
        )
    if data.era_tokens is not None and data.era_tokens < context_length:
        yield Problem(
            key="era_tokens",
            found=str(data.era_tokens),
            expected=f"at least context_length, {context_length}, and preferably thousands of times more",
            cause="windows are shuffled only within an era",
            other_keys=("context_length",),
        )
    if execution.compile == "model" and execution.parallel != "ddp":
        yield Problem(
            key="compile",
            found=f'"model" with parallel "{execution.parallel}"',
            expected="true",
            cause="FSDP gathers the weights of one block at a time, between compiled graphs",
            other_keys=("parallel",),
        )
    if shards % execution.tensor_parallel:
        expected = f"a multiple of tensor_parallel, {execution.tensor_parallel}"
        yield Problem(key="tensor_shards", found=str(shards), expected=expected, other_keys=("tensor_parallel",))
    if execution.compile == "model" and shards > 1:
        yield Problem(
            key="compile",
            found=f'"model" with {shards} tensor shards',
            expected="true",
            cause="shards exchange activations between compiled graphs",
            other_keys=("tensor_shards", "tensor_parallel"),
        )
    if data.era_tokens is not None and not data.shuffle:
        yield Problem(
            key="era_tokens",
            found=str(data.era_tokens),
            expected="null, or shuffle true",
            cause="without shuffle, eras have no effect",
            other_keys=("shuffle",),
        )


def unequal_shards(model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Yield a problem if the network cannot be divided into equal tensor shards."""
    if counts := indivisible_sizes(model, train.execution.shards):
        key = "tensor_parallel" if train.execution.tensor_shards is None else "tensor_shards"
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        expected = f"{either(map(str, shard_counts(model)))}, for equal parts of {parts}"
        yield Problem(key=key, found=str(train.execution.shards), expected=expected, other_keys=tuple(counts))
