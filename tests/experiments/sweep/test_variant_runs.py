"""The runs of a sweep are ordinary run directories. Their recipe cannot change once they have results."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from common.json_files import read_json
from experiments.sweep.sweep_file import read_sweep
from experiments.sweep.variant_runs import (
    check_records,
    check_rungs,
    check_variants,
    describe_runs,
    final_losses,
    results_of,
    runs_of,
    write_runs,
)
from tests.conftest import MakeRun
from tests.experiments.conftest import MakeSweep
from training.checkpoints.directory import CHECKPOINTS, name_of
from training.config.train_config import load_run


def write(file: Path) -> list[Path]:
    runs = runs_of(read_sweep(file), file.with_suffix(""), 1)
    write_runs(runs)
    return [run.directory for run in runs]


def change(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(read_json(file) | keys))


def test_runs_differ_from_the_base_only_by_their_changes(make_sweep: MakeSweep) -> None:
    file = make_sweep(set={"train.weight_decay": 0.3})
    directories = write(file)
    names = [f"{variant}-seed-{seed}" for variant in ("base", "learning_rate=0.05") for seed in (42, 43)]
    assert [directory.name for directory in directories] == names
    base = read_json(file.with_name("base") / "train.json")
    changes = {"weight_decay": 0.3, "learning_rate": 0.05, "random_seed": 43}
    assert read_json(directories[3] / "train.json") == base | changes
    assert load_run(directories[3], ()).train.random_seed == 43


def test_runs_do_not_share_the_bases_bucket(make_sweep: MakeSweep, make_run: MakeRun) -> None:
    file = make_sweep(base=make_run("stored", checkpoints="s3://bucket/stored"))
    assert all("checkpoints" not in read_json(directory / "train.json") for directory in write(file))


LINEAR = {"train.schedule_learning_rate": ["linear"]}
WSD = {"train.schedule_learning_rate": "warmup_stable_decay", "train.decay_period_percent": 75}


@pytest.mark.parametrize(
    ("levers", "variant", "earlier"),
    [
        ({"train.clipping_max_norm": [2, 2.0]}, "clipping_max_norm=2.0", "clipping_max_norm=2"),
        ({"train.learning_rate": [0.02], "fast": {"train.learning_rate": 0.02}}, "fast", "learning_rate=0.02"),
        ({"train.log_interval": [2]}, "log_interval=2", "base"),
        ({"model.rope_base": [500]}, "rope_base=500", "base"),
        ({"train.min_train_tokens": [2047]}, "min_train_tokens=2047", "base"),
        ({"train.warmup_period_percent": [30]}, "warmup_period_percent=30", "base"),
        ({"train.matrix_learning_rate": [0.01]}, "matrix_learning_rate=0.01", "base"),
        (LINEAR | {"late": WSD}, "late", "schedule_learning_rate=linear"),
    ],
)
def test_variants_that_train_the_same_are_refused(
    make_sweep: MakeSweep, levers: dict[str, object], variant: str, earlier: str
) -> None:
    sweep = read_sweep(file := make_sweep(levers=levers))
    with pytest.raises(BadInput) as error:
        check_variants(sweep, runs_of(sweep, file.with_suffix(""), 1), "cpu")
    place, _, advice = str(error.value).partition(f"'{variant}' trains the same as '{earlier}'; ")
    plumbing = "train.log_interval does not change results, so it cannot be a lever; put it into 'set', for all runs"
    assert (place, advice) == (f"{file}: levers: ", plumbing if "log_interval" in variant else "remove one of them")


def test_auto_precision_is_resolved_for_the_training_machine(make_sweep: MakeSweep) -> None:
    sweep = read_sweep(file := make_sweep(levers={"train.precision": ["fp32", "bf16"]}))
    runs = runs_of(sweep, file.with_suffix(""), 1)
    check_variants(sweep, runs, None)  # no error, because other machines may resolve "auto" differently
    with pytest.raises(BadInput) as error:
        check_variants(sweep, runs, "cpu")
    assert str(error.value) == (
        f"{file}: levers: 'precision=fp32' trains the same as 'base' on this machine, where the precision \"auto\" is "
        '"fp32"; remove one of them, or use --print-commands to train on other machines'
    )
    assert describe_runs(sweep, runs, None, None)[-1].startswith("with 90% probability")
    assert str(describe_runs(sweep, runs, None, "cpu")[-1]) == f"NOTE: {error.value}"


def record_of(run: Path, **changes: object) -> None:
    """Write the record of a trained run. `changes` has new values for keys of train.json or of the record itself."""
    train = load_run(run, ()).train.flat()
    stream = {"directory": "tokens", "tokens": 100, "files": ["a"], "sha256": ["1" * 64]}
    record = {
        "model": read_json(run / "model.json"),
        "train": train | {key: value for key, value in changes.items() if key in train},
        "numerics": {"precision": "fp32", "torch": "2"},
        "train_stream": stream,
        "validation_stream": stream,
        **{key: value for key, value in changes.items() if key not in train},
    }
    (run / "resolved.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").touch()


OTHER_STREAM = {"directory": "tokens", "tokens": 100, "files": ["a"], "sha256": ["2" * 64]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"start_val_token": 64}, "train.start_val_token: 64, but base-seed-42 has 0: the losses of these runs cannot"),
        ({"validation_sequences": 9}, "train.validation_sequences: 9, but base-seed-42 has 10"),
        ({"validation_stream": OTHER_STREAM}, "validation tokens: '100 tokens, sha256 222222222222', but base-seed-42"),
        ({"train_stream": OTHER_STREAM}, "train tokens: '100 tokens, sha256 222222222222', but base-seed-42 has"),
        ({"tokenizer": {"fingerprint": "b"}}, "tokenizer: 'b', but base-seed-42 has 'absent'"),
    ],
)
def test_a_sweep_compares_what_its_runs_recorded(
    make_sweep: MakeSweep, changes: dict[str, object], problem: str
) -> None:
    sweep = read_sweep(file := make_sweep())
    runs = runs_of(sweep, file.with_suffix(""), 1)
    write_runs(runs)
    assert check_records(sweep, runs) == []  # no run has started
    for run in runs:
        record_of(run.directory)
    assert check_records(sweep, runs) == []
    record_of(runs[-1].directory, **changes)
    with pytest.raises(BadInput) as error:
        check_records(sweep, runs)
    assert "learning_rate=0.05-seed-43/resolved.json: " in str(error.value) and problem in str(error.value)


def test_differing_conditions_give_warnings(make_sweep: MakeSweep) -> None:
    sweep = read_sweep(file := make_sweep())
    runs = runs_of(sweep, file.with_suffix(""), 1)
    write_runs(runs)
    for run in runs:
        record_of(run.directory)
    record_of(runs[1].directory, numerics={"precision": "bf16", "torch": "2"})
    (runs[0].directory / "resolved.json").unlink()
    assert check_records(sweep, runs) == [
        "WARNING: 1 run has no resolved.json (base-seed-42), so it is unknown on which tokens the loss was measured.",
        "WARNING: the runs differ in precision: bf16 in base-seed-43, fp32 in learning_rate=0.05-seed-43.",
    ]


@pytest.mark.parametrize(("rungs", "steps"), [([0.1, 0.15], "1, 1 of 8"), ([0.5, 0.99], "4, 8 of 8")])
def test_rungs_must_be_different_steps_before_the_last(make_sweep: MakeSweep, rungs: list[float], steps: str) -> None:
    file = make_sweep(halving={"factor": 2, "rungs": rungs})
    problem = f"halving: base-seed-42: the rungs are at steps {steps}, but they must be different"
    with pytest.raises(BadInput, match=problem):
        check_rungs(read_sweep(file), runs_of(read_sweep(file), file.with_suffix(""), 1))


def test_a_rule_added_too_late_is_refused(make_sweep: MakeSweep) -> None:
    file = make_sweep(halving={"factor": 2, "rungs": [0.25]})
    sweep = read_sweep(file)
    runs = runs_of(sweep, file.with_suffix(""), 1)
    write_runs(runs)
    check_rungs(sweep, runs)
    (runs[1].directory / CHECKPOINTS / name_of(8)).mkdir(parents=True)
    problem = r"halving: base-seed-43 was trained past the rung at step 2 without .*remove the key"
    with pytest.raises(BadInput, match=problem):
        check_rungs(sweep, runs)


def test_a_sweep_can_grow_but_not_change(
    make_sweep: MakeSweep,
) -> None:
    file = make_sweep(set={"train.weight_decay": 0.2})
    write(file)
    change(file, set={"train.weight_decay": 1, "model.n_kv_heads": 2})
    first = write(file)  # no run has started
    (first[0] / "metrics.jsonl").touch()
    change(file, set={"train.weight_decay": 1.0, "train.final_learning_rate_percent": 10})
    change(file, seeds=3, levers={"train.learning_rate": [0.05, 0.1]})
    assert set(write(file)) > set(first)
    change(file, set={"train.weight_decay": 0.4})
    changed = r"base-seed-42/train.json: this run was started with weight_decay 1.0, but the experiment now has 0.4"
    with pytest.raises(BadInput, match=changed):
        write(file)


def test_runs_of_other_ranks_are_collected(make_sweep: MakeSweep, make_run: MakeRun) -> None:
    sweep = read_sweep(file := make_sweep(base=make_run("free", global_batch_size=None), seeds=1))
    runs = runs_of(sweep, file.with_suffix(""), 1)
    write_runs(runs)
    for run in runs:
        (run.directory / CHECKPOINTS / name_of(16)).mkdir(parents=True)
        lines = [{"step": 16, "validation_loss": 4.5}, {"event": "end", "step": 16}]
        (run.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert runs[0].plan.steps == 32
    losses = [final_losses(sweep, run, None) for run in runs]
    assert [dict(variant.losses) for variant in results_of(sweep, runs, losses)] == [{42: 4.5}, {42: 4.5}]
