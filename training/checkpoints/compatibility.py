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

# Keys that must not change when a run resumes. If they did, a step would read different windows than before, so some
# tokens would be read twice and some never. The optimizer is fixed because each optimizer has its own kind of state.
_FIXED_KEYS = ("global_batch_size", "start_train_token", "shuffle", "era_tokens", "random_seed", "optimizer")
_SCHEDULE_KEYS = (
    *("schedule_learning_rate", "warmup_period_percent", "decay_period_percent", "final_learning_rate_percent"),
    "steps",
)
# The values of these keys are not compared. The values that result from them are compared instead: the datasets' shares
# and files, the number of steps, and the number of sequences per step.
RESOLVED_KEYS = ("dataset", "min_train_tokens", "global_batch_size")
_SLICE_KEYS = ("validation_sequences", "start_val_token")  # they select a slice of the validation stream


def differences(run_directory: Path, before: RunRecord, now: RunRecord, checkpoint: Path) -> list[Notice]:
    """Return a notice for each change since the checkpoint. Raises BadInput for a change that prevents a resume."""
    if before.shares != now.shares:
        raise BadInput(
            f"{run_directory / 'train.json'}: dataset: got shares {json.dumps(now.shares)} ([first step, samples of "
            f"each dataset]), but {checkpoint} was made with {json.dumps(before.shares)}; restore the datasets and "
            "their weights to resume, or start over with --resume never"
        )
    streams = [
        ("train", *pair)
        for number, pair in enumerate(zip(before.train_streams, now.train_streams, strict=False))
        if not (_has_same_beginning(*pair) and all(_reads_once_in_order(record, number) for record in (before, now)))
    ]
    streams += [("validation", *pair) for pair in zip(before.validation_streams, now.validation_streams, strict=False)]
    for stream in streams:
        if problem := _token_difference(*stream, checkpoint):
            advice = "select those tokens in train.json or with --token-files DIR, or start over with --resume never"
            raise BadInput(f"{problem}; {advice}")
    notices = []
    for file, key, old, new in _changed_keys(before, now):
        where = f"{run_directory / file}: {key}"
        if (file == "model.json" and key != "drop_rate") or key in _FIXED_KEYS:
            raise BadInput(
                f"{where}: got {json.dumps(new)}, but {checkpoint} was made with {json.dumps(old)}; set it back to "
                f"{json.dumps(old)} to resume, or start over with --resume never (a --set of this key overrides the "
                "file)"
            )
        notices.append(note(f"{where} was {json.dumps(old)} at {checkpoint.name} and is {json.dumps(new)} now"))
    return notices


def changed_settings(before: RunRecord, now: RunRecord, step: int) -> list[SettingChange]:
    """Return the changed settings that affect results.

    A different schedule does not count if its learning rates are the same up to `step`.
    """
    old, new = (
        {key: value for section in recipe(record.model, record.train).values() for key, value in section.items()}
        | {key: getattr(record.train.validation, key) for key in _SLICE_KEYS}
        | {"steps": record.steps, "precision": record.numerics.get("precision")}  # the resolved values
        for record in (before, now)
    )
    ignored = set(RESOLVED_KEYS)
    ignored |= set(_SCHEDULE_KEYS if _same_rates(before, now, step) else ())
    ignored |= set(_SLICE_KEYS if validates_alike(before, now) else ())
    changed = [key for key in new if key not in ignored and old[key] != new[key]]
    return [SettingChange(step=step, key=key, old=old[key], new=new[key]) for key in changed]


def all_changes(before: list[SettingChange], now: list[SettingChange]) -> list[SettingChange]:
    """Merge the changes by earlier jobs and by this one, so that a key changes at most once at each step."""
    merged = {(change.step, change.key): change for change in before}
    for change in now:
        first = merged.pop((change.step, change.key), change)
        if first.old != change.new:
            merged[change.step, change.key] = attrs.evolve(change, old=first.old)
    return list(merged.values())


