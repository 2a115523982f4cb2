"""The first GPU hour: all measurements that need a GPU, one after another, with one page and a tarball as the result.

python benchmarks/first_gpu_hour.py [--minutes 60] [--price-per-hour 24] [--output gpu-hour]

The script measures correctness, speed, memory, kernels, communication and host time on 1, 2, 4 or 8 GPUs. The most
important steps come first, and no data is needed. Each step has a time limit and its own result files, and a failed
step does not stop the rest. The page and the tarball are written after each step. A signal ends the running step and
all its processes. To continue, run the same command again; steps that are done are skipped. Run the script in tmux. At
the end, copy OUTPUT.tar.gz to your own machine. It has page.md, and the output and the GPU clocks of each step, but no
weights, tokens or credentials.
"""

import csv
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import bench
import torch
from bench import SIZES, Size
from gpu_hour_steps import STEPS, HourStep, Outcome, hour_steps, read_outcome, run_limited
from tabulate import tabulate

from common.errors import EXIT_ERROR, BadInput
from model.counts import parameter_count
from training.checkpoints.retention import CHECKPOINT_BYTES
from training.hardware.environment import cpu_name, git_commit
from training.hardware.preflight import DiskNeed, PreflightRequirements, report

LEAST_STEP_SECONDS = 30.0  # a step does not start if less time is left
DRY_RUN_SECONDS = 900.0  # limit of each step in a dry run, in case a step hangs
PREFLIGHT = "preflight"
REST_BYTES = 2e9  # disk space for compiled kernels, random tokens and checkpoints of small networks
PAGE = "page.md"
LAST_LINES = 100  # the page shows at most this many lines of output for a step that is not done
SMI = "nvidia-smi"
SETTINGS = (
    "index,name,driver_version,memory.total,memory.used,power.limit,power.max_limit,clocks.sm,clocks.max.sm,"
    "clocks.max.memory,ecc.mode.current,persistence_mode,mig.mode.current,temperature.gpu"
)
PROCESSES = "gpu_bus_id,pid,used_memory"
SAMPLE = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
SAMPLE_SECONDS = 2
SMI_SECONDS = 60  # timeout, in case the driver hangs
UNDERLINING = re.compile(r"\x1b\[\d*m")
# Bits of clocks_event_reasons.active: docs.nvidia.com, NVML API reference, nvmlClocksEventReasons.
IDLE = 0x1
REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}

Outcomes = Sequence[tuple[HourStep, Outcome]]


def main(
    *,
    minutes: float = 60,
    price_per_hour: float | None = None,
    output: Path = Path("gpu-hour"),
    dry_run: bool = False,
    preflight: Size | None = None,
) -> None:
    """Run the steps and write the page.

    Args:
        minutes: time limit for all steps that are not done yet.
        price_per_hour: price of the machine in dollars; with it, the page shows the cost of each step.
        output: folder for the page, the results and all temporary files.
        dry_run: use tiny sizes, to try everything on the emulated driver; the values mean nothing.
        preflight: run only the first step, which checks the machine and the disk space for a network of this size.
    """
    if preflight is not None:
        sys.exit(report(needs(preflight)))
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise BadInput(
            "this machine has no GPU; to try this script with emulated GPUs, run "
            "tests/fakegpu/run python benchmarks/first_gpu_hour.py --dry-run"
        )
    ranks = 1 << (min(gpus, 8).bit_length() - 1)
    check_output(output)
    output.mkdir(parents=True, exist_ok=True)
    title = f"{'DRY RUN with tiny sizes: the values mean nothing. ' if dry_run else ''}{ranks} of {gpus} GPUs"
    head, steps = [title, *machine_lines()], hour_steps(ranks)

    def write() -> list[Outcome]:
        outcomes = [read_outcome(output, step.name, words(step, ranks, dry_run=dry_run)) for step in steps]
        (output / PAGE).write_text(make_page(head, list(zip(steps, outcomes, strict=True)), output, price_per_hour))
        pack(output)
        return outcomes

    try:
        for _ in run_steps(steps, output, ranks, minutes, dry_run=dry_run):
            write()
    finally:
        outcomes = write()
    print(f"\n{output / PAGE}\n{pack(output)}", flush=True)
    if any(outcome.state != "done" for outcome in outcomes):
        sys.exit(EXIT_ERROR)


