"""Run record: the resolved configuration of a run. It is stored in the run's checkpoints and in `resolved.json`."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from common.checks import integer, optional, structured
from common.errors import InvalidValue, Problem, refusing
from common.files import check_replaceable, replace_file, writing
from common.json_files import read_json
from common.redaction import redacted_command
from common.text import quoted
from model.config import ModelConfig
from tokens.format.manifest import RANKS_FILE, Manifest, TokenizerRecord, read_manifest
from tokens.format.token_file import TokenStream
from training.config.batch_plan import Plan
from training.config.dataset_config import shares
from training.config.train_config import KEYS, Run, TrainConfig
from training.data.open_tokens import TokenDirectory, TokenSet
from training.hardware.environment import environment, git_commit
from training.parallel.process_group import Ranks
from training.telemetry.metrics_log import is_price

RESOLVED = "resolved.json"
_STREAMS = ("train_stream", "validation_stream")


@attrs.frozen(kw_only=True)
class StreamRecord:
    """Identity of a token stream: its length, and the sha256 that each file had when the run read it."""

    directory: str = ""
    tokens: int | None = attrs.field(validator=optional(integer(0)))  # None: the tokens are still being prepared
    files: list[str] = attrs.field(factory=list)
    sha256: list[str]
    plan: str | None = None  # fingerprint of the plan for preparing the tokens; the plan determines every byte


@attrs.frozen(kw_only=True)
class WeightsOrigin:
    """The model from whose weights a run started."""

    source: str  # as written on the command line
    sha256: str  # hash of the weights, as training/checkpoints/initial_weights.py computes it
    vocab_size: int | None = None  # vocabulary size of that model, if the run has added rows for new ids
    # Number of special tokens that the model has never seen; their rows start as copies of the end-of-text token's row
    unseen: int | None = None


@attrs.frozen(kw_only=True)
class SettingChange:
    """A change of one setting, made by a job when it resumed the run at `step`."""

    step: int
    key: str  # a key of model.json or train.json, or "steps"
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {json.dumps(self.old)} -> {json.dumps(self.new)}"


@attrs.frozen(kw_only=True)
class RunRecord:
    """The resolved configuration of a run. A key that is newer than the record has its default."""

    model: ModelConfig
    train: TrainConfig
    # "model" or "train" -> the recorded keys that this version does not have, with their values
    unknown: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    global_batch_size: int = attrs.field(validator=integer(1))
    accumulation: int | None = attrs.field(default=None, validator=optional(integer(1)))
    world_size: int | None = attrs.field(default=None, validator=optional(integer(1)))
    steps: int | None = attrs.field(default=None, validator=optional(integer(0)))
    shares: list[Any] = attrs.field(factory=lambda: [[0, [1]]])  # [first step, samples of each dataset]
    sources: list[dict[str, Any]] | None = None  # the tokens and epochs that the run reads from each dataset
    train_streams: list[StreamRecord] = attrs.field(factory=list)
    validation_streams: list[StreamRecord] = attrs.field(factory=list)
    git_commit: str | None = None
    numerics: dict[str, Any] = attrs.field()  # training/exactness/fingerprint.py
    self_test: dict[str, Any] | None = None
    initial_weights: WeightsOrigin | None = None  # None: random weights
    changes: list[SettingChange] = attrs.field(factory=list)  # made by the jobs that resumed the run

    @numerics.validator
    def _check(self, _: Any, value: dict[str, Any]) -> None:
        if not isinstance(value.get("determinism"), str):
            raise ValueError("numerics: determinism: missing")

    def network_config(self) -> ModelConfig:
        """Return the configuration with which the trained network can be built.

        Raises ValueError if the record has a key of model.json that this version does not have, because the key may
        change what the network computes.
        """
        for key in self.unknown.get("model", {}):
            raise ValueError(f"model: unknown key {quoted(key)}, so another version of Lockstep trained this network")
        return self.model

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON. In a run with a single dataset, each split has one stream instead of a list."""
        settings = {"model": attrs.asdict(self.model), "train": self.train.flat()}
        values: dict[str, Any] = {section: keys | self.unknown.get(section, {}) for section, keys in settings.items()}
        values |= attrs.asdict(self, filter=lambda field, _: field.name not in (*settings, "unknown"))
        if (origin := values["initial_weights"]) is not None:  # without nulls, as in older records
            values["initial_weights"] = {key: value for key, value in origin.items() if value is not None}
        for key in _STREAMS:
            streams = values.pop(f"{key}s")
            values[key] = streams if len(streams) > 1 else next(iter(streams), None)
        return values


