"""Data loading: throughput of micro-batches on one core, and latency of the first one of any step.

python benchmarks/reading.py [--tokens 200000000] [--seconds 3]

Writes random tokens to a temporary folder, reads them into the page cache, and prints a line for each order: the
stream's, shuffled, and a mixture of three shuffled sources. Latency is of a random step, the median of 200.
"""

import gc
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import command
import numpy as np
import torch
from safetensors.numpy import save_file

from tokens.batches.micro_batches import Reading, TokenSource, micro_batches
from tokens.batches.mixture import Mixture, Stage, to_shares
from tokens.batches.sampling import Layout, WindowOrder, window_count
from tokens.format.token_file import TokenStream, open_split

CONTEXT = 1024
MICROBATCH = 8
VOCABULARY = 50_257
STARTS = 200
LAYOUTS = {"1 rank, 16 micro-batches a step": 1, "8 ranks, 2 micro-batches a step": 8}
ORDERS = {  # whether it is shuffled, weights of the sources
    "as it lies": (False, (1,)),
    "shuffled": (True, (1,)),
    "mixture of 3, shuffled": (True, (0.7, 0.2995, 0.0005)),
}


def main(*, tokens: int = 200_000_000, seconds: float = 3.0) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        stream = _write(Path(folder), tokens)
        for title, ranks in LAYOUTS.items():
            layout = Layout(
                context_length=CONTEXT, microbatch_size=MICROBATCH, microbatches=16, data_parallel_size=ranks
            )
            rows = []
            for name, (shuffle, weights) in ORDERS.items():
                reading = _prepare(stream, layout, shuffle, weights)
                speed, starts = _throughput(reading, seconds), _first_batches(reading)
                rows.append([name, f"{speed / 1e6:.0f}", f"{1e3 * median(starts):.1f} ({1e3 * max(starts):.1f})"])
            columns = [f"{MICROBATCH} x {CONTEXT}, {title}", "M tokens/s", "first of a random step, ms (worst)"]
            print(command.table(columns, rows), flush=True)


def _write(folder: Path, count: int) -> TokenStream:
    """Return a stream of random tokens, read once."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, count, dtype=np.uint16)
    save_file({"tokens": tokens}, folder / "train.safetensors")
    stream = open_split(folder, "train")
    stream.check_ids(0, count, VOCABULARY)
    return stream


def _prepare(stream: TokenStream, layout: Layout, shuffle: bool, weights: tuple[float, ...]) -> Reading:
    """Return the reading of a run; the sources of a mixture share the file, one after the other, like shards would."""
    share = stream.length // len(weights)
    sources = tuple(
        TokenSource(
            stream=stream,
            start_token=number * share,
            order=WindowOrder(count=window_count(share, 0, CONTEXT), shuffle=shuffle, seed=42, source=number),
        )
        for number in range(len(weights))
    )
    mixture = Mixture([Stage(0, to_shares(weights))])
    return Reading(sources=sources, mixture=mixture, layout=layout, vocabulary_size=VOCABULARY)


def _throughput(reading: Reading, seconds: float) -> float:
    """Return the tokens that rank 0 reads in a second of processor time."""
    batches = micro_batches(reading, 0, range(sys.maxsize))
    next(batches)
    count, began = 0, time.process_time()
    while time.process_time() - began < seconds:
        for _ in range(100):
            inputs, _ = next(batches)
            count += inputs.numel()
    return count / (time.process_time() - began)


def _first_batches(reading: Reading) -> list[float]:
    """Return the seconds until the first micro-batch of a random step, anew each time."""
    times = []
    gc.collect()
    gc.disable()  # a pass over all that torch has made takes 50 ms, now and then, whatever is done meanwhile
    for step in np.random.default_rng(1).integers(0, 1_000_000, STARTS).tolist():
        began = time.perf_counter()
        next(micro_batches(reading, 0, range(step, 1_000_000_000)))
        times.append(time.perf_counter() - began)
    gc.enable()
    return times


if __name__ == "__main__":
    command.run(main)
