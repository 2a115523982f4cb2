"""Validation: mean loss over a fixed slice of the validation stream, computed by all ranks together."""

import math
from collections.abc import Callable

import numpy as np
import torch

from common.errors import BadInput
from tokens.batches.micro_batches import MicroBatch
from tokens.batches.sampling import read_target_weights, read_windows
from tokens.format.token_file import TokenStream
from training.parallel.process_group import Ranks, gather_parts
from training.precision import autocast
from training.prefetch import on_device, pinned
from training.state import StepSettings, TrainState


class Validation:
    def __init__(self, stream: TokenStream, start_token: int, sequences: int, context_length: int):
        """Raises BadInput for conversations of which no token counts."""
        self._stream, self._start_token, self._sequences = stream, start_token, sequences
        self._weights: np.ndarray | None = None  # of each target, (sequences, T)
        self._counted: float = sequences  # by which the sum of the sequences' means is divided
        if stream.weighted:
            weights = read_target_weights([(stream, start_token)], sequences * context_length)
            self._weights = weights.reshape(sequences, context_length)
            self._counted = int(weights.sum(dtype=np.int64)) / context_length
            if not self._counted:
                raise BadInput(f"{stream.files[0].path}: no token of {sequences} sequences counts; hold out more")

    @torch.no_grad()
    def measure(
        self, state: TrainState, settings: StepSettings, ranks: Ranks, stopping: Callable[[], bool]
    ) -> float | None:
        """Return the mean nats per token that counts, dropout off; None when asked to stop meanwhile.

        Call it on every rank; every rank gets the same number.

        Each sequence's loss is computed once, on whichever rank, and the mean is exactly rounded (math.fsum), so the
        result does not depend on how the slice is spread.
        """
        layout, model, part = settings.layout, state.parallel.model, state.parallel.data_parallel
        per_round = layout.microbatch_size * part.size
        pending = []
        model.eval()
        for first in range(0, self._sequences, per_round):
            if stopping():
                model.train()
                return None
            own = first + part.rank * layout.microbatch_size
            # Every rank runs every round at the same shape: FSDP gathers weights in it. The surplus is not counted.
            windows = [min(own + row, self._sequences - 1) for row in range(layout.microbatch_size)]
            parts = [(self._stream, self._start_token + window * layout.context_length) for window in windows]
            weights = None if self._weights is None else self._weights[windows]
            batch = pinned(MicroBatch.of_windows(read_windows(parts, layout.context_length), weights), ranks.device)
            batch = on_device(batch, ranks.device)
            with autocast(settings.numerics.precision, ranks.device):
                values = model(batch.inputs, batch.targets, batch.weights, by_sequence=True)
            pending.append(values[: max(0, self._sequences - own)])
        model.train()
        losses = [loss for own_losses in gather_parts(ranks, torch.cat(pending).tolist()) for loss in own_losses]
        assert len(losses) == self._sequences
        return math.fsum(losses) / self._counted
