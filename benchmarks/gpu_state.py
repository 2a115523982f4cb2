"""GPUs as nvidia-smi shows them: settings, links, memory in use; clocks, power and throttling while a command runs."""

import csv
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from command import markdown_table

SMI = "nvidia-smi"
SETTINGS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "power.limit", "power.max_limit", "clocks.sm",
    "clocks.max.sm", "clocks.max.memory", "ecc.mode.current", "persistence_mode", "mig.mode.current", "temperature.gpu",
)  # fmt: skip
PROCESSES = ("gpu_bus_id", "pid", "used_memory")
SAMPLE = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
SAMPLE_SECONDS = 2
TIMEOUT_SECONDS = 60  # of a driver that hangs
UNDERLINING = re.compile(r"\x1b\[\d*m")
# bits of clocks_event_reasons.active: docs.nvidia.com, NVML API reference, nvmlClocksEventReasons
IDLE = 0x1
REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def describe_gpus() -> list[str]:
    """Return paragraphs of Markdown: each GPU's settings, its links to the others, processes that use it already."""
    if shutil.which(SMI) is None:
        return [f"No {SMI} here."]
    settings = list(csv.reader(_query(f"--query-gpu={','.join(SETTINGS)}"), skipinitialspace=True))
    processes = _query(f"--query-compute-apps={','.join(PROCESSES)}")
    return [
        markdown_table(settings[0], settings[1:]) if len(settings) > 1 else indented(map(" ".join, settings)),
        "Processes on the GPUs before the start; in a container those of others may not show:",
        indented(processes),
        "Links:",
        indented(_smi("topo", "-m")),
    ]


def indented(lines: Iterable[str]) -> str:
    """Return lines as a block of code in Markdown, without the underlining of `nvidia-smi topo`."""
    return "\n".join(f"    {UNDERLINING.sub('', line).expandtabs()}" for line in lines)


@contextmanager
def sampled(path: Path) -> Iterator[None]:
    """Write a line of SAMPLE for each GPU every two seconds, until the block ends; nothing without nvidia-smi."""
    if shutil.which(SMI) is None:
        yield
        return
    query = [SMI, f"--query-gpu={','.join(SAMPLE)}", "--format=csv,noheader,nounits", f"--loop={SAMPLE_SECONDS}"]
    with path.open("w") as file:
        process = subprocess.Popen(query, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def summarize(lines: Iterable[str]) -> str:
    """Return the samples of GPUs that were busy: median clock, highest power and temperature, reasons of throttling."""
    busy = []
    for line in lines:
        with suppress(ValueError):  # a line cut off, or a value that this GPU does not tell
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


def _query(what: str) -> list[str]:
    return _smi(what, "--format=csv")


def _smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints, error messages included."""
    try:
        done = subprocess.run(
            [SMI, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [f"{SMI} {' '.join(arguments)}: no answer in {TIMEOUT_SECONDS} s"]
    return done.stdout.splitlines()
