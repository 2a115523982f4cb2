"""Exposed communication and host time of a step, with DDP and FSDP, and with `determinism` "off" and "elastic".

python benchmarks/communication.py exposed host [--ranks 8] [--microbatch 16]

The benchmark trains GPT-2 124M on random tokens with one micro-batch per rank in each step, as runs/8xh100 does.

The exposed communication is the time of a step minus the time of the same step on one rank, where nothing is sent. With
FSDP, the single rank updates all weights, so its step is slower, and the difference misses about a millisecond of
communication. In the row `fsdp elastic`, the single rank trains the bare network, so the cost of FSDP's hooks counts as
exposed communication.

The host time is the time of a step with one short sequence on each rank, so that the GPU has almost nothing to do. No
step can be faster.
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

# Steps from one log line to the next. Only a logged step waits for the GPU, so the benchmark measures whole intervals.
# It leaves out the first one.
LOG_STEPS = 5
SHORT_CONTEXT = 64  # tokens

Part = Literal["exposed", "host"]


def main(  # noqa: PLR0913  # each argument is an option
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
        ranks: number of ranks; default: one for each GPU.
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
            "exposed": [f"{microbatch} sequences per rank", "ms per step", "one rank", "exposed ms", "share"],
            "host": [f"one sequence of {SHORT_CONTEXT} tokens per rank", "host ms per step"],
        }
        print(f"\n{title}\n{bench.table(columns[part], rows)}\n", flush=True)


def _milliseconds(model: ModelConfig, ranks: int, microbatch: int, steps: int, settings: tuple[str, ...]) -> float:
    """Return the median time of a step with one micro-batch per rank."""
    batch = ranks * microbatch
    with TemporaryDirectory() as folder:
        sizes = {"microbatch_size": microbatch, "global_batch_size": batch, "log_interval": LOG_STEPS}
        run = bench.prepare(Path(folder), model, LOG_STEPS + steps, **sizes)
        records = bench.train(run, ranks, *settings, kill_after=LOG_STEPS + steps)
    seconds = bench.seconds_by_step(records, batch * model.context_length)
    return 1e3 * median(value for step, value in seconds.items() if step > LOG_STEPS)


if __name__ == "__main__":
    bench.run(main)
