"""Preflight checks of this machine: GPUs, C compiler, free disk, shared memory, open files, and the run's bucket.

python -m training.hardware.preflight    checks the machine without a run
train.py RUN --preflight                 checks the machine for a run, including disk space and the checkpoints' bucket
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs
import torch

from common.errors import EXIT_DONE, EXIT_ERROR, BadInput
from common.files import free_disk, mounted_as
from common.launch import setting
from common.output import show, warning
from common.text import counted, distinct_bytes, printable, readable_bytes
from training.hardware.driver import driver_cuda, driver_gpus
from training.hardware.usable_gpus import choose_device, too_few_gpus, use_gpu

SHARED_MEMORY = Path("/dev/shm")
# If GPUs have no direct access to each other, NCCL sends data through files in /dev/shm. There is a file for each
# channel and each neighbor in the ring, and there are at least two channels. Docker's default of 64 MiB is enough for
# two or three ranks but not for four (NVIDIA/nccl issues 342, 525). GPUs with direct access need smaller files, but
# with less than 64 MiB, even those did not fit (pytorch/torchtitan issue 853).
NCCL_FILE_BYTES, NCCL_CHANNELS = 9_637_888, 2
# Linux's default limit on open files, and the limit to which this program raises it if the system allows that
FEW_FILES, OPEN_FILES = 1 << 10, 1 << 16
# Without a GPU, a run is refused if it would take longer than this on CPU ranks of this speed, unless --device cpu is
# given. The speed is generous: few CPUs reach it, so a run that is refused would really take longer.
LONGEST_CPU_HOURS, CPU_FLOPS = 24.0, 1e12
# A mount whose type or source contains one of these words is an object store. Such a mount uploads only complete files,
# and renames a folder one object at a time.
OBJECT_STORES = re.compile("gcsfuse|s3fs|mountpoint-s3|blobfuse|goofys|geesefs|rclone|ossfs|cosfs")


@attrs.frozen
class Check:
    """The outcome of one check: a finding and, for a warning or a problem, what to do next."""

    name: str
    finding: str
    level: Literal["ok", "warning", "problem"] = "ok"  # a problem prevents a run from starting

    def __str__(self) -> str:
        return printable(f"{self.name:15}{self.level:9}{self.finding}")


@attrs.frozen(kw_only=True)
class DiskNeed:
    """The disk space that files will need in a directory. The directory may not exist yet."""

    directory: Path
    contents: str
    least_bytes: float  # with less than this, nothing can be written
    total_bytes: float
    advice: str
    in_place: bool = False  # whether files are written at arbitrary offsets and renamed together with their folder


@attrs.frozen(kw_only=True)
class PreflightRequirements:
    """What a run requires of this machine."""

    device: str | None = None  # the requested device; None: cuda if there are GPUs
    # The result of `compiled_on_gpu`: each feature that compiles kernels on a GPU -> the setting that turns it off
    compiles: Mapping[str, str] = {"torch.compile": setting(compile=False)}
    disk: DiskNeed | None = None
    ranks: int | None = None  # ranks on this machine; None: one for each GPU
    bucket: str | None = None  # the bucket for checkpoints
    # Counts the floating-point operations of the whole run. It is called only if the run may be too long for CPUs, and
    # returns None if the count is not known.
    count_flops: Callable[[], float | None] = lambda: None
    world_size: int = 1  # ranks on all machines


FINEWEB = DiskNeed(
    directory=Path("token_files"),
    contents="the FineWeb tokens of the GPU runs",
    least_bytes=0,
    total_bytes=21e9,  # the downloaded tokens of runs/8xa100
    advice="rent a larger disk, or train on other tokens",
)


def machine_checks(needs: PreflightRequirements) -> list[Check]:
    """Run the checks that a training process also runs. Return their outcomes. None of these checks uses a GPU."""
    gpus, count = _check_gpus(needs.device, needs.ranks)
    if count == 0 and gpus.level == "ok" and needs.device is None and (flops := needs.count_flops()) is not None:
        gpus = _check_cpu_hours(flops, needs.world_size) or gpus
    disk = [] if needs.disk is None else [check_disk(needs.disk)]
    if count == 0:
        return [gpus, *disk, check_open_files()]
    compiler = [check_compiler(needs.compiles)] if needs.compiles else []
    return [gpus, *compiler, *disk, check_shared_memory(needs.ranks or count), check_open_files()]


def check_each_gpu() -> Check:
    """Launch a kernel on every GPU, and return the names of the GPUs.

    A training process must not do this, because it would then occupy memory on all GPUs.
    """
    names: Counter[str] = Counter()
    for index in range(torch.cuda.device_count()):
        try:
            use_gpu(torch.device("cuda", index))
        except BadInput as error:
            return Check("GPUs tried", str(error), "problem")
        properties = torch.cuda.get_device_properties(index)
        names[f"{properties.name}, {readable_bytes(properties.total_memory, binary=True)}"] += 1
    return Check("GPUs tried", "; ".join(f"{count} x {name}" for name, count in names.items()))


def report(needs: PreflightRequirements) -> int:
    """Print one line for each check. Return EXIT_ERROR if there is a problem, and otherwise EXIT_DONE."""
    checks = machine_checks(needs)
    if checks[0].level == "ok" and choose_device(needs.device) == "cuda":
        checks.insert(1, check_each_gpu())
    checks += [] if needs.bucket is None else [check_bucket(needs.bucket)]
    show(*map(str, checks))
    return EXIT_ERROR if any(check.level == "problem" for check in checks) else EXIT_DONE


def enforce(needs: PreflightRequirements, *, quiet: bool = False) -> None:
    """Raise BadInput with all problems if there are any. Rank 0 also prints each warning, unless `quiet` is set."""
    checks = machine_checks(needs)
    if problems := [check.finding for check in checks if check.level == "problem"]:
        raise BadInput(*problems)
    if not quiet:
        show(*[warning(check.finding) for check in checks if check.level == "warning"], once=True)


def check_compiler(compiles: Mapping[str, str]) -> Check:
    """Check that the C compiler and Python.h exist. Triton needs both for GPU kernels, from the first step on."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    problem = "gcc was not found"
    if compiler is not None:
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Triton does the same
        headers = sysconfig.get_paths(scheme=scheme)["include"]
        command = [*compiler.split(), "-fsyntax-only", f"-I{headers}", "-xc", "-"]
        program = "#include <stdlib.h>\n#include <Python.h>\n"
        try:
            process = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
            if process.returncode == 0:
                return Check("compiler", f"{compiler} and Python.h")
            problem = next((line for line in process.stderr.splitlines() if "error" in line), f"{compiler} fails")
        except OSError as error:
            problem = f"{compiler}: {error.strerror}"
    finding = (
        f"GPU kernels of {' and '.join(compiles)} need a C compiler and Python's headers: {problem}; run: sudo apt-get "
        f"install build-essential python{sysconfig.get_python_version()}-dev; or train without these kernels, which is "
        f"slower: {' '.join(compiles.values())}"
    )
    return Check("compiler", finding, "problem")


