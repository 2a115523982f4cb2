"""Memory model: predict the GPU memory of a run without a GPU, from the tensors saved for the backward pass.

Memory peaks at one of three moments of a step. The tensors that are alive at each moment were determined with
torch.cuda.memory._snapshot() under a CUDA driver that computes nothing; tests/cuda/test_memory_prediction.py compares
the predictions with the peaks under that driver. All numbers are bytes on one rank, for training in bf16 with compiled
blocks.
"""

import bisect
import itertools

import attrs

from model.config import ModelConfig
from tokens.batches.sampling import longest_share
from training.config.key_groups import MemoryOptions
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu, known_gpus
from training.parallel.fsdp import group_length
from training.parallel.sum_tree import most_held_sums
from training.planning.network_sizes import NetworkSizes, network_sizes

GIB = 1 << 30
NODE_GPUS = 8  # largest number of GPUs per node; HSDP shards over the GPUs of a node
HEADROOM = 0.05  # share of a GPU's memory that a run leaves free
PLAIN, THRIFTY = MemoryOptions(), MemoryOptions(loss_chunks=8, recompute_blocks=True)
# This text is printed with every prediction.
CALIBRATION = "calibrated with torch's allocator, confirmed on one H200"

# On Hopper, cuBLAS allocates one workspace for the thread of the forward pass and another for that of the backward
# pass.
WORKSPACE_BYTES = 2 * (32 << 20)
# Memory of CUDA's context and libraries. benchmarks/outside_memory.py measured it on one H200 with torch 2.11 and
# driver 580.159.04. The size of NCCL's buffers is an assumption until that benchmark has run on several GPUs.
CONTEXT_BYTES = int(1.3 * GIB)
NCCL_BYTES = int(0.4 * GIB)
# Memory that the allocator cannot use, as a share of the allocated memory. The value applies to expandable segments,
# which common/script.py turns on.
FRAGMENTATION = 0.03

STATE_BYTES = 4  # fp32: for each weight, each gradient, and each partial sum of a gradient
HALF_BYTES = 2  # bf16: matrix products read weights and write gradients in this type
# Per token and per row of the embedding: the logits in bf16, which are later overwritten by their gradient. The
# compiled head and loss allocate no fp32 tensor of this size.
LOGIT_BYTES = 2
SOFTCAP_BYTES = 4  # per token and per row of the vocabulary: a compiled softcap keeps its tanh in fp32
HIDDEN_BYTES = 4  # per token and channel: the input of a block or of the head in fp32, and its gradient
OUTPUT_GRADIENT_BYTES = 2  # per token and channel: the gradient of a block's output, in bf16
OUTPUT_BYTES = 6  # per token and channel of a recomputed block: its output in fp32 and the MLP's output in bf16


@attrs.frozen(kw_only=True)
class Moment:
    """Bytes that are alive in addition to weights, optimizer state and reduced gradients."""

    copies: int  # weights in bf16, saved for the backward pass
    activations: int
    backward: int  # logits of a chunk, and gradients that are being computed
    end: bool = False  # whether this is the end of the backward pass, when all gradients of the micro-batch exist


