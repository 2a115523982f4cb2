"""Moments of a training step at which memory can peak, and the tensors alive at each, as torch's allocator showed.

Seen in torch.cuda.memory._snapshot() under a CUDA driver that computes nothing; tests/cuda/test_memory_prediction.py
compares the predictions with its peaks. Bytes are those of one rank in bf16, compiled.
"""

import attrs

from model.config import ModelConfig
from training.config.key_groups import MemoryOptions
from training.planning.network_sizes import NetworkSizes

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

    def __init__(self, model: ModelConfig, options: MemoryOptions, saved: NetworkSizes, sequences: int):
        self._model, self._options, self._saved = model, options, saved
        self._tokens = sequences * model.context_length
        self._row = model.padded_vocab_size * model.emb_dim
        self._hidden = HIDDEN_BYTES * model.emb_dim * self._tokens
        self._whole_blocks = 0 if options.recompute_blocks else model.n_layers  # their insides are kept
        self._block_bytes, self._outer_bytes = sequences * saved.block_bytes, sequences * saved.outer_bytes

    @property
    def kept(self) -> int:
        """Activations that the forward pass keeps for the backward pass."""
        inputs = self._model.n_layers * self._hidden if self._options.recompute_blocks else 0
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
        activations = blocks * self._block_bytes
        if self._options.recompute_blocks:
            blocks, gradients = 1, HIDDEN_BYTES + OUTPUT_BYTES
            activations = self._block_bytes + (self._model.n_layers - 1) * self._hidden
        return Moment(
            copies=blocks * self._saved.block_copies,
            activations=activations,
            # A tied head's gradient waits for the embedding's until the blocks are done.
            backward=gradients * self._model.emb_dim * self._tokens + STATE_BYTES * self._row * self._model.tie_weights,
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
        return (LOGIT_BYTES * self._model.padded_vocab_size + softcap) * tokens
