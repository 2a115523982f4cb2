"""First GPU hour: all measurements that wait for a card, one after the other, into one page and a tarball.

python benchmarks/first_gpu_hour.py [--minutes 60] [--price-per-hour 24] [--output gpu-hour]

Correctness, speed, memory, kernels, communication, host time, in order of worth, on 1, 2, 4 or 8 GPUs; needs no data.
Each step has a time limit and its own result files; one that fails ends no other. Page and tarball are written after
each step; a signal ends the running step and all processes below it. The same command again skips what is done. Run it
in tmux. Send OUTPUT.tar.gz home: page.md, output and GPU clocks of each step; no weights, tokens or credentials.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import command
import torch
from gpu_hour_page import PAGE, machine_lines, make_page, pack, samples_file
from gpu_hour_steps import HourStep, hour_steps
from gpu_state import sampled
from limited_command import Outcome, read_outcome, run_limited

from common.errors import EXIT_ERROR, BadInput

LEAST_SECONDS = 30.0  # a step that is given less is not started
DRY_RUN_SECONDS = 900.0  # limit of each step, for one that hangs
PREFLIGHT = "preflight"


def main(
    *,
    minutes: float = 60,
    price_per_hour: float | None = None,
    output: Path = Path("gpu-hour"),
    dry_run: bool = False,
) -> None:
    """Run the steps and write the page.

    Args:
        minutes: for all steps that are not done, by the clock.
        price_per_hour: of the machine; shows what each step has cost.
        output: folder of the page, the results and all temporary files.
        dry_run: tiny sizes, to try all this out on the emulated driver: its values mean nothing.
    """
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise BadInput("no GPU here; tools/fakegpu/run python benchmarks/first_gpu_hour.py --dry-run emulates some")
    ranks = 1 << (min(gpus, 8).bit_length() - 1)
    output.mkdir(parents=True, exist_ok=True)
    title = f"{'DRY RUN, tiny sizes: no value means anything. ' if dry_run else ''}{ranks} of {gpus} GPUs"
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


def words(step: HourStep, ranks: int, *, dry_run: bool) -> list[str]:
    """Return the step's command."""
    return (step.dry_run if dry_run else step.command).format(ranks=ranks).split()


def run_steps(
    steps: list[HourStep], output: Path, ranks: int, minutes: float, *, dry_run: bool
) -> Iterator[tuple[HourStep, Outcome]]:
    """Run each step that is not done, while there is time; yield each outcome. A failed preflight ends the hour."""
    deadline = time.monotonic() + 60 * minutes
    before = [(step, read_outcome(output, step.name, words(step, ranks, dry_run=dry_run))) for step in steps]
    waiting = [step for step, outcome in before if outcome.state != "done"]
    for step, earlier in before:
        print(f"{step.name:22}", end="", flush=True)
        if step in waiting:
            waiting.remove(step)
        left = deadline - time.monotonic()
        limit = min(left, DRY_RUN_SECONDS) if dry_run else limit_seconds(step, waiting, left)
        outcome = earlier
        if earlier.state != "done" and limit >= LEAST_SECONDS:
            with sampled(samples_file(output, step)):
                outcome = run_limited(output, step.name, [sys.executable, *earlier.command], limit)
            print(f"{outcome.state:12}{outcome.seconds:6.0f} s of {limit:.0f}", flush=True)
        else:
            print(earlier.state, flush=True)
        yield step, outcome
        if step.name == PREFLIGHT and outcome.state not in ("done", "not started"):
            print((output / f"{PREFLIGHT}.txt").read_text(errors="replace"), flush=True)
            return


def limit_seconds(step: HourStep, later: list[HourStep], left: float) -> float:
    """Return a step's limit: its own, and up to twice that of what earlier steps left over; later ones keep theirs."""
    own, spare = 60 * step.minutes, left - 60 * sum(each.minutes for each in later)
    return min(left, max(own, min(2 * own, spare)))


if __name__ == "__main__":
    command.run(main)
