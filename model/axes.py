"""Named axes of the network's parameters: the names state what the rows and columns of each parameter stand for.

The rows of a linear layer's weight are its outputs, and the columns are its inputs; in an embedding, the rows are the
inputs and the columns are the outputs. The names of the axes determine the initial weights, the weight decay, the
group that sets the learning rate, which rows are padding, and which matrices Muon trains. Tensor shards divide some
axes (TENSOR_AXES, docs/parallel.md). FSDP shards the rows of every parameter, regardless of their axes.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import attrs
from torch import Tensor

from model.config import ModelConfig

# The axes of each layer, by the last word of the layer's name: the axes of the rows, then the axis of the columns.
# `heads` are the heads of queries, `kv_heads` are the heads of keys or values, and `head` is the width of a head.
LAYERS = {
    "token_embedding": ("vocab", "embed"),
    "position_embedding": ("position", "embed"),
    "qkv": ("heads kv_heads kv_heads", "embed"),
    "output": ("embed", "heads"),
    "up": ("mlp", "embed"),
    "gate": ("mlp", "embed"),
    "down": ("embed", "mlp"),
    "head": ("vocab", "embed"),
    **dict.fromkeys(("query_norm", "key_norm"), ("head",)),
    **dict.fromkeys(("embedding_norm", "attention_norm", "mlp_norm", "final_norm"), ("embed",)),
}
EMBEDDINGS = ("token_embedding", "position_embedding")
# The name of a shard's parameter begins with this; the shard's index in the process and the plain name follow.
SHARDS = "shards."
# Tensor shards divide these axes. A parameter without any of these axes is copied to every shard.
TENSOR_AXES = ("heads", "kv_heads", "mlp", "vocab")


class Axis(NamedTuple):
    """A named dimension of the network, with its size in a parameter."""

    name: str
    size: int
    # Number of units, such as heads. Shards never split a unit. None: each row is a unit.
    parts: int | None = None


@attrs.frozen(kw_only=True)
class Axes:
    """The axes of a complete parameter, including the padding of the vocabulary."""

    rows: tuple[Axis, ...]  # one axis, or one for each part of a fused matrix, from top to bottom
    columns: Axis | None  # None for a vector
    embedding: bool  # rows are looked up by their index

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        rows = sum(axis.size for axis in self.rows)
        return (rows,) if self.columns is None else (rows, self.columns.size)

    @property
    def row_names(self) -> list[str]:
        return [axis.name for axis in self.rows]


def axes_of(name: str, config: ModelConfig) -> Axes:
    """Return the axes of the parameter with this name. Raises KeyError if its layer is missing from LAYERS."""
    path, _, kind = name.rpartition(".")
    layer = path.rpartition(".")[2]
    rows, *columns = LAYERS[layer]
    sizes = {
        "vocab": config.padded_vocab_size,
        "position": config.context_length,
        "embed": config.emb_dim,
        "heads": config.n_heads * config.head_width,
        "kv_heads": config.kv_heads * config.head_width,
        "head": config.head_width,
        "mlp": config.hidden_width,
    }
    parts = {"heads": config.n_heads, "kv_heads": config.kv_heads}
    return Axes(
        rows=tuple(Axis(axis, sizes[axis], parts.get(axis)) for axis in rows.split()),
        columns=Axis(columns[0], sizes[columns[0]], parts.get(columns[0])) if columns and kind == "weight" else None,
        embedding=layer in EMBEDDINGS,
    )


class ShardRows(NamedTuple):
    """Consecutive rows of a parameter in a tensor shard."""

    rows: range  # row numbers in the complete parameter
    holders: int  # number of consecutive shards that have a copy of these rows


@attrs.frozen(kw_only=True)
class ShardCut:
    """A tensor shard's part of a parameter: ranges of rows, one below the other, and a range of columns."""

    rows: tuple[ShardRows, ...]
    columns: range | None  # None means all columns
    shape: tuple[int, ...]

    def whole_rows(self, first: int, count: int) -> Iterator[tuple[slice, ShardRows]]:
        """Map `count` rows of the shard, from `first` on, to rows of the complete parameter.

        Yields a pair for each range of consecutive rows: its position within the `count` rows, and its rows in the
        complete parameter.
        """
        begin = 0
        for part in self.rows:
            start, stop = max(first, begin), min(first + count, begin + len(part.rows))
            if start < stop:
                yield slice(start - first, stop - first), part._replace(rows=part.rows[start - begin : stop - begin])
            begin += len(part.rows)


@functools.cache
def shard_cut(axes: Axes, shards: int, shard: int) -> ShardCut:
    """Return the part of a parameter that tensor shard number `shard` has."""
    columns, column_axis = None, axes.columns
    shape = list(axes.shape)
    rows: list[ShardRows] = []
    if column_axis is not None and column_axis.name in TENSOR_AXES and shards > 1:
        shape[1] //= shards
        columns = range(shard * shape[1], (shard + 1) * shape[1])
        rows = [ShardRows(range(shape[0]), 1)]
    else:
        first = 0
        for axis in axes.rows:
            parts = min(shards, axis.parts or axis.size) if axis.name in TENSOR_AXES else 1
            length, holders = axis.size // parts, shards // parts
            begin = first + shard // holders * length
            if rows and rows[-1] == ShardRows(range(rows[-1].rows.start, begin), holders):
                begin = rows.pop().rows.start
            rows.append(ShardRows(range(begin, first + (shard // holders + 1) * length), holders))
            first += axis.size
        shape[0] = sum(len(part.rows) for part in rows)
    return ShardCut(rows=tuple(rows), columns=columns, shape=tuple(shape))


def plain_name(name: str) -> str:
    """Return a parameter's name in the unsharded network. A name without a shard's prefix is returned unchanged."""
    return name.split(".", 2)[2] if name.startswith(SHARDS) else name


def stored_rows(name: str, rows: int, config: ModelConfig) -> int:
    """Return how many of a parameter's rows a checkpoint stores: all except the vocabulary's padding."""
    return config.vocab_size if axes_of(name, config).row_names == ["vocab"] else rows


def unpadded(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Return a view of a parameter without padding rows, in the shape that a checkpoint stores."""
    return value[: stored_rows(name, len(value), config)]
