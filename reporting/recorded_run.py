"""Parts of `resolved.json` that a report shows: a missing or damaged one is unknown, and a note names it."""

import math
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, quoted
from common.json_files import is_number, read_json
from common.structure import structured
from tokens.format.manifest import read_manifest
from training.checkpoints.run_record import RESOLVED, SettingChange, StreamRecord, WeightsOrigin, with_stream_list


def _check_finite(_: Any, field: Any, value: float) -> None:
    if not is_number(value):
        raise ValueError(f"{field.name}: got {quoted(value)}, wanted a finite number")


@attrs.frozen(kw_only=True)
class RecordedSource:
    """Share of a run that one dataset has."""

    dataset: str
    tokens: int
    epochs: float = attrs.field(validator=_check_finite)


@attrs.frozen(kw_only=True)
class RecordedTokenizer:
    """A run's tokenizer."""

    name: str
    vocabulary_size: int


@attrs.frozen(kw_only=True)
class RecordedEnvironment:
    """Machine and software of a run's last job."""

    world_size: int | None = None
    device: str | None = None
    python: str | None = None
    packages: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class RecordedRun:
    """A run as its last job resolved it; None or empty where that is unknown."""

    model: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    global_batch_size: int | None = None
    world_size: int | None = None
    steps: int | None = None
    sources: list[RecordedSource] | None = None
    train_streams: list[StreamRecord] | None = None
    git_commit: str | None = None
    numerics: dict[str, Any] | None = None
    initial_weights: WeightsOrigin | None = None
    changes: list[SettingChange] | None = None
    token_files: list[str] | None = None
    tokenizer: RecordedTokenizer | None = None
    environment: RecordedEnvironment | None = None
    price_per_hour: float | None = attrs.field(default=None, validator=attrs.validators.optional(_check_finite))


def read_recorded(directory: Path) -> tuple[RecordedRun, list[str]]:
    """Return what is known of a run, and notes on damaged parts."""
    path = directory / RESOLVED
    try:
        values = with_stream_list(read_json(path)) if path.exists() else {}
    except BadInput as error:
        return RecordedRun(), [_note(str(error))]
    if isinstance(values.get("token_files"), str):
        values["token_files"] = [values["token_files"]]
    known: dict[str, Any] = {}
    notes = []
    for name in attrs.fields_dict(RecordedRun):
        try:
            known[name] = getattr(structured({name: values.get(name)}, RecordedRun, unknown_keys=True), name)
        except ValueError as error:
            notes.append(_note(f"{path}: {error}"))
    return RecordedRun(**known), notes


def bits_per_nat(record: RecordedRun) -> float | None:
    """Return the bits per byte of text of a loss of one nat per token; None where the bytes are not at hand."""
    files = record.token_files or []
    try:
        manifest = read_manifest(Path(files[0])) if len(files) == 1 else None
    except (BadInput, ValueError):  # damaged, or an impossible path
        return None
    if manifest is None or not manifest.text_bytes or manifest.tokens <= 0:
        return None
    return manifest.tokens / manifest.text_bytes / math.log(2)


def _note(problem: str) -> str:
    return f"NOTE: {problem}; it is left out of the report"
