"""The largest micro-batch of a run on this machine: tried out in processes that may be killed.

A rank that runs out of memory leaves its peers inside a collective, where nothing can reach them. So the process that
searches never takes part in one: others do (training/probe.py), and all of them are killed (training/team.py) as soon
as any rank has said that its memory did not suffice.
"""

import time
from pathlib import Path

import attrs
import torch

from errors import BadInput
from training.config import Run
from training.edit import check_editable, write_microbatch
from training.memory import GIB, largest_microbatch, predict, remedies
from training.probe import Report, Verdict
from training.search import Search, candidates, keeping
from training.team import Team

PROBE = Path(__file__).parents[1] / "find_batch_size.py"  # what a rank's process runs, with --probe
TRIAL_STEPS = 3  # AdamW's moments come with the first, DDP's final buckets with the second
CONFIRMING_STEPS = 20
SEARCH_SECONDS = 40.0  # then the largest that has fitted is confirmed


@attrs.frozen(kw_only=True)
class Found:
    """The outcome of a search."""

    microbatch_size: int
    all_tried: bool  # no larger candidate fits; False: time was up


def report_largest(run: Run, overrides: list[str], device: str | None, processes: int | None, write: bool) -> None:
    """Find the largest micro-batch that fits on every rank, say so, and write it where asked.

    `overrides`: those that `run` was read with. `processes`: how many ranks to start here, None: one for each GPU; a
    rank of torchrun's starts its own. Raises BadInput when not even one sequence fits, or a trial fails.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise BadInput(
            "no GPU here; --predict a100-40gb predicts for one, --device cpu tries the search on this machine"
        )
    if write:
        check_editable(run, overrides)
    command = [str(PROBE), str(run.directory), *(f"--set={override}" for override in overrides)]
    command += [] if device is None else [f"--device={device}"]
    team = Team(command, processes or (torch.cuda.device_count() if device != "cpu" else 1))
    try:
        if team.leads:
            found = _lead(run, team)
            print("\n".join(_summary(run, team.world_size, found)), flush=True)
            if write:
                changed = write_microbatch(run, found.microbatch_size)
                print(f"{run.directory / 'train.json'}: {'written' if changed else 'it says so already'}", flush=True)
        else:
            team.follow()
    finally:
        team.kill()


def _lead(run: Run, team: Team) -> Found:
    """Decide what is tried, say how it went, return what is confirmed."""
    deadline = time.monotonic() + SEARCH_SECONDS
    try:
        search = Search(candidates(run, team.world_size))
        _, reports = team.order(1, 0)
        guess = _guess(run, team.world_size, reports)
        while True:
            size = search.next(guess)
            while size is not None and (search.largest is None or time.monotonic() < deadline):
                reports = _try(team, search, size, TRIAL_STEPS)
                guess = _guess(run, team.world_size, reports, size) if reports else guess
                size = search.next(guess)
            if search.largest is None:
                raise BadInput(
                    f"{run.directory}: not even one sequence of {run.model.context_length} tokens fits; "
                    + remedies(run.model, run.train.parallel, team.world_size, muon=run.train.thrift.muon)
                )
            winner = search.largest
            if _try(team, search, winner, CONFIRMING_STEPS):
                return Found(microbatch_size=winner, all_tried=search.next(None) is None)
    finally:
        team.dismiss()


def _try(team: Team, search: Search, size: int, steps: int) -> list[Report]:
    """Try a micro-batch, in processes as fresh as a run's where it is to be confirmed; [] when it does not fit."""
    verdict, reports = team.order(size, steps, fresh=steps == CONFIRMING_STEPS)
    search.learn(size, fits=bool(reports))
    print(f"micro-batch {size}, {steps} steps: {_describe(verdict, reports)}", flush=True)
    return reports


def _describe(verdict: Verdict, reports: list[Report]) -> str:
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
    """Return the largest micro-batch by prediction, corrected by what `size` took; None on a CPU."""
    usable = [report.usable for report in reports if report.usable is not None]
    if not usable:
        return None
    kind, scale = run.train.parallel, 1.0
    if size is not None:
        measured = max(report.allocated or 0 for report in reports)
        scale = measured / predict(run.model, kind, world_size, size, run.train.thrift).allocated
    return largest_microbatch(run.model, kind, world_size, int(min(usable) / scale), run.train.thrift) or 1


def _summary(run: Run, world_size: int, found: Found) -> list[str]:
    size, batch = found.microbatch_size, run.train.global_batch_size
    lines = []
    if not found.all_tried:
        lines.append(f"{SEARCH_SECONDS:.0f} s were up: a larger one may fit")
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
