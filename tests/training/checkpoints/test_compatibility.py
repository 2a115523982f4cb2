"""Compatibility of a checkpoint with a run: an error says which tokens, keys or numerics differ."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from model.config import ModelConfig
from tests.conftest import TINY_MODEL, TINY_TRAIN
from training.checkpoints.compatibility import all_changes, changed_settings, differences, numerics_drift
from training.checkpoints.run_record import RunRecord, SettingChange, StreamRecord
from training.config.train_config import TrainConfig

KEYS = TINY_TRAIN | {"dataset": "d"}
CHECKPOINT = Path("step-1")
RUN = Path("run")


def stream(*digests: str, tokens: int | None = 100, plan: str | None = None) -> StreamRecord:
    names = [f"train-{index:05d}-of-{len(digests):05d}.safetensors" for index in range(len(digests))]
    return StreamRecord(directory="tokens", tokens=tokens, files=names, sha256=list(digests), plan=plan)


def record(*streams: StreamRecord, **changes: Any) -> RunRecord:
    """Return the record of the tiny run with changes. `model` and `train` contain only the keys that differ."""
    settings = {
        "model": ModelConfig(**TINY_MODEL | changes.pop("model", {})),
        "train": TrainConfig.from_keys(KEYS | changes.pop("train", {})),
    }
    values: dict[str, Any] = {"global_batch_size": 8, "numerics": {"determinism": "run"}}
    return RunRecord(**values | settings | {"train_streams": list(streams)} | changes)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (stream("a", "b"), stream("a", "c"), "tokens/train-00001-of-00002.safetensors: damaged, or not the file that"),
        (stream("a"), stream("a", tokens=99), "tokens: there are 99 train tokens, but step-1 was made with 100"),
        (stream("a"), stream("a", "b"), "tokens are in 2 files, but step-1 was made with tokens in 1 files"),
        (stream(tokens=None, plan="p"), stream("a", plan="q"), "tokens: these train tokens were prepared differently"),
        (stream(tokens=None), stream("a"), "train tokens were prepared differently from the tokens of step-1"),
    ],
)
def test_differing_tokens_are_named(old: StreamRecord, new: StreamRecord, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        differences(RUN, record(old), record(new), CHECKPOINT)


@pytest.mark.parametrize(
    ("shuffle", "epochs", "same"), [(False, 0.5, True), (False, 1.0, True), (False, 1.5, False), (True, 0.5, False)]
)
def test_later_shards_do_not_matter_if_unread(shuffle: bool, epochs: float, same: bool) -> None:
    keys = {"train": {"shuffle": shuffle}, "sources": [{"dataset": "d", "tokens": 50, "epochs": epochs}]}
    few, more = stream("a", "b"), stream("a", "b", "c", tokens=150)
    different = stream("a", "d", "c", tokens=150)
    for old, new in ((few, more), (more, few)):
        if same:
            assert differences(RUN, record(old, **keys), record(new, **keys), CHECKPOINT) == []
        else:
            with pytest.raises(BadInput, match="train tokens, but step-1 was made with"):
                differences(RUN, record(old, **keys), record(new, **keys), CHECKPOINT)
    with pytest.raises(BadInput, match="train tokens, but step-1 was made with"):
        differences(RUN, record(few, **keys), record(different, **keys), CHECKPOINT)


def test_followed_tokens_match_the_finished_files() -> None:
    now = record(stream("a", plan="p"))
    assert differences(RUN, record(stream(tokens=None, plan="p")), now, CHECKPOINT) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": [[0, [1, 1]]]}, r"train\.json: dataset: got shares \[\[0, \[1, 1\]\]\]"),
        ({"global_batch_size": 16}, r"train\.json: global_batch_size: got 16, but step-1 was made with 8"),
        ({"train": {"shuffle": True}}, r"train\.json: shuffle: got true, but step-1 was made with false"),
        ({"train": {"optimizer": "muon"}}, r'train\.json: optimizer: got "muon", but step-1 was made with "adamw"'),
        (
            {"model": {"emb_dim": 8}},
            r"model\.json: emb_dim: got 8, but step-1 was made with 32; set it back to 32 to resume, or "
            r"start over with --resume never \(a --set of this key overrides the file\)",
        ),
    ],
)
def test_incompatible_changes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        differences(RUN, record(), record(**changes), CHECKPOINT)


def test_compatible_changes_are_notes() -> None:
    lines = differences(RUN, record(train={"log_interval": 1}), record(train={"log_interval": 2}), CHECKPOINT)
    assert [*map(str, lines)] == ["NOTE: run/train.json: log_interval was 1 at step-1 and is 2 now"]


STABLE = {"schedule_learning_rate": "warmup_stable_decay"}


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ({}, {"learning_rate": 0.001, "log_interval": 9, "microbatch_size": 1}, ["learning_rate 0.01 -> 0.001"]),
        ({}, {"weight_decay": 0}, ["weight_decay 0.1 -> 0.0"]),
        ({}, {"warmup_period_percent": 25.0, "final_learning_rate_percent": 10}, []),
        ({}, {"warmup_period_percent": 20}, ["warmup_period_percent 25.0 -> 20.0"]),
        ({}, {"drop_rate": 0.5}, ["drop_rate 0.0 -> 0.5"]),
        ({}, {"steps": 200}, ["steps 100 -> 200"]),
        ({"schedule_learning_rate": False}, {"schedule_learning_rate": "constant", "steps": 200}, []),
        (STABLE, STABLE | {"decay_period_percent": 40}, []),  # the decay begins at step 60, after the resume
        (STABLE, STABLE | {"decay_period_percent": 70}, ["decay_period_percent null -> 70.0"]),
        ({}, {"min_train_tokens": 1, "dataset": "elsewhere", "precision": "fp32"}, []),
        ({}, {"validation_sequences": 9}, ["validation_sequences 10 -> 9"]),
    ],
)
def test_only_changes_that_affect_results_count(old: dict[str, Any], new: dict[str, Any], changes: list[str]) -> None:
    records = []
    for keys in (old, new):
        train = {key: value for key, value in keys.items() if key not in ("drop_rate", "steps")}
        model = {key: keys[key] for key in ("drop_rate",) if key in keys}
        values: dict[str, Any] = {"model": model, "train": train, "steps": keys.get("steps", 100)}
        records.append(record(stream("a"), validation_streams=[stream("b")], **values))
    assert [str(change) for change in changed_settings(records[0], records[1], 40)] == changes


def test_key_changes_at_most_once_per_step() -> None:
    before = [SettingChange(step=5, key="a", old=1, new=2), SettingChange(step=9, key="a", old=2, new=3)]
    second_change, reversal = (SettingChange(step=9, key="a", old=3, new=new) for new in (4, 2))
    assert all_changes(before, [second_change]) == [before[0], attrs.evolve(before[1], new=4)]
    assert all_changes(before, [reversal]) == before[:1]


@pytest.mark.parametrize(("determinism", "refused"), [("run", True), ("off", False)])
def test_changed_numerics_are_refused_if_bits_matter(determinism: str, refused: bool) -> None:
    before, now = (record(numerics={"determinism": determinism, "torch": version}) for version in ("1", "2"))
    assert numerics_drift(before, now, CHECKPOINT, allowed=True) == ["torch: 1 -> 2"]
    if refused:
        with pytest.raises(BadInput, match=r"step-1: made with different numerics \(torch: 1 -> 2\)"):
            numerics_drift(before, now, CHECKPOINT, allowed=False)
    else:
        assert numerics_drift(before, now, CHECKPOINT, allowed=False) == ["torch: 1 -> 2"]
    assert numerics_drift(before, attrs.evolve(before), CHECKPOINT, allowed=False) == []
