"""Batch-size search: find the largest micro-batch of a run on this machine, by predicting sizes and trying full steps.

With --write, the result replaces the micro-batch in train.json. All other characters of the file stay the same.
"""

import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from common.errors import BadInput
from common.files import replace_file, writing
from common.json_files import parse_json, read_regular
from common.output import note, show
from common.text import readable_bytes
from training.config.batch_plan import derive_layout, factors
from training.config.train_config import Run, TrainConfig, spellings
from training.exactness.fingerprint import compiled_on_gpu
from training.hardware.preflight import PreflightRequirements, enforce
from training.hardware.usable_gpus import choose_device
from training.parallel.process_group import rendezvous_error
from training.planning.batch_probe import Prober, Report, Verdict
from training.planning.batch_search import candidates, largest_unchanged, next_candidate
from training.planning.memory_model import MemoryModel, outside_bytes

PROBE = Path(__file__).parents[2] / "find_batch_size.py"  # with --probe, this program runs one rank of a probe
SEARCH_SECONDS = 300.0  # after this time, the search ends with the largest size that has fitted so far
_MICROBATCH_KEYS = spellings("microbatch_size")
_MICROBATCH = re.compile(rf'("(?:{"|".join(_MICROBATCH_KEYS)})"\s*:\s*)\d+')


def report_largest(run: Run, overrides: Sequence[str], device: str | None, processes: int | None, write: bool) -> None:
    """Find the largest micro-batch that fits on every rank, and print it. With `write`, also write it into train.json.

    `overrides` are the values of --set with which `run` was loaded. `processes` is the number of ranks to start on this
    machine; None means one for each GPU. Under torchrun, every rank starts only one process. Raises BadInput if not
    even one sequence fits, or if a probe fails.
    """
    if device != "cpu" and (choose_device(device) == "cpu" or not torch.cuda.is_available()):
        raise BadInput(
            "this machine has no GPU; --predict a100-40gb predicts the size for that GPU, and --device cpu runs the "
            "search on the CPU"
        )
    enforce(PreflightRequirements(device=device, compiles=compiled_on_gpu(run.train), ranks=processes))
    if write:
        check_editable(run.train, overrides)
    if processes is not None and "RANK" in os.environ:
        raise BadInput(f"--world-size: got {processes}, but torchrun sets the world size; leave out --world-size")
    tensor_size = run.train.execution.tensor_parallel
    command = [str(PROBE), str(run.directory), *(f"--set={override}" for override in overrides)]
    command += [] if device is None else [f"--device={device}"]
    try:
        prober = Prober(command, processes or (torch.cuda.device_count() if device != "cpu" else tensor_size))
        if not prober.leads:
            while (next_size := prober.agree(None)) is not None:
                prober.probe(next_size)
            return
        try:
            size, complete = gallop(run, prober, time.monotonic() + SEARCH_SECONDS)
        finally:
            prober.agree(None)
        if size is None:
            remedies = MemoryModel.of(run.model, run.train, prober.world_size).remedies()
            raise BadInput(
                f"{run.directory}: not even one sequence of {run.model.context_length} tokens fits; {remedies}"
            )
        if device == "cpu":
            show(note("a CPU's memory is not measured, so the size below is the largest that ran, not a limit"))
        if not complete:
            show("the search ran out of time; a larger size may fit")
        show(_summary(run, prober.world_size, size))
        if write:
            state = "written" if write_microbatch(run.train.file, size) else "unchanged"
            show(f"{run.train.file}: {state}")
    except dist.DistError as error:
        raise rendezvous_error() from error


def gallop(run: Run, prober: Prober, deadline: float) -> tuple[int | None, bool]:
    """Probe micro-batch sizes. Return the largest one that fits, and whether the search is complete.

    The smallest size comes first, because its measurement corrects the prediction for this machine. `deadline` is a
    value of time.monotonic(). After the deadline, the search stops early, provided that at least one size fits.
    """
    sizes, fits, fails, guess = candidates(run.train, prober.world_size), 0, math.inf, None
    memory = MemoryModel.of(run.model, run.train, prober.world_size)
    while (size := next_candidate(sizes, fits, fails, guess)) is not None and (not fits or time.monotonic() < deadline):
        prober.agree(size)
        verdict, reports = prober.probe(size)
        if verdict.outcome == "late" and not fits:
            raise BadInput(f"micro-batch {size}: {verdict.reason}")
        show(f"micro-batch {size}: {_describe(verdict, reports)}")
        if verdict.outcome == "late":
            break
        fits, fails = (size, fails) if reports else (fits, size)
        guess = predicted_largest(memory, reports, size) if reports else guess
    return fits or None, size is None


