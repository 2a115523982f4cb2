"""The batch of a step as text: the ids that a real run read, their documents, losses before the step, and errors."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import BadInput
from reporting.samples.batch_text import ReadSequence, check_overrides, ends_before, read_batch
from tests.conftest import complete, metrics, one_line, train
from tests.tokens.format.token_directory import write_llm_c
from tests.tokens.preparing import CRASH, PREPARE, jsonl
from tests.tokens.preparing import run as command
from tests.training.conftest import CHANGED_TRAIN
from tokens.batches.sampling import Layout, idle_micro_steps
from tokens.format.token_file import open_split
from training.checkpoints.run_record import read_record
from training.config.train_config import load_run

Make = Callable[..., Path]
# Code for train.py that writes the ids that each rank reads, one line for each micro-batch.
RECORDER = """
import json
import sys

from training.prefetch import Feed

fed = Feed.next


def record(feed):
    batch = fed(feed)
    rows = [[*row, last] for row, last in zip(batch.inputs.tolist(), batch.targets[:, -1].tolist(), strict=True)]
    with open(f"{sys.argv[1]}/fed-{os.environ.get('RANK', 0)}", "a") as file:
        file.write(json.dumps(rows) + chr(10))
    return batch


Feed.next = record
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Write a version of train.py that contains the recorder, and return its path."""
    script = tmp_path / "recording.py"
    script.write_text(CHANGED_TRAIN.format(changes=RECORDER))
    return script


def rebuilt(run: Path, step: int, token_files: Path | None = None) -> list[ReadSequence]:
    record = read_record(run)
    assert record is not None
    return read_batch(load_run(run, ()), record, step, token_files)


def assert_batches_match(run: Path, ranks: int, steps: int, global_batch: int) -> None:
    layout = Layout(context_length=32, microbatch_size=2, microbatches=global_batch // 2, data_parallel_size=ranks)
    fed = [[json.loads(line) for line in (run / f"fed-{rank}").read_text().splitlines()] for rank in range(ranks)]
    for step in range(1, steps + 1):
        batch = rebuilt(run, step)
        for rank in range(ranks):
            micro_steps = fed[rank][(step - 1) * layout.accumulation : step * layout.accumulation]
            expected = np.concatenate(micro_steps[idle_micro_steps(layout, rank) :])
            assert np.array_equal([sequence.ids for sequence in batch if sequence.rank == rank], expected), (step, rank)


def mixture(token_files: Path, folder: Path) -> list[dict[str, Any]]:
    """Return a mixture with two stages.

    One of its datasets is in another program's format, and so small that the run reads it more than once.
    """
    folder.mkdir()
    write_llm_c(folder / "tiny_train_000000.bin", open_split(token_files, "train").read(5_000, 33 * 32 + 1))
    weights = [[0, 1], [3, 0.75]], [[0, 1], [3, 0.25]]
    return [
        {"dataset": str(name), "weight": weight} for name, weight in zip((folder, token_files), weights, strict=True)
    ]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (2, {"of_two": True, "max_epochs": 3, "shuffle": True}),
        (2, {"shuffle": True, "era_tokens": 1000}),
        (3, {"shuffle": True, "global_batch_size": 10, "min_train_tokens": 8 * 10 * 32}),  # uneven
    ],
)
def test_look_shows_the_batch_that_ranks_read(
    make_run: Make, token_files: Path, recording: Path, ranks: int, changes: dict[str, Any]
) -> None:
    if changes.pop("of_two", False):
        changes["dataset"] = mixture(token_files, recording.with_name("other"))
    run = make_run(**changes)
    complete(run, "--set", "learning_rate=0.001", ranks=ranks, script=recording)
    assert_batches_match(run, ranks, 8, changes.get("global_batch_size", 8))


def test_look_works_with_growing_tokens(make_run: Make, tmp_path: Path, recording: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}: {number**3}" for number in range(600)])
    fixed = ("--tokenizer", "bytes", "--executor", "inline", "--unit-bytes", "400", "--validation-fraction", "0.1")
    preparation = (source, "--output", tmp_path / "tokens", *fixed)
    killed = command(CRASH, *preparation, CRASH_AT="ledger written", CRASH_TIME="20")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    settings = {"shuffle": True, "era_tokens": 1000, "validation_interval": None, "min_train_tokens": 40 * 8 * 32}
    run = make_run(dataset=str(tmp_path / "tokens"), **settings)
    complete(run, "--follow", "--max-steps", "6", script=recording)
    assert_batches_match(run, 1, 6, 8)
    assert "still being prepared" in one_line(train(run, "--look", "40"))
    assert command(PREPARE, *preparation).returncode == 0
    assert_batches_match(run, 1, 6, 8)


def test_documents_are_counted_across_blocks(token_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reporting.samples.batch_text.SCAN_TOKENS", 1000)
    stream = open_split(token_files, "train")
    ids, positions = stream.read(0, stream.length), np.array([70_000, 0, stream.length - 1, 999, 1000])
    expected = [int((ids[:position] == 256).sum()) for position in positions]
    assert ends_before(stream, 256, positions).tolist() == expected and max(expected) > 0
    assert ends_before(stream, 256, np.array([], np.int64)).tolist() == []


def test_look_shows_the_losses_of_training(make_run: Make) -> None:
    run = make_run(checkpoint_interval=1, keep_checkpoints=8, tensor_shards=2)
    for options in (("tensor_parallel=2", "--max-steps", "2"), ("tensor_parallel=1",)):
        complete(run, "--set", *options, ranks=2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    losses = metrics(run, "train_loss")
    for step in (1, 2, 8):
        done = complete(run, "--look", str(step))
        under = "the run's random initial weights" if step == 1 else f"step-{step - 1:08d}"
        assert f"losses under {under}" in done.stdout
        assert f"read by data-parallel {'ranks 0 to 1' if step > 2 else 'rank 0'}" in done.stdout
        assert float(done.stdout.split("mean ")[1].split()[0]) == pytest.approx(losses[step], abs=2e-4)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_conversations_show_losses_of_answers(make_run: Make, answers: Path) -> None:
    run = make_run(dataset=str(answers), objective="answers", checkpoint_interval=1, keep_checkpoints=8)
    complete(run, "--max-steps", "2")
    for step, loss in metrics(run, "train_loss").items():
        done = complete(run, "--look", str(step))
        assert float(done.stdout.split("mean ")[1].split()[0]) == pytest.approx(loss, abs=2e-4)


def test_a_damaged_checkpoint_is_skipped_and_named(copied: Path) -> None:
    weights = copied / "checkpoints" / "step-00000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    done = train(copied, "--look", "8", "--rank", "0")
    assert "losses under the run's random initial weights" in done.stdout
    assert "step-00000004" in done.stderr


def test_errors_name_the_accepted_values(copied: Path, token_files: Path, tmp_path: Path, make_run: Make) -> None:
    late_step = one_line(train(copied, "--look", "9"))
    assert late_step.endswith("--look 9: the run has only 8 steps; pass a step from 1 to 8")
    high_rank = one_line(train(copied, "--look", "8", "--rank", "1"))
    assert "--rank 1: this rank read no sequence of the step; pass a data-parallel rank from 0 to 0" in high_rank
    assert "the run has not begun" in one_line(train(make_run("new"), "--look", "1"))
    other_rate = one_line(train(copied, "--look", "8", "--set", "dataset=moved", "--set", "learning_rate=0.5"))
    assert (
        "--set learning_rate=0.5: --look shows the run as it was trained, with 0.01; leave this option out"
        in other_rate
    )
    page = tmp_path / "mine.txt"
    page.write_text("mine")
    assert "is not a page of train.py --look" in one_line(train(copied, "--look", "8", "--html", str(page)))
    for words in (("--look", "0"), ("--look", "-1"), ("--rank", "0")):
        assert train(copied, *words).returncode == 2
    moved = tmp_path / "other"
    shutil.copytree(token_files, moved)
    original_ids = [sequence.ids for sequence in rebuilt(copied, 8)]
    assert [sequence.ids for sequence in rebuilt(copied, 8, moved)] == original_ids
    (moved / "manifest.json").unlink()
    file = moved / "train.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"\0\0")
    message = r"train.safetensors: damaged, or not the file that .*resolved.json"
    with pytest.raises(BadInput, match=message):
        rebuilt(copied, 8, moved)


def test_removed_keys_are_ignored(copied: Path) -> None:
    record = read_record(copied)
    assert record is not None
    for text in ("on_spike=skip", "train.spike_window=9", "spike_zscore=3", "minibatch_size=4", "on_spike=null"):
        trained = ["learning_rate=0.01", text.replace("=4", f"={record.train.batch.microbatch_size}")]
        run = load_run(copied, trained)
        assert (
            any("is ignored" in notice or "is read as" in notice for notice in map(str, run.notices)) or "null" in text
        )
        check_overrides(run, record, trained)
    with pytest.raises(BadInput, match="--set minibatch_size=1: --look shows the run as it was trained"):
        check_overrides(load_run(copied, ["minibatch_size=1"]), record, ["minibatch_size=1"])


def test_look_shows_the_first_loss_of_fine_tuning(make_run: Make, finished: Path, tmp_path: Path) -> None:
    talk = [[("user", f"q{number} what"), ("assistant", f"answer {number}")] for number in range(80)]
    lines = [
        {"messages": [{"role": role, "content": content} for role, content in conversation]} for conversation in talk
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = ("--template", "turns", "--context-length", "32", "--tokenizer", "bytes", "--executor", "inline")
    prepared = command(PREPARE, tmp_path / "talk.jsonl", "--output", tmp_path / "talk", *how)
    assert prepared.returncode == 0, prepared.stderr
    settings = {"objective": "answers", "validation_interval": None, "min_train_tokens": 8 * 32}
    run = make_run(dataset=str(tmp_path / "talk"), model={"vocab_size": 261}, **settings)
    complete(run, "--init-from", str(finished))
    (run / "checkpoints").rename(tmp_path / "away")
    done = complete(run, "--look", "1", "--init-from", str(finished))
    assert float(done.stdout.split("mean ")[1].split()[0]) == pytest.approx(metrics(run, "train_loss")[1], abs=1e-4)
    assert "<|user|>q" in done.stdout and "<|assistant|>answer" in done.stdout
    assert "pass --init-from" in one_line(train(run, "--look", "1"))
    assert "began with random weights" in one_line(train(finished, "--look", "1", "--init-from", str(run)))
    assert "the sha256 of these weights is" in one_line(
        train(run, "--look", "1", "--init-from", str(tmp_path / "away" / "latest"))
    )
