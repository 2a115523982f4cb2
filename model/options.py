"""Architecture option: one row of the table of `model.json`'s keys (the fields of ModelConfig, model/config.py).

A row holds a key's default and check, how the stock classes of Hugging Face's transformers say it, what attention it
leaves, and its words for the model card. The network itself is in gpt.py; parameters, bytes and all FLOPs but those of
attention are counted from it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

# Stock classes, by their `model_type`.
GPT2, LLAMA, ARCEE, QWEN3, NANOCHAT = "gpt2", "llama", "arcee", "qwen3", "nanochat"
ROTARY = (LLAMA, ARCEE, QWEN3, NANOCHAT)  # with RoPE: the same keys of config.json
EVERY: dict[str, None] = dict.fromkeys((GPT2, *ROTARY))


@attrs.frozen(kw_only=True)
class ArchitectureOption:
    """A row of the table, beside default and check; `config`: a ModelConfig."""

    # Stock class -> values that it computes, None: all. A class that is not here computes the default alone.
    stock: Mapping[str, tuple[Any, ...] | None] = attrs.field(factory=dict)
    keys: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)  # stock class -> keys of its config.json
    # config, stock class -> value of these keys, attrs.NOTHING to leave them out; None: the field's own
    says: Callable[[Any, str], Any] | None = None
    window: Callable[[Any], int | None] | None = None  # config -> tokens that a query attends to, at most; None: all
    card: Callable[[Any, str], tuple[str, str] | None] | None = None  # config, stock class -> row of the model card


def option(check: Callable[..., None], default: Any = attrs.NOTHING, **row: Any) -> Any:
    """Return a field of ModelConfig with its row, an ArchitectureOption of `row`."""
    return attrs.field(default=default, validator=check, metadata={ArchitectureOption: ArchitectureOption(**row)})


def rows(config_class: Any) -> dict[str, ArchitectureOption]:
    """Return the table, by key; a field without a row is not in it."""
    fields = attrs.fields(config_class)
    return {field.name: field.metadata[ArchitectureOption] for field in fields if ArchitectureOption in field.metadata}


def named(gpt2: str, rotary: str) -> dict[str, tuple[str, ...]]:
    """Return keys of config.json, separated by spaces: of GPT2's class, and of those with RoPE."""
    return {GPT2: tuple(gpt2.split()), **dict.fromkeys(ROTARY, tuple(rotary.split()))}
