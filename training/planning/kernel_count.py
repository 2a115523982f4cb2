"""Kernels of a forward and a backward pass, and the bytes that they save and move, on torch's meta device.

There tensors have shapes and no memory. Bytes are those of bf16 autocast with compiled blocks on a GPU: matrix products
and attention are kernels of libraries, all else is fused (`Kernels`). T context length, C embedding width.
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
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", COLLECTIVE)  # libraries' kernels: names begin so
REDUCTIONS = ("norm", "softmax", "sum", "mean", "dropout")  # of results that are kept: a compiler does not redo them
SUMMED_ROWS = 16  # a sum over so many is that of a bias's gradient, or a statistic of a norm


def count_kernels(config: ModelConfig, shards: int, local: int, *, compiled: bool) -> "Kernels":
    """Return the kernels of a sequence's forward and backward pass, on a rank with so many of the tensor shards."""

    def exchanged(tensor: Tensor, *shape: int) -> Tensor:
        kernels.launch(COLLECTIVE, (kernels.value(tensor),), [result := tensor.new_empty(shape)])
        return result

    def run_block(block: Any, x: Any, *more: Any) -> Any:
        kernels.cross(x, into_block=True)
        output = block(x, *more)
        kernels.cross(output, into_block=False)
        for piece in tensors_in(output):
            piece.register_hook(lambda gradient: kernels.cross(gradient, into_block=True))
        for piece in tensors_in(x):
            piece.register_hook(lambda gradient: kernels.cross(gradient, into_block=False))
        return output

    exchange = ShardExchange(
        shards=shards,
        local_shards=range(local),
        all_gather=lambda own: exchanged(own.to(torch.bfloat16), shards, *own.shape[1:]),
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
            logits = [F.linear(x, each.output_weight()) for x, each in heads]
            kernels.backward = True
            gradients = [torch.empty_like(each) for each in logits]
            kernels.cross(gradients, into_block=False)
            torch.autograd.backward(logits, gradients)
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(
            f"model.json: this network cannot be planned: it does not run without memory: {reason}"
        ) from error
    finally:
        network.zero_grad()
    return kernels


@attrs.define(eq=False)
class _Value:
    """Memory of the passes, and the kernel that writes it."""

    tensor: Tensor
    of_tokens: bool  # its size follows the micro-batch
    kernel: tuple[bool, bool, int] | None  # backward, in a block, level; None: a library's, or given
    level: int = 0  # products on the longest way to it
    backward: bool = False
    in_block: bool = False
    inputs: tuple["_Value", ...] = ()
    kind: Literal["reduction", "spread"] | None = None  # spread: a copy with repeated elements
    stored: bool = False

    @property
    def bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    @property
    def available(self) -> bool:
        """True where another kernel finds it in memory."""
        return self.kernel is None or self.stored


class Kernels(TorchDispatchMode):
    """Fused kernels: operators between two products are one kernel, which reads and writes each memory once.

    As torch.compile does it: a kernel's function of the results of others is computed again where another one, or
    the backward pass, needs it, unless a product reads it, or a reduction is in it. So are repeated elements. Casts of
    a tensor are made once. What is saved for the backward pass follows; the statistics of a norm over heads are not.
    """

    def __init__(self, network: nn.Module, compiled: bool):
        super().__init__()
        self.compiled = compiled  # else the passes save what PyTorch's autograd saves
        self.backward = self.in_block = False
        self.saved: Counter[tuple[str, str]] = Counter()  # bytes, by place and what they depend on
        self.moved: Counter[str] = Counter()  # bytes of a block
        self.attention_width = 0
        self._parameters = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
        self._values: dict[int, _Value] = {}
        self._casts: dict[tuple[int, torch.dtype, bool], _Value] = {}
        self._seen: set[tuple[int, Any]] = set()
        self._alive: list[Tensor] = []  # keeps addresses from being used again

    def cross(self, tensors: Any, *, into_block: bool) -> None:
        """Take tensors over the edge of a block, where each is in memory."""
        for tensor in tensors_in(tensors):
            value = self.value(tensor)
            self._store(value)
            self._values[_address(tensor)] = _Value(
                tensor, True, None, value.level + 1, self.backward, self.in_block and not into_block
            )
        self.in_block = into_block

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        given = {_address(tensor): tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor) and _address(one) not in given]
        self._alive += made
        if made and not name.startswith(("empty", "new_empty", "zeros")):
            inputs = tuple(map(self.value, given.values()))
            if name != "_to_copy" or not self.compiled:
                self.launch(name, inputs, made)
            elif (cast := self._casts.get((id(inputs[0]), made[0].dtype, self.backward))) is not None:
                self._values[_address(made[0])] = cast
            else:
                self.launch(name, inputs, made)
                self._casts[id(inputs[0]), made[0].dtype, self.backward] = self.value(made[0])
        return result

    def launch(self, name: str, inputs: tuple[_Value, ...], made: list[Tensor]) -> None:
        """Record an operator that writes memory."""
        level = max((value.level for value in inputs if value.backward == self.backward), default=0)
        product, of_tokens = name.startswith(PRODUCTS), any(value.of_tokens for value in inputs)
        rows = max((value.tensor.numel() for value in inputs), default=0)
        if name in ("mm", "addmm") and all(value.of_tokens for value in inputs):
            of_tokens = False  # a weight's gradient, summed over tokens
        if name == "sum" and made[0].numel() * SUMMED_ROWS < rows:
            of_tokens = False  # a bias's
        kernel = None if product else (self.backward, self.in_block, level)
        for value in inputs:
            if product or value.kernel != kernel:
                self._use(value, kernel)
        eager = not (self.backward or torch.is_grad_enabled())  # exchanges of tensor shards are not compiled
        for tensor in made:
            self._values[_address(tensor)] = _Value(
                tensor,
                of_tokens and tensor.dtype != torch.uint64,  # seeds of attention's dropout
                None if name == "native_dropout" else kernel,  # whose mask is kept
                level + product,
                self.backward,
                self.in_block,
                inputs,
                "reduction" if eager else _kind(name, inputs, tensor),
            )
        if self.in_block and kernel is not None and of_tokens:
            tensors = [value.tensor for value in inputs if value.of_tokens] + made
            whole = (tensor for tensor in tensors if tensor.numel() * SUMMED_ROWS > rows and tensor.shape[-1:] != (1,))
            self.moved["separate"] += sum(tensor.nbytes for tensor in whole)

    def _use(self, value: _Value, kernel: tuple[bool, bool, int] | None) -> None:
        """Record that a kernel other than the one that computes a value reads it; None: a library's."""
        saved = self.backward and not value.backward
        if not value.of_tokens:
            if saved and _address(value.tensor) not in self._parameters:
                self._save(value, "fixed")
            return
        if kernel is None and not saved:
            self._store(value)
            return
        again = value.kind == "spread" and saved and self.compiled
        for source in [one for each in value.inputs for one in self._sources(each)] if again else self._sources(value):
            self._store(source)
            if saved:
                self._save(source, "sequences")
            if kernel is not None and self._first(source, kernel):
                self._move(source, self.in_block)

    def _sources(self, value: _Value) -> list[_Value]:
        """Return the values in memory that a kernel computes this one from."""
        if value.available or value.kind == "reduction" or not (self.compiled and value.in_block):
            return [value]
        sources = [source for each in value.inputs if each.of_tokens for source in self._sources(each)]
        return sources if all(source.available for source in sources) else [value]

    def _store(self, value: _Value) -> None:
        if not value.available:
            value.stored = True
            self._move(value, value.in_block)

    def _move(self, value: _Value, in_block: bool) -> None:
        if in_block and value.of_tokens and value.tensor.shape[-1:] != (1,):  # no statistics
            self.moved["fused"] += value.bytes

    def _save(self, value: _Value, follows: str) -> None:
        statistic = value.tensor.dim() == 4 and value.tensor.shape[-1] == 1
        if self._first(value, "saved") and not (statistic and self.compiled):
            self.saved["block" if value.in_block else "outer", follows] += value.bytes

    def _first(self, value: _Value, use: Any) -> bool:
        first = (id(value), use) not in self._seen
        self._seen.add((id(value), use))
        return first

    def value(self, tensor: Tensor) -> _Value:
        new = _Value(tensor, False, None, backward=self.backward, in_block=self.in_block)
        return self._values.setdefault(_address(tensor), new)


