"""Job: what a run prints, records and refuses, tested with the real command."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from safetensors.numpy import load_file, save_file

from tests import launch
from tests.conftest import MakeRun, complete, in_terminal, metrics, one_line, slow, start_training, train, train_command
from tokens.format.token_file import open_split
from training.config.train_config import KEYS
from training.telemetry.metrics_log import read_metrics


def test_metrics_and_record_have_the_expected_fields(make_run: MakeRun) -> None:
    run = make_run()
    options, environment = ("--price-per-hour", "3600"), {launch.DRAW_CHART: "1"}
    done = complete(run, *options, "--set", "train.learning_rate=0.02", environment=environment)
    records = read_metrics(run)
    measured = "step train_loss learning_rate epochs grad_norm tokens_per_second mfu peak_memory_bytes elapsed_seconds"
    steps = [record for record in records if "train_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 9))
    for record in steps:
        assert record.keys() == {*measured.split()}
        assert record["mfu"] is None  # because the peak speed of a CPU is unknown
        assert record["peak_memory_bytes"] > 50 * 2**20
    assert steps[1]["learning_rate"] == 0.02  # the peak rate, reached after 2 warm-up steps
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
    [usd] = re.findall(r"step 8/8 .* \$([\d.]+) spent$", done.stderr, re.MULTILINE)  # no cost remains
    assert float(usd) == pytest.approx(steps[-1]["elapsed_seconds"], abs=0.01)  # one dollar per second


@pytest.fixture
def copied_tokens(token_files: Path, tmp_path: Path) -> Path:
    """A copy of the token files, which a test may damage."""
    return Path(shutil.copytree(token_files, tmp_path / "tokens"))


DAMAGED = "damaged: got sha256"  # the message if the damaged id is still valid


@pytest.mark.parametrize(
    ("split", "ranks", "problem"),
    [
        ("train", 2, DAMAGED),
        ("validation", 1, DAMAGED),
        ("train", 1, "token 2000: got id 999, wanted less than vocab_size 257"),
    ],
)
def test_unsuitable_token_files_are_refused_before_training(
    make_run: MakeRun, copied_tokens: Path, split: str, ranks: int, problem: str
) -> None:
    run = make_run()
    [file] = open_split(copied_tokens, split).files
    with file.path.open("r+b") as opened:
        opened.seek(file.offset_bytes + 2 * 2000)
        opened.write((7 if problem == DAMAGED else 999).to_bytes(2, "little"))
    if problem != DAMAGED:
        (copied_tokens / "manifest.json").unlink()
    line = one_line(train(run, "--token-files", str(copied_tokens), ranks=ranks))
    assert f"{file.path}: {problem}" in line
    assert problem != DAMAGED or "prepare or download it again" in line
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["exit.json", ".lock", "resolved.json", "metrics.jsonl", "checkpoints"])
def test_obstacle_to_an_output_file_is_named(make_run: MakeRun, name: str) -> None:
    run = make_run()
    if name == "checkpoints":
        (run / name).symlink_to(run / "absent")
    else:
        (run / name).mkdir()
    line = one_line(train(run))
    assert f"train.py: {run / name}: " in line
    assert "make room" not in line and "move" in line


def test_resume_accepts_only_the_same_tokens(make_run: MakeRun, token_files: Path, copied_tokens: Path) -> None:
    run, options = make_run(), ("--token-files", str(copied_tokens))
    complete(run, "--max-steps", "1")
    (copied_tokens / "manifest.json").unlink()
    complete(run, "--max-steps", "2", *options)
    record = json.loads((run / "resolved.json").read_text())
    manifest = json.loads((token_files / "manifest.json").read_text())
    for split in ("train", "validation"):
        name = f"{split}.safetensors"
        assert record[f"{split}_stream"]["files"] == [name]
        assert record[f"{split}_stream"]["sha256"] == [manifest["files"][name]["sha256"]]
    with (copied_tokens / "validation.safetensors").open("r+b") as file:
        file.seek(4096 + 64)
        file.write(bytes(64))
    line = one_line(train(run, *options))
    assert f"{copied_tokens}/validation.safetensors: damaged, or not the file that {run}/checkpoints" in line
    tokens = load_file(copied_tokens / "train.safetensors")["tokens"]
    save_file({"tokens": tokens[:-1]}, copied_tokens / "train.safetensors")
    line = one_line(train(run, *options))
    assert f"{copied_tokens}: there are {len(tokens) - 1:,} train tokens, but {run}/checkpoints" in line


# A script for torchrun. It damages a file that was already checked. Only the loop and its feed can notice the damage.
DAMAGE_AFTER_THE_CHECK = """
plain, damage = build.verify_tokens, os.environ["DAMAGE"]


