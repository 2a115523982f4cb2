"""Batch-size search: the largest micro-batch of a run on this machine, by prediction and probes of full steps.

With --write the result is edited into train.json in place; every other character stays.
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
from training.planning.batch_search import candidates, keeping, next_candidate
from training.planning.memory_model import MemoryModel, outside_bytes

PROBE = Path(__file__).parents[2] / "find_batch_size.py"  # the program of a probe's processes, with --probe
SEARCH_SECONDS = 300.0  # then the largest that fitted is taken
_MICROBATCH_KEYS = spellings("microbatch_size")
_MICROBATCH = re.compile(rf'("(?:{"|".join(_MICROBATCH_KEYS)})"\s*:\s*)\d+')


def report_largest(run: Run, overrides: Sequence[str], device: str | None, processes: int | None, write: bool) -> None:
    """Find the largest micro-batch that fits on every rank; print it, and write it into train.json with `write`.

    `overrides`: those of `run`. `processes`: ranks to start here, None: one for each GPU; under torchrun each rank
    starts its own. Raises BadInput when not even one sequence fits, or a probe fails.
    """
    if device != "cpu" and (choose_device(device) == "cpu" or not torch.cuda.is_available()):
        raise BadInput(
            "no GPU here; --predict a100-40gb predicts for one, --device cpu tries the search on this machine"
        )
    enforce(PreflightRequirements(device=device, compiles=compiled_on_gpu(run.train), ranks=processes))
    if write:
        check_editable(run.train, overrides)
    if processes is not None and "RANK" in os.environ:
        raise BadInput(f"--world-size: got {processes}, but torchrun sets the world size; leave it out")
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
            size, all_known = gallop(run, prober, time.monotonic() + SEARCH_SECONDS)
        finally:
            prober.agree(None)
        if size is None:
            remedies = MemoryModel.of(run.model, run.train, prober.world_size).remedies()
            raise BadInput(
                f"{run.directory}: not even one sequence of {run.model.context_length} tokens fits; {remedies}"
            )
        if device == "cpu":
            show(note("a CPU's memory is not measured, so this is the largest size that ran, not a limit"))
        if not all_known:
            show("time was up: a larger one may fit")
        show(_summary(run, prober.world_size, size))
        if write:
            changed = "written" if write_microbatch(run.train.file, size) else "unchanged"
            show(f"{run.train.file}: {changed}")
    except dist.DistError as error:
        raise rendezvous_error() from error


def gallop(run: Run, prober: Prober, deadline: float) -> tuple[int | None, bool]:
    """Probe micro-batches until all is known, or until the deadline, of time.monotonic(), once something fits.

    The first is the smallest: its measurement corrects the prediction for this machine. Returns the largest that fits,
    and whether all is known.
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
    accumulation = 2 if memory.determinism != "elastic" else max(2, memory.accumulation_at(size))  # a probe's
    probed = attrs.evolve(memory, accumulation=accumulation, global_batch_size=None)
    scale = max(report.allocated for report in reports) / probed.predict(size).allocated
    # What is outside torch's allocator is held already where memory was measured.
    return memory.largest_microbatch(int(usable / scale) + outside_bytes(memory.world_size)) or 1


def check_editable(train: TrainConfig, overrides: Sequence[str]) -> None:
    """Raise BadInput where editing the micro-batch would change other settings, or cannot be written."""
    path, file = train.file, train.file.resolve()
    text = read_regular(path).decode()
    keys = parse_json(text)
    if not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)):
        raise BadInput(f"{path}: --write: this file and its folder must be writable; or leave out --write")
    if not _MICROBATCH.search(text):
        raise BadInput(f'{path}: --write: wanted the key spelt "microbatch_size", without escapes')
    if overrides:
        raise BadInput(f"--write: got --set {overrides[0]} as well; put it into {path}, or leave out --write")
    if train.batch.global_batch_size is None:
        raise BadInput(
            f"{path}: --write keeps the global batch, wanted global_batch_size; without it the global batch follows "
            "the micro-batch: set it first"
        )
    other = f"validation_sequences {train.validation.validation_sequences} in its place"
    _, *older = spellings("validation_sequences")  # which count micro-batches
    counted = {"gradient_accumulation_steps": "global_batch_size alone"} | dict.fromkeys(older, other)
    for key, wanted in counted.items():
        if key in keys:
            raise BadInput(f"{path}: --write: got {key} {keys[key]}, which counts micro-batches; wanted {wanted}")


def write_microbatch(path: Path, size: int) -> bool:
    """Write the micro-batch into train.json, atomically; return whether that changed it.

    A symbolic link, the file's mode and its line ends are kept. Raises BadInput when it cannot be written.
    """
    file = path.resolve()
    before = read_regular(file).decode()  # not as text, which would lose \r
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
    keeps = keeping(run.train.batch, world_size // run.train.execution.tensor_parallel, size)
    advice = f"without global_batch_size in train.json the global batch follows it; {keeps} keeps what it is now"
    return f"largest micro-batch that fits: {size}" + ("" if keeps is None else f"\n{advice}")


def _describe(verdict: Verdict, reports: list[Report]) -> str:
    if verdict.outcome == "late":
        return f"{verdict.reason}; no larger one is tried"
    if not reports:
        return f"does not fit on {verdict.reason}"
    rank, report = max(enumerate(reports), key=lambda pair: pair[1].allocated)
    if not report.allocated:
        return "fits"
    allocated, reserved, usable = (readable_bytes(size, binary=True) for size in attrs.astuple(report))
    return f"fits, at its peak {allocated} allocated, {reserved} reserved of {usable} (rank {rank})"
