"""Processes on emulated GPUs, with a cache of torch.compile for each kind of GPU, and readers of run directories."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from common.errors import EXIT_DONE
from common.json_files import read_json
from tests import launch
from tests.conftest import ROOT

CACHES = "LOCKSTEP_COMPILED"  # environment variable with the folder of the caches
TIMEOUT_SECONDS = 540  # enough to compile the largest network while other tests run
ATOMIC_PTX = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:atom|red)\.", re.MULTILINE)
ATOMIC_SOURCE = "tl.atomic"


def cache_of(gpu: str, determinism: str) -> Path:
    """Return the folder of the compiled kernels for one kind of GPU and one determinism level."""
    return Path(os.environ[CACHES]) / f"{gpu}-{determinism}"


def compiled_for(cache: Path) -> set[str]:
    """Return the architectures, such as sm_90a, for which the kernels in a cache were compiled."""
    return {
        target[1] for path in cache.rglob("*.ptx") if (target := re.search(r"^\.target (\w+)", path.read_text(), re.M))
    }


def atomic_kernels(cache: Path) -> list[str]:
    """Return the names of the cached kernels that use atomics, and so add numbers in no fixed order."""
    machine = [path.stem for path in cache.rglob("*.ptx") if ATOMIC_PTX.search(path.read_text())]
    source = [path.name for path in cache.rglob("*.py") if ATOMIC_SOURCE in path.read_text()]
    return sorted({*machine, *source})


def environment(gpu: str = "h100", determinism: str = "off", **variables: str) -> dict[str, str]:
    """Return the environment of processes on emulated GPUs.

    `variables`: additional environment variables, such as those in tests/fakegpu/README.md.
    """
    folder = cache_of(gpu, determinism)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    return {"FAKEGPU": gpu, **caches, **variables}


def start(script: Path, *arguments: object, ranks: int = 1, **variables: str) -> launch.Process:
    """Start a script with one GPU for each rank. `variables` are passed to `environment`."""
    surroundings = environment(**({"FAKEGPU_COUNT": str(ranks)} | variables))
    return launch.start(script, *map(str, arguments), ranks=ranks, environment=surroundings)


def run(script: Path, *arguments: object, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end. The parameters are the same as for `start`."""
    return launch.finish(start(script, *arguments, ranks=ranks, **variables), TIMEOUT_SECONDS)


def train(run_directory: Path, *options: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end. `how`: keyword arguments of `start`."""
    return run(ROOT / "train.py", run_directory, *options, **how)


def disturbed(name: str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a function of disturbed.py to its end. `how`: keyword arguments of `start`."""
    return run(ROOT / "tests" / "cuda" / "disturbed.py", name, *arguments, **how)


def finished(done: Any) -> str:
    """Return the output of a job, which must have succeeded."""
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
    return done.stdout


def records(run_directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, in order."""
    return [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]


def events(run_directory: Path) -> list[tuple[str, int]]:
    """Return the name and step of each event of a run, in order. Checkpoint events are left out."""
    event_records = [record for record in records(run_directory) if "event" in record]
    return [(record["event"], record["step"]) for record in event_records if record["event"] != "checkpoint"]


def logged_steps(run_directory: Path) -> list[int]:
    """Return the logged steps of a run, in order."""
    return [record["step"] for record in records(run_directory) if "train_loss" in record]


def checkpoint_step(run_directory: Path) -> int:
    """Return the step of the newest checkpoint."""
    return read_json(run_directory / "checkpoints" / "latest" / "state.json")["step"]


def exit_status(run_directory: Path) -> int:
    """Return the exit status that the last job of a run recorded."""
    return read_json(run_directory / "exit.json")["status"]