def predicted_largest(memory: MemoryModel, reports: list[Report], size: int) -> int | None:
    """Return the predicted largest micro-batch, corrected by the measurement at `size`; None on a CPU."""
    usable = min(report.usable for report in reports)
    if not usable:
        return None
    # Number of micro-batches per rank in a probe's steps, as in batch_probe.py
    accumulation = 2 if memory.determinism != "elastic" else max(2, memory.accumulation_at(size))
    probed = attrs.evolve(memory, accumulation=accumulation, global_batch_size=None)
    scale = max(report.allocated for report in reports) / probed.predict(size).allocated
    # `usable` already excludes memory outside torch's allocator, so it must not be subtracted a second time.
    return memory.largest_microbatch(int(usable / scale) + outside_bytes(memory.world_size)) or 1


def check_editable(train: TrainConfig, overrides: Sequence[str]) -> None:
    """Raise BadInput if a new micro-batch would change other settings, or cannot be written into train.json."""
    path, file = train.file, train.file.resolve()
    text = read_regular(path).decode()
    keys = parse_json(text)
    if not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)):
        raise BadInput(f"{path}: --write: this file or its folder is not writable; change that, or leave out --write")
    if not _MICROBATCH.search(text):
        raise BadInput(f'{path}: --write: the key must be spelled "microbatch_size", without escapes')
    if overrides:
        raise BadInput(f"--write: got --set {overrides[0]} as well; put it into {path}, or leave out --write")
    if train.batch.global_batch_size is None:
        raise BadInput(
            f"{path}: --write must not change the global batch, which depends on the micro-batch unless "
            "global_batch_size is set; set global_batch_size first"
        )
    replacement = f"use validation_sequences {train.validation.validation_sequences} instead"
    _, *older = spellings("validation_sequences")  # these count micro-batches
    advice_by_key = {"gradient_accumulation_steps": "remove it, because global_batch_size determines it"}
    advice_by_key |= dict.fromkeys(older, replacement)
    for key, advice in advice_by_key.items():
        if key in keys:
            raise BadInput(f"{path}: --write: got {key} {keys[key]}, which counts micro-batches; {advice}")


def write_microbatch(path: Path, size: int) -> bool:
    """Write the micro-batch into train.json atomically, and return whether the file has changed.

    A symbolic link, the file's mode and its line endings are preserved. Raises BadInput if the file cannot be written.
    """
    file = path.resolve()
    before = read_regular(file).decode()  # reading in text mode would lose \r
    keys = parse_json(before)
    after = _MICROBATCH.sub(rf"\g<1>{size}", before)
    assert parse_json(after) == keys | {key: size for key in _MICROBATCH_KEYS if key in keys}
    if after == before:
        return False
    mode = file.stat().st_mode
    with writing(path):
        replace_file(file, after, durable=True)
        file.chmod(mode)
    return True


def _summary(run: Run, world_size: int, size: int) -> str:
    batch = run.train.batch.global_batch_size
    if batch is not None:
        layout = derive_layout(run.train.replace(microbatch_size=size), run.model.context_length, world_size)
        product = factors(layout, run.train.execution.tensor_parallel).removeprefix("micro-batch ")
        return f"largest micro-batch that fits and keeps the global batch: {size} ({batch} = {product})"
    unchanged = largest_unchanged(run.train.batch, world_size // run.train.execution.tensor_parallel, size)
    advice = (
        "train.json has no global_batch_size, so the micro-batch changes the global batch; "
        f"micro-batch {unchanged} keeps the current global batch"
    )
    return f"largest micro-batch that fits: {size}" + ("" if unchanged is None else f"\n{advice}")


def _describe(verdict: Verdict, reports: list[Report]) -> str:
    if verdict.outcome == "late":
        return f"{verdict.reason}; no larger size is tried"
    if not reports:
        return f"does not fit on {verdict.reason}"
    rank, report = max(enumerate(reports), key=lambda pair: pair[1].allocated)
    if not report.allocated:
        return "fits"
    allocated, reserved, usable = (readable_bytes(size, binary=True) for size in attrs.astuple(report))
    return f"fits; peak memory {allocated} allocated, {reserved} reserved of {usable} (rank {rank})"
