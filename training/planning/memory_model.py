"""How much of a GPU a run will hold: predicted from what the network saves for its backward pass, without a GPU.

The real forward pass runs on torch's meta device, where tensors have shapes and no memory. B micro-batch in sequences,
T context, C width, V rows of the embedding in memory, W world size, N parameters.
"""

import bisect
import functools
import itertools
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from model.config import ModelConfig
from model.gpt import GPT
from training.config.train_config import Thrift
from training.hardware.gpus import Gpu, known_gpus

GIB = 1 << 30
HEADROOM = 0.05  # of a GPU's memory that a run is to leave
PLAIN, THRIFTY = Thrift(), Thrift(loss_chunks=8, recompute_blocks=True)
CALIBRATION = "uncalibrated: not compared with a GPU yet"  # what every prediction is shown with

STATE_BYTES = 4  # of a weight and of a gradient, fp32
MOMENT_BYTES = 4  # of a parameter; AdamW has two moments, Muon one
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
        """What torch.cuda.max_memory_allocated() will say."""
        return self.total - self.fragmentation - self.outside

    @property
    def total(self) -> int:
        """What the card has to have."""
        return sum(attrs.astuple(self))


def predict(
    config: ModelConfig, kind: str, world_size: int, microbatch_size: int, thrift: Thrift = PLAIN
) -> Prediction:
    """Return what a rank will hold: bf16, compiled, determinism off, at least two micro-batches a step.

    `kind`: "ddp" or "fsdp".
    """
    saved = _measure(config)
    tokens = microbatch_size * config.context_length
    block_backward = BLOCK_BACKWARD_BYTES * config.emb_dim * tokens
    fsdp = kind == "fsdp"
    shards = world_size if fsdp else 1
    parameters = saved.outer_parameters + config.n_layers * saved.block_parameters
    parts = {
        "weights": STATE_BYTES * parameters // shards,
        # FSDP adds up whole gradients, not shards, until the last micro-batch reduces them.
        "gradients": STATE_BYTES * parameters,
        "optimizer": MOMENT_BYTES * _moment_count(config, saved, thrift) // shards,
        "buckets": _bucket_bytes(saved, parameters, kind, world_size),
        **_kept(config, saved, tokens, thrift),
        "logits": max(_logit_bytes(config, tokens, thrift), block_backward + _tied_bytes(config)),
    }
    fragmentation = int(FRAGMENTATION * sum(parts.values()))
    return Prediction(**parts, fragmentation=fragmentation, outside=outside_bytes(world_size))


def outside_bytes(world_size: int) -> int:
    """Return what a rank needs of a GPU beside torch's allocator."""
    return CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0)


def largest_microbatch(
    config: ModelConfig, kind: str, world_size: int, usable_bytes: int, thrift: Thrift = PLAIN
) -> int | None:
    """Return how many sequences of a forward pass fit, or None where not even one does."""

    def needed(size: int) -> int:
        return predict(config, kind, world_size, size, thrift).total

    beyond = 1
    while needed(beyond) <= usable_bytes:
        beyond *= 2
    return bisect.bisect_right(range(1, beyond), usable_bytes, key=needed) or None


