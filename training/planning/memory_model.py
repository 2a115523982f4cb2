"""Memory model: the GPU memory of a run, predicted without a GPU from the tensors saved for the backward pass."""

import bisect
import itertools

import attrs

from model.config import ModelConfig
from tokens.batches.sampling import longest_share
from training.config.key_groups import MemoryOptions
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu, known_gpus
from training.parallel.block_groups import group_length
from training.parallel.sum_tree import most_held_sums
from training.planning.memory_peaks import HALF_BYTES, STATE_BYTES, BatchMemory, Moment
from training.planning.network_sizes import NetworkSizes, network_sizes

GIB = 1 << 30
NODE_GPUS = 8  # of a node, at most, over which HSDP shards
HEADROOM = 0.05  # share of a GPU's memory that a run leaves free
PLAIN, THRIFTY = MemoryOptions(), MemoryOptions(loss_chunks=8, recompute_blocks=True)
CALIBRATION = "calibrated on torch's allocator, not on a card"  # shown with every prediction

WORKSPACE_BYTES = 2 * (32 << 20)  # of cuBLAS on Hopper, for the threads of the forward and of the backward pass
# Assumed, until benchmarks/outside_memory.py has run on a card: CUDA's context and libraries, and NCCL's buffers.
CONTEXT_BYTES = int(0.6 * GIB)
NCCL_BYTES = int(0.4 * GIB)
# Of what is allocated: what the allocator cannot use, with the expandable segments that common/installation.py sets.
FRAGMENTATION = 0.03


@attrs.frozen
class Prediction:
    """Bytes on one rank at the peak of a run's steps."""

    parts: dict[str, int]  # by name

    @property
    def allocated(self) -> int:
        """Predicted torch.cuda.max_memory_allocated()."""
        return self.reserved - self.parts["fragmentation"]

    @property
    def reserved(self) -> int:
        """Bound of torch.cuda.max_memory_reserved()."""
        return self.total - self.parts["outside"]

    @property
    def total(self) -> int:
        """Memory that the GPU must have."""
        return sum(self.parts.values())


