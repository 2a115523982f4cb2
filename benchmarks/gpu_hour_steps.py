"""The steps of the first GPU hour, with the most important first, and the function that runs a step.

Each step has a command, a time limit, and the places in docs/ that its results fill in. Running a step writes its
output to NAME.txt and its outcome to NAME.json.
"""

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
from bench import GRACE_SECONDS, ROOT, kill_tree

SMALL_SPEED = "benchmarks/train_speed.py --sizes small --steps 2 --set compile=false"
SMALL_STEPS = "--ranks {ranks} --size small --steps 5 --microbatch 1 --set compile=false"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node={ranks}"
# Environment variables whose names match this pattern are not passed to the steps.
SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
COMPILED = "compiled"  # folder for compiled kernels and graphs, which later commands reuse

State = Literal["done", "failed", "timed out", "interrupted", "not started"]


@attrs.frozen(kw_only=True)
class HourStep:
    """One command of the hour. In the command, {ranks} is the number of GPUs that are used: 1, 2, 4 or 8."""

    name: str
    command: str  # command-line arguments for `python`, which runs in the repository root
    dry_run: str  # the same command with a tiny size
    minutes: float  # time limit; the limits of all steps add up to at most an hour
    fills: str  # places in docs/ that the results fill in
    least_gpus: int = 1


STEPS = (
    HourStep(
        name="preflight",
        command="benchmarks/first_gpu_hour.py --preflight 1.5B",
        dry_run="benchmarks/first_gpu_hour.py --preflight small",
        minutes=2,
        fills="nothing; if this step fails, the hour ends before it costs much",
    ),
    HourStep(
        name="correctness-elastic",
        command="benchmarks/correctness.py elastic",
        dry_run="benchmarks/correctness.py elastic --emulated --steps 2 --ranks {ranks}",
        minutes=7,
        fills="docs/status.md: same bits on 1, 2, 4, 8 ranks; same bits on one layout (self-test); torch.compile",
    ),
    HourStep(
        name="correctness-losses",
        command="benchmarks/correctness.py losses",
        dry_run="benchmarks/correctness.py losses --emulated --steps 2",
        minutes=4,
        fills="docs/status.md: attention kernel; also Tokens/s, because a step that is fast but wrong is worthless",
    ),
    HourStep(
        name="correctness-resume",
        command="benchmarks/correctness.py resume --steps 200",
        dry_run="benchmarks/correctness.py resume --emulated --steps 40",
        minutes=3,
        fills="docs/status.md: kill, resume, replay to the same bits",
    ),
    HourStep(
        name="speed-124M",
        command="benchmarks/train_speed.py --sizes 124M --steps 30",
        dry_run=SMALL_SPEED + " --step-tokens 512",
        minutes=3,
        fills="docs/performance.md: one H100, 124M; docs/status.md: Tokens/s, MFU",
    ),
    HourStep(
        name="speed-124M-many",
        command="benchmarks/train_speed.py --sizes 124M --steps 30 --ranks {ranks} --parallel ddp fsdp",
        dry_run=SMALL_SPEED + " --step-tokens 256 --ranks {ranks} --parallel ddp fsdp",
        minutes=4,
        fills="docs/performance.md: eight H100, 124M",
        least_gpus=2,
    ),
    HourStep(
        name="bus-bandwidth",
        command=f"{TORCHRUN} benchmarks/bus_bandwidth.py",
        dry_run=f"{TORCHRUN} benchmarks/bus_bandwidth.py --mebibytes 1",
        minutes=1,
        fills="docs/performance.md: NCCL's bandwidth",
        least_gpus=2,
    ),
    HourStep(
        name="speed-1.5B-many",
        command="benchmarks/train_speed.py --sizes 1.5B --steps 15 --ranks {ranks} --parallel ddp fsdp",
        dry_run=SMALL_SPEED + " --step-tokens 256 --ranks {ranks} --parallel fsdp",
        minutes=6,
        fills="docs/performance.md: eight H100, 1.5B",
        least_gpus=2,
    ),
    HourStep(
        name="speed-1.5B",
        command="benchmarks/train_speed.py --sizes 1.5B --steps 15 --step-tokens 262144",
        dry_run=SMALL_SPEED + " --step-tokens 256 --set loss_chunks=2",
        minutes=5,
        fills="docs/performance.md: one H100, 1.5B",
    ),
    HourStep(
        name="communication",
        command="benchmarks/communication.py exposed --ranks {ranks}",
        dry_run=f"benchmarks/communication.py exposed {SMALL_STEPS} --parallel fsdp --determinism elastic",
        minutes=6,
        fills="docs/exactness.md: cost of elastic on GPUs, exposed communication",
        least_gpus=2,
    ),
    HourStep(
        name="host",
        command="benchmarks/communication.py host --ranks {ranks}",
        dry_run=f"benchmarks/communication.py host {SMALL_STEPS} --parallel ddp --determinism off",
        minutes=3,
        fills="docs/performance.md: host time of a step",
    ),
    HourStep(
        name="memory",
        command="benchmarks/memory.py --sizes 124M 1.5B --cards h100-80gb",
        dry_run="benchmarks/memory.py --sizes small --cards h100-80gb",
        minutes=4,
        fills="docs/memory.md: accuracy; docs/status.md: memory prediction",
    ),
    HourStep(
        name="outside-memory",
        command="benchmarks/outside_memory.py --ranks {ranks}",
        dry_run="benchmarks/outside_memory.py runs/quickstart --ranks {ranks} --set compile=false",
        minutes=2,
        fills="docs/memory.md: CUDA's context and NCCL, predicted without a measurement",
    ),
    HourStep(
        name="batch-search",
        command="find_batch_size.py runs/8xh100 --world-size {ranks}",
        dry_run="find_batch_size.py runs/quickstart --world-size {ranks} --set compile=false",
        minutes=2,
        fills="docs/status.md: largest micro-batch by trial",
    ),
    HourStep(
        name="kernels",
        command="benchmarks/kernels.py runs/1xh100 microbatch_size=64",
        dry_run="benchmarks/kernels.py runs/quickstart compile=false",
        minutes=1,
        fills="docs/money.md: the roofline's shares",
    ),
    HourStep(
        name="kernels-many",
        command=f"{TORCHRUN} benchmarks/kernels.py runs/8xh100",
        dry_run=f"{TORCHRUN} benchmarks/kernels.py runs/quickstart compile=false",
        minutes=1,
        fills="docs/performance.md: NCCL's share of the kernels' time",
        least_gpus=2,
    ),
    HourStep(
        name="speed-350M",
        command="benchmarks/train_speed.py --sizes 350M --steps 15",
        dry_run=SMALL_SPEED + " --step-tokens 256",
        minutes=3,
        fills="docs/performance.md: one H100, 350M",
    ),
    HourStep(
        name="speed-774M",
        command="benchmarks/train_speed.py --sizes 774M --steps 15 --step-tokens 262144",
        dry_run=SMALL_SPEED + " --step-tokens 256",
        minutes=3,
        fills="docs/performance.md: one H100, 774M",
    ),
)