@attrs.frozen(kw_only=True)
class JobEnvironment:
    """The facts about a job's machine and software that Lockstep reads again later.

    training/hardware/environment.py records more facts than these.
    """

    world_size: int | None = None
    device: str | None = None
    python: str | None = None
    packages: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class JobRecord:
    """The record of a run's last job. It is part of `resolved.json`, which also has the record of the run itself.

    An earlier version may have written the file, or a user may have edited it. A command that only needs the price must
    not fail because the tokenizer cannot be read. Therefore a key with a value of the wrong type counts as absent; its
    error is stored in `misfits` and raised by `check`. Keys that are never read, such as the command line, are not
    checked.
    """

    token_files: Sequence[str] = attrs.field(factory=tuple)  # paths of the token directories; several for a mixture
    tokenizer: TokenizerRecord | None = None
    environment: JobEnvironment | None = None
    price_per_hour: float | None = attrs.field(default=None)  # of the machine, USD
    misfits: dict[str, InvalidValue] = attrs.field(init=False, factory=dict)  # key -> its error

    @price_per_hour.validator
    def _check_price(self, _: Any, value: float | None) -> None:
        if value is not None and not is_price(value):
            raise InvalidValue(Problem(key="price_per_hour", expected="dollars"))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobRecord":
        """Convert the content of `resolved.json`, without the values that cannot be read. Never raises an exception."""
        if isinstance(values.get("token_files"), str):  # a run with a single dataset has no list
            values = {**values, "token_files": [values["token_files"]]}
        readable: dict[str, Any] = {}
        misfits: dict[str, InvalidValue] = {}
        for key in ("token_files", "tokenizer", "environment", "price_per_hour"):
            if key in values:
                try:
                    readable[key] = getattr(structured({key: values[key]}, cls, unknown_keys=True), key)
                except InvalidValue as error:
                    misfits[key] = error
        job = cls(**readable)
        job.misfits.update(misfits)
        return job

    @property
    def token_directories(self) -> tuple[Path, ...]:
        """The token directories from which the job read, one per dataset; empty if that is not recorded."""
        return tuple(Path(name) for name in self.token_files)

    def check(self, *keys: str) -> None:
        """Raise InvalidValue if one of these keys has a value of the wrong type. Without arguments, check all keys."""
        for key, error in self.misfits.items():
            if not keys or key in keys:
                raise error


def record_fields(values: Any) -> Any:
    """Convert a record's JSON to fields of `RunRecord`: streams are always lists, and unknown keys are in `unknown`."""
    if not isinstance(values, dict):
        return values
    sections = {section: values.get(section) for section in KEYS}
    unknown = {
        section: {key: value for key, value in keys.items() if key not in KEYS[section]}
        for section, keys in sections.items()
        if isinstance(keys, dict)
    }
    lists = {}
    for key in _STREAMS:
        streams = values.get(key) or []
        lists[f"{key}s"] = streams if isinstance(streams, list) else [streams]
    return values | lists | {"unknown": unknown}


def read_record(directory: Path) -> RunRecord | None:
    """Return the record of a run's last job, or None if there is none. Raises BadInput for a damaged record."""
    file = directory / RESOLVED
    with refusing(f"{file}: damaged or edited", "copy it here again, or move it away"):
        return structured(record_fields(read_json(file)), RunRecord, unknown_keys=True) if file.exists() else None


def read_job(directory: Path) -> JobRecord:
    """Return what a run has recorded about its last job, or an empty record if there is none.

    Raises BadInput for a file that is not JSON. A wrong value of a key is an error only for code that checks this key.
    """
    file = directory / RESOLVED
    return JobRecord.from_json(read_json(file)) if file.exists() else JobRecord()