@attrs.frozen(kw_only=True)
class MemoryModel:
    """Memory of one rank in bf16, compiled."""

    model: ModelConfig
    parallel: str = "ddp"  # as in train.json
    world_size: int = 1
    options: MemoryOptions = PLAIN
    optimizer: str = "adamw"  # as in train.json
    determinism: str = "off"
    accumulation: int = 2  # micro-batches a step on a rank
    global_batch_size: int | None = None  # sequences; the micro-batch then determines the accumulation

    @classmethod
    def of(cls, model: ModelConfig, train: TrainConfig, world_size: int) -> "MemoryModel":
        """Return the memory model of a run on so many ranks."""
        return cls(
            model=model,
            parallel=train.execution.parallel,
            world_size=world_size,
            options=train.memory,
            optimizer=train.optimization.optimizer,
            determinism=train.execution.determinism or "off",  # what null means on a GPU
            accumulation=train.batch.gradient_accumulation_steps or 1,
            global_batch_size=train.batch.global_batch_size,
        )

    @property
    def sharded(self) -> bool:
        """True if a rank holds a part of the weights; one rank is not wrapped."""
        return self.parallel != "ddp" and self.world_size > 1

    @property
    def shards(self) -> int:
        """Of how many ranks each holds a part of the weights."""
        if self.parallel == "hsdp":
            return min(self.world_size, NODE_GPUS)
        return self.world_size if self.sharded else 1

    def predict(self, size: int) -> Prediction:
        """Return the bytes at the peak of a run's steps; `size`: of the micro-batch."""
        saved = network_sizes(self.model)
        batch, microbatches = BatchMemory(self.model, self.options, saved, size), self.microbatches_at(size)
        idle = batch.idle
        if self.sharded and self.options.recompute_blocks:  # its buffers lie between kept inputs
            idle += STATE_BYTES * (2 * saved.outer_parameters + self._group_parameters(saved))
        moments = (batch.head, batch.block, batch.end)
        predictions = [self._prediction(saved, microbatches, moment, idle) for moment in moments]
        return max(predictions, key=lambda prediction: prediction.total)

    def accumulation_at(self, microbatch_size: int) -> int:
        """Return the micro-batches a step on a rank, at most."""
        return longest_share(self.microbatches_at(microbatch_size), self.world_size)

    def microbatches_at(self, microbatch_size: int) -> int:
        """Return the micro-batches a step; where they do not make up the global batch, as many on each rank."""
        batch = self.global_batch_size
        if batch is None:
            return self.accumulation * self.world_size
        if batch % microbatch_size or batch < microbatch_size * self.world_size:
            return -(-batch // (microbatch_size * self.world_size)) * self.world_size
        return batch // microbatch_size

    def _prediction(self, saved: NetworkSizes, microbatches: int, moment: Moment, idle: int) -> Prediction:
        weights = STATE_BYTES * saved.parameters(self.model.n_layers)
        holds_gradients = self._holds_gradients(longest_share(microbatches, self.world_size), moment)
        shard = weights // self.shards
        parts = {
            "weights": shard,
            "gradients": weights if holds_gradients else shard * moment.end,
            "sums": weights * most_held_sums(self.determinism, microbatches, self.world_size),  # of gradients
            "optimizer": saved.state_bytes(self.optimizer, self.model.n_layers) // self.shards,
            "gathered": self._gathered(saved) if self.sharded else 0,
            "copies": moment.copies,
            "activations": moment.activations,
            "backward": moment.backward,
            "workspace": WORKSPACE_BYTES,
        }
        fragmentation = int(FRAGMENTATION * sum(parts.values())) + idle
        return Prediction(parts | {"fragmentation": fragmentation, "outside": outside_bytes(self.world_size)})

    def _gathered(self, saved: NetworkSizes) -> int:
        """Return the bytes of the weights that FSDP gathers, beside those of blocks that `copies` has."""
        again = self.options.recompute_blocks  # then one group of blocks is used and one fetched ahead, in bf16
        return STATE_BYTES * saved.outer_parameters + 2 * HALF_BYTES * self._group_parameters(saved) * again

    def _group_parameters(self, saved: NetworkSizes) -> int:
        """Return the parameters of a group of blocks that FSDP gathers together."""
        return saved.block_parameters * group_length(saved.block_parameters, self.model.n_layers)

    def _holds_gradients(self, accumulation: int, moment: Moment) -> bool:
        """Tell whether a rank holds whole gradients, beside those in partial sums."""
        if self.sharded:  # adds up whole ones, not shards, until the last micro-batch reduces them
            return self.determinism == "off" and accumulation > 1
        if self.world_size > 1:  # in DDP's buckets
            return True
        return moment.end or (self.determinism == "off" and accumulation > 1)

    def largest_microbatch(self, usable_bytes: int) -> int | None:
        """Return the largest micro-batch that fits, in sequences, or None where not even one does."""

        # Without accumulation a larger micro-batch always needs more; with it, a step has more sums of smaller ones.
        least = attrs.evolve(self, determinism="off", accumulation=1, global_batch_size=None)

        def needed(size: int) -> int:
            return least.predict(size).total

        beyond = 1
        while needed(beyond) <= usable_bytes:
            beyond *= 2
        most = bisect.bisect_right(range(1, beyond), usable_bytes, key=needed)
        return next((size for size in range(most, 0, -1) if self.predict(size).total <= usable_bytes), None)

    def remedies(self, usable_bytes: int | None = None) -> str:
        """Return settings, and the smallest GPU, with which one sequence fits; settings only with `usable_bytes`."""
        ways, plain = [], attrs.evolve(self, options=PLAIN)
        sharded, fsdp = attrs.evolve(plain, parallel="fsdp"), "--set parallel=fsdp"
        if usable_bytes is not None:
            if self.parallel == "ddp" and self.world_size > 1 and sharded.largest_microbatch(usable_bytes):
                ways.append(fsdp)
            thrifty = f"--set loss_chunks={THRIFTY.loss_chunks} --set recompute_blocks=true"
            if attrs.evolve(self, options=THRIFTY).largest_microbatch(usable_bytes):
                ways.append(thrifty)
            elif not ways and attrs.evolve(sharded, options=THRIFTY).largest_microbatch(usable_bytes):
                ways.append(f"{fsdp} {thrifty}")
            length = self.model.context_length
            for tokens in (length >> power for power in range(1, length.bit_length())):
                shorter = attrs.evolve(plain, model=attrs.evolve(self.model, context_length=tokens))
                if shorter.largest_microbatch(usable_bytes):
                    ways.append(f"--set model.context_length={tokens}")
                    break
        cards = sorted(known_gpus().values(), key=lambda gpu: gpu.memory_gib)
        large = (card.name for card in cards if plain.largest_microbatch(gpu_bytes(card)))
        ways += [f"{card} or a larger GPU" for card in itertools.islice(large, 1)]
        return f"predicted to fit: {', or '.join(ways or ['a smaller model'])}"


def outside_bytes(world_size: int) -> int:
    """Return a rank's memory outside torch's allocator: CUDA's context, NCCL's buffers."""
    return CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0)


def gpu_bytes(gpu: Gpu) -> int:
    """Return the memory of a GPU, less headroom."""
    return int((1 - HEADROOM) * gpu.memory_gib * GIB)