def hour_steps(gpus: int) -> list[HourStep]:
    """Return the steps that a machine with this number of GPUs can run."""
    return [step for step in STEPS if gpus >= step.least_gpus]


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of a command."""

    command: list[str]
    state: State = "not started"
    seconds: float = 0.0
    exit_status: int | None = None


def run_limited(folder: Path, name: str, command: list[str], limit_seconds: float) -> Outcome:
    """Run a command in the repository's root with a time limit, and write its output and outcome.

    At the limit, or if an exception ends the wait, the command and all its processes are killed.
    """
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # an earlier command may have been killed before it removed its files
    scratch.mkdir(parents=True)
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
                kill_tree(process, GRACE_SECONDS)
            shutil.rmtree(scratch, ignore_errors=True)
            seconds = round(time.monotonic() - began, 1)
            outcome = Outcome(command=command[1:], state=state, seconds=seconds, exit_status=status)
            (folder / f"{name}.json").write_text(json.dumps(attrs.asdict(outcome), indent=2) + "\n")
    return outcome


def read_outcome(folder: Path, name: str, command: list[str]) -> Outcome:
    """Return the outcome of an earlier run of this command, or "not started" if there was none."""
    with suppress(OSError, ValueError, TypeError):
        outcome = Outcome(**json.loads((folder / f"{name}.json").read_text()))
        if outcome.command == command:
            return outcome
    return Outcome(command=command)


def _environment(folder: Path, scratch: Path) -> dict[str, str]:
    """Return this process's environment without credentials, with a temporary directory and a shared compile cache."""
    environment = {key: value for key, value in os.environ.items() if not SECRETS.search(key)}
    compiled = folder.absolute() / COMPILED
    return environment | {
        "TMPDIR": str(scratch.absolute()),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