def saved_bytes(network: GPT, microbatch_size: int) -> int:
    """Return the bytes that a forward pass saves for the backward pass, each memory counted once, no parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # holding them keeps their addresses from being used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    device = network.token_embedding.weight.device
    tokens = torch.zeros(microbatch_size, network.config.context_length, dtype=torch.int64, device=device)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        network(tokens)
    return sum(storage.nbytes() for storage in saved.values())


def gpu_bytes(gpu: Gpu) -> int:
    """Return the memory of a GPU, headroom off."""
    return int((1 - HEADROOM) * gpu.memory_gib * GIB)


def remedies(
    config: ModelConfig, kind: str, world_size: int, usable_bytes: int | None = None, *, muon: bool = False
) -> str:
    """Return what would make one sequence fit, by prediction; in so much memory, where that is known."""
    ways, plain = [], Thrift(muon=muon)
    fsdp = "--set parallel=fsdp" + (" --set optimizer=adamw" if muon else "")
    if usable_bytes is not None:
        if kind == "ddp" and world_size > 1 and largest_microbatch(config, "fsdp", world_size, usable_bytes):
            ways.append(fsdp)
        thrifty = f"--set loss_chunks={THRIFTY.loss_chunks} --set recompute_blocks=true"
        if largest_microbatch(config, kind, world_size, usable_bytes, attrs.evolve(THRIFTY, muon=muon)):
            ways.append(thrifty)
        elif not ways and largest_microbatch(config, "fsdp", world_size, usable_bytes, THRIFTY):
            ways.append(f"{fsdp} {thrifty}")
        halves = (config.context_length >> power for power in range(1, config.context_length.bit_length()))
        shorter = (attrs.evolve(config, context_length=tokens) for tokens in halves)
        fitting = (short for short in shorter if largest_microbatch(short, kind, world_size, usable_bytes, plain))
        ways += [f"--set model.context_length={short.context_length}" for short in itertools.islice(fitting, 1)]
    cards = sorted(known_gpus().values(), key=lambda gpu: gpu.memory_gib)
    large = (card.name for card in cards if largest_microbatch(config, kind, world_size, gpu_bytes(card), plain))
    ways += [f"a {card} or larger" for card in itertools.islice(large, 1)]
    return f"what would, by prediction: {', or '.join(ways or ['a smaller model'])}"


@attrs.frozen(kw_only=True)
class _Saved:
    """What one block, and all that is outside the blocks, has and saves."""

    outer_parameters: int
    block_parameters: int
    outer_copies: int  # bytes whatever the micro-batch
    block_copies: int
    outer_bytes: int  # of each sequence
    block_bytes: int


def _moment_count(config: ModelConfig, saved: _Saved, thrift: Thrift) -> int:
    """Return the elements of all moments."""
    parameters = saved.outer_parameters + config.n_layers * saved.block_parameters
    matrices = 12 * config.n_layers * config.emb_dim**2  # in the blocks: what Muon takes
    return 2 * parameters - (matrices if thrift.muon else 0)


def _kept(config: ModelConfig, saved: _Saved, tokens: int, thrift: Thrift) -> dict[str, int]:
    """Return the bytes of weights in bf16 and of activations when the backward pass needs the most of them."""
    sequences, hidden = tokens // config.context_length, HIDDEN_BYTES * config.emb_dim * tokens
    blocks = 1 if thrift.recompute_blocks else config.n_layers  # whose insides are there at a time
    activations = sequences * (saved.outer_bytes + blocks * saved.block_bytes)
    if thrift.recompute_blocks:
        activations += config.n_layers * hidden
    if thrift.loss_chunks > 1:
        activations += hidden // 2  # what the head takes, in fp32 now
    return {"copies": saved.outer_copies + blocks * saved.block_copies, "activations": activations}


def _bucket_bytes(saved: _Saved, parameters: int, kind: str, world_size: int) -> int:
    """Return the bytes of gradients and gathered weights on their way between ranks."""
    if kind == "fsdp":
        # Embeddings and head stay gathered through a step; of the blocks one is used and one fetched ahead, each in
        # the all-gather's buffer and copied out of it.
        return STATE_BYTES * (saved.outer_parameters + 4 * saved.block_parameters)
    # Later gradients are views of DDP's buckets. In the first two steps there is a second copy: gradients that
    # no_sync() adds up before DDP has them, then the first bucket, of all parameters, beside those that replace it.
    return STATE_BYTES * parameters if world_size > 1 else 0


def _logit_bytes(config: ModelConfig, tokens: int, thrift: Thrift) -> int:
    if thrift.loss_chunks == 1:
        return config.padded_vocab_size * (LOGIT_BYTES * tokens + HEAD_BYTES * config.emb_dim)
    chunk = -(-tokens // thrift.loss_chunks)
    return config.padded_vocab_size * (LOGIT_BYTES * chunk + (HEAD_BYTES + CHUNK_SUM_BYTES) * config.emb_dim)


def _tied_bytes(config: ModelConfig) -> int:
    """Return the bytes of a tied head's gradient, which waits for the embedding's until the blocks are done."""
    return STATE_BYTES * config.padded_vocab_size * config.emb_dim if config.tie_weights else 0


@functools.cache
def _measure(config: ModelConfig) -> _Saved:
    """Measure what is linear in layers and in sequences, at one and two of each."""
    counts, sizes = {}, {}
    for layers in (1, 2):
        with torch.device("meta"), _AsOnAGpu():
            network = GPT(attrs.evolve(config, n_layers=layers))
            sizes[layers] = [saved_bytes(network, microbatch_size) for microbatch_size in (1, 2)]
        counts[layers] = sum(parameter.numel() for parameter in network.parameters())
    each = {layers: two - one for layers, (one, two) in sizes.items()}
    fixed = {layers: 2 * one - two for layers, (one, two) in sizes.items()}
    return _Saved(
        outer_parameters=2 * counts[1] - counts[2],
        block_parameters=counts[2] - counts[1],
        outer_copies=2 * fixed[1] - fixed[2],
        block_copies=fixed[2] - fixed[1],
        outer_bytes=2 * each[1] - each[2],
        block_bytes=each[2] - each[1],
    )


class _AsOnAGpu(TorchFunctionMode):
    """Makes operations on meta tensors save what they save on a GPU under bf16 autocast.

    The meta device knows no autocast, and would compute attention by its formula, with a T x T matrix. Flash attention
    and cuDNN's save queries, keys, values, their output and a log-sum in fp32 of each row. Weights stay unfilled: to
    "fill" them there would import torch's compiler, for a second.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.normal_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        if function is F.linear:
            args = [None if value is None else value.to(torch.bfloat16) for value in args]
        elif function is F.scaled_dot_product_attention:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(*args, kwargs["dropout_p"], kwargs["is_causal"])[0]
        elif function is F.dropout and kwargs["p"] > 0:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # its mask takes a byte an element
        return function(*args, **kwargs)
