"""Compatibility of a checkpoint with the run that resumes from it: configuration, tokens and numerics."""

import json
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.output import Notice, note
from training.checkpoints.run_record import RunRecord, SettingChange, StreamRecord
from training.config.optimization import make_schedule
from training.config.train_config import recipe
from training.exactness.fingerprint import drift
from training.schedule import agree

# A change of these would read tokens twice or never after a resume: a step would no longer mean the same windows; and
# each optimizer keeps its own state.
_KEPT_KEYS = ("global_batch_size", "start_train_token", "shuffle", "era_tokens", "random_seed", "optimizer")
_SCHEDULE_KEYS = (
    *("schedule_learning_rate", "warmup_period_percent", "decay_period_percent", "final_learning_rate_percent"),
    "steps",
)
RESOLVED_KEYS = ("dataset", "min_train_tokens", "global_batch_size")  # to shares and files, steps, sequences
_SLICE_KEYS = ("validation_sequences", "start_val_token")  # of the validation stream


def differences(run_directory: Path, before: RunRecord, now: RunRecord, checkpoint: Path) -> list[Notice]:
    """Return the changes since the checkpoint, a line each. Raises BadInput for one that makes it unusable."""
    if before.shares != now.shares:
        raise BadInput(
            f"{run_directory / 'train.json'}: dataset: got shares {json.dumps(now.shares)} ([first step, samples of "
            f"each dataset]), but {checkpoint} was made with {json.dumps(before.shares)}; set datasets and weights "
            "back to resume, or start over with --resume never"
        )
    streams = [
        ("train", *pair)
        for number, pair in enumerate(zip(before.train_streams, now.train_streams, strict=False))
        if not (_has_same_beginning(*pair) and all(_reads_once_in_order(record, number) for record in (before, now)))
    ]
    streams += [("validation", *pair) for pair in zip(before.validation_streams, now.validation_streams, strict=False)]
    for stream in streams:
        if problem := _other_tokens(*stream, checkpoint):
            advice = "name those in train.json, or with --token-files DIR, or start over with --resume never"
            raise BadInput(f"{problem}; {advice}")
    notices = []
    for file, key, was, value in _changed_keys(before, now):
        where = f"{run_directory / file}: {key}"
        if (file == "model.json" and key != "drop_rate") or key in _KEPT_KEYS:
            raise BadInput(
                f"{where}: got {json.dumps(value)}, but {checkpoint} was made with {json.dumps(was)}; set it back to "
                "resume, or start over with --resume never (a --set of this key counts instead of the file)"
            )
        notices.append(note(f"{where} was {json.dumps(was)} at {checkpoint.name} and is {json.dumps(value)} now"))
    return notices


def changed_settings(before: RunRecord, now: RunRecord, step: int) -> list[SettingChange]:
    """Return the changes of settings that change results; a schedule that agrees up to the step does not."""
    old, new = (
        {key: value for section in recipe(record.model, record.train).values() for key, value in section.items()}
        | {key: getattr(record.train.validation, key) for key in _SLICE_KEYS}
        | {"steps": record.steps, "precision": record.numerics.get("precision")}  # as resolved
        for record in (before, now)
    )
    without = set(RESOLVED_KEYS)
    without |= set(_SCHEDULE_KEYS if _same_rates(before, now, step) else ())
    without |= set(_SLICE_KEYS if validates_alike(before, now) else ())
    changed = [key for key in new if key not in without and old[key] != new[key]]
    return [SettingChange(step=step, key=key, old=old[key], new=new[key]) for key in changed]


def all_changes(before: list[SettingChange], now: list[SettingChange]) -> list[SettingChange]:
    """Return the changes of a run after those of another job: at one step a key has changed once, or not at all."""
    merged = {(change.step, change.key): change for change in before}
    for change in now:
        first = merged.pop((change.step, change.key), change)
        if first.old != change.new:
            merged[change.step, change.key] = attrs.evolve(change, old=first.old)
    return list(merged.values())