def check_output(folder: Path) -> None:
    """Raise BadInput if a folder has files but no results of this script.

    The page could replace such files, and the archive would copy them.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if names and not {f"{step.name}.json" for step in STEPS} & {*names}:
        raise BadInput(
            f"{folder}: has files such as {min(names)}, but no results of this script; pass another --output"
        )


def needs(largest: Size) -> PreflightRequirements:
    """Return the preflight's requirements. They include disk space, because train.py needs room for a checkpoint."""
    needed_bytes = CHECKPOINT_BYTES * parameter_count(SIZES[largest]) + REST_BYTES
    disk = DiskNeed(
        directory=Path(tempfile.gettempdir()),
        contents=f"a checkpoint of {largest} and compiled kernels",
        least_bytes=needed_bytes,
        total_bytes=needed_bytes,
        advice="free some space, or choose a larger disk with --output",
    )
    return PreflightRequirements(disk=disk)


def words(step: HourStep, ranks: int, *, dry_run: bool) -> list[str]:
    """Return the step's command."""
    return (step.dry_run if dry_run else step.command).format(ranks=ranks).split()


def run_steps(
    steps: list[HourStep], output: Path, ranks: int, minutes: float, *, dry_run: bool
) -> Iterator[tuple[HourStep, Outcome]]:
    """Run each step that is not done, while there is time, and yield its outcome. A failed preflight ends the hour."""
    deadline = time.monotonic() + 60 * minutes
    earlier_outcomes = [(step, read_outcome(output, step.name, words(step, ranks, dry_run=dry_run))) for step in steps]
    waiting = [step for step, outcome in earlier_outcomes if outcome.state != "done"]
    for step, earlier in earlier_outcomes:
        print(f"{step.name:22}", end="", flush=True)
        if step in waiting:
            waiting.remove(step)
        seconds_left = deadline - time.monotonic()
        limit = min(seconds_left, DRY_RUN_SECONDS) if dry_run else limit_seconds(step, waiting, seconds_left)
        outcome = earlier
        if earlier.state != "done" and limit >= LEAST_STEP_SECONDS:
            with sampled(samples_file(output, step)):
                outcome = run_limited(output, step.name, [sys.executable, *earlier.command], limit)
            print(f"{outcome.state:12}{outcome.seconds:6.0f} s of {limit:.0f}", flush=True)
        else:
            print(earlier.state, flush=True)
        yield step, outcome
        if step.name == PREFLIGHT and outcome.state not in ("done", "not started"):
            print((output / f"{PREFLIGHT}.txt").read_text(errors="replace"), flush=True)
            return


def limit_seconds(step: HourStep, later: list[HourStep], seconds_left: float) -> float:
    """Return the time limit of a step.

    A step gets up to twice its planned time if earlier steps took less time than planned. The time that is planned for
    `later` steps is not used for this.
    """
    planned, spare = 60 * step.minutes, seconds_left - 60 * sum(later_step.minutes for later_step in later)
    return min(seconds_left, max(planned, min(2 * planned, spare)))


def machine_lines() -> list[str]:
    """Return paragraphs with versions, commit and hardware. Do not initialize CUDA, which would take GPU memory."""
    torch_line = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return [f"commit {git_commit()}, {torch_line}", f"{cpu_name()}, {platform.platform()}", *describe_gpus()]


def samples_file(folder: Path, step: HourStep) -> Path:
    """Return the file for the samples that nvidia-smi writes during a step."""
    return folder / f"{step.name}.gpus.csv"


