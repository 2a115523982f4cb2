"""A command with a time limit and result files: NAME.txt, what it printed, and NAME.json, how it ended."""

import json
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs
from command import ROOT
from process_tree import end_tree

SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # names of variables that steps do not get
COMPILED = "compiled"  # folder of kernels and graphs, kept from one command to the next

State = Literal["done", "failed", "timed out", "interrupted", "not started"]


@attrs.frozen(kw_only=True)
class Outcome:
    """Outcome of a command."""

    command: list[str]
    state: State = "not started"
    seconds: float = 0.0
    exit_status: int | None = None


def run_limited(folder: Path, name: str, command: list[str], limit_seconds: float) -> Outcome:
    """Run a command in the repository's root, for so long at most; write its files.

    At the limit, and where an exception ends the wait, all of it is killed.
    """
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)  # a command that is killed removes nothing
    began = time.monotonic()
    state: State = "interrupted"
    status: int | None = None
    with (folder / f"{name}.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(folder, scratch),
            text=True,
        )
        try:
            status = process.wait(limit_seconds)
            state = "failed" if status else "done"
        except subprocess.TimeoutExpired:
            state = "timed out"
        finally:
            if status is None:
                end_tree(process)
            shutil.rmtree(scratch, ignore_errors=True)
            seconds = round(time.monotonic() - began, 1)
            outcome = Outcome(command=command[1:], state=state, seconds=seconds, exit_status=status)
            (folder / f"{name}.json").write_text(json.dumps(attrs.asdict(outcome), indent=2) + "\n")
    return outcome


def read_outcome(folder: Path, name: str, command: list[str]) -> Outcome:
    """Return how this command ended earlier; "not started" where it was another one, or none."""
    with suppress(OSError, ValueError, TypeError):
        outcome = Outcome(**json.loads((folder / f"{name}.json").read_text()))
        if outcome.command == command:
            return outcome
    return Outcome(command=command)


def _environment(folder: Path, scratch: Path) -> dict[str, str]:
    """Return this process's environment without credentials, with a temporary directory and a cache of all commands."""
    environment = {key: value for key, value in os.environ.items() if not SECRETS.search(key)}
    compiled = folder.absolute() / COMPILED
    return environment | {
        "TMPDIR": str(scratch.absolute()),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
