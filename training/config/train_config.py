"""A run directory's `model.json` and `train.json`: read, older spellings translated, checked."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from common.checks import boolean, checked, integer, key_field, row_of
from common.errors import BadInput, Problem, check_all, problem_of
from common.files import is_folder
from common.json_files import parse_json, read_json
from common.output import Notice, note
from common.text import either, quoted
from model.config import ModelConfig, shard_counts, undivided
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

SET_OPTION = "--set"  # where a problem is that an override causes
MOST_UNKNOWN = 5  # unknown keys of a file that are named
_WANTED = "a run directory holds model.json and train.json, each a JSON object"


@attrs.frozen(kw_only=True)
class TrainConfig:
    """`train.json`: grouped here, flat in the file and in every record of a run."""

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
        meaning="refuse a network that no class of Hugging Face's transformers computes, because it could not be "
        "exported",
        plumbing=True,
    )
    random_seed: int = key_field(integer(0), 42, meaning="seed of initialization, shuffle and dropout", names="seed")
    execution: ExecutionOptions
    memory: MemoryOptions
    timeout_seconds: int = key_field(
        integer(10, 30 * 86400),
        600,
        meaning="timeout of one collective; a rank without a heartbeat is considered lost after half of it, at most "
        "60 s",
        plumbing=True,
    )

    file: Path = attrs.field(default=Path("train.json"), eq=False)  # where it was read, for errors
    given: tuple[str, ...] = attrs.field(default=(), eq=False)  # keys that have no default here, for errors
    overridden: tuple[str, ...] = attrs.field(default=(), eq=False)  # keys of --set, also of model.json, in order

    @classmethod
    def from_keys(
        cls, values: Mapping[str, Any], file: Path = Path("train.json"), overridden: Sequence[str] = ()
    ) -> "TrainConfig":
        """Group flat keys. Raises InvalidValue, also for an unknown or missing key."""
        rest, groups = dict(values), {}
        for field in attrs.fields(cls):
            if attrs.has(field.type):
                own = {key: rest.pop(key) for key in attrs.fields_dict(field.type) if key in rest}
                groups[field.name] = checked(field.type, own)
        return checked(cls, rest, **groups, file=file, given=tuple(values), overridden=tuple(overridden))

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Return the settings that a run has recorded, flat, with any version of Lockstep.

        A key that the version did not have gets its default, which is what that version did. A key that has been
        removed since is left out. A value that is refused today is kept as it was recorded, because the run was trained
        with it, and a resume or a comparison has to name it. Raises ValueError if a key without a default is missing or
        wrong.
        """
        known = {key: value for key, value in values.items() if key in KEYS["train"]}
        refused = {
            key: value
            for key, value in known.items()
            if KEYS["train"][key].default is not attrs.NOTHING and _wrong_value("train", key, value) is not None
        }
        train = cls.from_keys({key: value for key, value in known.items() if key not in refused})
        for group in (train, *(getattr(train, field.name) for field in attrs.fields(cls) if attrs.has(field.type))):
            for key in refused.keys() & attrs.fields_dict(type(group)).keys():
                object.__setattr__(group, key, refused[key])  # nothing else has seen the new object yet
        return train

    def located(self, problem: Problem) -> Problem:
        """Return a problem with the place where the user has set its keys."""
        return located(problem, self.file, self.given, self.overridden)

    def flat(self) -> dict[str, Any]:
        """Return keys and values as in train.json, in the order of their definition."""
        flat: dict[str, Any] = {}
        for name, value in attrs.asdict(self).items():
            flat |= value if isinstance(value, dict) else {name: value}
        return {key: flat[key] for key in KEYS["train"]}

    def replace(self, **values: Any) -> "TrainConfig":
        return TrainConfig.from_keys(self.flat() | values, self.file, self.overridden)


