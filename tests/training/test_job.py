"""Job: what a run prints, records and refuses, through the real command."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import launch
from tests.conftest import ROOT, in_terminal, train, train_command
from tests.test_train import one_line
from training.telemetry.metrics_log import read_metrics


def test_metrics_and_record_hold_what_others_read(make_run: Callable[..., Path]) -> None:
    run = make_run()
    done = train(run, "--price-per-hour", "3600", "--set", "train.learning_rate=0.02")
    assert done.returncode == 0, done.stderr
    records = read_metrics(run)
    steps = [record for record in records if "train_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 9))
    for record in steps:
        assert record.keys() == {
            "step",
            "train_loss",
            "learning_rate",
            "epochs",
            "grad_norm",
            "tokens_per_second",
            "mfu",
            "peak_memory_bytes",
            "elapsed_seconds",
        }
        assert record["mfu"] is None  # of a CPU there is no peak to divide by
        assert record["peak_memory_bytes"] > 50 * 2**20
    assert steps[1]["learning_rate"] == 0.02  # the peak, after 2 of 8 steps of warm-up
    assert [record["step"] for record in records if "validation_loss" in record] == [0, 4, 8]
    assert [record["event"] for record in records if "event" in record] == ["start", "checkpoint", "checkpoint", "end"]
    resolved = json.loads((run / "resolved.json").read_text())
    assert resolved["train"]["learning_rate"] == 0.02
    assert resolved["environment"]["packages"]["torch"]
    assert resolved["tokenizer"]["name"] == "bytes"
    assert (run / "training-run-chart.png").read_bytes().startswith(b"\x89PNG")
    assert "global batch 8 sequences = micro-batch 2 x accumulation 4 x world size 1" in done.stdout
    assert "8 steps x 256 = 2,048 tokens" in done.stdout
    for part in ("done: step 8 of 8, train loss", "best validation loss", "\nstart-up ", "cost: $"):
        assert part in done.stdout
    [(spent, to_go)] = re.findall(r"step 8/8 .* \$([\d.]+) spent, \$([\d.]+) to go", done.stderr)
    assert float(spent) == pytest.approx(steps[-1]["elapsed_seconds"], abs=0.01)  # at a dollar a second
    assert 0 <= float(to_go) < 5


def test_ids_beyond_the_vocabulary_are_refused_before_the_first_step(
    make_run: Callable[..., Path], token_files: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "foreign"
    directory.mkdir()
    values = np.zeros(3000, np.uint16)
    values[2000] = 999
    save_file({"tokens": values}, directory / "train.safetensors")
    shutil.copy(token_files / "validation.safetensors", directory)
    run = make_run()
    for ranks in (1, 2):
        line = one_line(train(run, "--token-files", str(directory), ranks=ranks))
        assert f"{directory}/train.safetensors: token 2000: got id 999, wanted less than vocab_size 257" in line
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["exit.json", ".lock", "resolved.json", "metrics.jsonl", "checkpoints"])
def test_what_stands_in_the_way_of_a_file_is_named_before_the_first_step(
    make_run: Callable[..., Path], name: str
) -> None:
    run = make_run()
    if name == "checkpoints":
        (run / name).symlink_to(run / "absent")
    else:
        (run / name).mkdir()
    line = one_line(train(run))
    assert f"train.py: {run / name}: " in line
    assert "make room" not in line and "move" in line


def test_a_checkpoint_of_another_run_is_not_resumed(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run, "--max-steps", "1").returncode == 0
    line = one_line(train(run, "--set", "model.n_heads=4"))
    assert "model.json: n_heads: got 4, but" in line
    assert "set it back to resume, or start anew with --resume never (a --set of this key counts" in line


def test_a_resume_on_other_tokens_is_refused(make_run: Callable[..., Path], token_files: Path, tmp_path: Path) -> None:
    run = make_run()
    assert train(run, "--max-steps", "1").returncode == 0
    other = tmp_path / "other"
    shutil.copytree(token_files, other)
    assert train(run, "--max-steps", "2", "--token-files", str(other)).returncode == 0  # the same, elsewhere
    tokens = load_file(other / "train.safetensors")["tokens"]
    save_file({"tokens": tokens[:-1]}, other / "train.safetensors")
    (other / "manifest.json").unlink()
    line = one_line(train(run, "--token-files", str(other)))
    assert f"{other}: its {len(tokens) - 1:,} train tokens are not the {len(tokens):,} that" in line


# Runs under torchrun. The file changes after it was checked: nothing but the loop and its feed can find that.
DAMAGE_AFTER_THE_CHECK = """
import os

import train
from training import open_job

plain, damage = open_job.verify_tokens, os.environ["DAMAGE"]


