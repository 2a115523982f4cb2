"""Batch-size search: the largest micro-batch of a run on this machine, found by trials in worker processes.

A rank that runs out of memory leaves its peers inside a collective, where nothing can reach them. So the searching
process takes part in none: workers do (worker.py), and all are killed (worker_pool.py) as soon as one reports that its
memory does not suffice.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from common.errors import BadInput
from training.batch_finder.edit_json import check_editable, write_microbatch
from training.batch_finder.search import Search, candidates, keeping
from training.batch_finder.worker import MICRO_STEPS, Report, Verdict
from training.batch_finder.worker_pool import WorkerPool
from training.config.train_config import Run
from training.hardware.preflight import check_compiler, choose_device
from training.planning.memory_model import GIB, MemoryModel, outside_bytes

PROBE = Path(__file__).parents[2] / "find_batch_size.py"  # the workers' program, with --probe
TRIAL_STEPS = 3  # DDP's final buckets come with the second
CONFIRMING_STEPS = 20
SEARCH_SECONDS = 40.0  # then the largest that fitted is confirmed


@attrs.frozen(kw_only=True)
class Found:
    """Result of a search."""

    microbatch_size: int
    all_tried: bool  # no larger candidate fits; False: time was up


def report_largest(run: Run, overrides: Sequence[str], device: str | None, processes: int | None, write: bool) -> None:
    """Find the largest micro-batch that fits on every rank; print it, and write it into train.json with `write`.

    `overrides`: those that `run` was read with. `processes`: ranks to start here, None: one for each GPU; under
    torchrun each rank starts its own. Raises BadInput when not even one sequence fits, or a trial fails.
    """
    if device != "cpu" and (choose_device(device) == "cpu" or not torch.cuda.is_available()):
        raise BadInput(
            "no GPU here; --predict a100-40gb predicts for one, --device cpu tries the search on this machine"
        )
    if device != "cpu" and run.train.execution.compile is not False:
        check_compiler()
    if write:
        check_editable(run, overrides)
    if processes is not None and "RANK" in os.environ:
        raise BadInput(f"--world-size: got {processes}, but torchrun sets the world size; leave it out")
    command = [str(PROBE), str(run.directory), *(f"--set={override}" for override in overrides)]
    command += [] if device is None else [f"--device={device}"]
    try:
        _search(run, WorkerPool(command, processes or (torch.cuda.device_count() if device != "cpu" else 1)), write)
    except dist.DistError as error:
        raise BadInput("torchrun is gone, or does not answer; run the same command again", alone=True) from error


def _search(run: Run, pool: WorkerPool, write: bool) -> None:
    try:
        if pool.leads:
            found = find(run, pool)
            print("\n".join(_summary(run, pool.world_size, found)), flush=True)
            if write:
                changed = write_microbatch(run, found.microbatch_size)
                print(
                    f"{run.directory / 'train.json'}: {'written' if changed else 'unchanged'}",
                    flush=True,
                )
        else:
            pool.follow()
    finally:
        pool.kill()


def find(run: Run, pool: WorkerPool) -> Found:
    """Search, print each trial, and return the confirmed result. Raises BadInput, as report_largest does."""
    deadline = time.monotonic() + SEARCH_SECONDS
    try:
        search = Search(candidates(run, pool.world_size))
        while True:
            gallop(run, pool, search, deadline)
            if search.largest is None:
                raise BadInput(
                    f"{run.directory}: not even one sequence of {run.model.context_length} tokens fits; "
                    + MemoryModel.of(run, pool.world_size).remedies()
                )
            winner = search.largest
            if _try(run, pool, winner, CONFIRMING_STEPS)[1]:
                return Found(microbatch_size=winner, all_tried=search.next(None) is None)
            search.learn(winner, fits=False)
    finally:
        with suppress(dist.DistError):  # nobody is left to be told
            pool.dismiss()


def gallop(run: Run, pool: WorkerPool, search: Search, deadline: float) -> None:
    """Try micro-batches until all is known, or until the deadline, of time.monotonic(), once something fits."""
    _, reports = pool.run_trial(1, 0)
    guess = _guess(run, pool.world_size, reports)
    while (size := search.next(guess)) is not None and (search.largest is None or time.monotonic() < deadline):
        verdict, reports = _try(run, pool, size, TRIAL_STEPS)
        if verdict.outcome == "late" and search.largest is not None:
            return
        search.learn(size, fits=bool(reports))
        guess = _guess(run, pool.world_size, reports, size) if reports else guess


def _try(run: Run, pool: WorkerPool, size: int, steps: int) -> tuple[Verdict, list[Report]]:
    """Try a micro-batch; to confirm it, in fresh processes like a run's.

    Raises BadInput for a failure other than memory, and for a trial too slow where nothing smaller can be taken.
    """
    confirming = steps == CONFIRMING_STEPS
    verdict, reports = pool.run_trial(size, steps, _extra_sums(run, pool.world_size, size), fresh=confirming)
    if verdict.outcome == "late" and (confirming or size == 1):
        raise BadInput(f"micro-batch {size}: {verdict.reason}")
    print(f"micro-batch {size}, {steps} steps: {_describe(verdict, reports)}", flush=True)
    return verdict, reports


def _extra_sums(run: Run, world_size: int, size: int) -> int:
    """Return the copies of the gradients that a step holds beyond a trial's: elastic sums hold one per doubling."""
    train = run.train
    accumulation = train.batch.gradient_accumulation_steps or 1
    if train.batch.global_batch_size is not None:
        accumulation = train.batch.global_batch_size // (size * world_size)
    if train.execution.determinism != "elastic":
        return 0
    return max(0, accumulation.bit_length() - MICRO_STEPS["elastic"].bit_length())


