"""Checkpoints: complete or not there, whenever the process is killed; damage found by name; a full disk survived."""

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from common.errors import BadInput
from tests import launch
from tests.conftest import ROOT, forge_manifest, in_terminal, metrics, seal_again, train, train_command, write_run
from tests.training.supervision.runs import start
from training.checkpoints import archive
from training.checkpoints import atomic_commit as commit
from training.checkpoints.atomic_commit import CRASH_POINTS, restore
from training.checkpoints.directory import find, verify
from training.telemetry.metrics_log import read_metrics

CRASH = ROOT / "tests" / "training" / "checkpoints" / "crash.py"
CRASH_SETTINGS = {"checkpoint_interval": 2, "validation_interval": 2, "keep_checkpoints": 1}
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> Path:
    """A run with two checkpoints, to be copied and damaged."""
    run = write_run(tmp_path_factory.mktemp("finished") / "run", token_files)
    assert train(run).returncode == 0
    return run


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> dict[str, Any]:
    """What a run of CRASH_SETTINGS leaves behind that was not killed."""
    run = write_run(tmp_path_factory.mktemp("uncrashed") / "run", token_files, **CRASH_SETTINGS)
    assert train(run, script=CRASH).returncode == 0
    left = left_behind(run)
    assert left["files"]["best"] == "step-00000004"
    return left


def left_behind(run: Path) -> dict[str, Any]:
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    return {
        **{key: state[key] for key in ("step", "state_sha256", "best_step", "best_validation_loss")},
        "files": {path.name: path.resolve().name for path in (run / "checkpoints").iterdir()},
    }


@pytest.mark.parametrize(
    ("point", "ranks", "rank"),
    [
        *((point, 1, 0) for point in CRASH_POINTS),
        *((point, 2, 0) for point in ("prepared", "renamed", "latest moved")),
        ("share written", 2, 1),
    ],
)
def test_a_kill_at_any_point_of_a_save_loses_nothing_and_changes_nothing(
    make_run: Callable[..., Path], uncrashed: dict[str, Any], point: str, ranks: int, rank: int
) -> None:
    run = make_run(**CRASH_SETTINGS)
    at = {"CRASH_AT": point, "CRASH_SAVE": "2", "CRASH_RANK": str(rank)}
    if point == "old one aside":  # a checkpoint is replaced only when its validation is made up for
        assert train(run, script=CRASH, environment={"STOP_IN_STEP_2": "1"}).returncode == 75
        at["CRASH_SAVE"] = "1"
    killed = train(run, ranks=ranks, script=CRASH, environment=at)
    assert killed.returncode == (-signal.SIGKILL if ranks == 1 else 1)
    assert "Signal 9" in killed.stderr or ranks == 1
    restore(run / "checkpoints")  # as a start does
    intact = find(run, "auto")
    before = CRASH_POINTS.index(point) < CRASH_POINTS.index("renamed")
    assert intact is not None and intact.name == ("step-00000002" if before else "step-00000004")
    done = train(run, ranks=ranks, script=CRASH)
    assert done.returncode == 0, done.stderr
    assert left_behind(run) == uncrashed


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_found_by_name(finished: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "step-00000008"
    shutil.copytree(finished / "checkpoints" / "step-00000008", checkpoint)
    assert verify(checkpoint) is None
    file = checkpoint / name
    intact = file.read_bytes()
    draw = random.Random(name)
    positions = range(len(intact)) if len(intact) < 2000 else [draw.randrange(len(intact)) for _ in range(200)]
    damaged = [flipped(intact, position, draw.randrange(8)) for position in positions]
    page = draw.randrange(max(1, len(intact) // 4096)) * 4096
    damaged.append(intact[:page] + bytes(len(intact[page : page + 4096])) + intact[page + 4096 :])
    damaged += [intact[:-1], b"", intact + b"\0"]
    for content in damaged:
        file.write_bytes(content)
        problem = verify(checkpoint)
        assert problem is not None
        assert name in problem
    file.unlink()
    assert name in str(verify(checkpoint))


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def test_a_damaged_checkpoint_is_passed_over_loudly_and_set_aside(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    newest = run / "checkpoints" / "step-00000008"
    weights = newest / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), -1000, 0))
    done = train(run, ranks=2)
    assert done.returncode == 0, done.stderr
    assert f"WARNING: {weights}: damaged: its sha256 is not the one in manifest.json" in done.stderr
    assert "falling back to step-00000004" in done.stderr
    assert verify(newest) is None  # written again
    assert len(list((run / "archive").glob("*/checkpoints/step-00000008"))) == 1
    # Byte for byte what one rank had written: the layout of the files does not depend on who writes them.
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest / name).read_bytes() == (finished / "checkpoints" / newest.name / name).read_bytes()