# The attrs definition of each flat key, in the order of their definition
KEYS: dict[str, dict[str, Any]] = {"model": dict(attrs.fields_dict(ModelConfig)), "train": {}}
for _field in attrs.fields(TrainConfig):
    _kind: Any = _field.type
    KEYS["train"] |= attrs.fields_dict(_kind) if attrs.has(_kind) else {_field.name: _field}
for _name in ("file", "given", "overridden"):
    del KEYS["train"][_name]
KEY_ROWS = {section: {key: row_of(field) for key, field in keys.items()} for section, keys in KEYS.items()}
PLUMBING_KEYS = frozenset(key for key, row in KEY_ROWS["train"].items() if row.plumbing)
# Better than the defaults, which are gpjt's; measured in docs/run-directory.md
GOOD_RECIPE = {key: row.recommended for key, row in KEY_ROWS["train"].items() if row.recommended is not None}
# Earlier names of keys, those of gpjt/ddp-base-model-from-scratch: the key of each, and the other way round
_KEYS_BY_OLDER_NAME = {row.older.name: key for key, row in KEY_ROWS["train"].items() if row.older is not None}
_OTHER_SPELLINGS = _KEYS_BY_OLDER_NAME | {key: older for older, key in _KEYS_BY_OLDER_NAME.items()}