def _describe(verdict: Verdict, reports: list[Report]) -> str:
    if verdict.outcome == "late":
        return f"{verdict.reason}; no larger one is tried"
    if not reports:
        return f"does not fit on rank {verdict.rank}: {verdict.reason}"
    allocated = [report.allocated for report in reports if report.allocated is not None]
    if not allocated:
        return "fits"
    rank = allocated.index(max(allocated))
    held, usable = reports[rank].reserved or 0, reports[rank].usable or 0
    return (
        f"fits, at its peak {allocated[rank] / GIB:.2f} GiB allocated, {held / GIB:.2f} reserved of {usable / GIB:.2f} "
        f"(rank {rank})"
    )


def _guess(run: Run, world_size: int, reports: list[Report], size: int | None = None) -> int | None:
    """Return the predicted largest micro-batch, corrected by the measurement at `size`; None on a CPU."""
    usable = [report.usable for report in reports if report.usable is not None]
    if not usable:
        return None
    memory, scale = MemoryModel.of(run, world_size), 1.0
    if size is not None:
        measured = max(report.allocated or 0 for report in reports)
        scale = measured / memory.predict(size).allocated
    room = int(min(usable) / scale) + outside_bytes(world_size)  # which is held already where it was measured
    return memory.largest_microbatch(room) or 1


def _summary(run: Run, world_size: int, found: Found) -> list[str]:
    size, batch = found.microbatch_size, run.train.batch.global_batch_size
    lines = []
    if not found.all_tried:
        lines.append("time was up: a larger one may fit")
    if batch is not None:
        accumulation = batch // (size * world_size)
        lines.append(
            f"largest micro-batch that fits and keeps the global batch: {size} "
            f"({batch} = {size} x accumulation {accumulation} x world size {world_size})"
        )
        return lines
    lines.append(f"largest micro-batch that fits: {size}")
    keeps = keeping(run, world_size, size)
    if keeps is not None:
        lines.append(
            f"without global_batch_size in train.json the global batch follows it; {keeps} keeps what it is now"
        )
    return lines
