"""Prefetch: a data loader thread that reads this rank's micro-batches ahead of training."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from common.output import progress, show
from tokens.batches.micro_batches import MicroBatch, Reading, micro_batches, ready
from training.data.verify_tokens import TOKEN_POLL_SECONDS, TokenWatch
from training.parallel.process_group import Ranks

MICROBATCHES_AHEAD = 4
REMIND_SECONDS = 60.0  # between two log lines while waiting for tokens


class Feed:
    """Returns the micro-batches of a range of steps, micro-step by micro-step. Close the feed to end its thread."""

    def __init__(self, reading: Reading, rank: int, device: torch.device, steps: range, watch: TokenWatch):
        self.waited_seconds = 0.0  # training time spent waiting for data
        self.watch = watch  # checks the token files for changes
        self._reading = reading
        self._rank, self._device = rank, device  # the data-parallel rank
        self._ready: queue.Queue[MicroBatch | Exception] = queue.Queue(MICROBATCHES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(steps,), name="feed", daemon=True)
        self._thread.start()

    def next(self) -> MicroBatch:
        """Return the next micro-batch on the device. Raises BadInput for a token id that is out of range."""
        with self._waiting():
            batch = self._ready.get()
        if isinstance(batch, Exception):
            raise batch
        return on_device(batch, self._device)

    def wait_for_tokens(self, step: int, ranks: Ranks, stopping: Callable[[], bool]) -> bool:
        """Wait until the tokens of a step are prepared. Call it on every rank.

        Returns False if the run has to stop, or if the preparation was abandoned and no more tokens will come.
        """
        growing, reminded = self._reading.growing, -REMIND_SECONDS
        with self._waiting():
            while growing:
                is_ready = ready(self._reading, step)
                inspect = not is_ready and ranks.coordinates
                problem = next(filter(None, (tokens.abandoned() for tokens in growing if inspect)), None)
                flags = torch.tensor([float(is_ready), float(problem is None)])
                dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=ranks.control)
                if flags[0].item():
                    break
                if problem is not None:
                    show(progress(problem), once=True)
                if not flags[1].item() or stopping():
                    return False
                if time.monotonic() - reminded >= REMIND_SECONDS:
                    reminded = time.monotonic()
                    states = "; ".join(f"{tokens.directory}: {tokens.progress()}" for tokens in growing)
                    show(progress(f"waiting for tokens: {states}"), once=True)
                time.sleep(TOKEN_POLL_SECONDS)
        return True

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _wait_for(self, step: int) -> bool:
        """Wait until the tokens of a step are ready; return False if the feed is closed while waiting."""
        while not ready(self._reading, step):
            if self._closed.wait(TOKEN_POLL_SECONDS):
                return False
        return True

    def _read(self, steps: range) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # otherwise pinning opens a context on GPU 0 in every rank
            for batch in micro_batches(self._reading, self._rank, steps, self._wait_for):
                if self._closed.is_set():
                    return
                self._ready.put(pinned(batch, self._device))
        except Exception as error:  # noqa: BLE001  # passed to the training thread, which raises it
            self._ready.put(error)


def pinned(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a micro-batch in pinned memory, from which a GPU can copy it while the host continues."""
    return batch.moved(Tensor.pin_memory) if device.type == "cuda" else batch


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    return batch.moved(lambda values: values.to(device, non_blocking=True))