def make_page(head: Sequence[str], outcomes: Outcomes, folder: Path, price_per_hour: float | None) -> str:
    """Return the page as Markdown: the machine, a table of all steps, and the output of each step."""
    columns = ["step", "outcome", "seconds", *(["USD"] if price_per_hour else []), "GPUs while busy", "fills"]
    rows = []
    for step, outcome in outcomes:
        cost = [f"{outcome.seconds / 3600 * price_per_hour:.2f}"] if price_per_hour else []
        busy = summarize(_lines(samples_file(folder, step), outcome))
        rows.append([step.name, outcome.state, f"{outcome.seconds:.0f}", *cost, busy, step.fills])
    total = sum(outcome.seconds for _, outcome in outcomes)
    cost = [f"{total / 3600 * price_per_hour:.2f}"] if price_per_hour else []
    rows.append(["all", "", f"{total:.0f}", *cost, "", ""])
    parts = ["# First GPU hour", *head, _table(columns, rows)]
    for step, outcome in outcomes:
        lines = _lines(folder / f"{step.name}.txt", outcome)
        shown = lines if outcome.state == "done" else lines[-LAST_LINES:]
        parts.append(f"## {step.name}: {outcome.state}")
        parts.append(_indented([f"python {' '.join(outcome.command)}", "", *shown]))
    return "\n\n".join(parts) + "\n"


def pack(folder: Path) -> Path:
    """Write FOLDER.tar.gz with the page, the output and the outcomes of the steps, and return its path."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".md", ".txt", ".json", ".csv") and path.is_file():
                tar.add(path, f"{folder.name}/{path.name}")
    return archive


def describe_gpus() -> list[str]:
    """Return Markdown paragraphs: the GPUs' settings, the processes that already use a GPU, and the GPUs' links."""
    if shutil.which(SMI) is None:
        return [f"This machine has no {SMI}."]
    settings = list(csv.reader(_smi(f"--query-gpu={SETTINGS}", "--format=csv"), skipinitialspace=True))
    return [
        _table(settings[0], settings[1:]) if len(settings) > 1 else _indented(map(" ".join, settings)),
        "Processes on the GPUs before the start (in a container, processes outside of it may not be listed):",
        _indented(_smi(f"--query-compute-apps={PROCESSES}", "--format=csv")),
        "Links:",
        _indented(_smi("topo", "-m")),
    ]


@contextmanager
def sampled(path: Path) -> Iterator[None]:
    """Write the SAMPLE values of each GPU every two seconds until the block ends. Without nvidia-smi, do nothing."""
    if shutil.which(SMI) is None:
        yield
        return
    query = [SMI, f"--query-gpu={SAMPLE}", "--format=csv,noheader,nounits", f"--loop={SAMPLE_SECONDS}"]
    with path.open("w") as file:
        process = subprocess.Popen(query, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def summarize(lines: Iterable[str]) -> str:
    """Summarize samples of busy GPUs: median clock, highest power and temperature, and reasons for throttling."""
    busy = []
    for line in lines:
        with suppress(ValueError):  # the line was cut off, or this GPU does not report a value
            clock, power, temperature, reasons = line.split(",")
            if not int(reasons, 16) & IDLE:
                busy.append((float(clock), float(power), float(temperature), int(reasons, 16)))
    if not busy:
        return ""
    clocks, powers, temperatures, masks = zip(*busy, strict=True)
    shares = Counter(name for mask in masks for bit, name in REASONS.items() if mask & bit)
    throttled = [f"{name} {count / len(busy):.0%}" for name, count in shares.most_common()] or ["not throttled"]
    busiest = f"{statistics.median(clocks):.0f} MHz, {max(powers):.0f} W, {max(temperatures):.0f} °C"
    return ", ".join([busiest, *throttled])


def _indented(lines: Iterable[str]) -> str:
    """Return lines as a block of code in Markdown, without the underlining of `nvidia-smi topo`."""
    return "\n".join(f"    {UNDERLINING.sub('', line).expandtabs()}" for line in lines)


def _lines(path: Path, outcome: Outcome) -> list[str]:
    """Return the lines of a step's file. If the step has not started, the file is old, so return no lines."""
    is_current = outcome.state != "not started" and path.exists()
    return path.read_text(errors="replace").splitlines() if is_current else []


def _smi(*arguments: str) -> list[str]:
    """Return the output of nvidia-smi, including error messages, as lines."""
    try:
        done = subprocess.run(
            [SMI, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SMI_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [f"{SMI} {' '.join(arguments)}: no answer within {SMI_SECONDS} s"]
    return done.stdout.splitlines()


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return str(tabulate(rows, columns, "github", disable_numparse=True))


if __name__ == "__main__":
    bench.run(main)