# Runs under torchrun: fails where a copy of the state for a save communicates.
WATCHED = """
from torch.distributed.tensor.debug import CommDebugMode

import train
from training.checkpoints.tensor_files import Share

copy = Share.copy


def watched(share):
    with CommDebugMode() as communication:
        copy(share)
    # in one piece: another rank writes to the same pipe
    print(f"collectives in a save's copy: {communication.get_total_counts()}\\n", end="", flush=True)


Share.copy = watched
train.leave(train.main())
"""


def test_a_sharded_save_gathers_nothing(make_run: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    done = train(make_run(parallel="fsdp"), ranks=2, script=script)
    assert done.returncode == 0, done.stderr
    counts = [line for line in done.stdout.splitlines() if line.startswith("collectives in a save's copy: ")]
    assert counts == ["collectives in a save's copy: 0"] * 4  # two saves on two ranks


WITHOUT_PICKLE = """
import pickle

import torch

import train


def refuse(*_, **__):
    raise AssertionError("a pickle is read from a file")


# What torch's collectives unpickle comes from memory, by a name of their own for the class.
pickle.load = pickle.Unpickler = torch.load = refuse
train.leave(train.main())
"""


def test_no_pickle_is_read(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    script = tmp_path / "without_pickle.py"
    script.write_text(WITHOUT_PICKLE)
    for ranks, parallel, last in ((1, "ddp", "6"), (2, "ddp", "7"), (2, "fsdp", "8")):
        options = ("--resume", "step-00000004") if last == "6" else ()
        done = train(run, *options, "--max-steps", last, "--set", f"parallel={parallel}", ranks=ranks, script=script)
        assert done.returncode == 0, done.stderr
        assert "resuming from" in done.stdout
    assert {path.name for path in (run / "checkpoints" / "step-00000008").iterdir()} == set(FILES)


LONG = {"min_train_tokens": 80 * 8 * 32, "validation_interval": None, "checkpoint_interval": 10}
FULL = 60_000  # bytes that any file may have: less than the weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_stops_no_run_and_the_next_save_is_tried_again(make_run: Callable[..., Path], ranks: int) -> None:
    straight, run = (make_run(name, **LONG) for name in ("straight", "full"))
    process = start(run, ranks, file_bytes=FULL, SLOW_STEP=0.03)
    deadline = time.monotonic() + 60
    while not (failures := [record for record in read_metrics(run) if record.get("event") == "checkpoint-failed"]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "File too large" in failures[0]["problem"]
    assert not list((run / "checkpoints").glob("step-*"))
    for worker in [process.pid, *process.children()]:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"WARNING: step {failures[0]['step']}: NOT SAVED, to be tried again at the next checkpoint" in errors
    saved = [record["step"] for record in read_metrics(run) if record.get("event") == "checkpoint"]
    assert saved[-1] == 80
    assert not list((run / "checkpoints").glob(".partial-*"))
    assert train(straight, ranks=1).returncode == 0
    assert metrics(run, "train_loss") == metrics(straight, "train_loss")
    states = [json.loads((path / "checkpoints/latest/state.json").read_text()) for path in (run, straight)]
    assert states[0]["state_sha256"] == states[1]["state_sha256"]


def train_on_full_disk(run: Path, *options: str, file_bytes: int) -> Any:
    return launch.run(ROOT / "train.py", str(run), "--device", "cpu", *options, ranks=2, file_bytes=file_bytes)


def test_a_failed_save_stays_in_the_bar_until_one_succeeds(make_run: Callable[..., Path]) -> None:
    run = make_run(min_train_tokens=24 * 8 * 32, validation_interval=None)
    status, lines = in_terminal(["prlimit", f"--fsize={FULL}", *train_command(run, ranks=1)])
    assert status == 1  # the last save failed, too
    assert any("20/24" in line and "loss " in line and line.endswith("NOT SAVED") for line in lines), lines
    done = train(run)
    assert done.returncode == 0
    assert "NOT SAVED" not in done.stderr


def test_a_run_whose_last_checkpoint_cannot_be_written_says_so_and_goes_on_later(
    make_run: Callable[..., Path],
) -> None:
    run = make_run()
    assert train(run, "--max-steps", "4").returncode == 0
    done = train_on_full_disk(run, file_bytes=FULL)
    assert done.returncode == 1
    assert done.stderr.count("the last steps are not saved, older checkpoints are as they were") == 1
    assert [path.name for path in (run / "checkpoints").glob("*step-*")] == ["step-00000004"]
    assert verify(run / "checkpoints" / "step-00000004") is None
    assert json.loads((run / "exit.json").read_text())["outcome"] == "error"
    assert train(run).returncode == 0


def test_a_checkpoint_whose_name_cannot_be_synced_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new = tmp_path / "step-00000002", tmp_path / ".partial-step-00000002"
    for directory, text in ((path, "old"), (new, "new")):
        directory.mkdir()
        (directory / "state.json").write_text(text)

    def broken(_: Path) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(commit, "sync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        commit.publish(path)
    commit.discard(path)
    assert [(file, file.read_text()) for file in tmp_path.rglob("*.json")] == [(path / "state.json", "old")]


def test_a_full_disk_at_a_start_is_one_line(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    before = (run / "resolved.json").read_text()
    done = train_on_full_disk(run, "--resume", "step-00000004", file_bytes=500)
    assert done.returncode == 1
    assert f"train.py: {run / 'resolved.json'}: cannot be written: File too large; make room" in done.stderr
    assert 'train.py", line' not in done.stderr
    assert (run / "resolved.json").read_text() == before


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.mark.parametrize("left", ["latest", "best", "both", "all"])
def test_a_copy_that_followed_links_is_resumed_and_loses_nothing(copied: Path, left: str) -> None:
    directory = copied / "checkpoints"
    for link in ("latest", "best"):
        target = (directory / link).resolve()
        (directory / link).unlink()
        if left in (link, "both", "all"):
            shutil.copytree(target, directory / link)
    if left != "all":
        for name in ("step-00000004", "step-00000008"):
            shutil.rmtree(directory / name)
    digests = {(path / "manifest.json").read_text() for path in directory.iterdir()}
    lines = archive.restore(copied)
    assert len(lines) == (1 if left in ("latest", "best") else 2)
    assert all("is no link, as after a copy that followed links; it is now " in line for line in lines)
    found = find(copied, "auto")
    assert found is not None and found.name == "step-00000008"  # the best one as well
    links = ("latest", "best") if left in ("both", "all") else (left,)
    assert all((directory / link).is_symlink() and verify(directory / link) is None for link in links)
    left_over = {path.read_text() for path in copied.rglob("manifest.json")}
    assert left_over == digests
    assert archive.restore(copied) == []


def test_a_run_copied_with_nothing_but_a_folder_latest_goes_on(copied: Path) -> None:
    directory = copied / "checkpoints"
    for name in ("latest", "best"):
        (directory / name).unlink()
    (directory / "step-00000008").rename(directory / "latest")
    shutil.rmtree(directory / "step-00000004")
    done = train(copied, "--set", "min_train_tokens=2304", "--set", "schedule_learning_rate=false")
    assert done.returncode == 0, done.stderr
    assert f"NOTE: {directory / 'latest'} is no link" in done.stdout
    assert f"resuming from {directory / 'step-00000008'} at step 8 of 9" in done.stdout
    assert (directory / "latest").readlink() == Path("step-00000009")


def test_a_damaged_folder_in_a_links_place_is_refused_and_never_deleted(copied: Path) -> None:
    directory = copied / "checkpoints"
    (directory / "latest").unlink()
    (directory / "best").unlink()
    (directory / "step-00000008").rename(directory / "latest")
    (directory / "latest" / "state.json").write_text("{}")
    shutil.rmtree(directory / "step-00000004")
    assert archive.restore(copied) == []
    with pytest.raises(BadInput, match=r"latest/state\.json: got 2 bytes.*start anew with --resume never"):
        find(copied, "auto")
    (directory / "note").mkdir()
    commit.point(directory, "latest", "note")
    assert [path.read_text() for path in copied.glob("archive/*/checkpoints/latest/state.json")] == ["{}"]


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "checkpoints")
    with pytest.raises(BadInput, match="checkpoints: cannot be written: Permission denied; check the permissions"):
        archive.restore(copied)


def test_a_run_with_nothing_but_a_kept_copy_says_how_to_go_on_from_it(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copied / "checkpoints"
    (directory / "step-00000008").rename(directory / "kept")
    shutil.rmtree(directory / "step-00000004")
    with pytest.raises(
        BadInput, match="names step-00000008, which is not there; continue from a copy with --resume kept"
    ):
        find(copied, "auto")
    for link in ("latest", "best"):
        (directory / link).unlink()
    assert find(copied, "auto") is None
    assert capsys.readouterr().out == f"NOTE: {directory}: got only kept; --resume kept continues from that\n"


def test_a_run_whose_links_name_nothing_does_not_begin_anew_in_silence(copied: Path) -> None:
    for name in ("step-00000004", "step-00000008"):
        shutil.rmtree(copied / "checkpoints" / name)
    with pytest.raises(BadInput, match="latest: names step-00000008, which is not there; bring it back, or start anew"):
        find(copied, "auto")


def test_hidden_names_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (".partial-step-00000004", ".partial-mine", ".partial-step-00000004-aside", "step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-best").symlink_to("nowhere")
    commit.delete_old(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-mine", "step-00000004"]


FORGED = {
    "step": [7, "8", None, -1, True, 8.0, 10**30],
    "optimizer_steps": [7, 9, "8", None],
    "tokens": [1, "x"],
    "elapsed_seconds": ["1", -1, 10**400],
    "best_step": [9, "8"],
    "guard": [[], {"losses": [1], "grad_norms": [], "skipped_steps": 0}, {"losses": [None]}],
    "loss_scale": [None, {"scale": 0, "finite_steps": 0}, {"scale": "1", "finite_steps": 0}],
    "config": [
        None,
        {},
        {"model": {}, "train": {}, "global_batch_size": 8},
        {"model": [], "train": {}, "global_batch_size": 8},
    ],
    "state_sha256": [None, "0" * 64],
    "fields_sha256": ["0" * 64],
}


def test_a_state_that_was_edited_is_refused_though_its_manifest_was_made_anew(copied: Path) -> None:
    path = copied / "checkpoints" / "step-00000008"
    intact = json.loads((path / "state.json").read_text())
    for key, values in FORGED.items():
        for value in values:
            for older in (False, True):  # a version that wrote no hash of the fields
                state = intact | {key: value}
                if older:
                    del state["fields_sha256"]
                    if (key, value) in (("optimizer_steps", 7), ("tokens", 1)) or key == "fields_sha256":
                        continue  # nothing tells
                (path / "state.json").write_text(json.dumps(state))
                forge_manifest(path)
                problem = verify(path)
                assert problem is not None and f"{path / 'state.json'}: " in problem, (key, value, older)
    (path / "state.json").write_text(json.dumps({k: v for k, v in intact.items() if k != "fields_sha256"}))
    forge_manifest(path)
    assert verify(path) is None


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_is_waited_for(copied: Path, name: str) -> None:
    path = copied / "checkpoints" / "step-00000008"
    (path / name).unlink()
    os.mkfifo(path / name)
    assert str(path / name) in str(verify(path))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("content", [b"\x80\x04N.", b"[" * 100_000, "other shapes"])
def test_a_tensor_file_that_is_none_is_one_line(copied: Path, name: str, content: bytes | str) -> None:
    file = (copied / "checkpoints" / "latest").resolve() / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        tensors = load_file(file)
        save_file({key: value[:1] for key, value in tensors.items()}, file)
    seal_again(file.parent)
    done = train(copied, "--set", "min_train_tokens=3000")
    assert done.returncode == 1
    assert f"train.py: {file}: " in done.stderr and "Traceback" not in done.stderr
    assert ("cannot be read" if isinstance(content, bytes) else "got F32 [1") in done.stderr


def test_deeply_nested_json_in_a_checkpoint_is_damage(copied: Path) -> None:
    for name in ("manifest.json", "state.json"):
        path = copied / "checkpoints" / ("step-00000008" if name == "manifest.json" else "step-00000004")
        (path / name).write_text("[" * 100_000)
        forge_manifest(path) if name == "state.json" else None
        assert f"{path / name}: " in str(verify(path))
        assert "nested deeper than 100" in str(verify(path))
