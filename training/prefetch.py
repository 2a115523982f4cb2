"""This rank's micro-batches, read ahead by a thread while the GPU works."""

import queue
import threading
import time

import torch
from torch import Tensor

from tokens.batches.micro_batches import Reading, micro_batches, ready

MICROBATCHES_AHEAD = 4
POLL_SECONDS = 1.0  # between two looks at tokens that are being written


class _Closed(Exception):
    """The feed was closed while it waited for tokens."""


class Feed:
    """Yields (inputs, targets) of some steps, micro-step by micro-step. Close it to end the thread."""

    def __init__(self, reading: Reading, rank: int, device: torch.device, steps: range):
        self.waited_seconds = 0.0  # that training stood still for data
        self._reading = reading
        self._rank, self._device = rank, device  # rank: data-parallel
        self._ready: queue.Queue[tuple[Tensor, Tensor] | Exception] = queue.Queue(MICROBATCHES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(steps,), name="feed", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next micro-batch on the device, (B, T) int64 each. Raises BadInput for an id out of range."""
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_seconds += time.perf_counter() - began
        if isinstance(item, Exception):
            raise item
        inputs, targets = item
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _wait_for(self, step: int) -> None:
        while not self._closed.is_set() and not ready(self._reading, step):
            self._closed.wait(POLL_SECONDS)
        if self._closed.is_set():
            raise _Closed

    def _read(self, steps: range) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # else pinning opens a context on GPU 0 in every rank
            for inputs, targets in micro_batches(self._reading, self._rank, steps, self._wait_for):
                if self._closed.is_set():
                    return
                if self._device.type == "cuda":
                    self._ready.put((inputs.pin_memory(), targets.pin_memory()))
                else:
                    self._ready.put((inputs, targets))
        except _Closed:
            return
        except Exception as error:  # noqa: BLE001  # handed to the training thread, which raises it
            self._ready.put(error)