def check_disk(need: DiskNeed) -> Check:
    """Compare the free disk space with what will be written.

    Less than `least_bytes` is a problem, and less than `total_bytes` is a warning. If files are written in place, a
    mount of an object store is a problem, too.
    """
    existing, free = free_disk(need.directory)
    mount = mounted_as(existing.resolve())
    if need.in_place and mount.startswith("fuse") and OBJECT_STORES.search(mount):
        finding = (
            f"{need.directory}: this is a mount of an object store ({mount}), where files cannot be written in place "
            "and folders cannot be renamed in one step; use a run directory on a disk, and set checkpoints to the "
            "bucket's URL"
        )
        return Check("disk", finding, "problem")
    free_text, total_text = distinct_bytes(free, need.total_bytes)
    finding = f"{free_text} free at {existing.absolute()}, wanted {total_text} for {need.contents}"
    if free >= need.total_bytes:
        return Check("disk", finding)
    return Check("disk", f"{finding}; {need.advice}", "problem" if free < need.least_bytes else "warning")


def check_bucket(url: str) -> Check:
    """Check that a bucket is writable, by writing and deleting an object."""
    from common.bucket import Bucket

    try:
        bucket = Bucket(url)
        bucket.write("preflight", b"")
        bucket.delete(["preflight"])
    except BadInput as error:
        return Check("bucket", str(error), "problem")
    return Check("bucket", f"{url}: writable")


