"""This rank's micro-batches, read ahead by a thread while the GPU works."""

import queue
import threading
import time

import attrs
import torch
from torch import Tensor

from errors import BadInput
from tokens.batches import Layout, WindowOrder, microbatch_places, read_windows
from tokens.token_file import TokenStream
from training.ranks import Ranks

MICROBATCHES_AHEAD = 4


@attrs.frozen(kw_only=True)
class FeedSource:
    """Where a feed's tokens come from."""

    stream: TokenStream
    start_token: int
    order: WindowOrder
    layout: Layout
    vocabulary_size: int


class Feed:
    """Yields (inputs, targets) of step `first_step` on, micro-step by micro-step. Close it to end the thread."""

    def __init__(self, source: FeedSource, ranks: Ranks, first_step: int, steps: int):
        self.waited_seconds = 0.0  # that training stood still for data
        self._source = source
        self._ranks = ranks
        self._ready: queue.Queue[tuple[Tensor, Tensor] | Exception] = queue.Queue(MICROBATCHES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(first_step, steps), name="feed", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next micro-batch on the device, (B, T) int64 each. Raises BadInput for an id out of range."""
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_seconds += time.perf_counter() - began
        if isinstance(item, Exception):
            raise item
        inputs, targets = item
        device = self._ranks.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _read(self, first_step: int, steps: int) -> None:
        try:
            if self._ranks.device.type == "cuda":
                torch.cuda.set_device(self._ranks.device)  # else pinning opens a context on GPU 0 in every rank
            for step in range(first_step, steps):
                for micro_step in range(self._source.layout.accumulation):
                    if self._closed.is_set():
                        return
                    self._ready.put(self._microbatch(step, micro_step))
        except Exception as error:  # noqa: BLE001  # handed to the training thread, which raises it
            self._ready.put(error)

    def _microbatch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        source = self._source
        places = microbatch_places(source.layout, step, micro_step, self._ranks.rank)
        windows = [source.order.window(place) for place in places]
        batch = read_windows(source.stream, source.start_token, windows, source.layout.context_length)
        if max(int(part.max()) for part in batch) >= source.vocabulary_size:
            raise BadInput(f"step {step + 1}: {self._find_bad_id(windows)}", alone=True)
        if self._ranks.device.type == "cuda":
            return batch[0].pin_memory(), batch[1].pin_memory()
        return batch

    def _find_bad_id(self, windows: list[int]) -> str:
        source = self._source
        try:
            for window in windows:
                first = source.start_token + window * source.layout.context_length
                source.stream.check_ids(first, source.layout.context_length + 1, source.vocabulary_size)
        except BadInput as error:
            return str(error)
        return "the token files changed while they were read"