def manifest_of(stream: StreamRecord, directory: Path | None = None) -> Manifest | None:
    """Return the manifest of the files that a run read; None if there is none, or if the files have changed since.

    The files change if different text is prepared into the same directory, or if a different tokenizer is used.
    `directory`: where the files are now, if not at the path in the record. Raises BadInput for a damaged manifest.
    """
    manifest = read_manifest(directory or Path(stream.directory))
    if manifest is None:
        return None
    if stream.sha256:
        return manifest if {entry.sha256 for entry in manifest.files.values()}.issuperset(stream.sha256) else None
    return manifest if stream.plan in (None, manifest.plan) else None


def describe_changes(changes: Sequence[SettingChange]) -> list[str]:
    """Return "changed at step N: KEY OLD -> NEW, ..." for each step where settings changed."""
    steps = dict.fromkeys(change.step for change in changes)
    return [
        f"changed at step {step:,}: {', '.join(str(change) for change in changes if change.step == step)}"
        for step in steps
    ]


def make_record(run: Run, plan: Plan, token_set: TokenSet, numerics: dict[str, Any]) -> RunRecord:
    """Return the record of a run that is about to start. `numerics`: the fingerprint on which all ranks agree."""
    return RunRecord(
        model=run.model,
        train=run.train,
        global_batch_size=plan.layout.global_batch_size,
        accumulation=plan.layout.accumulation,
        world_size=plan.layout.data_parallel_size * run.train.execution.tensor_parallel,
        steps=plan.steps,
        shares=[[first_step, list(share)] for first_step, share in shares(run.train.data.parts)],
        sources=plan.read_until(plan.steps),
        train_streams=[_describe(directory, directory.train) for directory in token_set.directories],
        validation_streams=[
            _describe(directory, directory.validation) for directory in token_set.validated if directory.validation
        ],
        git_commit=git_commit(),
        numerics=numerics,
    )


def write_record(
    run_directory: Path, record: RunRecord, token_set: TokenSet, ranks: Ranks, price_per_hour: float | None
) -> None:
    """Write `resolved.json` and the tokenizer's file, so that the run can be used without its tokens.

    Raises BadInput if a file cannot be written, or if it would replace a file that was not written by a run.
    """
    directories = [str(directory.path.resolve()) for directory in token_set.directories]
    origin, tokenizer = token_set.tokenizer or (None, None)
    values = {
        **record.to_json(),
        "token_files": directories if len(directories) > 1 else directories[0],
        "tokenizer": None if tokenizer is None else tokenizer.as_json(),
        "environment": environment(ranks.device, ranks.world_size),
        "price_per_hour": price_per_hour,  # machine price, USD
        "command": redacted_command(sys.argv),
    }
    files = {RESOLVED: json.dumps(values, indent=2) + "\n"}
    if origin is not None and tokenizer is not None and tokenizer.ranks_file:
        files[RANKS_FILE] = (origin / RANKS_FILE).read_text()
    check_replaceable(run_directory / RESOLVED, b'"numerics": ', "the record of a run")
    # If resolved.json exists, an earlier job of the run has already copied the tokenizer's file.
    if RANKS_FILE in files and not (run_directory / RESOLVED).exists():
        ranks_content = files[RANKS_FILE].encode()
        check_replaceable(run_directory / RANKS_FILE, ranks_content.__eq__, "the tokenizer of the run's tokens")
    for name, text in files.items():
        with writing(run_directory / name):
            replace_file(run_directory / name, text)


def _describe(directory: TokenDirectory, stream: TokenStream) -> StreamRecord:
    growing, manifest = directory.growing, directory.manifest
    manifest_plan = None if manifest is None else manifest.plan
    names = [file.path.name for file in stream.files if growing is None]
    return StreamRecord(
        directory=str(directory.path),
        tokens=stream.length if growing is None else None,
        files=names,
        sha256=[directory.contents[name].sha256 for name in names],
        plan=manifest_plan if growing is None else growing.fingerprint,
    )