def check_shared_memory(ranks: int) -> Check:
    """Compare the free shared memory with what NCCL needs for GPUs without direct access to each other."""
    needed = ranks * NCCL_CHANNELS * NCCL_FILE_BYTES
    if ranks == 1 or os.environ.get("NCCL_SHM_DISABLE") == "1" or not SHARED_MEMORY.is_dir():
        return Check("shared memory", "not used")
    free = shutil.disk_usage(SHARED_MEMORY).free
    free_text, needed_text = (readable_bytes(count, binary=True) for count in (free, needed))
    finding = f"{free_text} free in {SHARED_MEMORY}; NCCL may need {needed_text} for {ranks} GPUs"
    if free >= needed:
        return Check("shared memory", finding)
    advice = "if this is a container, start it with --shm-size=1g; or set NCCL_SHM_DISABLE=1, which is slower"
    return Check("shared memory", f"{finding}; {advice}", "warning")


def check_open_files() -> Check:
    """Raise this process's limit on open files as far as the system allows. Return a warning if the limit stays low."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check("open files", "no limit")
    before, raised = limit, OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if limit < raised:
        with suppress(OSError, ValueError):  # macOS has another limit in addition to the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            limit = raised
    finding = f"at most {limit:,}{f', raised from {before:,}' if limit != before else ''}"
    if limit >= FEW_FILES:
        return Check("open files", finding)
    advice = f"wanted {FEW_FILES:,}; raise the hard limit as root: ulimit -Hn {OPEN_FILES}"
    return Check("open files", f"{finding} open files; {advice}", "warning")


def _check_gpus(device: str | None, ranks: int | None) -> tuple[Check, int]:
    """Check the driver and torch. Return the outcome, and the number of GPUs that a run can use.

    If torch cannot use the GPUs, the number of GPUs that the driver sees is returned instead.
    """
    try:
        cuda = choose_device(device) == "cuda"
    except BadInput as error:
        return Check("GPUs", str(error), "problem"), driver_gpus()
    if not cuda:
        return Check("GPUs", "not used" if device == "cpu" else "this machine has none; training uses the CPU"), 0
    count = torch.cuda.device_count()
    if count == 0:  # possible only if a GPU was requested
        return Check("GPUs", too_few_gpus(count, ranks or 1), "problem"), count
    driver = driver_cuda() or "of unknown version"
    return Check("GPUs", f"{count} usable; driver for CUDA {driver}, torch built for {torch.version.cuda}"), count


def _check_cpu_hours(flops: float, world_size: int) -> Check | None:
    """Return a problem if a run would take more than LONGEST_CPU_HOURS on CPUs, although nobody has asked for CPUs."""
    hours = flops / (world_size * CPU_FLOPS) / 3600
    if hours <= LONGEST_CPU_HOURS:
        return None
    finding = (
        f"no GPU is visible, and the run needs {flops:.2g} FLOPs, which take {hours:,.0f} hours or more on "
        f"{counted(world_size, 'CPU rank')}; start it on a machine with GPUs, or pass --device cpu to train on the CPU "
        "anyway"
    )
    return Check("GPUs", finding, "problem")


if __name__ == "__main__":
    sys.exit(report(PreflightRequirements(disk=FINEWEB)))
