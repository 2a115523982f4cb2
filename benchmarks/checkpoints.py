"""Cost of a checkpoint: how long training stalls for a save, and how long until it is durable.

python benchmarks/checkpoints.py [--ranks 1 2] [--size 124M]

Trains a GPT-2 on random tokens with a save every few steps and prints, for each wrapper, the stall beside the time of a
step. "At 500" is the share of wall time that saves take at the default checkpoint_interval of 500 such steps. On a GPU
a step has the 0.5 M tokens of GPT-2's training, on a CPU 256, to take seconds instead of hours: there the stall in
seconds is the result, not its ratio.
"""

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
import command
import random_run
import torch

from model.config import GPT2_SIZES, parameter_count

STEPS, INTERVAL = 16, 5
DEFAULT_INTERVAL = 500  # of train.json
FIRST = 2  # steps left out: compilation, buffers
COLUMNS = ["ranks, wrapper", "s a step", "s, others", "stall s", "stall/step", "s to the disk", "at 500"]


def main(*, ranks: tuple[int, ...] = (1, 2), size: Literal["124M", "350M", "774M", "1.5B"] = "124M") -> None:
    """Measure and print."""
    context, microbatch, global_batch = (1024, 16, 512) if torch.cuda.is_available() else (128, 1, 2)
    model = attrs.evolve(GPT2_SIZES[size], context_length=context)
    keys = {"checkpoint_interval": INTERVAL, "keep_checkpoints": 1}
    rows = []
    with TemporaryDirectory() as folder:
        run = random_run.prepare(
            Path(folder), model, STEPS, microbatch_size=microbatch, global_batch_size=global_batch, **keys
        )
        for count in ranks:
            for parallel in ("ddp", "fsdp") if count > 1 else ("ddp",):
                records, _ = random_run.train(run, count, f"parallel={parallel}")
                rows.append([f"{count} {parallel}", *_costs(records, global_batch * context)])
    state = 3 * 4 * parameter_count(model) / 2**30
    print(f"{size}: {parameter_count(model):,} parameters, {state:.2f} GiB of weights and moments")
    print(command.table(COLUMNS, rows))
    print("s a step: while no save is being written; others: while one is")


def _costs(records: list[dict[str, Any]], tokens_per_step: int) -> list[str]:
    saves = random_run.saves(records, STEPS)
    seconds = random_run.seconds_by_step(records, tokens_per_step)
    writing = _writing_steps(saves, seconds)
    free = median(value for step, value in seconds.items() if step > FIRST and step not in writing)
    busy = median(seconds[step] for step in writing)
    stall, write = (median(save[key] for save in saves) for key in ("stall_seconds", "write_seconds"))
    extra = sum(seconds[step] - free for step in writing) / len(saves)  # steps that share the machine with it
    share = (stall + max(0.0, extra)) / (DEFAULT_INTERVAL * free)
    return [*(f"{value:.3f}" for value in (free, busy, stall, stall / free)), f"{write:.2f}", f"{share:.3%}"]


def _writing_steps(saves: list[dict[str, Any]], seconds: dict[int, float]) -> set[int]:
    """Return the steps during which a save was being written."""
    steps = set()
    for save in saves:
        left, step = save["write_seconds"], save["step"] + 1
        while left > 0 and step in seconds:
            steps.add(step)
            left, step = left - seconds[step], step + 1
    return steps


if __name__ == "__main__":
    command.run(main)
