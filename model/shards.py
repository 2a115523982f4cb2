"""Tensor parallelism: a network in shards. Each shard has a part of the heads, the MLP columns and the vocabulary.

Each shard computes attention and MLP for all tokens, with its part of the weights. Between attention and MLP, each
shard computes only a piece of the sequence (Korthikanti et al., arXiv 2205.05198). Sums over shards are computed in
order, in fp32, so the bits depend only on the number of shards, not on how the shards are divided among processes. If
several shards need the same parameter, each shard has its own copy, and the gradients of the copies are added up
(training/parallel/tensor_shards.py).

B micro-batch, T tokens, S shards, t = T / S, C width, P processes, L = S / P shards per process, N tokens of a chunk,
V vocabulary, R = V / S including padding.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.errors import BadInput
from model.axes import TENSOR_AXES, axes_of, shard_cut
from model.config import ModelConfig
from model.gpt import GPT, Block, Pieces


@attrs.frozen(kw_only=True)
class ShardExchange:
    """The shards of this process, and the functions that exchange tensors with the processes of all other shards."""

    shards: int
    local_shards: range  # consecutive shards that this process has
    all_gather: Callable[[Tensor], Tensor] = lambda local: local  # (L, ...) -> (S, ...)
    # (P, ...), a part to send to each process -> (P, ...), a part received from each process
    all_to_all: Callable[[Tensor], Tensor] = lambda parts: parts

    def sequence(self, pieces: Iterable[Tensor]) -> Float[Tensor, "B T C"]:
        """Return all pieces of the sequence as one tensor."""
        return self.all_gather(_stacked(list(pieces))).transpose(0, 1).flatten(1, 2)

    def summed(self, partials: Sequence[Float[Tensor, "B T C"]]) -> tuple[Tensor, ...]:
        """Add up the tensors of all shards in fp32, and return this process's pieces of the sum."""
        local = len(self.local_shards)
        parts = _stacked(partials).unflatten(2, (self.shards // local, local, -1))
        # (P, L, L, B, t, C): the first dimensions are the receiving process, the sending shard, the receiving shard
        parts = parts.permute(2, 0, 3, 1, 4, 5).contiguous()
        return ordered_sum(self.all_to_all(parts).flatten(0, 1)).unbind()


def ordered_sum(parts: Float[Tensor, "S *N"]) -> Float[Tensor, "*N"]:
    """Return the sum over the first dimension, in fp32. The parts are added in order."""
    total = parts[0].float() + parts[1]
    for part in parts[2:]:
        total += part
    return total


class Gather(torch.autograd.Function):
    """Join pieces into the complete sequence, once for each shard. The gradients of all shards are added in order."""

    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.dtype, kind = exchange, pieces[0].dtype, pieces[0].device.type
        dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else ctx.dtype
        sequence = exchange.sequence(piece.to(dtype) for piece in pieces)
        return tuple(sequence.view_as(sequence) for _ in pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *(piece.to(ctx.dtype) for piece in ctx.exchange.summed(gradients))


class Sum(torch.autograd.Function):
    """Add the tensors of all shards, and return this process's pieces of the sum, in fp32."""

    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, *partials: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.dtype = exchange, partials[0].dtype
        return exchange.summed(partials)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sequence = ctx.exchange.sequence(gradient.to(ctx.dtype) for gradient in gradients)
        return None, *(sequence for _ in gradients)


class PartialLinear(nn.Linear):
    """A linear layer for one shard's part of the inputs. Its bias is not added here, but to the sum over shards."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LayerOfShards(nn.Module):
    """The same layer in every shard of this process, joined into one module that takes and returns pieces."""

    def __init__(self, layers: Iterable[nn.Module], exchange: ShardExchange):
        super().__init__()
        self.shards: Any = nn.ModuleList(layers)
        self.exchange = exchange


class PieceLayer(LayerOfShards):
    """A layer that treats every token separately, such as a norm. Each shard applies its own copy to its own piece."""

    def forward(self, pieces: Pieces) -> Pieces:
        layers = zip(self.shards, pieces.tensors, strict=True)
        return Pieces(tuple(layer(x) for layer, x in layers), pieces.first_seed)


class GatheredLayer(PieceLayer):
    """A PieceLayer followed by the exchange: it returns the complete sequence (B, T, C), once for each shard."""

    def forward(self, pieces: Pieces) -> Pieces:
        normalized = super().forward(pieces)
        return Pieces(Gather.apply(self.exchange, *normalized.tensors), normalized.first_seed)


class SummedLayer(LayerOfShards):
    """A layer whose heads or columns are divided over the shards.

    It takes complete sequences and returns pieces of the sum over shards. The last matrix of each shard is a
    PartialLinear; its bias is added only once, to the sum. `place` is the number that ShardedBlock gives to the dropout
    inside the layer, such as the dropout of attention.
    """

    def __init__(self, layers: Iterable[nn.Module], exchange: ShardExchange, rate: float, place: int):
        super().__init__(layers, exchange)
        self.dropout = ShardDropout(rate, place, exchange)
        last = [[part for part in layer.modules() if isinstance(part, PartialLinear)] for layer in self.shards]
        assert all(len(parts) == 1 for parts in last), "the bias of a sum over shards must belong to a single matrix"
        self._biased = [part for [part] in last]

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile each shard's computation between exchanges, so that a shard has the same graph on every process."""
        for layer in self.shards:
            layer.compile(*args, **options)

    def forward(self, sequences: Pieces, *arguments: Any) -> Pieces:
        partials = []
        for shard, layer, x in zip(self.exchange.local_shards, self.shards, sequences.tensors, strict=True):
            self.dropout.seed(sequences.first_seed, shard)
            partials.append(layer(x, *arguments))
        totals = zip(Sum.apply(self.exchange, *partials), self._biased, strict=True)
        return Pieces(
            tuple(total if part.bias is None else total + part.bias for total, part in totals), sequences.first_seed
        )


class TokenEmbedding(LayerOfShards):
    """A token embedding whose rows are divided over the shards.

    It takes token ids (B, T) and returns pieces of the sum over shards.
    """

    def __init__(self, layers: Iterable[nn.Module], exchange: ShardExchange, rate: float):
        super().__init__(layers, exchange)
        self._rate = rate

    def forward(self, tokens: Int[Tensor, "B T"]) -> Pieces:
        first_seed = torch.initial_seed() if self.training and self._rate > 0 else 0
        layers = zip(self.exchange.local_shards, self.shards, strict=True)
        embedded = [self._embed(layer, tokens, shard) for shard, layer in layers]
        return Pieces(Sum.apply(self.exchange, *embedded), first_seed)

    def _embed(self, layer: nn.Embedding, tokens: Int[Tensor, "B T"], shard: int) -> Float[Tensor, "B T C"]:
        """Return the embeddings of the tokens whose rows this shard has, and zeros for all other tokens."""
        rows = len(layer.weight)
        local = tokens - shard * rows  # rows of this shard
        elsewhere = (local < 0) | (local >= rows)
        return layer(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)


class PositionEmbedding(LayerOfShards):
    """A position embedding. Each shard looks up the positions of its piece."""

    def forward(self, positions: Int[Tensor, "T"]) -> Pieces:
        chunks = positions.chunk(self.exchange.shards)
        layers = zip(self.exchange.local_shards, self.shards, strict=True)
        return Pieces(tuple(layer(chunks[shard]) for shard, layer in layers))


class ShardDropout(nn.Module):
    """Dropout whose masks depend only on the micro-batch's seed, the place in the network, and the shard."""

    def __init__(self, rate: float, place: int, exchange: ShardExchange):
        super().__init__()
        self.rate, self.place, self.exchange = rate, place, exchange

    def seed(self, first_seed: int, shard: int) -> None:
        """Set the seed of a shard's next dropout mask at this place. Do nothing in validation or without dropout."""
        if self.training and self.rate > 0:
            torch.manual_seed((first_seed + self.place * self.exchange.shards + shard) % (1 << 63))

    def forward(self, pieces: Pieces) -> Pieces:
        if not self.training or self.rate == 0:
            return pieces
        outputs = []
        for shard, x in zip(self.exchange.local_shards, pieces.tensors, strict=True):
            self.seed(pieces.first_seed, shard)
            outputs.append(F.dropout(x, self.rate))
        return Pieces(tuple(outputs), pieces.first_seed)


class ShardedBlock(Block):
    """A transformer block in shards. It runs `Block.forward` with layers that exchange their results."""

    attention: Any  # these layers take and return Pieces
    attention_dropout: Any
    mlp: Any
    mlp_dropout: Any

    def __init__(self, blocks: Sequence[Block], exchange: ShardExchange, config: ModelConfig, layer: int):
        nn.Module.__init__(self)
        layers = ShardedParts(blocks, f"blocks.{layer}", exchange)
        # Every place with a dropout has a number. Number 0 is the place after the embedding. The last numbers are
        # reserved for places inside MLPs, which have no dropout yet.
        rate, place, place_in_mlp = config.drop_rate, 3 * layer + 1, 3 * config.n_layers + 1 + layer
        self.attention_norm = GatheredLayer(layers.take("attention_norm"), exchange)
        self.attention = SummedLayer(layers.take("attention"), exchange, rate, place)
        self.attention_dropout = ShardDropout(layers.take_rate("attention_dropout"), place + 1, exchange)
        self.mlp_norm = GatheredLayer(layers.take("mlp_norm"), exchange)
        self.mlp = SummedLayer(layers.take("mlp"), exchange, rate, place_in_mlp)
        self.mlp_dropout = ShardDropout(layers.take_rate("mlp_dropout"), place + 2, exchange)
        layers.finish(self)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile what the shards compute between two exchanges."""
        for layer in (self.attention, self.mlp):
            layer.compile(*args, **options)


class ShardedGPT(GPT):
    """One process's shards of a network. `GPT.hidden` runs here with layers that exchange their results.

    A parameter's name consists of SHARDS, the shard's index in the process, and the plain name. The output head's
    weight exists only in the modules of `shards`. Each module holds some rows of this weight (see ShardedLoss).
    """

    token_embedding: Any
    position_embedding: Any
    dropout: Any

    def __init__(self, config: ModelConfig, exchange: ShardExchange):
        nn.Module.__init__(self)
        self.exchange = exchange
        self.shards: Any = nn.ModuleList(
            _network_of_shard(config, exchange.shards, shard) for shard in exchange.local_shards
        )
        layers = ShardedParts(self.shards, "the network", exchange)
        self.token_embedding = TokenEmbedding(layers.take("token_embedding"), exchange, config.drop_rate)
        self.embedding_norm = PieceLayer(layers.take("embedding_norm"), exchange)
        self.position_embedding = None
        if config.positions == "learned":
            self.position_embedding = PositionEmbedding(layers.take("position_embedding"), exchange)
        self.dropout = ShardDropout(layers.take_rate("dropout"), 0, exchange)
        blocks_of_shards = enumerate(zip(*layers.take("blocks"), strict=True))
        self.blocks = nn.ModuleList(ShardedBlock(blocks, exchange, config, layer) for layer, blocks in blocks_of_shards)
        self.final_norm = GatheredLayer(layers.take("final_norm"), exchange)
        self.head = None
        layers.take("head")
        layers.finish(self)

    def output_weight(self) -> Tensor:
        raise TypeError(
            "the output head's weight is divided over tensor shards; use the weights of the modules in `shards`"
        )


class ShardedParts:
    """The layers of a plain module, such as a block: every layer has one version for each shard of this process.

    The caller takes the layers one by one, and `finish` checks that all of them were taken.
    """

    def __init__(self, modules: Iterable[Any], name: str, exchange: ShardExchange):
        self._modules, self._name, self._exchange = list(modules), name, exchange
        self._used_names: set[str] = set()

    def take(self, name: str) -> list[Any]:
        """Return the layer with this name, once for each shard."""
        self._used_names.add(name)
        return [getattr(module, name) for module in self._modules]

    def take_rate(self, name: str) -> float:
        """Return the rate of the dropout layer with this name."""
        rate: float = self.take(name)[0].p
        return rate

    def finish(self, sharded: nn.Module) -> None:
        """Copy the remaining attributes of the unsharded module, such as flags that its `forward` reads, to `sharded`.

        Raises BadInput if the unsharded module has a layer, a parameter or a buffer that was not taken. The forward
        pass would use this part, but this file does not define how shards compute it.
        """
        plain = vars(self._modules[0])
        for name, value in (plain["_modules"] | plain["_parameters"] | plain["_buffers"]).items():
            if value is not None and name not in self._used_names:
                raise BadInput(
                    f"tensor_parallel: got {self._exchange.shards} shards of a network with {self._name}.{name}, which "
                    "model/shards.py does not compute; set tensor_parallel to 1, or add the layer there"
                )
        for name, value in plain.items():
            if not name.startswith("_") and name not in vars(sharded):
                setattr(sharded, name, value)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _network_of_shard(config: ModelConfig, shards: int, shard: int) -> GPT:
    """Return a network with the parameters of one shard, on the meta device."""
    with torch.device("meta"):
        network = GPT(config)
        blocks: Any = network.blocks
        for block in blocks:
            block.attention.heads = tuple(max(1, heads // shards) for heads in config.qkv_heads)
        for name, _ in list(network.named_parameters()):
            path, _, kind = name.rpartition(".")
            axes = axes_of(name, config)
            module: Any = network.get_submodule(path)
            # If shards divide the columns, the layer's output is a sum over shards.
            if axes.columns is not None and axes.columns.name in TENSOR_AXES:
                module = PartialLinear(module.in_features, module.out_features, module.bias is not None)
                network.set_submodule(path, module)
            setattr(module, kind, nn.Parameter(torch.empty(shard_cut(axes, shards, shard).shape)))
    return network
