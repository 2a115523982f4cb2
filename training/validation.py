"""Validation: the mean loss over a fixed slice of the validation stream, computed by all ranks together."""

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
        """Read the weights of the targets, if they have any. Raises BadInput if no target adds to the loss."""
        self._stream, self._start_token, self._sequences = stream, start_token, sequences
        self._weights: np.ndarray | None = None  # weight of each target, (sequences, T)
        self._total_weight: float = sequences  # divisor of the sum of the sequences' mean losses
        if stream.weighted:
            weights = read_target_weights([(stream, start_token)], sequences * context_length)
            self._weights = weights.reshape(sequences, context_length)
            self._total_weight = int(weights.sum(dtype=np.int64)) / context_length
            if not self._total_weight:
                raise BadInput(
                    f"{stream.files[0].path}: no token of the {sequences} validation sequences belongs to an answer, "
                    "so there is no loss to measure; hold out more text"
                )

    @torch.no_grad()
    def measure(
        self, state: TrainState, settings: StepSettings, ranks: Ranks, stopping: Callable[[], bool]
    ) -> float | None:
        """Return the mean loss without dropout, in nats per token; None if a stop interrupts the measurement.

        If targets have weights, the mean is weighted by them. Call it on every rank; every rank gets the same number.
        The loss of each sequence is computed on one of the ranks, and the losses are added without rounding errors
        (math.fsum). The number therefore does not depend on which rank computes which sequence.
        """
        layout, model, part = settings.layout, state.parallel.model, state.parallel.data_parallel
        per_round = layout.microbatch_size * part.size
        pending = []
        model.eval()
        for first in range(0, self._sequences, per_round):
            if stopping():
                model.train()
                return None
            local_first = first + part.rank * layout.microbatch_size
            # FSDP gathers weights in each round, so every rank must run every round, with the same shape. A rank that
            # has no sequence left repeats the last one, which is not counted again.
            windows = [min(local_first + row, self._sequences - 1) for row in range(layout.microbatch_size)]
            parts = [(self._stream, self._start_token + window * layout.context_length) for window in windows]
            weights = None if self._weights is None else self._weights[windows]
            batch = pinned(MicroBatch.of_windows(read_windows(parts, layout.context_length), weights), ranks.device)
            batch = on_device(batch, ranks.device)
            with autocast(settings.numerics.precision, ranks.device):
                sequence_losses = model(batch.inputs, batch.targets, batch.weights, by_sequence=True)
            pending.append(sequence_losses[: max(0, self._sequences - local_first)])
        model.train()
        losses = [loss for rank_losses in gather_parts(ranks, torch.cat(pending).tolist()) for loss in rank_losses]
        assert len(losses) == self._sequences
        return math.fsum(losses) / self._total_weight