def check_then_damage(run, tokens, ranks):
    checked = plain(run, tokens, ranks)
    if ranks.coordinates:
        file = checked.directories[0].train.files[0]
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


build.verify_tokens = check_then_damage
"""


# A script for torchrun. It replaces a file, as another program might, after the tokens were opened and before they are
# verified.
REPLACED_BEFORE_THE_CHECK = """
plain = build.verify_tokens


def replace_then_check(run, tokens, ranks):
    if ranks.coordinates:
        file = tokens.token_set.directories[0].train.files[0].path
        copy = file.with_suffix(".new")
        copy.write_bytes(file.read_bytes())
        copy.rename(file)
    return plain(run, tokens, ranks)


build.verify_tokens = replace_then_check
"""


def test_token_file_replaced_during_start_up_is_refused(
    make_run: MakeRun, changed_train: Callable[[str], Path], copied_tokens: Path
) -> None:
    script = changed_train(REPLACED_BEFORE_THE_CHECK)
    line = one_line(train(make_run(), "--token-files", str(copied_tokens), ranks=2, script=script))
    assert f"{copied_tokens / 'train.safetensors'}: was modified while the run was reading it" in line


COUNTED_FUNCTIONS = {  # each function, with the file that defines it
    "make_plan": "training/config/batch_plan.py",
    "open_all": "training/data/open_tokens.py",
    "check_tokenizers": "training/data/open_tokens.py",
}
COUNT_CALLS = f"""
import collections
import sys

files, calls = {COUNTED_FUNCTIONS!r}, collections.Counter()


def count(frame, event, _):
    name = frame.f_code.co_name
    if event == "call" and name in files and frame.f_code.co_filename.endswith(files[name]):
        calls[name] += 1


sys.setprofile(count)
leave = train.leave


def report(status):
    sys.setprofile(None)
    print("CALLS", os.environ.get("RANK"), dict(sorted(calls.items())), flush=True)
    leave(status)


train.leave = report
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_opened_and_planned_once(
    make_run: MakeRun, changed_train: Callable[[str], Path], ranks: int
) -> None:
    done = complete(make_run(), "--max-steps", "1", ranks=ranks, script=changed_train(COUNT_CALLS))
    lines = [line.partition("{")[2] for line in done.stdout.splitlines() if line.startswith("CALLS")]
    assert lines == [f"{str(dict.fromkeys(sorted(COUNTED_FUNCTIONS), 1))[1:]}"] * ranks


COUNT_CHECKS = """
import collections

from common import checks
from model.config import ModelConfig
from training.config.train_config import KEYS

plain, calls = checks.ValueCheck.__call__, collections.Counter()


def count(check, instance, field, value):
    if not isinstance(instance, ModelConfig):  # to count parameters, networks with fewer layers are configured as well
        calls.update(key for keys in KEYS.values() for key, key_field in keys.items() if key_field == field)
    return plain(check, instance, field, value)


checks.ValueCheck.__call__ = count
leave = train.leave


def report(status):
    print("CHECKS", *sorted(f"{key}={times}" for key, times in calls.items()), flush=True)
    leave(status)


train.leave = report
"""


