"""Batch-size search: the largest micro-batch of a run on this machine, found by trials in worker processes.

A rank that runs out of memory leaves its peers inside a collective, where nothing can reach them. So the searching
process takes part in none: workers do (worker.py), and all are killed (worker_pool.py) as soon as one reports that its
memory does not suffice.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from common.errors import BadInput, printable
from model.config import ModelConfig
from training.batch_finder.edit_json import check_editable, write_microbatch
from training.batch_finder.search import Search, candidates, keeping
from training.batch_finder.worker import MICRO_STEPS, Report, Verdict
from training.batch_finder.worker_pool import WorkerPool
from training.config.batch_plan import derive_layout, factors
from training.config.train_config import Run, TrainConfig
from training.hardware.preflight import Needs, enforce
from training.hardware.usable_gpus import choose_device
from training.parallel.process_group import not_met
from training.parallel.sum_tree import most_held_sums
from training.planning.memory_model import GIB, MemoryModel, outside_bytes

PROBE = Path(__file__).parents[2] / "find_batch_size.py"  # the workers' program, with --probe
TRIAL_STEPS = 3  # DDP's final buckets come with the second
CONFIRMING_STEPS = 20
SEARCH_SECONDS = 40.0  # then the largest that fitted is confirmed


def report_largest(run: Run, overrides: Sequence[str], device: str | None, processes: int | None, write: bool) -> None:
    """Find the largest micro-batch that fits on every rank; print it, and write it into train.json with `write`.

    `overrides`: those that `run` was read with. `processes`: ranks to start here, None: one for each GPU; under
    torchrun each rank starts its own. Raises BadInput when not even one sequence fits, or a trial fails.
    """
    if device != "cpu" and (choose_device(device) == "cpu" or not torch.cuda.is_available()):
        raise BadInput(
            "no GPU here; --predict a100-40gb predicts for one, --device cpu tries the search on this machine"
        )
    enforce(Needs(device=device, compiles=run.train.execution.compiles_on_gpu, ranks=processes))
    if write:
        check_editable(run.train, overrides)
    if processes is not None and "RANK" in os.environ:
        raise BadInput(f"--world-size: got {processes}, but torchrun sets the world size; leave it out")
    command = [str(PROBE), str(run.directory), *(f"--set={override}" for override in overrides)]
    command += [] if device is None else [f"--device={device}"]
    try:
        with ExitStack() as stack:
            pool = WorkerPool(command, processes or (torch.cuda.device_count() if device != "cpu" else 1))
            stack.callback(pool.kill)
            if pool.leads:
                size = Finder(run.model, run.train, pool).find()
                if write:
                    changed = "written" if write_microbatch(run.train.file, size) else "unchanged"
                    print(printable(f"{run.train.file}: {changed}"), flush=True)
            else:
                pool.follow()
    except dist.DistError as error:
        raise not_met() from error


@attrs.frozen
class Finder:
    """Search for the largest micro-batch of a run, in the trials of a pool."""

    model: ModelConfig
    train: TrainConfig
    pool: WorkerPool

    @property
    def memory(self) -> MemoryModel:
        """The memory model of the run on the pool's ranks."""
        return MemoryModel.of(self.model, self.train, self.pool.world_size)

    def find(self) -> int:
        """Search, print each trial and the result, and return it. Raises BadInput, as report_largest does."""
        deadline = time.monotonic() + SEARCH_SECONDS
        search = Search(candidates(self.train, self.pool.world_size))
        try:
            while True:
                self.gallop(search, deadline)
                size = search.largest
                if size is None:
                    raise BadInput(
                        f"{self.train.file.parent}: not even one sequence of {self.model.context_length} tokens fits; "
                        + self.memory.remedies()
                    )
                if self._try(size, CONFIRMING_STEPS)[1]:
                    break
                search.learn(size, fits=False)
        finally:
            with suppress(dist.DistError):  # nobody is left to be told
                self.pool.dismiss()
        print("" if search.next(None) is None else "time was up: a larger one may fit\n", end="")
        print(self._summary(size), flush=True)
        return size

    def gallop(self, search: Search, deadline: float) -> None:
        """Try micro-batches until all is known, or until the deadline, of time.monotonic(), once something fits."""
        _, reports = self.pool.run_trial(1, 0)
        guess = self._guess(reports)
        while (size := search.next(guess)) is not None and (search.largest is None or time.monotonic() < deadline):
            verdict, reports = self._try(size, TRIAL_STEPS)
            if verdict.outcome == "late" and search.largest is not None:
                return
            search.learn(size, fits=bool(reports))
            guess = self._guess(reports, size) if reports else guess

    def _try(self, size: int, steps: int) -> tuple[Verdict, list[Report]]:
        """Try a micro-batch; to confirm it, in fresh processes like a run's.

        Raises BadInput for a failure other than memory, and for a trial too slow where nothing smaller can be taken.
        """
        confirming = steps == CONFIRMING_STEPS
        verdict, reports = self.pool.run_trial(size, steps, self._extra_sums(size), fresh=confirming)
        if verdict.outcome == "late" and (confirming or size == 1):
            raise BadInput(f"micro-batch {size}: {verdict.reason}")
        print(f"micro-batch {size}, {steps} steps: {_describe(verdict, reports)}", flush=True)
        return verdict, reports

    def _extra_sums(self, size: int) -> int:
        """Return the partial sums of all gradients that a step holds beyond a trial's."""
        memory, trial = self.memory, MICRO_STEPS[self.memory.determinism]
        held = most_held_sums(memory.determinism, memory.microbatches_at(size), memory.world_size)
        return max(0, held - most_held_sums(memory.determinism, trial * memory.world_size, memory.world_size))

    def _guess(self, reports: list[Report], size: int | None = None) -> int | None:
        """Return the predicted largest micro-batch, corrected by the measurement at `size`; None on a CPU."""
        usable = [report.usable for report in reports if report.usable is not None]
        if not usable:
            return None
        scale = 1.0
        if size is not None:
            measured = max(report.allocated or 0 for report in reports)
            micro_steps = max(MICRO_STEPS[self.memory.determinism], self.memory.accumulation_at(size))
            trial = attrs.evolve(self.memory, accumulation=micro_steps, global_batch_size=None)
            scale = measured / trial.predict(size).allocated
        # What is outside torch's allocator is held already where memory was measured.
        room = int(min(usable) / scale) + outside_bytes(self.pool.world_size)
        return self.memory.largest_microbatch(room) or 1

    def _summary(self, size: int) -> str:
        world_size, batch = self.pool.world_size, self.train.batch.global_batch_size
        if batch is not None:
            layout = derive_layout(self.train.replace(microbatch_size=size), self.model.context_length, world_size)
            product = factors(layout).removeprefix("micro-batch ")
            return f"largest micro-batch that fits and keeps the global batch: {size} ({batch} = {product})"
        keeps = keeping(self.train.batch, world_size, size)
        advice = f"without global_batch_size in train.json the global batch follows it; {keeps} keeps what it is now"
        return f"largest micro-batch that fits: {size}" + ("" if keeps is None else f"\n{advice}")


def _describe(verdict: Verdict, reports: list[Report]) -> str:
    if verdict.outcome == "late":
        return f"{verdict.reason}; no larger one is tried"
    if not reports:
        return f"does not fit on rank {verdict.rank}: {verdict.reason}"
    rank, report = max(enumerate(reports), key=lambda pair: pair[1].allocated or 0)
    if report.allocated is None:
        return "fits"
    allocated, reserved, usable = (
        f"{(size or 0) / GIB:.2f}" for size in (report.allocated, report.reserved, report.usable)
    )
    return f"fits, at its peak {allocated} GiB allocated, {reserved} reserved of {usable} (rank {rank})"
