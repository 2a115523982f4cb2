"""Validation: mean loss over a fixed slice of the validation stream, computed by all ranks together."""

import math

import torch

from tokens.batches.sampling import inputs_and_targets, read_windows
from tokens.format.token_file import TokenStream
from training.parallel.process_group import Ranks, gather
from training.precision import autocast
from training.state import StepSettings, TrainState
from training.supervision.stop_request import StopRequest


class Validation:
    """A slice of the validation stream, to measure a model on."""

    def __init__(self, stream: TokenStream, start_token: int, sequences: int):
        self.stream = stream
        self._start_token = start_token
        self._sequences = sequences

    @torch.no_grad()
    def measure(
        self, state: TrainState, settings: StepSettings, ranks: Ranks, stop_request: StopRequest
    ) -> float | None:
        """Return the mean nats per token, dropout off; None when asked to stop meanwhile.

        Call it on every rank; every rank gets the same number.

        Each sequence's loss is computed once, on whichever rank, and the mean is exactly rounded (math.fsum), so the
        result does not depend on how the slice is spread.
        """
        layout, model, part = settings.layout, state.parallel.model, state.parallel.data_parallel
        per_round = layout.microbatch_size * part.size
        losses: dict[int, float] = {}
        pending = []
        model.eval()
        stopping = False
        for first in range(0, self._sequences, per_round):
            stopping = stop_request.agreed()
            if stopping:
                break
            own = range(first + part.rank * layout.microbatch_size, first + (part.rank + 1) * layout.microbatch_size)
            # Every rank runs every round at the same shape: FSDP gathers weights in it. The surplus is not counted.
            windows = [min(window, self._sequences - 1) for window in own]
            parts = [(self.stream, self._start_token + window * layout.context_length) for window in windows]
            inputs, targets = inputs_and_targets(read_windows(parts, layout.context_length))
            inputs, targets = (ids.to(ranks.device, non_blocking=True) for ids in (inputs, targets))
            with autocast(settings.numerics.precision, ranks.device):
                pending.append((own, model(inputs, targets, by_sequence=True)))
        model.train()
        if stopping:
            return None
        for own, values in pending:
            losses.update(
                (window, value) for window, value in zip(own, values.tolist(), strict=True) if window < self._sequences
            )
        everywhere = [part for rank_losses in gather(ranks, losses) for part in rank_losses.items()]
        assert len(everywhere) == self._sequences
        return math.fsum(value for _, value in everywhere) / self._sequences