def test_each_setting_is_checked_once(make_run: MakeRun, changed_train: Callable[[str], Path]) -> None:
    run = make_run()
    done = complete(run, "--max-steps", "1", script=changed_train(COUNT_CHECKS))
    [line] = [line for line in done.stdout.splitlines() if line.startswith("CHECKS")]
    run_keys = [key for name in ("model", "train") for key in json.loads((run / f"{name}.json").read_text())]
    assert {"emb_dim=1", "microbatch_size=1"} <= set(line.split()[1:]) <= {f"{key}=1" for key in run_keys}


def test_default_settings_are_valid() -> None:
    for keys in KEYS.values():
        for field in keys.values():
            if field.default is not attrs.NOTHING:
                field.validator(None, field, field.default)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # Only one rank notices the wrong id.
        ("wrong id", "train.py: step 4: {}: token 1000: got id 65535"),
        *slow(("written", "train.py: {}: was modified while the run was reading it")),
        *slow(("cut", "train.py: {}: can no longer be read: it was truncated")),
        ("touched", "WARNING: {}: was modified while the run was reading it, but its content is the same"),
    ],
)
def test_token_file_that_changes_during_training_is_named(
    make_run: MakeRun, changed_train: Callable[[str], Path], copied_tokens: Path, damage: str, message: str
) -> None:
    options, script = ("--token-files", str(copied_tokens)), changed_train(DAMAGE_AFTER_THE_CHECK)
    done = train(make_run(), *options, ranks=2, script=script, environment={"DAMAGE": damage})
    count = (done.stdout + done.stderr).count(message.format(copied_tokens / "train.safetensors"))
    if damage == "touched":
        assert (done.returncode, count) == (0, 1), done.stderr
    else:
        assert done.returncode == 1 and count
    assert "SIGBUS" not in done.stderr


@pytest.mark.slow
def test_interrupted_last_validation_is_repeated(make_run: MakeRun) -> None:
    run = make_run(validation_interval=8, checkpoint_interval=8, validation_sequences=3000)
    process = start_training(run)
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"step": 8, "train_loss"' in metrics.read_text()):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert not any("validation_loss" in record and record["step"] == 8 for record in read_metrics(run))
    complete(run)
    assert any("validation_loss" in record and record["step"] == 8 for record in read_metrics(run))
    assert "the run is complete" in train(run).stdout


@pytest.mark.slow
def test_patience_ends_a_run_without_a_better_loss(make_run: MakeRun) -> None:
    constant = {"learning_rate": 1e-30, "weight_decay": 0, "schedule_learning_rate": False}  # all losses are equal
    for name, ranks, stops in (("whole", 1, ()), ("halves", 2, ("2",))):
        run = make_run(name, **constant, checkpoint_interval=1, patience=2)
        for stop in stops:
            complete(run, "--max-steps", stop, ranks=ranks)
        done = complete(run, ranks=ranks)
        assert "done, ended by patience: step 3 of 8" in done.stdout
        last = [record for record in read_metrics(run) if "event" in record][-1]
        assert (last["event"], last["step"], last["reason"]) == ("end", 3, "patience")
        again = complete(run, ranks=ranks)
        assert f"{run}: complete: patience ended it at step 3 of 8, best validation loss" in again.stdout
        assert list(metrics(run, "train_loss")) == [1, 2, 3]
        assert (run / "checkpoints" / "best").resolve().name == "step-00000001"
    assert "patience: got 2, wanted null" in one_line(train(run, "--set", "validation_interval=null", "--dry-run"))


@pytest.mark.slow
def test_terminal_shows_one_complete_progress_bar(make_run: MakeRun) -> None:
    run = make_run(min_train_tokens=24 * 256, log_interval=2)
    status, last = in_terminal(train_command(run, "--price-per-hour", "14.32", ranks=2))
    assert status == 0, last
    bars = [line for line in last if "24/24" in line]
    assert bars and len(bars[0]) > 80
    assert sum("| 0/24" in line for line in last) <= 2  # the bar is drawn again below the first validation loss
    for word in ("100%", "loss ", "tok/s", " spent"):
        assert word in bars[-1]
    assert re.search(r"\$\d+\.\d\d spent", bars[-1])
    assert "ETA" not in bars[-1] and "to go" not in bars[-1]
