"""Memory model: the GPU memory of a run, predicted without a GPU from the tensors saved for the backward pass.

Memory peaks at one of three moments of a step. The tensors alive at each were seen in torch.cuda.memory._snapshot()
under a CUDA driver that computes nothing; tests/cuda/test_memory_prediction.py compares the predictions with its peaks.
Bytes are those of one rank in bf16, compiled.
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
NODE_GPUS = 8  # of a node, at most, over which HSDP shards
HEADROOM = 0.05  # share of a GPU's memory that a run leaves free
PLAIN, THRIFTY = MemoryOptions(), MemoryOptions(loss_chunks=8, recompute_blocks=True)
CALIBRATION = "calibrated on torch's allocator, met on one H200"  # shown with every prediction

WORKSPACE_BYTES = 2 * (32 << 20)  # of cuBLAS on Hopper, for the threads of the forward and of the backward pass
# CUDA's context and libraries: on one H200, torch 2.11, driver 580.159.04, by benchmarks/outside_memory.py. NCCL's
# buffers: assumed, until that has run on several GPUs.
CONTEXT_BYTES = int(1.3 * GIB)
NCCL_BYTES = int(0.4 * GIB)
# Of what is allocated: what the allocator cannot use, with the expandable segments that common/script.py sets.
FRAGMENTATION = 0.03

STATE_BYTES = 4  # of a weight, of a gradient and of its partial sums: fp32
HALF_BYTES = 2  # of the same in bf16, as matrix products take weights and give gradients
# Per token and row of the embedding: bf16 logits, over which their gradient is written. The compiled head and loss hold
# nothing in fp32 at this size.
LOGIT_BYTES = 2
SOFTCAP_BYTES = 4  # per token and row of the vocabulary: compiled, a softcap keeps its tanh in fp32
HIDDEN_BYTES = 4  # per token and C: the input of a block or of the head in fp32, and its gradient
OUTPUT_GRADIENT_BYTES = 2  # per token and C: the gradient of a block's output, in bf16
OUTPUT_BYTES = 6  # per token and C of a block that was run again: its output in fp32 and the MLP's in bf16


@attrs.frozen(kw_only=True)
class Moment:
    """Bytes alive beside weights, optimizer state and reduced gradients."""

    copies: int  # weights in bf16, saved for the backward pass
    activations: int
    backward: int  # logits of a chunk, gradients in flight
    end: bool = False  # of the backward pass: this micro-batch's own gradients are there


class BatchMemory:
    """Work between two moments: so many sequences through a network."""

    def __init__(self, memory: "MemoryModel", saved: NetworkSizes, sequences: int):
        self._model, self._options, self._saved, model = memory.model, memory.options, saved, memory.model
        shards, self._ranks = memory.tensor
        self._local = shards // self._ranks
        self._tokens = sequences * model.context_length
        self._row = model.padded_vocab_size // self._ranks * model.emb_dim
        self._hidden = HIDDEN_BYTES * model.emb_dim * self._tokens
        self._inputs = self._hidden // self._ranks  # of a block
        self._whole_blocks = 0 if memory.options.recompute_blocks else model.n_layers  # their insides are kept
        self._block_bytes, self._outer_bytes = sequences * saved.block_bytes, sequences * saved.outer_bytes

    @property
    def kept(self) -> int:
        """Activations that the forward pass keeps for the backward pass."""
        inputs = self._model.n_layers * self._inputs if self._options.recompute_blocks else 0
        head = self._hidden // 2 if self._options.loss_chunks > 1 else 0  # its whole input in fp32, not in bf16
        return self._outer_bytes + inputs + self._whole_blocks * self._block_bytes + head

    @property
    def head(self) -> Moment:
        """Loss, and backward pass of the head: all activations and a chunk's logits."""
        chunks, row, width = self._options.loss_chunks, self._row, self._model.emb_dim
        chunk = -(-self._tokens // chunks)
        hidden = HIDDEN_BYTES * width * chunk
        # The forward pass holds the head's input in fp32, the backward pass the weight's gradient in bf16; then, when
        # the logits are gone, in fp32, beside the input's.
        logits = self._logits(chunk)
        held = HALF_BYTES * row if chunks > 1 else max(HALF_BYTES * row, hidden)
        backward, activations = max(logits + held, STATE_BYTES * row + hidden), self.kept
        if chunks > 1:  # the chunk's input in bf16, the gradients of the chunks before, and the weight's
            activations += HALF_BYTES * width * chunk + HIDDEN_BYTES * width * (self._tokens - 2 * chunk)
            backward += STATE_BYTES * row
        return Moment(
            copies=self._saved.outer_copies + self._whole_blocks * self._saved.block_copies,
            activations=activations,
            backward=backward,
        )

    @property
    def block(self) -> Moment:
        """Backward pass of the last block: all blocks' activations, or one's that was run again."""
        blocks, gradients = self._whole_blocks, HIDDEN_BYTES + OUTPUT_GRADIENT_BYTES
        width = self._local * self._model.emb_dim  # each tensor shard has a gradient of the whole sequence
        activations = blocks * self._block_bytes
        if self._options.recompute_blocks:
            blocks, gradients = 1, HIDDEN_BYTES + OUTPUT_BYTES
            activations = self._block_bytes + (self._model.n_layers - 1) * self._inputs
        return Moment(
            copies=blocks * self._saved.block_copies,
            activations=activations,
            # A tied head's gradient waits for the embedding's until the blocks are done.
            backward=gradients * width * self._tokens + STATE_BYTES * self._row * self._model.tie_weights,
        )

    @property
    def end(self) -> Moment:
        """Backward pass of the embeddings: gradients of all weights."""
        rows = 1 + self._model.tie_weights
        return Moment(copies=0, activations=0, backward=STATE_BYTES * rows * self._row + self._hidden, end=True)

    @property
    def idle(self) -> int:
        """Memory that torch's allocator holds for logits or a block's insides while it computes the other.

        With `recompute_blocks` both come and go beside the inputs of blocks, and fit into each other's place badly.
        """
        logits = self._logits(-(-self._tokens // self._options.loss_chunks))
        return min(logits, self._block_bytes) if self._options.recompute_blocks else 0

    def _logits(self, tokens: int) -> int:
        softcap = 0 if self._model.logit_softcap is None else SOFTCAP_BYTES * self._model.vocab_size
        return (LOGIT_BYTES * self._model.padded_vocab_size + softcap) * tokens // self._ranks


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
    model: ModelConfig
    parallel: str = "ddp"  # as in train.json
    tensor: tuple[int, int] = (1, 1)  # shards of a layer, ranks that they lie on
    world_size: int = 1
    options: MemoryOptions = PLAIN
    optimizer: str = "adamw"  # as in train.json
    determinism: str = "off"
    accumulation: int = 2  # micro-batches a step on a rank
    global_batch_size: int | None = None  # sequences; the micro-batch then determines the accumulation

    @classmethod
    def of(cls, model: ModelConfig, train: TrainConfig, world_size: int) -> "MemoryModel":
        return cls(
            model=model,
            parallel=train.execution.parallel,
            tensor=(train.execution.shards, train.execution.tensor_parallel),
            world_size=world_size,
            options=train.memory,
            optimizer=train.optimization.optimizer,
            determinism=train.execution.determinism or "off",  # what null means on a GPU
            accumulation=train.batch.gradient_accumulation_steps or 1,
            global_batch_size=train.batch.global_batch_size,
        )

    @property
    def data_parallel(self) -> int:
        """Number of ranks, or groups that share each layer, with batches of their own."""
        return -(-self.world_size // self.tensor[1])

    @property
    def sharded(self) -> bool:
        """True if FSDP divides the weights; one rank is not wrapped."""
        return self.shards > 1

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP divides the weights, or a tensor rank's part of them."""
        node = max(1, NODE_GPUS // self.tensor[1]) if self.parallel == "hsdp" else self.data_parallel
        return 1 if self.parallel == "ddp" else min(self.data_parallel, node)

    def predict(self, size: int) -> Prediction:
        """Return the bytes at the peak of a run's steps; `size`: of the micro-batch."""
        saved = network_sizes(self.model, *self.tensor)
        batch, microbatches = BatchMemory(self, saved, size), self.microbatches_at(size)
        idle = batch.idle
        if self.sharded and self.options.recompute_blocks:  # its buffers lie between kept inputs
            idle += STATE_BYTES * (2 * saved.outer_parameters + self._group_parameters(saved))
        moments = (batch.head, batch.block, batch.end)
        predictions = [self._prediction(saved, microbatches, moment, idle) for moment in moments]
        return max(predictions, key=lambda prediction: prediction.total)

    def accumulation_at(self, microbatch_size: int) -> int:
        """Return the micro-batches a step on a rank, at most."""
        return longest_share(self.microbatches_at(microbatch_size), self.data_parallel)

    def microbatches_at(self, microbatch_size: int) -> int:
        """Return the micro-batches a step; where they do not make up the global batch, as many on each rank."""
        batch, ranks = self.global_batch_size, self.data_parallel
        if batch is None:
            return self.accumulation * ranks
        if batch % microbatch_size or batch < microbatch_size * ranks:
            return -(-batch // (microbatch_size * ranks)) * ranks
        return batch // microbatch_size

    def _prediction(self, saved: NetworkSizes, microbatches: int, moment: Moment, idle: int) -> Prediction:
        weights = STATE_BYTES * saved.parameters(self.model.n_layers)
        holds_gradients = self._holds_gradients(longest_share(microbatches, self.data_parallel), moment)
        shard = weights // self.shards
        parts = {
            "weights": shard,
            "gradients": weights if holds_gradients else shard * moment.end,
            "sums": weights * most_held_sums(self.determinism, microbatches, self.data_parallel),  # of gradients
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
        return saved.block_parameters * group_length(saved.block_parameters, self.model.n_layers)

    def _holds_gradients(self, accumulation: int, moment: Moment) -> bool:
        """Tell whether a rank holds whole gradients, beside those in partial sums."""
        if self.sharded:  # adds up whole ones, not shards, until the last micro-batch reduces them
            return self.determinism == "off" and accumulation > 1
        if self.data_parallel > 1:  # in DDP's buckets
            return True
        return moment.end or (self.determinism == "off" and accumulation > 1)

    def largest_microbatch(self, usable_bytes: int) -> int | None:
        """Return the largest micro-batch that fits, in sequences, or None where not even one does."""
        # Without accumulation a larger micro-batch always needs more; with it, a step has more sums of smaller ones.
        least = attrs.evolve(self, determinism="off", accumulation=1, global_batch_size=None)
        beyond = 1
        while least.predict(beyond).total <= usable_bytes:
            beyond *= 2
        most = bisect.bisect_right(range(1, beyond), usable_bytes, key=lambda size: least.predict(size).total)
        return next((size for size in range(most, 0, -1) if self.predict(size).total <= usable_bytes), None)

    def remedies(self, usable_bytes: int | None = None) -> str:
        """Return settings, and the smallest GPU, with which one sequence fits; settings only with `usable_bytes`."""
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
        large = (card.name for card in cards if plain.largest_microbatch(gpu_bytes(card)))
        ways += [f"{card} or a larger GPU" for card in itertools.islice(large, 1)]
        return f"predicted to fit: {', or '.join(ways or ['a smaller model'])}"


def outside_bytes(world_size: int) -> int:
    """Return a rank's memory outside torch's allocator: CUDA's context, NCCL's buffers."""
    return CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0)


def gpu_bytes(gpu: Gpu) -> int:
    """Return the memory of a GPU, less headroom."""
    return int((1 - HEADROOM) * gpu.memory_gib * GIB)
