"""Compare runs by their records: the tokens on which their losses were measured, and all other conditions.

A configuration file states only an intention. The actual behavior of a run also depends on defaults, code and token
files. A run records its actual behavior in `resolved.json`, and a verdict on several runs compares these records.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, refusing
from common.json_files import read_json
from common.output import warning
from common.text import counted, quoted
from experiments.shared.experiment_files import FIXED
from tokens.format.manifest import identity_of
from training.checkpoints.run_record import RESOLVED

ABSENT = "absent"
MEASURE_KEYS = (*FIXED, "train.objective")  # these settings determine the tokens on which a final loss is measured
CONDITIONS = ("precision", "torch")  # the compared keys of "numerics" in a run's record
NAMED_RUNS = 3  # a message names at most this many runs
HASH_DIGITS = 12


@attrs.frozen(kw_only=True)
class RecordedRun:
    """The part of a run's `resolved.json` on which its loss depends.

    The file is read as plain JSON and not as a RunRecord, because the compared runs were often trained by other
    commits, for example by a trial's candidate. The record of such a run may lack keys, or may have values that this
    version does not know. The comparison must show these differences, but a RunRecord would raise an error or fill in
    this version's default.
    """

    directory: Path
    measure: Mapping[str, Any]  # the keys are MEASURE_KEYS, "validation tokens" and "tokenizer"
    token_files: Mapping[str, str]  # hash or plan of each stream, by the folder and split from which it was read
    train_tokens: int | None  # tokens that the complete run reads
    conditions: Mapping[str, Any]  # numerics and git commit, on which the loss also depends

    @classmethod
    def read(cls, directory: Path) -> "RecordedRun":
        """Read the record of a run directory. Raise BadInput if the record is missing or damaged."""
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
                for split, streams_of_split in streams.items()
                for stream in streams_of_split
                if stream.get("directory")
            },
            train_tokens=sum(counts) if counts and all(type(count) is int for count in counts) else None,
            conditions={key: numerics.get(key) for key in CONDITIONS} | {"commit": record.get("git_commit")},
        )


def read_recorded(directories: Iterable[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Return the existing records of the runs, and a warning if some runs have no record.

    Raise BadInput as `RecordedRun.read` does.
    """
    recorded, missing = [], []
    for directory in directories:
        if (directory / RESOLVED).exists():
            recorded.append(RecordedRun.read(directory))
        else:
            missing.append(directory.name)
    if not missing:
        return recorded, []
    names = ", ".join(missing[:NAMED_RUNS]) + (" and more" if len(missing) > NAMED_RUNS else "")
    verb = "has" if len(missing) == 1 else "have"
    runs = counted(len(missing), "run")
    problem = f"{runs} {verb} no {RESOLVED} ({names}), so it is unknown on which tokens the loss was measured."
    return recorded, [str(warning(problem))]


def check_same_tokens(runs: Sequence[RecordedRun]) -> None:
    """Raise BadInput if two runs read different tokens from the same folder, because the folder was prepared again."""
    first_readers: dict[str, tuple[str, RecordedRun]] = {}
    for run in runs:
        for name, identity in run.token_files.items():
            first_identity, first_run = first_readers.setdefault(name, (identity, run))
            if first_identity != identity:
                raise _different(first_run, run, name, first_identity, identity)


def check_same_measure(runs: Sequence[RecordedRun]) -> None:
    """Raise BadInput if the losses of two runs were measured on different tokens."""
    for run in runs[1:]:
        for name, value in run.measure.items():
            if value != runs[0].measure[name]:
                raise _different(runs[0], run, name, runs[0].measure[name], value)


def describe_conditions(runs: Sequence[RecordedRun], intended: Collection[str] = ()) -> Iterator[str]:
    """Yield a warning for each condition in which the runs differ, except for the `intended` differences."""
    for name in [name for name in (runs[0].conditions if runs else ()) if name not in intended]:
        values = {str(run.conditions[name]): run.directory.name for run in runs}
        if len(values) > 1:
            shown = ", ".join(f"{value} in {directory}" for value, directory in [*values.items()][:NAMED_RUNS])
            yield str(warning(f"the runs differ in {name}: {shown}."))


def _different(first: RecordedRun, second: RecordedRun, name: str, first_value: Any, second_value: Any) -> BadInput:
    return BadInput(
        f"{second.directory / RESOLVED}: {name}: {quoted(second_value)}, but {first.directory.name} has "
        f"{quoted(first_value)}: the losses of these runs cannot be compared, because the runs were trained or "
        f"evaluated on different tokens; restore the earlier value, or move {second.directory} away and train that "
        "run again"
    )


def _objects(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _streams(value: Any) -> list[dict[str, Any]]:
    """Return the streams of one split as a list. For a run with a single dataset, `value` is the stream itself."""
    return [_objects(stream) for stream in (value if isinstance(value, list) else [value]) if stream is not None]


def _identity(stream: Mapping[str, Any]) -> str:
    """Return a text that identifies the tokens of a stream.

    The text has the hashes of the tokens or, if the tokens were still being prepared, the hash of their plan.
    """
    hashes, tokens = stream.get("sha256"), stream.get("tokens")
    if isinstance(hashes, list) and hashes:
        shown = "+".join(str(digest)[:HASH_DIGITS] for digest in hashes)
        return f"{tokens:,} tokens, sha256 {shown}" if type(tokens) is int else f"sha256 {shown}"
    return f"plan {str(stream.get('plan'))[:HASH_DIGITS]}"