def validates_alike(before: RunRecord, now: RunRecord) -> bool:
    """Tell whether validation losses of two jobs are comparable: of the same windows of the same tokens."""
    if not now.validation_streams:
        return True  # without a loss there is nothing to compare
    options = (before.train.validation, now.train.validation)
    if not before.validation_streams or any(len({getattr(one, key) for one in options}) > 1 for key in _SLICE_KEYS):
        return False
    old, new = before.validation_streams[0], now.validation_streams[0]  # the first one's loss tells the best
    return (old.plan is not None and old.plan == new.plan) or _has_same_beginning(old, new)


def numerics_drift(before: RunRecord, now: RunRecord, checkpoint: Path, *, allowed: bool) -> list[str]:
    """Return the changes of the numerics. Raises BadInput where one breaks `determinism` and is not allowed."""
    changes = drift(before.numerics, now.numerics)
    promised = {before.numerics["determinism"], now.numerics["determinism"]} - {"off"}
    if changes and promised and not allowed:
        raise BadInput(
            f"{checkpoint}: made with other numerics ({'; '.join(changes)}), so the run would not continue "
            "bit-identically; set them back, or pass --allow-numerics-drift, which the metrics will show"
        )
    return changes


def _changed_keys(before: RunRecord, now: RunRecord) -> list[tuple[str, str, Any, Any]]:
    """Return (file, key, old, new) of each difference between two resolved configurations."""
    sections = {
        "model.json": (attrs.asdict(before.model), attrs.asdict(now.model)),
        "train.json": (before.train.flat(), now.train.flat()),
    }
    pairs = [
        (file, key, old[key], value)
        for file, (old, new) in sections.items()
        for key, value in new.items()
        if key not in ("global_batch_size", "tensor_shards")  # resolved: below; in the fingerprint
    ]
    # as resolved: a directory without it follows the world size
    pairs.append(("train.json", "global_batch_size", before.global_batch_size, now.global_batch_size))
    return [pair for pair in pairs if pair[2] != pair[3]]


def _same_rates(before: RunRecord, now: RunRecord, step: int) -> bool:
    if before.steps is None or now.steps is None:
        return before.steps == now.steps
    old = make_schedule(before.train.optimization, before.steps)
    return agree(old, make_schedule(now.train.optimization, now.steps), step)


def _has_same_beginning(old: StreamRecord, new: StreamRecord) -> bool:
    """Tell whether one of two streams is the beginning of the other: some of its files, in order."""
    count = min(len(old.sha256), len(new.sha256))
    return count > 0 and old.sha256[:count] == new.sha256[:count]


def _reads_once_in_order(record: RunRecord, number: int) -> bool:
    """Tell whether a run reads nothing but the beginning of a dataset: then its windows do not depend on the end."""
    sources = record.sources or []
    epochs = sources[number]["epochs"] if number < len(sources) else None
    return not record.train.data.shuffle and epochs is not None and epochs <= 1


def _other_tokens(split: str, old: StreamRecord, new: StreamRecord, checkpoint: Path) -> str | None:
    """Return why a stream is not the one that the checkpoint was made with, or None: other windows follow."""
    its = f"{new.directory}: its"
    if None in (old.tokens, new.tokens):  # still being prepared, then or now
        same = old.plan is not None and old.plan == new.plan
        return None if same else f"{its} {split} tokens were prepared differently from those of {checkpoint}"
    if old.tokens != new.tokens:
        return f"{its} {new.tokens:,} {split} tokens are not the {old.tokens:,} that {checkpoint} was made with"
    if len(old.sha256) != len(new.sha256):
        return f"{its} {split} tokens are split into other files than those that {checkpoint} was made with"
    for name, was, now in zip(new.files, old.sha256, new.sha256, strict=True):
        if was != now:
            return (
                f"{Path(new.directory) / name}: damaged, or another file than the one that {checkpoint} was made with: "
                f"got sha256 {str(now)[:12]}..., wanted {str(was)[:12]}..."
            )
    return None