def _kind(name: str, inputs: tuple[_Value, ...], made: Tensor) -> Literal["reduction", "spread"] | None:
    if any(reduction in name for reduction in REDUCTIONS):
        return "reduction"
    elements = max((value.bytes // value.tensor.element_size() for value in inputs), default=0)
    return "spread" if name == "clone" and made.numel() > elements else None


class _AsOnAGpu(TorchFunctionMode):
    """Makes operators on meta tensors what they are on a GPU under bf16 autocast.

    The meta device knows no autocast, and would compute attention by its formula, with a T x T matrix. Flash attention
    and cuDNN's save queries, keys, values, their output and a log-sum in fp32 of each row. Attention in which a query
    does not attend to all tokens before it is refused, because the planner counts all of them.
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
            return F.layer_norm(*args)  # compiled, it saves no more
        elif function is F.dropout and kwargs["p"] > 0:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # its mask takes a byte an element
        return function(*args, **kwargs)

    def _attention(self, queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        self.kernels.attention_width += queries.shape[1] * queries.shape[3]
        mask, causal = options.pop("attn_mask", None), options.pop("is_causal", False)
        drop_rate = options.pop("dropout_p", 0.0)
        if not causal or mask is not None:
            raise BadInput(
                "model.json: got attention with a mask, or without is_causal, wanted causal attention to all earlier "
                "tokens: the cost of any other is unknown; count it in training/planning/kernel_count.py"
            )
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(queries, keys, values, drop_rate, is_causal=True, **options)[0]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in what a layer takes or returns: a tensor, or the pieces of tensor shards."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