class BatchMemory:
    """The memory that a micro-batch of the given number of sequences needs while it passes through a network."""

    def __init__(self, memory: "MemoryModel", saved: NetworkSizes, sequences: int):
        self._model, self._options, self._saved, model = memory.model, memory.options, saved, memory.model
        shards, self._ranks = memory.tensor
        self._local = shards // self._ranks
        self._tokens = sequences * model.context_length
        self._row = model.padded_vocab_size // self._ranks * model.emb_dim
        self._hidden = HIDDEN_BYTES * model.emb_dim * self._tokens
        self._inputs = self._hidden // self._ranks  # bytes of the input of one block
        # Number of blocks that keep all of their activations, not only their inputs
        self._kept_blocks = 0 if memory.options.recompute_blocks else model.n_layers
        self._block_bytes, self._outer_bytes = sequences * saved.block_bytes, sequences * saved.outer_bytes

    @property
    def kept(self) -> int:
        """Bytes of the activations that the forward pass keeps for the backward pass."""
        inputs = self._model.n_layers * self._inputs if self._options.recompute_blocks else 0
        # With chunks, the complete input of the head is kept in fp32 instead of bf16.
        head = self._hidden // 2 if self._options.loss_chunks > 1 else 0
        return self._outer_bytes + inputs + self._kept_blocks * self._block_bytes + head

    @property
    def head(self) -> Moment:
        """The loss and the backward pass of the head, when all activations and the logits of one chunk are alive."""
        chunks, row, width = self._options.loss_chunks, self._row, self._model.emb_dim
        chunk = -(-self._tokens // chunks)
        hidden = HIDDEN_BYTES * width * chunk
        # In addition to the logits, the forward pass has the head's input in fp32, and the backward pass has the
        # weight's gradient in bf16. After the logits are freed, the gradients of the weight and of the input are both
        # in fp32.
        logits = self._logits(chunk)
        next_to_logits = HALF_BYTES * row if chunks > 1 else max(HALF_BYTES * row, hidden)
        backward, activations = max(logits + next_to_logits, STATE_BYTES * row + hidden), self.kept
        if chunks > 1:
            # Add the chunk's input in bf16, the gradients of the inputs of earlier chunks, and the weight's gradient.
            activations += HALF_BYTES * width * chunk + HIDDEN_BYTES * width * (self._tokens - 2 * chunk)
            backward += STATE_BYTES * row
        return Moment(
            copies=self._saved.outer_copies + self._kept_blocks * self._saved.block_copies,
            activations=activations,
            backward=backward,
        )

    @property
    def block(self) -> Moment:
        """The backward pass of the last block.

        At this moment, the activations of all blocks are alive or, with `recompute_blocks`, the activations of one
        recomputed block and the inputs of all other blocks.
        """
        blocks, gradients = self._kept_blocks, HIDDEN_BYTES + OUTPUT_GRADIENT_BYTES
        width = self._local * self._model.emb_dim  # each tensor shard has a gradient of the whole sequence
        activations = blocks * self._block_bytes
        if self._options.recompute_blocks:
            blocks, gradients = 1, HIDDEN_BYTES + OUTPUT_BYTES
            activations = self._block_bytes + (self._model.n_layers - 1) * self._inputs
        return Moment(
            copies=blocks * self._saved.block_copies,
            activations=activations,
            # The gradient of a tied head stays in memory until the embedding's gradient is added to it, after the
            # backward pass of all blocks.
            backward=gradients * width * self._tokens + STATE_BYTES * self._row * self._model.tie_weights,
        )

    @property
    def end(self) -> Moment:
        """The backward pass of the embeddings, when the gradients of all weights exist."""
        rows = 1 + self._model.tie_weights
        return Moment(copies=0, activations=0, backward=STATE_BYTES * rows * self._row + self._hidden, end=True)

    @property
    def idle(self) -> int:
        """Memory that is lost because torch's allocator cannot use it for both the logits and a block's activations.

        With `recompute_blocks`, both are allocated and freed in the gaps between the kept inputs of blocks, and neither
        fits well into the memory that the other has freed.
        """
        logits = self._logits(-(-self._tokens // self._options.loss_chunks))
        return min(logits, self._block_bytes) if self._options.recompute_blocks else 0

    def _logits(self, tokens: int) -> int:
        softcap = 0 if self._model.logit_softcap is None else SOFTCAP_BYTES * self._model.vocab_size
        return (LOGIT_BYTES * self._model.padded_vocab_size + softcap) * tokens // self._ranks


@attrs.frozen
class Prediction:
    """The bytes on one rank at the peak of a run's steps."""

    parts: dict[str, int]  # name of a part of the memory, as in docs/memory.md -> its bytes

    @property
    def allocated(self) -> int:
        """The predicted torch.cuda.max_memory_allocated()."""
        return self.reserved - self.parts["fragmentation"]

    @property
    def reserved(self) -> int:
        """An upper bound on torch.cuda.max_memory_reserved()."""
        return self.total - self.parts["outside"]

    @property
    def total(self) -> int:
        """The memory that the GPU must have."""
        return sum(self.parts.values())


@attrs.frozen(kw_only=True)
class MemoryModel:
    """The settings of a run that determine its memory."""

    model: ModelConfig
    parallel: str = "ddp"  # as in train.json
    tensor: tuple[int, int] = (1, 1)  # number of tensor shards, and number of ranks that share them
    world_size: int = 1
    options: MemoryOptions = PLAIN
    optimizer: str = "adamw"  # as in train.json
    determinism: str = "off"
    accumulation: int = 2  # micro-batches per step on a rank, unless global_batch_size is set
    global_batch_size: int | None = None  # in sequences; None: `accumulation` applies

    @classmethod
    def of(cls, model: ModelConfig, train: TrainConfig, world_size: int) -> "MemoryModel":
        """Return the memory model of a run on a GPU."""
        return cls(
            model=model,
            parallel=train.execution.parallel,
            tensor=(train.execution.shards, train.execution.tensor_parallel),
            world_size=world_size,
            options=train.memory,
            optimizer=train.optimization.optimizer,
            determinism=train.execution.determinism or "off",  # null means off on a GPU
            accumulation=train.batch.gradient_accumulation_steps or 1,
            global_batch_size=train.batch.global_batch_size,
        )

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks. If several ranks share each layer, they count as one data-parallel rank."""
        return -(-self.world_size // self.tensor[1])

    @property
    def sharded(self) -> bool:
        """Whether FSDP divides the weights. A single rank is not wrapped in FSDP."""
        return self.shards > 1

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP divides the weights. If ranks share layers, FSDP divides each rank's part."""
        node = max(1, NODE_GPUS // self.tensor[1]) if self.parallel == "hsdp" else self.data_parallel
        return 1 if self.parallel == "ddp" else min(self.data_parallel, node)

    def predict(self, size: int) -> Prediction:
        """Return the bytes at the peak of a run's steps, with micro-batches of `size` sequences."""
        saved = network_sizes(self.model, *self.tensor)
        batch, microbatches = BatchMemory(self, saved, size), self.microbatches_at(size)
        idle = batch.idle
        if self.sharded and self.options.recompute_blocks:  # FSDP's buffers are allocated between the kept inputs
            idle += STATE_BYTES * (2 * saved.outer_parameters + self._group_parameters(saved))
        moments = (batch.head, batch.block, batch.end)
        predictions = [self._prediction(saved, microbatches, moment, idle) for moment in moments]
        return max(predictions, key=lambda prediction: prediction.total)

    def accumulation_at(self, microbatch_size: int) -> int:
        """Return the number of micro-batches per step on the rank that has the most."""
        return longest_share(self.microbatches_at(microbatch_size), self.data_parallel)

    def microbatches_at(self, microbatch_size: int) -> int:
        """Return the number of micro-batches per step.

        If the global batch cannot be divided into micro-batches of this size, all ranks are assumed to have the same
        number of micro-batches, rounded up.
        """
        batch, ranks = self.global_batch_size, self.data_parallel
        if batch is None:
            return self.accumulation * ranks
        if batch % microbatch_size or batch < microbatch_size * ranks:
            return -(-batch // (microbatch_size * ranks)) * ranks
        return batch // microbatch_size

    def _prediction(self, saved: NetworkSizes, microbatches: int, moment: Moment, idle: int) -> Prediction:
        weights = STATE_BYTES * saved.parameters(self.model.n_layers)
        has_gradients = self._has_gradients(longest_share(microbatches, self.data_parallel), moment)
        shard = weights // self.shards
        parts = {
            "weights": shard,
            "gradients": weights if has_gradients else shard * moment.end,
            # Partial sums of gradients
            "sums": weights * most_held_sums(self.determinism, microbatches, self.data_parallel),
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
        """Return the bytes of the weights that FSDP gathers.

        Without recompute_blocks, the gathered weights of blocks belong to `Moment.copies`, and are not counted here.
        """
        # With recompute_blocks, one group of blocks is in use and the next is fetched in advance, both in bf16.
        blocks = 2 * HALF_BYTES * self._group_parameters(saved) if self.options.recompute_blocks else 0
        return STATE_BYTES * saved.outer_parameters + blocks

    def _group_parameters(self, saved: NetworkSizes) -> int:
        return saved.block_parameters * group_length(saved.block_parameters, self.model.n_layers)

    def _has_gradients(self, accumulation: int, moment: Moment) -> bool:
        """Return whether a rank has complete gradients in memory, in addition to partial sums of gradients."""
        if self.sharded:  # until the last micro-batch, FSDP accumulates full gradients, not shards
            return self.determinism == "off" and accumulation > 1
        if self.data_parallel > 1:  # DDP's buckets contain all gradients
            return True
        return moment.end or (self.determinism == "off" and accumulation > 1)

    def largest_microbatch(self, usable_bytes: int) -> int | None:
        """Return the largest micro-batch that fits, in sequences, or None if not even one sequence fits."""
        # Without accumulation, a larger micro-batch always needs more memory. With accumulation, it may need less,
        # because a step of larger micro-batches has fewer partial sums.
        least = attrs.evolve(self, determinism="off", accumulation=1, global_batch_size=None)
        too_large = 1
        while least.predict(too_large).total <= usable_bytes:
            too_large *= 2
        limit = bisect.bisect_right(range(1, too_large), usable_bytes, key=lambda size: least.predict(size).total)
        return next((size for size in range(limit, 0, -1) if self.predict(size).total <= usable_bytes), None)

    def remedies(self, usable_bytes: int | None = None) -> str:
        """Return advice on how to fit at least one sequence: settings, and the smallest GPU that is large enough.

        Settings are suggested only if `usable_bytes`, the memory of the GPU, is given.
        """
        ways, plain = [], attrs.evolve(self, options=PLAIN)
        sharded, fsdp = attrs.evolve(plain, parallel="fsdp"), "--set parallel=fsdp"
        if usable_bytes is not None:
            if self.parallel == "ddp" and self.data_parallel > 1 and sharded.largest_microbatch(usable_bytes):
                ways.append(fsdp)
            thrifty = f"--set loss_chunks={THRIFTY.loss_chunks} --set recompute_blocks=true"
            if attrs.evolve(self, options=THRIFTY).largest_microbatch(usable_bytes):
                ways.append(thrifty)
            elif not ways and attrs.evolve(sharded, options=THRIFTY).largest_microbatch(usable_bytes):
                ways.append(f"{fsdp} {thrifty}")
            length = self.model.context_length
            for tokens in (length >> power for power in range(1, length.bit_length())):
                shorter = attrs.evolve(plain, model=attrs.evolve(self.model, context_length=tokens))
                if tokens % self.tensor[0] == 0 and shorter.largest_microbatch(usable_bytes):
                    ways.append(f"--set model.context_length={tokens}")
                    break
        cards = sorted(known_gpus().values(), key=lambda gpu: gpu.memory_gib)
        large_names = (card.name for card in cards if plain.largest_microbatch(gpu_bytes(card)))
        ways += [f"{name} or a larger GPU" for name in itertools.islice(large_names, 1)]
        return f"predicted to fit: {', or '.join(ways or ['a smaller model'])}"


def outside_bytes(world_size: int) -> int:
    """Return the memory of a rank outside torch's allocator, in bytes: CUDA's context and NCCL's buffers."""
    return CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0)


def gpu_bytes(gpu: Gpu) -> int:
    """Return the memory of a GPU that a run may use, in bytes: all of it except the headroom."""
    return int((1 - HEADROOM) * gpu.memory_gib * GIB)
