"""Atomic commit: no matter when a save is killed, a checkpoint is complete or does not exist."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeRun, complete, slow, train, write_run
from tests.training.checkpoints.conftest import CRASH
from tests.training.checkpoints.crash import CALLS
from training.checkpoints.atomic_commit import recover
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import find_to_resume

CRASH_SETTINGS = {"checkpoint_interval": 2, "validation_interval": 2, "keep_checkpoints": 1}
QUICK = ("write weights", "replace", "publish", "move latest", "delete old one")


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> dict[str, Any]:
    """The final state of a run that had CRASH_SETTINGS but was not killed."""
    run = write_run(tmp_path_factory.mktemp("uncrashed") / "run", token_files, **CRASH_SETTINGS)
    complete(run, script=CRASH)
    summary = summary_of(run)
    checkpoints = {name: name for name in ("step-00000004", "step-00000008")}
    assert summary["files"] == checkpoints | {"best": "step-00000004", "latest": "step-00000008"}
    return summary


def summary_of(run: Path) -> dict[str, Any]:
    """Return the last step, its hash, the best step and its loss, and the folder that each checkpoint name leads to."""
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    return {
        **{key: state[key] for key in ("step", "state_sha256", "best_step", "best_validation_loss")},
        "files": {path.name: path.resolve().name for path in (run / "checkpoints").iterdir()},
    }


@pytest.mark.parametrize(
    ("call", "ranks", "rank"),
    [
        *((call, 1, 0) for call in QUICK),
        *slow(*((call, 1, 0) for call in CALLS if call not in QUICK), ("write moments", 2, 1)),
        *slow(*((call, 2, 0) for call in ("write weights", "make latest", "make best"))),
    ],
)
def test_kill_during_a_save_loses_nothing(
    make_run: MakeRun, uncrashed: dict[str, Any], call: str, ranks: int, rank: int
) -> None:
    run = make_run(**CRASH_SETTINGS)
    environment = {"CRASH_AT": call, "CRASH_SAVE": "2", "CRASH_RANK": str(rank)}
    if call == "replace":  # a checkpoint is replaced only if its validation was interrupted and is repeated
        assert train(run, script=CRASH, environment={"STOP_IN_STEP_2": "1"}).returncode == 75
        environment["CRASH_SAVE"] = "1"
    killed = train(run, ranks=ranks, script=CRASH, environment=environment)
    assert killed.returncode == (-signal.SIGKILL if ranks == 1 else 1)
    assert "Signal 9" in killed.stderr or ranks == 1
    recover(checkpoints_of(run))  # as at the start of a resume
    intact = find_to_resume(checkpoints_of(run), "auto")
    before = [*CALLS].index(call) <= [*CALLS].index("publish")
    assert intact is not None and intact.name == ("step-00000002" if before else "step-00000004")
    complete(run, ranks=ranks, script=CRASH)
    assert summary_of(run) == uncrashed
