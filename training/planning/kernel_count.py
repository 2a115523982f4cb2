"""Count the kernels of a forward and a backward pass, and the bytes that they save and move, on torch's meta device.

On the meta device, tensors have shapes but no memory. The bytes are counted as for bf16 autocast with compiled blocks
on a GPU: matrix products and attention are kernels from libraries, and everything else is fused (`Kernels`).

T context length, C embedding width.
"""

from collections import Counter
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import BadInput
from model.config import ModelConfig
from model.counts import meta_network
from model.shards import ShardedGPT, ShardExchange

COLLECTIVE = "collective"
# An operator is a kernel from a library if its name starts with one of these words.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", COLLECTIVE)
# If the name of an operator contains one of these words, its output is kept, because a compiler does not recompute it.
REDUCTIONS = ("norm", "softmax", "sum", "mean", "dropout")
SUMMED_ROWS = 16  # a sum over at least this many rows is assumed to be a bias gradient or a statistic of a norm


def count_kernels(config: ModelConfig, shards: int, local: int, *, compiled: bool) -> "Kernels":
    """Return the kernels of one sequence's forward and backward pass, on a rank with `local` of `shards` tensor shards.

    Raises BadInput if the network cannot run on the meta device, or if its attention is not causal.
    """

    def exchanged(tensor: Tensor, *shape: int) -> Tensor:
        output = tensor.new_empty(shape)
        kernels.launch(COLLECTIVE, (kernels.value(tensor),), [output])
        return output

    def run_block(block: Any, x: Any, *arguments: Any) -> Any:
        kernels.cross(x, into_block=True)
        output = block(x, *arguments)
        kernels.cross(output, into_block=False)
        for piece in tensors_in(output):
            piece.register_hook(lambda gradient: kernels.cross(gradient, into_block=True))
        for piece in tensors_in(x):
            piece.register_hook(lambda gradient: kernels.cross(gradient, into_block=False))
        return output

    exchange = ShardExchange(
        shards=shards,
        local_shards=range(local),
        all_gather=lambda pieces: exchanged(pieces.to(torch.bfloat16), shards, *pieces.shape[1:]),
        all_to_all=lambda parts: exchanged(parts, *parts.shape),
    )
    network = meta_network(config) if shards == 1 else ShardedGPT(config, exchange)
    kernels = Kernels(network, compiled)
    try:
        with torch.device("meta"), _AsOnAGpu(kernels), kernels:
            tokens = torch.zeros(1, config.context_length, dtype=torch.int64)
            kernels.cross(tokens, into_block=False)
            hidden = tensors_in(network.hidden(tokens, recompute=run_block))
            heads = zip(hidden, network.shards if isinstance(network, ShardedGPT) else [network], strict=True)
            logits = [F.linear(x, module.output_weight()) for x, module in heads]
            kernels.backward = True
            gradients = [torch.empty_like(shard_logits) for shard_logits in logits]
            kernels.cross(gradients, into_block=False)
            torch.autograd.backward(logits, gradients)
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(
            f"model.json: this network cannot be planned, because it does not run on torch's meta device: {reason}"
        ) from error
    finally:
        network.zero_grad()
    return kernels


@attrs.define(eq=False)
class _Value:
    """A piece of memory that the passes use, and the kernel that writes it."""

    tensor: Tensor
    of_tokens: bool  # its size is proportional to the micro-batch
    # The fused kernel that writes this value, as (backward, in a block, level). None if the value is an input, or if a
    # kernel from a library writes it.
    kernel: tuple[bool, bool, int] | None
    level: int = 0  # number of matrix products on the longest path from the inputs to this value
    backward: bool = False
    in_block: bool = False
    inputs: tuple["_Value", ...] = ()
    kind: Literal["reduction", "spread"] | None = None  # "spread" is a copy with repeated elements
    stored: bool = False

    @property
    def bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    @property
    def available(self) -> bool:
        """Whether another kernel can read this value from memory."""
        return self.kernel is None or self.stored


