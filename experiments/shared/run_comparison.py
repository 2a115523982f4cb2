"""Comparison of runs by their own records: on which tokens their losses were measured, and what else sets them apart.

A configuration file states an intention. Defaults, code and token files decide what a run does, and `resolved.json`
says what that was, so a verdict on several runs compares these records.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, refusing
from common.json_files import read_json
from common.output import warning
from common.text import quoted
from experiments.shared.experiment_files import FIXED, counted
from tokens.format.manifest import identity_of
from training.checkpoints.run_record import RESOLVED

ABSENT = "absent"
MEASURE_KEYS = (*FIXED, "train.objective")  # of a record: what decides on which tokens a final loss is measured
CONDITIONS = ("precision", "torch")  # of a record's numerics
NAMED_RUNS = 3  # runs without a record
HASH_DIGITS = 12


@attrs.frozen(kw_only=True)
class RecordedRun:
    """The part of a run's `resolved.json` on which its loss depends.

    It is read from the JSON and not as a RunRecord, because the compared runs are often trained by other commits, with
    the code of a trial's candidate. Such a record may lack keys, or have values that this version does not know. The
    comparison must show such a difference, where a RunRecord would refuse it or fill in this version's default.
    """

    directory: Path
    measure: Mapping[str, Any]  # by MEASURE_KEYS, and "validation tokens", "tokenizer"
    token_files: Mapping[str, str]  # identity of each stream, by the folder and split that it was read from
    train_tokens: int | None  # that the whole run reads
    conditions: Mapping[str, Any]  # other than by its settings

    @classmethod
    def read(cls, directory: Path) -> "RecordedRun":
        """Raise BadInput for a record that is missing or damaged."""
        record = read_json(directory / RESOLVED)
        measure: dict[str, Any] = {}
        for name in MEASURE_KEYS:
            section, _, key = name.partition(".")
            measure[name] = _objects(record.get(section)).get(key, ABSENT)
        streams = {split: _streams(record.get(f"{split}_stream")) for split in ("train", "validation")}
        measure["validation tokens"] = [_identity(stream) for stream in streams["validation"]]
        tokenizer = _objects(record.get("tokenizer"))
        measure["tokenizer"] = tokenizer.get("fingerprint", ABSENT)
        if isinstance(measure["tokenizer"], str) and isinstance(structure := tokenizer.get("structure"), str):
            with refusing(f"{directory / RESOLVED}: tokenizer: structure"):
                measure["tokenizer"] = identity_of(measure["tokenizer"], structure)
        sources = record.get("sources")
        counts: list[Any] = [_objects(source).get("tokens") for source in sources] if isinstance(sources, list) else []
        numerics = _objects(record.get("numerics"))
        return cls(
            directory=directory,
            measure=measure,
            token_files={
                f"{stream['directory']}: {split} tokens": _identity(stream)
                for split, each in streams.items()
                for stream in each
                if stream.get("directory")
            },
            train_tokens=sum(counts) if counts and all(type(count) is int for count in counts) else None,
            conditions={key: numerics.get(key) for key in CONDITIONS} | {"commit": record.get("git_commit")},
        )


def read_recorded(directories: Iterable[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Return the records of the runs that have one, and a note on those that have none. Raises BadInput as `read`."""
    recorded, missing = [], []
    for directory in directories:
        if (directory / RESOLVED).exists():
            recorded.append(RecordedRun.read(directory))
        else:
            missing.append(directory.name)
    if not missing:
        return recorded, []
    names = ", ".join(missing[:NAMED_RUNS]) + (" and others" if len(missing) > NAMED_RUNS else "")
    verb = "has" if len(missing) == 1 else "have"
    runs = counted(len(missing), "run")
    return recorded, [str(warning(f"{runs} {verb} no {RESOLVED}, so what was measured there is not known: {names}."))]


def check_same_tokens(runs: Sequence[RecordedRun]) -> None:
    """Raise BadInput where two runs have read different tokens from one folder: it was prepared again in between."""
    seen: dict[str, tuple[str, RecordedRun]] = {}
    for run in runs:
        for name, identity in run.token_files.items():
            before, other = seen.setdefault(name, (identity, run))
            if before != identity:
                raise _different(other, run, name, before, identity)


def check_same_measure(runs: Sequence[RecordedRun]) -> None:
    """Raise BadInput where two runs have measured their losses on different tokens."""
    for run in runs[1:]:
        for name, value in run.measure.items():
            if value != runs[0].measure[name]:
                raise _different(runs[0], run, name, runs[0].measure[name], value)


def describe_conditions(runs: Sequence[RecordedRun], intended: Collection[str] = ()) -> Iterator[str]:
    """Yield a warning for each condition in which the runs differ; `intended`: names of keys that are to differ."""
    for name in [name for name in (runs[0].conditions if runs else ()) if name not in intended]:
        values = {str(run.conditions[name]): run.directory.name for run in runs}
        if len(values) > 1:
            shown = ", ".join(f"{value} in {directory}" for value, directory in [*values.items()][:NAMED_RUNS])
            yield str(warning(f"the runs differ in {name}: {shown}."))


def _different(one: RecordedRun, other: RecordedRun, name: str, before: Any, now: Any) -> BadInput:
    return BadInput(
        f"{other.directory / RESOLVED}: {name}: {quoted(now)}, but {one.directory.name} has {quoted(before)}: their "
        "losses cannot be compared, because they were not measured, or not trained, on the same tokens; undo that "
        f"change, or move {other.directory} away and train it again"
    )


def _objects(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _streams(value: Any) -> list[dict[str, Any]]:
    """Return the streams of one split: a run with a single dataset has one in place of a list."""
    return [_objects(stream) for stream in (value if isinstance(value, list) else [value]) if stream is not None]


def _identity(stream: Mapping[str, Any]) -> str:
    """Return what identifies the tokens of a stream, as text; while they are being prepared, the plan does."""
    hashes, tokens = stream.get("sha256"), stream.get("tokens")
    if isinstance(hashes, list) and hashes:
        shown = "+".join(str(digest)[:HASH_DIGITS] for digest in hashes)
        return f"{tokens:,} tokens, sha256 {shown}" if type(tokens) is int else f"sha256 {shown}"
    return f"plan {str(stream.get('plan'))[:HASH_DIGITS]}"
