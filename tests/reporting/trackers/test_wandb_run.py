"""W&B: a run has each row once, offline and online. A failure gives one line, and no file contains the access key."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import ROOT, MakeRun, metrics
from tests.launch import wait_until
from tests.reporting.trackers.tracked import append_steps, assert_holds_losses, from_wandb
from tests.reporting.trackers.wandb_server import WandbServer, serve_wandb
from tests.training.supervision.runs import start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # importing wandb takes minutes on a busy machine
pytest.importorskip("wandb")
OFFLINE = {"WANDB_MODE": "offline"}
KEY = "f00dfeed" * 5


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with serve_wandb() as serving:
        yield serving


def online(address: str, home: Path) -> dict[str, str]:
    """Return the environment of a user with a key. `home` is the folder in which W&B would store the key."""
    return {"WANDB_MODE": "online", "WANDB_BASE_URL": address, "WANDB_API_KEY": KEY, "NETRC": str(home / "netrc")}


def send(*runs: Path, **environment: str) -> tuple[int, str, str]:
    done = launch.run(ROOT / "report.py", *map(str, runs), "--to", "wandb", environment=OFFLINE | environment)
    return done.returncode, done.stdout, done.stderr


def test_an_offline_run_has_each_row_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    append_steps(run, 1, 25)
    killed = launch.start(ROOT / "report.py", str(run), "--to", "wandb", environment=OFFLINE)
    wait_until(lambda: any(run.glob("wandb/offline-run-*/*.wandb")), killed)
    killed.send_signal(9)
    killed.communicate(60)
    assert send(run)[0] == 0
    append_steps(run, 11, 30, loss=3.0, job=1)
    assert send(run)[:2] == (0, f"{run}: 30 new steps for wandb, 30 in all\n")
    assert send(run)[1] == f"{run}: 0 new steps for wandb, 30 in all\n"
    values, events = from_wandb(run)
    assert_holds_losses(values, run)
    assert (events[10], events[11]) == ("step 10: checkpoint", "step 10: start")
    assert (events[21], events[30]) == ("step 20: checkpoint", "step 30: checkpoint")


def test_a_run_with_a_missing_file_is_sent_again(tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for number, run in enumerate(runs):
        append_steps(run, 1, 25, loss=2.0 + number)
    assert send(*runs)[0] == 0
    for path in runs[1].glob("wandb/offline-run-*/*.wandb"):
        path.unlink()
    done = send(*runs)
    new = [f"{run}: {sent} new steps for wandb, 25 in all" for run, sent in zip(runs, (0, 25), strict=True)]
    assert done[0] == 0 and done[1].splitlines() == new
    for run in runs:
        assert_holds_losses(from_wandb(run)[0], run)


def test_changed_steps_become_a_new_online_run(tmp_path: Path, server: WandbServer) -> None:
    run, user = tmp_path / "run", online(server.address, tmp_path)
    append_steps(run, 1, 25)
    killed = launch.start(ROOT / "report.py", str(run), "--to", "wandb", environment=user)
    wait_until(lambda: server.answered > 0, killed)
    killed.send_signal(9)
    killed.communicate(60)
    append_steps(run, 26, 45, job=1)
    status, shown, _ = send(run, **user)
    [name] = server.histories
    assert status == 0 and shown.endswith(" new steps for wandb, 45 in all\n")
    assert_holds_losses(server.values(name), run)
    assert server.values(name)["events"][26] == "step 25: start"
    append_steps(run, 41, 60, loss=3.0, job=2)
    before = list(server.histories[name])
    assert send(run, **user)[1] == f"{run}: 60 new steps for wandb, 60 in all\n"
    append_steps(run, 61, 70, loss=3.0, job=3)
    assert send(run, **user)[1] == f"{run}: 10 new steps for wandb, 70 in all\n"
    assert list(server.histories) == [name, f"{name}-2"] and server.histories[name] == before
    assert_holds_losses(server.values(f"{name}-2"), run)
    del server.histories[f"{name}-2"]  # the user deletes the run, and then sends it again
    assert send(run, **user)[1] == f"{run}: 70 new steps for wandb, 70 in all\n"
    assert_holds_losses(server.values(f"{name}-2"), run)
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_rows_that_the_server_rejected_are_sent_again(tmp_path: Path, server: WandbServer) -> None:
    run, user = tmp_path / "run", online(server.address, tmp_path)
    append_steps(run, 1, 25)
    assert send(run, **user)[0] == 0
    append_steps(run, 26, 40, job=1)
    server.answers = server.answered
    status, shown, errors = send(run, **user)
    assert (status, shown, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("report.py: W&B: steps up to 40 were sent, but the server has only steps up to 25; rerun")
    server.answers = None
    assert send(run, **user)[:2] == (0, f"{run}: 15 new steps for wandb, 40 in all\n")
    [name] = server.histories
    assert_holds_losses(server.values(name), run)


def test_a_dead_server_does_not_disturb_the_run(make_run: MakeRun) -> None:
    train = {"min_train_tokens": 60 * 8 * 32, "checkpoint_interval": 20}
    alone, disturbed = make_run("alone", **train), make_run("beside", **train)
    start(alone, 1, "--hash-every", "1").communicate(120)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts and never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        training = start(disturbed, 1, "--hash-every", "1")
        wait_until((disturbed / "metrics.jsonl").exists, training)
        status, _, errors = send(disturbed, **online(url, disturbed), WANDB_INIT_TIMEOUT="5")
    training.communicate(120)
    assert training.returncode == 0 and metrics(disturbed, "state_sha256") == metrics(alone, "state_sha256")
    assert status == 1 and errors.startswith("report.py: W&B: ") and errors.count("\n") == 1
    assert send(disturbed)[0] == 0 and from_wandb(disturbed)[0]["train_loss"] == metrics(disturbed, "train_loss")
    files = [path for path in disturbed.rglob("*") if path.is_file()]
    assert files and not any(KEY.encode() in path.read_bytes() for path in files)
