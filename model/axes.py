"""Named axes of the network's parameters: the dimensions that rows and columns stand for.

A layer's weight has its outputs as rows and its inputs as columns, an embedding the other way round. From the names
follow padded rows, first weights, weight decay, learning rates by group, and the matrices that an optimizer takes.
FSDP shards rows, whichever axis they are.
"""

from typing import NamedTuple

import attrs
from torch import Tensor

from model.config import ModelConfig

# Axes of rows, then of columns, by the last word of a layer's name. `heads`, `kv_heads`: of queries, of keys or values,
# each as wide as `head`.
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


class Axis(NamedTuple):
    """Dimension of the network, and its size in a parameter."""

    name: str
    size: int


@attrs.frozen(kw_only=True)
class Axes:
    """Axes of a parameter, whole and with the vocabulary's padding."""

    rows: tuple[Axis, ...]  # several of a fused matrix, one after the other
    columns: Axis | None  # none of a vector
    embedding: bool  # rows are looked up

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(axis.size for axis in self.rows)
        return (rows,) if self.columns is None else (rows, self.columns.size)

    @property
    def row_names(self) -> list[str]:
        return [axis.name for axis in self.rows]


def axes_of(name: str, config: ModelConfig) -> Axes:
    """Return the axes of a parameter by its name in the network. Raises KeyError for a layer without a row above."""
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
    return Axes(
        rows=tuple(Axis(axis, sizes[axis]) for axis in rows.split()),
        columns=Axis(columns[0], sizes[columns[0]]) if columns and kind == "weight" else None,
        embedding=layer in EMBEDDINGS,
    )


def stored_rows(name: str, rows: int, config: ModelConfig) -> int:
    """Return the number of a parameter's rows that a checkpoint stores: all but the vocabulary padding."""
    return config.vocab_size if axes_of(name, config).row_names == ["vocab"] else rows


def unpadded(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Cut the padding rows off a parameter: a view, of the shape that a checkpoint stores."""
    return value[: stored_rows(name, len(value), config)]
