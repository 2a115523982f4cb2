#!/usr/bin/env python3
"""Cost of a checkpoint: how long training stalls for a save, and how long until it is durable.

`python benchmarks/checkpoints.py [--ranks 1 2] [--size 124M]` trains a GPT-2 on random tokens with a save every few
steps and prints, for each wrapper, the stall beside the time of a step. "At 500" is the share of wall time that saves
take at the default checkpoint_interval of 500 such steps. On a GPU a step has the 0.5 M tokens of GPT-2's training, on
a CPU 256, to take seconds instead of hours: there the stall in seconds is the result, not its ratio.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import attrs
import random_run
import torch

from model.config import GPT2_SIZES, parameter_count

STEPS, INTERVAL = 16, 5
DEFAULT_INTERVAL = 500  # of train.json
FIRST = 2  # steps left out: compilation, buffers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", choices=sorted(GPT2_SIZES), default="124M")
    arguments = parser.parse_args()
    config = GPT2_SIZES[arguments.size]
    context, microbatch, global_batch = (1024, 16, 512) if torch.cuda.is_available() else (128, 1, 2)
    with tempfile.TemporaryDirectory() as folder:
        model = attrs.evolve(config, context_length=context)
        run = random_run.prepare(
            Path(folder),
            model,
            STEPS,
            microbatch_size=microbatch,
            global_batch_size=global_batch,
            checkpoint_interval=INTERVAL,
            keep_checkpoints=1,
        )
        state = 3 * 4 * parameter_count(model) / 2**30
        print(f"{arguments.size}: {parameter_count(model):,} parameters, {state:.2f} GiB of weights and moments")
        print("ranks  wrapper  s a step  s, others  stall s  stall/step  s to the disk  at 500")
        for ranks in arguments.ranks:
            for parallel in ("ddp", "fsdp") if ranks > 1 else ("ddp",):
                print(row(run, ranks, parallel, global_batch * context), flush=True)
        print("s a step: while no save is being written; others: while one is")


def row(run: Path, ranks: int, parallel: str, tokens_per_step: int) -> str:
    """Train the run and return its line of the table."""
    records, _ = random_run.train(run, ranks, parallel=parallel)
    saves = random_run.saves(records, STEPS)
    step_seconds = random_run.seconds_by_step(records, tokens_per_step)
    writing = writing_steps(saves, step_seconds)
    free = statistics.median(value for step, value in step_seconds.items() if step > FIRST and step not in writing)
    busy = statistics.median(step_seconds[step] for step in writing)
    stall = statistics.median(record["stall_seconds"] for record in saves)
    write = statistics.median(record["write_seconds"] for record in saves)
    extra = sum(step_seconds[step] - free for step in writing) / len(saves)  # steps that share the machine with it
    share = (stall + max(0.0, extra)) / (DEFAULT_INTERVAL * free)
    return (
        f"{ranks:5}  {parallel:7}  {free:8.3f}  {busy:9.3f}  {stall:7.3f}  {stall / free:10.3f}  {write:13.2f}  "
        f"{share:6.3%}"
    )


def writing_steps(saves: list[dict[str, Any]], step_seconds: dict[int, float]) -> set[int]:
    """Return the steps during which a save was being written."""
    steps = set()
    for save in saves:
        left, step = save["write_seconds"], save["step"] + 1
        while left > 0 and step in step_seconds:
            steps.add(step)
            left, step = left - step_seconds[step], step + 1
    return steps


if __name__ == "__main__":
    main()
