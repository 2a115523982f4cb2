"""Memory model: the GPU memory of a run, predicted without a GPU from what the network saves for its backward pass."""

import bisect
import itertools

import attrs

from model.config import ModelConfig
from training.config.key_groups import MemoryOptions
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu, known_gpus
from training.optimizers.optimizer_registry import OPTIMIZERS
from training.planning.network_sizes import NetworkSizes, network_sizes

GIB = 1 << 30
HEADROOM = 0.05  # share of a GPU's memory that a run leaves free
PLAIN, THRIFTY = MemoryOptions(), MemoryOptions(loss_chunks=8, recompute_blocks=True)
CALIBRATION = "uncalibrated: not compared with a GPU yet"  # shown with every prediction

STATE_BYTES = 4  # of a weight and of a gradient, fp32
# Per token and row of the embedding: bf16 logits, over which their gradient is written. The compiled head and loss hold
# nothing in fp32 at this size.
LOGIT_BYTES = 2
# Per weight of the head: its gradient in bf16, as the matrix product gives it, then in fp32; and other chunks' sum.
HEAD_BYTES, CHUNK_SUM_BYTES = 6, 4
HIDDEN_BYTES = 4  # per token and C: what enters a recomputed block, and the head, in fp32
BLOCK_BACKWARD_BYTES = 24  # per token and C, in a block's backward: bf16 gradients in the MLP, fp32 ones beside it
# Assumed, until measured: CUDA's context with cuBLAS and cuDNN, NCCL's buffers, and what the allocator cannot use.
CONTEXT_BYTES = int(0.6 * GIB)
NCCL_BYTES = int(0.4 * GIB)
# Of what is allocated, with the expandable segments that common/installation.py sets. On torch's own allocator it was
# at most 0.8 % under DDP, and 4 % under FSDP, where 5 % less was allocated than is predicted.
FRAGMENTATION = 0.02


@attrs.frozen(kw_only=True)
class Prediction:
    """Bytes on one rank at the peak of a run's steps."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int  # FSDP: weights gathered and gradients on their way; DDP: a second copy of the gradients
    copies: int  # weights in bf16, saved for the backward pass
    activations: int
    logits: int  # of a chunk where there are several; and gradients in flight
    fragmentation: int
    outside: int  # of torch's allocator

    @property
    def allocated(self) -> int:
        """Predicted torch.cuda.max_memory_allocated()."""
        return self.total - self.fragmentation - self.outside

    @property
    def total(self) -> int:
        """Memory that the GPU must have."""
        return sum(attrs.astuple(self))


@attrs.frozen(kw_only=True)
class MemoryModel:
    """Memory of one rank in bf16, compiled, determinism off, with at least two micro-batches a step."""

    model: ModelConfig
    parallel: str = "ddp"  # or "fsdp"
    world_size: int = 1
    options: MemoryOptions = PLAIN
    optimizer: str = "adamw"  # as in train.json

    @classmethod
    def of(cls, model: ModelConfig, train: TrainConfig, world_size: int) -> "MemoryModel":
        """Return the memory model of a run on so many ranks."""
        return cls(
            model=model,
            parallel=train.execution.parallel,
            world_size=world_size,
            options=train.memory,
            optimizer=train.optimization.optimizer,
        )

    def predict(self, microbatch_size: int) -> Prediction:
        """Return the bytes at the peak of a run's steps."""
        config, options, saved = self.model, self.options, network_sizes(self.model)
        tokens = microbatch_size * config.context_length
        row = config.padded_vocab_size * config.emb_dim
        shards = self.world_size if self.parallel == "fsdp" else 1
        parameters = saved.outer_parameters + config.n_layers * saved.block_parameters
        # A tied head's gradient waits for the embedding's until the blocks are done.
        block_backward = BLOCK_BACKWARD_BYTES * config.emb_dim * tokens + STATE_BYTES * row * config.tie_weights
        chunk = -(-tokens // options.loss_chunks)
        head = HEAD_BYTES + (CHUNK_SUM_BYTES if options.loss_chunks > 1 else 0)
        hidden = HIDDEN_BYTES * config.emb_dim * tokens
        blocks = 1 if options.recompute_blocks else config.n_layers  # whose insides are there at a time
        activations = microbatch_size * (saved.outer_bytes + blocks * saved.block_bytes)
        if options.recompute_blocks:
            activations += config.n_layers * hidden
        if options.loss_chunks > 1:
            activations += hidden // 2  # what the head takes, in fp32 now
        parts = {
            "weights": STATE_BYTES * parameters // shards,
            # FSDP adds up whole gradients, not shards, until the last micro-batch reduces them.
            "gradients": STATE_BYTES * parameters,
            "optimizer": saved.state_bytes(self.optimizer, config.n_layers) // shards,
            "buckets": self._bucket_bytes(saved, parameters),
            "copies": saved.outer_copies + blocks * saved.block_copies,
            "activations": activations,
            "logits": max(LOGIT_BYTES * config.padded_vocab_size * chunk + head * row, block_backward),
        }
        fragmentation = int(FRAGMENTATION * sum(parts.values()))
        return Prediction(**parts, fragmentation=fragmentation, outside=outside_bytes(self.world_size))

    def _bucket_bytes(self, saved: NetworkSizes, parameters: int) -> int:
        """Return the bytes of gradients and gathered weights on their way between ranks."""
        if self.parallel == "fsdp":
            # Embeddings and head stay gathered through a step; of the blocks one is used and one fetched ahead, each in
            # the all-gather's buffer and copied out of it.
            return STATE_BYTES * (saved.outer_parameters + 4 * saved.block_parameters)
        # Later gradients are views of DDP's buckets. In the first two steps there is a second copy: gradients that
        # no_sync() adds up before DDP has them, then the first bucket, of all parameters, beside those that replace it.
        return STATE_BYTES * parameters if self.world_size > 1 else 0

    def largest_microbatch(self, usable_bytes: int) -> int | None:
        """Return the largest micro-batch that fits, in sequences, or None where not even one does."""

        def needed(size: int) -> int:
            return self.predict(size).total

        beyond = 1
        while needed(beyond) <= usable_bytes:
            beyond *= 2
        return bisect.bisect_right(range(1, beyond), usable_bytes, key=needed) or None

    def remedies(self, usable_bytes: int | None = None) -> str:
        """Return settings, and the smallest GPU, with which one sequence fits; settings only with `usable_bytes`."""
        ways, plain = [], attrs.evolve(self, options=PLAIN)
        whole = OPTIMIZERS[self.optimizer].needs_whole_parameters
        sharded = attrs.evolve(plain, parallel="fsdp", optimizer="adamw" if whole else self.optimizer)
        fsdp = "--set parallel=fsdp" + (" --set optimizer=adamw" if whole else "")
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
