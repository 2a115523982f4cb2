"""Runs over several datasets and epochs: reported numbers, validation on each dataset, and errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeRun, complete, metrics, one_line, train
from tests.tokens.format.token_directory import write_llm_c
from tokens.format.token_file import open_split
from training.telemetry.metrics_log import read_metrics


def mixture(many: Path, few: Path, **changes: Any) -> dict[str, Any]:
    """Return keys of train.json for a mixture in two stages. A run reads `few` for 1.3 of the 2 allowed epochs."""
    weights = [[0, 1], [3, 0.75]]
    return {
        "dataset": [{"dataset": str(many), "weight": [[0, 1], [3, 0.25]]}, {"dataset": str(few), "weight": weights}],
        "max_epochs": 2,
        "shuffle": True,
    } | changes


def test_epochs_and_tokens_of_each_dataset_are_reported(make_run: MakeRun, token_files: Path, few: Path) -> None:
    run = make_run(**mixture(token_files, few))
    planned = train(run, "--dry-run")
    process = complete(run)
    line = f"data         42 windows of {few}: 1.27 epochs of 33 windows"
    assert line in planned.stdout, planned.stdout
    assert line in process.stdout
    assert f"data: 1.27 epochs, 1,344 tokens of {few}" in process.stdout
    epochs = [counts[1] for counts in metrics(run, "epochs").values()]  # type: ignore[index]  # each value is a list
    assert epochs == [count / 33 for count in (4, 8, 12, 18, 24, 30, 36, 42)]
    last = next(record for record in read_metrics(run) if record.get("event") == "end")
    record = json.loads((run / "resolved.json").read_text())
    assert last["sources"] == record["sources"]
    assert [source["tokens"] for source in record["sources"]] == [22 * 32, 42 * 32]
    assert record["shares"] == [[0, [1, 1]], [3, [1, 3]]]
    assert [stream["directory"] for stream in record["train_stream"]] == [str(token_files), str(few)]
    assert record["validation_stream"]["directory"] == str(token_files)


@pytest.mark.slow
def test_each_validated_dataset_has_its_own_loss(
    make_run: MakeRun, token_files: Path, few: Path, tmp_path: Path
) -> None:
    second_dataset = tmp_path / "other"
    second_dataset.mkdir()
    stream = open_split(token_files, "train")
    write_llm_c(second_dataset / "tiny_train_000001.bin", stream.read(10_000, 10_000))
    write_llm_c(second_dataset / "tiny_val_000000.bin", stream.read(30_000, 400))
    names = [str(few), str(token_files), str(second_dataset)]
    keys = {"dataset": [{"dataset": name, "weight": 1} for name in names], "checkpoint_interval": 1}
    alone, two = make_run("alone", **keys), make_run("two", **keys)
    silent = make_run("silent", **keys, validation_interval=None)
    for run, ranks in ((alone, 1), (two, 2), (silent, 1)):
        errors = complete(run, "--max-steps", "3", "--hash-every", "1", ranks=ranks).stderr
        reason = (
            f"it has no validation tokens; prepare some with --validation-fraction. The loss on {names[1]} determines"
        )
        assert errors.count(f"NOTE: {few}: not used for validation: {reason}") == (run != silent)
    losses: dict[int, Any] = metrics(alone, "validation_losses")
    assert losses == metrics(two, "validation_losses")
    assert metrics(alone, "state_sha256") == metrics(two, "state_sha256") == metrics(silent, "state_sha256")
    # The first dataset has no validation tokens, so it is not listed.
    assert [list(step_losses) for step_losses in losses.values()] == [names[1:]] * 4
    first = {step: step_losses[names[1]] for step, step_losses in losses.items()}
    assert metrics(alone, "validation_loss") == first
    assert (alone / "checkpoints" / "best").resolve().name == f"step-{min(first, key=lambda step: first[step]):08d}"
    single = make_run("single", dataset=names[2], min_train_tokens=256)
    complete(single, "--max-steps", "1")
    assert metrics(single, "validation_loss")[0] == losses[0][names[2]]
    process = train(alone)
    last: Any = metrics(alone, "validation_losses")[8]
    assert (
        f"step 8: validation loss of {names[1]} {last[names[1]]:.4f}, {names[2]} {last[names[2]]:.4f}" in process.stderr
    )
    streams = json.loads((alone / "resolved.json").read_text())["validation_stream"]
    assert [stream["directory"] for stream in streams] == names[1:]
    only = make_run("only", **keys | {"dataset": [{"dataset": str(few), "weight": 1}]})
    expected_error = (
        f"none of {few} has validation tokens; prepare some with --validation-fraction, or set validation_i"
    )
    assert expected_error in one_line(train(only, "--set", "max_epochs=9"))


def test_short_validation_streams_are_skipped_with_a_note(make_run: MakeRun, token_files: Path, tmp_path: Path) -> None:
    second_dataset = tmp_path / "other"
    second_dataset.mkdir()
    for word, count in (("train", 10_000), ("val", 320)):
        write_llm_c(second_dataset / f"tiny_{word}.bin", open_split(token_files, "train").read(0, count))
    parts = [{"dataset": name, "weight": 1} for name in (str(token_files), str(second_dataset))]
    run = make_run(dataset=parts)
    (second_dataset / "tiny_train.bin").rename(second_dataset / "tiny_train_000003.bin")
    process = train(run, "--max-steps", "1")
    assert f"NOTE: {second_dataset}/tiny_val.bin: not used for validation: got 320 tokens, wanted 321" in process.stderr
    missing = f"NOTE: {second_dataset}: its train shards start with tiny_train_000003.bin; "
    assert missing in process.stderr
    assert metrics(run, "validation_losses") == {}
    assert list(metrics(run, "validation_loss")) == [0, 1]
    (run / "train.json").write_text(json.dumps(json.loads((run / "train.json").read_text()) | {"dataset": parts[::-1]}))
    assert "got 320 tokens, wanted at least 321 = 0 + 10 sequences" in one_line(train(run, "--resume", "never"))


def test_max_epochs_alone_reads_all_tokens(make_run: MakeRun, few: Path) -> None:
    run = make_run(dataset=str(few), min_train_tokens=None, max_epochs=3, validation_interval=None)
    process = complete(run)
    assert len(metrics(run, "train_loss")) == 33 * 3 // 8
    assert f"data         96 windows of {few}: 2.91 epochs of 33 windows" in process.stdout


def test_a_changed_mixture_is_refused_at_resume(
    make_run: MakeRun, token_files: Path, few: Path, tmp_path: Path
) -> None:
    run = make_run(**mixture(token_files, few))
    complete(run, "--max-steps", "2")
    original = (run / "train.json").read_text()
    keys = json.loads(original)
    moved = tmp_path / "moved"
    shutil.copytree(few, moved)
    parts = keys["dataset"]
    for change, message in (
        ([parts[0], parts[1] | {"weight": [[0, 1], [3, 0.7]]}], "dataset: got shares [[0, [1, 1]], [3, [5, 14]]]"),
        ([parts[0], parts[1] | {"weight": [[0, 1], [4, 0.75]]}], "dataset: got shares [[0, [1, 1]], [3, [1, 4]]"),
        (str(token_files), "dataset: got shares [[0, [1]]] ([first step"),
        ([parts[0] | {"dataset": str(few)}, parts[1] | {"dataset": str(token_files)}], f"{few}: there are "),
    ):
        (run / "train.json").write_text(json.dumps(keys | {"dataset": change}))
        line = one_line(train(run))
        assert message in line, line
        assert "start over with --resume never" in line
    # The run may continue if the same tokens are in another directory and the same weights are written differently.
    same = [parts[0], {"dataset": str(moved), "weight": [[0, 1.0], [3, 0.750]]}]
    (run / "train.json").write_text(json.dumps(keys | {"dataset": same}))
    process = complete(run, "--max-steps", "3")
    assert "resuming from" in process.stdout


def test_invalid_mixtures_are_refused_in_one_line(
    make_run: MakeRun, token_files: Path, few: Path, tmp_path: Path
) -> None:
    second_dataset = tmp_path / "other"
    shutil.copytree(few, second_dataset)
    manifest = json.loads((second_dataset / "manifest.json").read_text())
    manifest["tokenizer"] |= {"name": "letters", "vocabulary_size": 100}
    (second_dataset / "manifest.json").write_text(json.dumps(manifest))
    run, single_epoch = (
        make_run(**mixture(token_files, few)),
        make_run("once", **mixture(token_files, few, max_epochs=1)),
    )
    letters = make_run("letters", **mixture(token_files, second_dataset))
    epochs = (
        f"{single_epoch / 'train.json'}: max_epochs: got 1, wanted at least 2: the run reads 42 windows of {few}, "
        "which has only 33; prepare more tokens, lower min_train_tokens, or set max_epochs to 2"
    )
    replacement = f"--token-files {few}: can replace only a single dataset, but {run}/train.json has a list"
    tokenizers = (
        f"{second_dataset}: was prepared with tokenizer letters (100 ids), but {token_files} was prepared with bytes "
        "(257 ids)"
    )
    for refused, options, ranks, line in (
        (single_epoch, (), 2, epochs),
        (single_epoch, ("--dry-run",), 1, epochs),
        (run, ("--token-files", str(few)), 1, replacement),
        (run, ("--token-files", str(few), "--dry-run"), 1, replacement),
        (letters, (), 1, tokenizers),
    ):
        assert line in one_line(train(refused, *options, ranks=ranks))


def test_dry_runs_can_plan_without_the_datasets(make_run: MakeRun, few: Path) -> None:
    process = complete(make_run(**mixture(Path("someone/dataset"), few)), "--dry-run")
    line = "data         22 windows of someone/dataset; its token files are not complete on this disk yet"
    assert line in process.stdout
    assert ": 1.27 epochs of 33 windows" in process.stdout