def validates_alike(before: RunRecord, now: RunRecord) -> bool:
    """Return whether two jobs measure comparable validation losses: on the same windows of the same tokens."""
    if not now.validation_streams:
        return True  # without a validation loss, there is nothing to compare
    old_options, new_options = before.train.validation, now.train.validation
    if not before.validation_streams:
        return False
    if any(getattr(old_options, key) != getattr(new_options, key) for key in _SLICE_KEYS):
        return False
    # The loss on the first stream decides which checkpoint is the best one.
    old, new = before.validation_streams[0], now.validation_streams[0]
    return (old.plan is not None and old.plan == new.plan) or _has_same_beginning(old, new)


def numerics_drift(before: RunRecord, now: RunRecord, checkpoint: Path, *, allowed: bool) -> list[str]:
    """Return the changes in the numerics since the checkpoint.

    If `determinism` promises the same bits, raises BadInput for any change, unless changes are `allowed`.
    """
    changes = drift(before.numerics, now.numerics)
    promised_levels = {before.numerics["determinism"], now.numerics["determinism"]} - {"off"}
    if changes and promised_levels and not allowed:
        raise BadInput(
            f"{checkpoint}: made with different numerics ({'; '.join(changes)}), so the run would not continue with "
            "the same bits; restore the earlier numerics, or pass --allow-numerics-drift, which is recorded in the "
            "metrics"
        )
    return changes


def _changed_keys(before: RunRecord, now: RunRecord) -> list[tuple[str, str, Any, Any]]:
    """Return (file, key, old value, new value) for each difference between two resolved configurations."""
    sections = {
        "model.json": (attrs.asdict(before.model), attrs.asdict(now.model)),
        "train.json": (before.train.flat(), now.train.flat()),
    }
    pairs = [
        (file, key, old[key], new_value)
        for file, (old, new) in sections.items()
        for key, new_value in new.items()
        # The resolved global batch is added below; tensor shards are part of the fingerprint of the numerics.
        if key not in ("global_batch_size", "tensor_shards")
    ]
    # The resolved value is compared: without this key in train.json, the global batch depends on the world size.
    pairs.append(("train.json", "global_batch_size", before.global_batch_size, now.global_batch_size))
    return [pair for pair in pairs if pair[2] != pair[3]]


def _same_rates(before: RunRecord, now: RunRecord, step: int) -> bool:
    if before.steps is None or now.steps is None:
        return before.steps == now.steps
    old = make_schedule(before.train.optimization, before.steps)
    return agree(old, make_schedule(now.train.optimization, now.steps), step)


def _has_same_beginning(old: StreamRecord, new: StreamRecord) -> bool:
    """Return whether the files of one stream are the first files of the other one."""
    count = min(len(old.sha256), len(new.sha256))
    return count > 0 and old.sha256[:count] == new.sha256[:count]


def _reads_once_in_order(record: RunRecord, number: int) -> bool:
    """Return whether a run reads a dataset in order and at most once.

    The windows of such a run do not depend on the tokens after the part that the run reads.
    """
    sources = record.sources or []
    epochs = sources[number]["epochs"] if number < len(sources) else None
    return not record.train.data.shuffle and epochs is not None and epochs <= 1


def _token_difference(split: str, old: StreamRecord, new: StreamRecord, checkpoint: Path) -> str | None:
    """Return how a stream differs from the stream that the checkpoint was made with; None if it is the same."""
    if None in (old.tokens, new.tokens):  # one of the two jobs started before all tokens were prepared
        if old.plan is not None and old.plan == new.plan:
            return None
        return f"{new.directory}: these {split} tokens were prepared differently from the tokens of {checkpoint}"
    if old.tokens != new.tokens:
        return (
            f"{new.directory}: there are {new.tokens:,} {split} tokens, but {checkpoint} was made with {old.tokens:,}"
        )
    if len(old.sha256) != len(new.sha256):
        return (
            f"{new.directory}: the {split} tokens are in {len(new.sha256)} files, but {checkpoint} was made with "
            f"tokens in {len(old.sha256)} files"
        )
    for name, old_digest, new_digest in zip(new.files, old.sha256, new.sha256, strict=True):
        if old_digest != new_digest:
            return (
                f"{Path(new.directory) / name}: damaged, or not the file that {checkpoint} was made with: got sha256 "
                f"{str(new_digest)[:12]}..., wanted {str(old_digest)[:12]}..."
            )
    return None