def one_form(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of "model" or "train", with defaults, in the form that reading gives; wrong values as they are."""
    known = {key: value for key, value in values.items() if key in KEYS[section]}
    try:
        read = attrs.asdict(ModelConfig(**known)) if section == "model" else TrainConfig.from_keys(known).flat()
    except (TypeError, ValueError):
        read = {}
    return read | {key: value for key, value in values.items() if key not in read}


def recipe(model: ModelConfig, train: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the keys that change results by more than rounding; not the seed, nor any without effect."""
    found: dict[str, dict[str, Any]] = {"model": attrs.asdict(model), "train": train.flat()}
    for section, key in list(_without_effect(**found)):
        found[section][key] = KEYS[section][key].default
    not_recipe = PLUMBING_KEYS | {"random_seed"}
    return found | {"train": {key: value for key, value in found["train"].items() if key not in not_recipe}}


def _without_effect(model: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield section and key of values that change nothing beside the others."""
    if model["positions"] != "rope":
        yield "model", "rope_base"
    if model["n_layers"] == 1:
        yield "model", "scale_attention_by_inverse_layer"
    for key in GROUP_RATES:
        if train[key] == train["learning_rate"]:
            yield "train", key
    if not (model["norm_gain"] or model["biases"] or model["qkv_bias"]):  # no vector to train
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
    """A run directory, read and checked."""

    directory: Path
    model: ModelConfig
    train: TrainConfig
    notices: tuple[Notice | str, ...]  # translated keys, and keys of a good recipe that are left out, a line each


def load_run(directory: Path, overrides: Sequence[str]) -> Run:
    """Read a run directory; `overrides` as of --set. Raises BadInput with all problems, a line each: file and key."""
    values = read_files(directory)
    return make_run(directory, directory, values, override(overrides, values))


def read_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the keys of model.json and train.json, by "model" and "train". Raises BadInput."""
    if not is_folder(directory):
        raise BadInput(
            f"{directory}: no such run directory; wanted a folder with model.json and train.json; --like RUN writes one"
        )
    files = [directory / f"{section}.json" for section in KEYS]
    return dict(zip(KEYS, check_all(*(partial(read_json, file, advice=_WANTED) for file in files)), strict=True))


def make_run(directory: Path, source: Path, values: dict[str, dict[str, Any]], overridden: Sequence[str]) -> Run:
    """Return the run of these keys, those of other programs translated in place. Raises BadInput, a line a problem."""
    if not str(directory).isascii() and str(directory) != os.fsencode(directory).decode(errors="replace"):
        raise BadInput(f"{directory}: not a UTF-8 name, so its checkpoints could not be read; rename the folder")
    files = {section: source / f"{section}.json" for section in KEYS}

    def placed(section: str, problem: Problem) -> Problem:
        return located(problem, files[section], values[section], overridden)

    notices, problems = _translate(values, files, overridden)
    problems += [placed(section, problem) for section in KEYS for problem in _wrong_values(section, values[section])]
    if problems:
        raise BadInput(*problems)
    with attrs.validators.disabled():  # each value has been checked just now, so that all problems are told at once
        train = TrainConfig.from_keys(values["train"], files["train"], overridden)
    tied = values["model"].get("tie_weights", KEYS["model"]["tie_weights"].default)
    problems += [placed("train", one) for one in contradictions(values["model"]["context_length"], tied, train)]
    try:
        with attrs.validators.disabled():
            model = ModelConfig(**values["model"])
        problems += [placed("train", problem) for problem in unequal_shards(model, train)]
        if train.require_stock_class:  # one that could be exported
            stock_class(model, str(files["model"]))
    except ValueError as error:
        problems.append(placed("model", problem_of(error)))
    except BadInput as error:
        advice = "or set require_stock_class to false in train.json to train it nevertheless"
        problems += [problem.at("", advice) for problem in error.problems]
    if problems:
        raise BadInput(*problems)
    if left := {key: value for key, value in GOOD_RECIPE.items() if key not in values["train"]}:
        better = f"trains better with {json.dumps(left)[1:-1]}"
        notices.append(note(f"{files['train']}: {better}; a key that is there, with gpjt's default too, is not named"))
    return Run(directory=directory, model=model, train=train, notices=tuple(notices))


def located(problem: Problem, file: Path, given: Collection[str], overridden: Sequence[str]) -> Problem:
    """Return a problem with the place where the user has set its keys.

    If several keys contradict each other, that is where the last one was set: the file was right before --set. `given`:
    the keys of the file and of --set.
    """
    last = next((key for key in reversed(overridden) if key == problem.key or key in problem.other_keys), None)
    if last is None:
        return problem.at(file)
    if problem.key in overridden:
        return problem.at(SET_OPTION)
    if problem.key in given:
        return problem.at(f"{SET_OPTION} {last}: {file}")
    return replace(problem, where=f"{SET_OPTION} {last}", text=f"default of {replace(problem, advice='')}")


def _wrong_values(section: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield each missing key of a file, and each value that is wrong by itself."""
    required = [key for key, field in KEYS[section].items() if field.default is attrs.NOTHING]
    if missing := [key for key in required if key not in values]:
        yield Problem(
            key=missing[0],
            text=f"key {', '.join(map(quoted, missing))} is missing",
            advice=f"wanted {', '.join(required)}",
            other_keys=tuple(missing[1:]),
        )
    problems = (_wrong_value(section, key, values[key]) for key in KEYS[section] if key in values)
    yield from (problem for problem in problems if problem is not None)


def _wrong_value(section: str, key: str, value: Any) -> Problem | None:
    """Return why a value of a known key is wrong by itself; None if it is right."""
    field = KEYS[section][key]
    try:
        field.validator(None, field, field.converter(value) if field.converter else value)
    except ValueError as error:
        return replace(problem_of(error), key=key)
    return None


def _translate(
    values: dict[str, dict[str, Any]], files: dict[str, Path], overridden: Collection[str]
) -> tuple[list[Notice | str], list[Problem]]:
    """Translate keys of other programs in place; return a notice for each, and a problem for each unknown one."""
    if all(key in KEYS[section] for section in KEYS for key in values[section]):
        return [], []
    from training.config.foreign_keys import hint, translate

    notices = translate(values["model"], values["train"], KEY_ROWS["train"], files)
    problems: list[Problem] = []
    for section, known in KEYS.items():
        for key in [key for key in values[section] if key not in known][:MOST_UNKNOWN]:
            where = SET_OPTION if key in overridden else str(files[section])
            meant = hint(section, key, values[section][key], KEY_ROWS, overridden=key in overridden)
            problems.append(Problem(where=where, key=key, text=f"unknown key {quoted(key)}", advice=meant))
    return notices, problems


def resolve_key(name: str) -> tuple[str, str]:
    """Return section and key of "model.KEY", "train.KEY", or KEY alone: no key is one of both files."""
    section, _, key = name.rpartition(".")
    return section or next((section for section in KEYS if key in KEYS[section]), "train"), key


def spellings(key: str) -> tuple[str, ...]:
    """Return a key of train.json and, if it has one, its older name."""
    older = KEY_ROWS["train"][key].older
    return (key,) if older is None else (key, older.name)


def resolve_spelling(name: str) -> tuple[str, str]:
    """Return section and key, as `resolve_key`, in our spelling of the key."""
    section, key = resolve_key(name)
    return section, _KEYS_BY_OLDER_NAME.get(key, key)


def override(overrides: Sequence[str], values: dict[str, dict[str, Any]]) -> list[str]:
    """Put the values of --set in place, of either spelling; return their keys, in order. Raises BadInput."""
    overridden: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        section, key = resolve_key(name)
        if not equals or not key or section not in values:
            raise BadInput(f"--set {quoted(text)}: wanted KEY=VALUE, train.KEY=VALUE or model.KEY=VALUE")
        other_spelling = _OTHER_SPELLINGS.get(key, "")
        values[section].pop(other_spelling, None)
        try:
            values[section][key] = parse_json(value, kind=None)
        except ValueError:
            values[section][key] = value  # a bare word is a string
        if repeated := [earlier for earlier in overridden if earlier in (key, other_spelling)]:
            first = overrides[overridden.index(repeated[0])]
            found, expected = f"{quoted(first)} and {quoted(text)}", f"one value for {key}"
            raise BadInput(Problem(where=SET_OPTION, found=found, expected=expected, advice="give it once"))
        overridden.append(key)
    return overridden


def contradictions(context_length: int, tied: bool, train: TrainConfig) -> Iterator[Problem]:
    """Yield values that are right alone and wrong together. `tied`: tie_weights."""
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
            cause="its sources end at different times",
            advice="set min_train_tokens",
            other_keys=("dataset",),
        )
    if train.validation.patience is not None and train.validation.validation_interval is None:
        yield Problem(
            key="patience",
            found=str(train.validation.patience),
            expected="null, as validation_interval is",
            cause="no loss is measured",
            other_keys=("validation_interval",),
        )
    if data.era_tokens is not None and data.era_tokens < context_length:
        yield Problem(
            key="era_tokens",
            found=str(data.era_tokens),
            expected=f"at least context_length {context_length}, better some thousand times as many",
            cause="windows are shuffled inside an era",
            other_keys=("context_length",),
        )
    if execution.compile == "model" and execution.parallel != "ddp":
        yield Problem(
            key="compile",
            found=f'"model" with parallel "{execution.parallel}"',
            expected="true",
            cause="FSDP gathers the weights of one block at a time, between graphs",
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
            cause="they exchange between graphs",
            other_keys=("tensor_shards", "tensor_parallel"),
        )
    if data.era_tokens is not None and not data.shuffle:
        yield Problem(
            key="era_tokens",
            found=str(data.era_tokens),
            expected="null, or shuffle true",
            cause="eras are ranges of a shuffle",
            other_keys=("shuffle",),
        )


def unequal_shards(model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Yield a number of tensor shards that cannot have equal parts of a network."""
    if counts := undivided(model, train.execution.shards):
        key = "tensor_parallel" if train.execution.tensor_shards is None else "tensor_shards"
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        wanted = either(map(str, shard_counts(model)))
        expected = f"{wanted}, for equal parts of {parts}"
        yield Problem(key=key, found=str(train.execution.shards), expected=expected, other_keys=tuple(counts))
