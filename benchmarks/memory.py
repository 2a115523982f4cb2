"""Predicted memory compared with torch.cuda.max_memory_allocated(), and the largest micro-batch, predicted and real.

python benchmarks/memory.py [--sizes 124M 1.5B] [--cards a100-40gb]

Each micro-batch is tried in the same way as in find_batch_size.py: a separate process, which may run out of memory,
takes compiled steps with accumulation and AdamW. A smaller card is imitated by giving less of this GPU's memory to
torch's allocator.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import bench
import torch
from bench import SIZES, Size, prepare

import find_batch_size
from common.errors import BadInput
from training.config.train_config import Run, load_run
from training.hardware.environment import git_commit
from training.hardware.gpus import known_gpus
from training.planning import batch_probe as probe
from training.planning.batch_finder import PROBE, gallop
from training.planning.batch_probe import Prober
from training.planning.memory_model import GIB, HEADROOM, MemoryModel, gpu_bytes

CARDS = ("rtx3090-24gb", "a100-40gb", "l40s-48gb", "h100-80gb")
CARD_SECONDS = 20.0  # time limit for one size on one card; if it is reached, the result is only a lower bound
OVERRIDE = "global_batch_size=null"  # so that any micro-batch is possible
CARD_VARIABLE = "CARD_BYTES"  # environment variable that tells a probe how much memory the imitated card has
SHARES = (0.25, 0.5, 0.75)  # micro-batches to measure, as shares of the predicted largest micro-batch


def main(
    *,
    sizes: tuple[Size, ...] = ("124M", "350M", "774M", "1.5B"),
    cards: tuple[str, ...] = CARDS,
) -> None:
    """Print the tables."""
    if unknown := [card for card in cards if card not in known_gpus()]:
        raise BadInput(f"--cards: got {unknown[0]}, expected one or more of {', '.join(known_gpus())}")
    if not torch.cuda.is_available():
        raise BadInput("this machine has no GPU, which this benchmark needs")
    name, total = _gpu()
    print(f"{name}, {total / GIB:.1f} GiB, torch {torch.__version__}, commit {git_commit()}", flush=True)
    with TemporaryDirectory() as folder:
        runs = {size: _run(Path(folder), size) for size in sizes}
        for size, run in runs.items():
            compare_allocated(size, run, total)
        for size, run in runs.items():
            for card in cards:
                compare_largest(size, run, card, total)


def compare_allocated(size: str, run: Run, gpu_memory: int) -> None:
    """Print the measured and the predicted peak memory of a step on this GPU, for a few micro-batches."""
    memory = MemoryModel(model=run.model)
    largest = memory.largest_microbatch(int((1 - HEADROOM) * gpu_memory)) or 1
    prober = _prober(run, None)
    for microbatch_size in sorted({max(1, int(share * largest)) for share in SHARES}):
        _, reports = prober.probe(microbatch_size)
        subject = f"{size}, micro-batch {microbatch_size}, allocated"
        if reports:
            predicted = memory.predict(microbatch_size).allocated
            _print_ratio(subject, predicted, reports[0].allocated or 0)
        else:
            print(f"{subject}: predicted to fit, but it does not", flush=True)


def compare_largest(size: str, run: Run, card: str, gpu_memory: int) -> None:
    """Print the predicted and the measured largest micro-batch for a card that this GPU imitates."""
    gpu = known_gpus()[card]
    card_bytes = int(gpu.memory_gib * GIB)
    if 0.98 * card_bytes > gpu_memory:  # a GPU of the same kind may have slightly less memory
        print(f"{size}, {card}: has more memory than this GPU", flush=True)
        return
    predicted = MemoryModel(model=run.model).largest_microbatch(gpu_bytes(gpu))
    largest, is_complete = gallop(run, _prober(run, card_bytes), time.monotonic() + CARD_SECONDS)
    measured = f"{'' if is_complete else 'at least '}{largest or 'none'}"
    print(f"{size}, {card}: largest micro-batch predicted {predicted or 'none'}, found {measured}", flush=True)


def _run(folder: Path, size: str) -> Run:
    """Return a run with a network of this size. Its tokens are never read."""
    return load_run(prepare(folder / size, SIZES[size], 1, microbatch_size=1, global_batch_size=1), [OVERRIDE])


def probe_on_card(card_bytes: int) -> NoReturn:
    """Run one probe of find_batch_size.py as if this GPU had only `card_bytes` of memory."""
    usable_bytes_here = probe.usable_bytes

    def usable_bytes(device: torch.device) -> int:
        _, total = torch.cuda.mem_get_info(device)
        missing = max(0, total - card_bytes)
        return usable_bytes_here(device) - missing + int(HEADROOM * missing)

    probe.usable_bytes = usable_bytes
    sys.exit(find_batch_size.main())


def _prober(run: Run, card_bytes: int | None) -> Prober:
    program = PROBE
    if card_bytes is not None:
        program, os.environ[CARD_VARIABLE] = Path(__file__), str(card_bytes)
    return Prober([str(program), str(run.directory), f"--set={OVERRIDE}"], 1)


def _gpu() -> tuple[str, int]:
    """Return the name of the GPU, and the size of its memory in bytes.

    A separate process reads both values, because reading them takes some of the GPU's memory until the process ends.
    """
    program = "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps([p.name, p.total_memory]))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    name, total = json.loads(done.stdout)
    return name, total


def _print_ratio(subject: str, predicted: int, measured: int) -> None:
    ratio = predicted / measured
    print(
        f"{subject}: predicted {predicted / GIB:.3f} GiB, measured {measured / GIB:.3f}, ratio {ratio:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    if CARD_VARIABLE in os.environ:
        probe_on_card(int(os.environ[CARD_VARIABLE]))
    bench.run(main)