def check_then_damage(train, plan, token_set, ranks, vocabulary_size):
    checked = plain(train, plan, token_set, ranks, vocabulary_size)
    if ranks.coordinates:
        file = token_set.directories[0].train.files[0]
        before, token_1000 = file.path.stat(), file.offset_bytes + 2 * 1000  # in step 4
        if damage == "touched":
            os.utime(file.path, ns=(1, 1))
            return checked
        if damage == "cut":
            os.truncate(file.path, file.offset_bytes)
        else:
            with file.path.open("r+b") as opened:
                opened.seek(token_1000)
                opened.write(bytes([255, 255] if damage == "wrong id" else [7, 0]))
        if damage != "written":
            os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return checked


open_job.verify_tokens = check_then_damage
train.leave(train.main())
"""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("wrong id", "step 4: {path}: token 1000: got id 65535"),  # one rank finds it, the other loses its peer
        ("written", "{path}: was written while the run read it"),
        ("cut", "{path}: cannot be read any more: it was cut short"),
    ],
)
def test_a_token_file_that_changes_later_ends_the_run_with_its_name(
    make_run: Callable[..., Path], token_files: Path, tmp_path: Path, damage: str, message: str
) -> None:
    damaged, script = tmp_path / "damaged", tmp_path / "damage.py"
    shutil.copytree(token_files, damaged)
    script.write_text(DAMAGE_AFTER_THE_CHECK)
    options = ("--token-files", str(damaged))
    done = train(make_run(), *options, ranks=2, script=script, environment={"DAMAGE": damage})
    assert done.returncode == 1
    assert f"train.py: {message.format(path=damaged / 'train.safetensors')}" in done.stderr
    assert "SIGBUS" not in done.stderr


def test_a_token_file_that_is_touched_costs_one_line(
    make_run: Callable[..., Path], token_files: Path, tmp_path: Path
) -> None:
    touched, script = tmp_path / "touched", tmp_path / "touch.py"
    shutil.copytree(token_files, touched)
    script.write_text(DAMAGE_AFTER_THE_CHECK)
    done = train(make_run(), "--token-files", str(touched), script=script, environment={"DAMAGE": "touched"})
    assert done.returncode == 0, done.stderr
    line = f"WARNING: {touched / 'train.safetensors'}: was touched while the run reads it; its content is as it was"
    assert (done.stdout + done.stderr).count(line) == 1


@pytest.mark.parametrize(("split", "ranks"), [("train", 2), ("validation", 1)])
def test_a_damaged_token_file_ends_the_start_with_its_name(
    make_run: Callable[..., Path], token_files: Path, tmp_path: Path, split: str, ranks: int
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(token_files, damaged)
    path = damaged / f"{split}.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1  # another legal id
    path.write_bytes(data)
    run = make_run()
    line = one_line(train(run, "--token-files", str(damaged), ranks=ranks))
    assert f"{path}: damaged: got sha256" in line
    assert "prepare or download it again" in line
    assert not (run / "metrics.jsonl").exists()


def test_without_a_manifest_a_resume_on_a_damaged_file_is_refused(
    make_run: Callable[..., Path], token_files: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for split in ("train", "validation"):
        shutil.copy(token_files / f"{split}.safetensors", bare)
    run = make_run(dataset=str(bare))
    assert train(run, "--max-steps", "1").returncode == 0
    record = json.loads((run / "resolved.json").read_text())
    manifest = json.loads((token_files / "manifest.json").read_text())
    for split in ("train", "validation"):
        name = f"{split}.safetensors"
        assert record[f"{split}_stream"]["files"] == [name]
        assert record[f"{split}_stream"]["sha256"] == [manifest["files"][name]["sha256"]]
    with (bare / "validation.safetensors").open("r+b") as file:
        file.seek(4096 + 64)
        file.write(bytes(64))
    line = one_line(train(run))
    assert f"{bare}/validation.safetensors: damaged, or another file than the one that {run}/checkpoints" in line


def test_a_last_validation_that_a_signal_cut_short_is_made_up_for(make_run: Callable[..., Path]) -> None:
    run = make_run(validation_interval=8, checkpoint_interval=8, validation_sequences=3000)
    process = launch.start(ROOT / "train.py", str(run), "--device", "cpu")
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"step": 8, "train_loss"' in metrics.read_text()):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert not any("validation_loss" in record and record["step"] == 8 for record in read_metrics(run))
    assert train(run).returncode == 0
    assert any("validation_loss" in record and record["step"] == 8 for record in read_metrics(run))
    assert "the run is complete" in train(run).stdout


@pytest.mark.slow
def test_in_a_terminal_there_is_one_bar_with_everything(make_run: Callable[..., Path]) -> None:
    run = make_run(min_train_tokens=24 * 256, log_interval=2)
    status, last = in_terminal(train_command(run, "--price-per-hour", "14.32", ranks=2))
    assert status == 0, last
    bars = [line for line in last if "24/24" in line]
    assert bars
    assert len(bars[0]) > 80
    assert sum("| 0/24" in line for line in last) <= 2  # drawn, and again under the first validation loss: one bar
    for word in ("100%", "loss ", "tok/s", "ETA ", "$0.0", " spent, $0.0", " to go"):
        assert word in bars[-1]
