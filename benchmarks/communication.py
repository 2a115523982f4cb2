"""Exposed communication and host time of a step: DDP and FSDP, determinism off and elastic.

python benchmarks/communication.py exposed host [--ranks 8] [--microbatch 16]

Trains GPT-2 124M on random tokens with one micro-batch a rank and step, as runs/8xh100 does. Exposed communication:
milliseconds of that step, less those of the same step on one rank, where nothing is sent; under FSDP the one rank
updates all weights, which hides about a millisecond, and under `fsdp elastic` it trains the bare network, so that the
cost of FSDP's hooks counts as exposed. Host time: a step of one short sequence, where the GPU has next to
nothing to do, on all ranks; a step never takes less.
"""

from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import attrs
import bench
import torch
from bench import SIZES, Size

from model.config import ModelConfig

LOG_STEPS = 5  # only a logged step waits for the GPU; the first five do not count
SHORT_CONTEXT = 64  # tokens

Part = Literal["exposed", "host"]


def main(  # noqa: PLR0913  # each is an option
    *parts: Part,
    ranks: int | None = None,
    microbatch: int = 16,
    steps: int = 30,
    size: Size = "124M",
    parallel: tuple[Literal["ddp", "fsdp"], ...] = ("ddp", "fsdp"),
    determinism: tuple[Literal["off", "elastic"], ...] = ("off", "elastic"),
    set: tuple[str, ...] = (),
) -> None:
    """Print the tables.

    Args:
        ranks: default: one for each GPU.
        set: KEY=VALUE of train.json; may be repeated.
    """
    count = ranks or torch.cuda.device_count() or 1
    for part in parts or ("exposed", "host"):
        rows = []
        for kind, level in product(parallel, determinism):
            settings = (f"parallel={kind}", f"determinism={level}", *set)
            if part == "exposed":
                many, alone = (_milliseconds(SIZES[size], n, microbatch, steps, settings) for n in (count, 1))
                share = f"{max(0.0, many - alone) / many:.1%}"
                rows.append([f"{kind} {level}", f"{many:.1f}", f"{alone:.1f}", f"{many - alone:.1f}", share])
            else:
                short = attrs.evolve(SIZES[size], context_length=SHORT_CONTEXT)
                rows.append([f"{kind} {level}", f"{_milliseconds(short, count, 1, steps, settings):.1f}"])
            print(" | ".join(rows[-1]), flush=True)
        title = f"{size}, {count} ranks, medians of {steps} steps"
        columns = {
            "exposed": [f"{microbatch} sequences a rank", "ms a step", "one rank", "exposed ms", "share"],
            "host": [f"one sequence of {SHORT_CONTEXT} tokens a rank", "host ms a step"],
        }
        print(f"\n{title}\n{bench.table(columns[part], rows)}\n", flush=True)


def _milliseconds(model: ModelConfig, ranks: int, microbatch: int, steps: int, settings: tuple[str, ...]) -> float:
    """Return the median time of a step of one micro-batch a rank."""
    batch = ranks * microbatch
    with TemporaryDirectory() as folder:
        sizes = {"microbatch_size": microbatch, "global_batch_size": batch, "log_interval": LOG_STEPS}
        run = bench.prepare(Path(folder), model, LOG_STEPS + steps, **sizes)
        records = bench.train(run, ranks, *settings, kill_after=LOG_STEPS + steps)
    seconds = bench.seconds_by_step(records, batch * model.context_length)
    return 1e3 * median(value for step, value in seconds.items() if step > LOG_STEPS)


if __name__ == "__main__":
    bench.run(main)