class Kernels(TorchDispatchMode):
    """A model of torch.compile: all operators between two matrix products are fused into one kernel.

    A fused kernel reads and writes each piece of memory only once. Later kernels, and the backward pass, read a value
    from memory only if a matrix product also reads this value, or if computing it involves a reduction. All other
    values are computed again from values in memory, and so are copies in which elements are repeated. A tensor is cast
    only once. These rules determine which tensors are saved for the backward pass. The statistics of a norm over heads
    are not saved.
    """

    def __init__(self, network: nn.Module, compiled: bool):
        super().__init__()
        self.compiled = compiled  # if false, the passes save what PyTorch's autograd saves
        self.backward = self.in_block = False
        # Saved bytes, by place ("block" or "outer") and by size ("sequences" if they grow with the micro-batch,
        # otherwise "fixed")
        self.saved: Counter[tuple[str, str]] = Counter()
        self.moved: Counter[str] = Counter()  # bytes that a block moves
        self.attention_width = 0
        self._parameters = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
        self._values: dict[int, _Value] = {}
        self._casts: dict[tuple[int, torch.dtype, bool], _Value] = {}
        self._uses: set[tuple[int, Any]] = set()
        self._alive: list[Tensor] = []  # references that keep addresses from being reused

    def cross(self, tensors: Any, *, into_block: bool) -> None:
        """Record that tensors cross the edge of a block. At the edge, every tensor is stored in memory."""
        for tensor in tensors_in(tensors):
            value = self.value(tensor)
            self._store(value)
            self._values[_address(tensor)] = _Value(
                tensor, True, None, value.level + 1, self.backward, self.in_block and not into_block
            )
        self.in_block = into_block

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        arguments = {_address(tensor): tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        outputs = [tensor for tensor in tensors_in(returned) if _address(tensor) not in arguments]
        self._alive += outputs
        if outputs and not name.startswith(("empty", "new_empty", "zeros")):
            inputs = tuple(map(self.value, arguments.values()))
            if name != "_to_copy" or not self.compiled:
                self.launch(name, inputs, outputs)
            elif (cast := self._casts.get((id(inputs[0]), outputs[0].dtype, self.backward))) is not None:
                self._values[_address(outputs[0])] = cast
            else:
                self.launch(name, inputs, outputs)
                self._casts[id(inputs[0]), outputs[0].dtype, self.backward] = self.value(outputs[0])
        return returned

    def launch(self, name: str, inputs: tuple[_Value, ...], outputs: list[Tensor]) -> None:
        """Record an operator that writes memory."""
        level = max((value.level for value in inputs if value.backward == self.backward), default=0)
        product, of_tokens = name.startswith(PRODUCTS), any(value.of_tokens for value in inputs)
        rows = max((value.tensor.numel() for value in inputs), default=0)
        if name in ("mm", "addmm") and all(value.of_tokens for value in inputs):
            of_tokens = False  # the gradient of a weight, summed over tokens
        if name == "sum" and outputs[0].numel() * SUMMED_ROWS < rows:
            of_tokens = False  # the gradient of a bias
        kernel = None if product else (self.backward, self.in_block, level)
        for value in inputs:
            if product or value.kernel != kernel:
                self._use(value, kernel)
        eager = not (self.backward or torch.is_grad_enabled())  # exchanges of tensor shards are not compiled
        for tensor in outputs:
            self._values[_address(tensor)] = _Value(
                tensor,
                of_tokens and tensor.dtype != torch.uint64,  # uint64: seeds of attention's dropout
                None if name == "native_dropout" else kernel,  # the mask of a dropout is kept
                level + product,
                self.backward,
                self.in_block,
                inputs,
                "reduction" if eager else _kind(name, inputs, tensor),
            )
        if self.in_block and kernel is not None and of_tokens:
            tensors = [value.tensor for value in inputs if value.of_tokens] + outputs
            # Statistics and sums are not counted, because they have few elements.
            large = (tensor for tensor in tensors if tensor.numel() * SUMMED_ROWS > rows and tensor.shape[-1:] != (1,))
            self.moved["separate"] += sum(tensor.nbytes for tensor in large)

    def _use(self, value: _Value, kernel: tuple[bool, bool, int] | None) -> None:
        """Record that a kernel reads a value that another kernel has computed.

        `kernel` is None for a library's kernel.
        """
        saved = self.backward and not value.backward
        if not value.of_tokens:
            if saved and _address(value.tensor) not in self._parameters:
                self._save(value, "fixed")
            return
        if kernel is None and not saved:
            self._store(value)
            return
        if value.kind == "spread" and saved and self.compiled:  # the backward pass recomputes it
            sources = [source for input_value in value.inputs for source in self._sources(input_value)]
        else:
            sources = self._sources(value)
        for source in sources:
            self._store(source)
            if saved:
                self._save(source, "sequences")
            if kernel is not None and self._is_first_use(source, kernel):
                self._move(source, self.in_block)

    def _sources(self, value: _Value) -> list[_Value]:
        """Return the values in memory from which a kernel computes this value."""
        if value.available or value.kind == "reduction" or not (self.compiled and value.in_block):
            return [value]
        inputs = [input_value for input_value in value.inputs if input_value.of_tokens]
        sources = [source for input_value in inputs for source in self._sources(input_value)]
        return sources if all(source.available for source in sources) else [value]

    def _store(self, value: _Value) -> None:
        if not value.available:
            value.stored = True
            self._move(value, value.in_block)

    def _move(self, value: _Value, in_block: bool) -> None:
        if in_block and value.of_tokens and value.tensor.shape[-1:] != (1,):  # statistics are not counted
            self.moved["fused"] += value.bytes

    def _save(self, value: _Value, proportional_to: str) -> None:
        statistic = value.tensor.dim() == 4 and value.tensor.shape[-1] == 1
        if self._is_first_use(value, "saved") and not (statistic and self.compiled):
            self.saved["block" if value.in_block else "outer", proportional_to] += value.bytes

    def _is_first_use(self, value: _Value, use: Any) -> bool:
        """Return whether this use of a value is new, and record the use."""
        first = (id(value), use) not in self._uses
        self._uses.add((id(value), use))
        return first

    def value(self, tensor: Tensor) -> _Value:
        """Return the `_Value` of a tensor's memory. A tensor that no operator has written counts as an input."""
        input_value = _Value(tensor, False, None, backward=self.backward, in_block=self.in_block)
        return self._values.setdefault(_address(tensor), input_value)


def _kind(name: str, inputs: tuple[_Value, ...], output: Tensor) -> Literal["reduction", "spread"] | None:
    if any(reduction in name for reduction in REDUCTIONS):
        return "reduction"
    elements = max((value.bytes // value.tensor.element_size() for value in inputs), default=0)
    return "spread" if name == "clone" and output.numel() > elements else None


class _AsOnAGpu(TorchFunctionMode):
    """Make operators on meta tensors behave as on a GPU under bf16 autocast.

    The meta device has no autocast, and it would compute attention with a complete T x T matrix. On a GPU, flash
    attention and cuDNN's attention save queries, keys, values, the output, and an fp32 log-sum for each row. Attention
    is refused unless every query attends to all earlier tokens, because the planner counts all earlier tokens.
    """

    def __init__(self, kernels: Kernels):
        super().__init__()
        self.kernels = kernels

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            args = [None if value is None else value.to(torch.bfloat16) for value in args]
        elif function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        elif function is F.rms_norm:
            return F.layer_norm(*args)  # a compiled LayerNorm saves no more than a compiled RMSNorm
        elif function is F.dropout and kwargs["p"] > 0:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # its mask takes one byte per element
        return function(*args, **kwargs)

    def _attention(self, queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        self.kernels.attention_width += queries.shape[1] * queries.shape[3]
        mask, causal = options.pop("attn_mask", None), options.pop("is_causal", False)
        drop_rate = options.pop("dropout_p", 0.0)
        if not causal or mask is not None:
            raise BadInput(
                "model.json: got attention with a mask or without is_causal, wanted causal attention to all earlier "
                "tokens, because the cost of any other attention is unknown; to support it, "
                "count its cost in training/planning/kernel_count.py"
            )
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(queries, keys, values, drop_rate, is_causal=True, **options)[0]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in the inputs or outputs of a layer: a single tensor, or the pieces of tensor shards."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
