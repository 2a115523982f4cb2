"""Convert the weights of a network to the format of its stock class in Hugging Face transformers, and back.

C embedding width, H heads, K key-value heads, D head width, V vocabulary size.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import GATED, GPT2, NANOCHAT, ModelConfig
from model.naming import HUGGING_FACE, PROJECTIONS
from model.stock import CLASSES, stock_kind

# Our module -> its name in GPT-2's class. For a module of a block, this is the name within the block.
GPT2_OUTSIDE_BLOCKS = ("token_embedding", "position_embedding", "final_norm")
GPT2_NAMES = HUGGING_FACE | {name: f"transformer.{HUGGING_FACE[name]}" for name in GPT2_OUTSIDE_BLOCKS}
# Our module -> its name in Llama and in similar classes. For a module of a block, this is the name within the block.
ROTARY_NAMES = {
    **{"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    **{"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"},
    **{"attention.output": "self_attn.o_proj"},
    **{"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"},
    **{"token_embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
}
NANOCHAT_NAMES = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
GPT2_BLOCKS, ROTARY_BLOCKS = "transformer.h", "model.layers"
STOCK_QKV = ("q_proj", "k_proj", "v_proj")  # in the order of attention.qkv
BLOCK_NAME = re.compile(r"blocks\.(\d+)\.")


def to_stock(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert a plain state dict to the names and layout of its stock class. Raises BadInput if no class fits."""
    kind = stock_kind(config)
    state = _with_normalized_table(plain, config) if config.folds_embedding_norm(kind) else plain
    names, blocks = (GPT2_NAMES, GPT2_BLOCKS) if kind == GPT2 else (_rotary_names(kind), ROTARY_BLOCKS)
    stock_state = {}
    for name, value in {**_neutral_parameters(config, kind), **state}.items():
        module, _, leaf = name.rpartition(".")
        block = BLOCK_NAME.match(module)
        part, where = (module[block.end() :], f"{blocks}.{block[1]}.") if block else (module, "")
        if part == "attention.qkv" and kind != GPT2:
            parts = value.split([heads * config.head_width for heads in config.qkv_heads])
            for projection, heads, rows in zip(STOCK_QKV, config.qkv_heads, parts, strict=True):
                stock_rows = swap_halves(rows, heads) if kind == NANOCHAT and projection != "v_proj" else rows
                stock_state[f"{where}self_attn.{projection}.{leaf}"] = stock_rows.contiguous()
            continue
        transposed = kind == GPT2 and part in PROJECTIONS and leaf == "weight"
        stock_state[f"{where}{names[part]}.{leaf}"] = (value.t() if transposed else value).contiguous()
    return stock_state


def from_stock(weights: dict[str, Tensor], config: ModelConfig, kind: str) -> dict[str, Tensor]:
    """Convert a state dict of a class with RoPE to a plain state dict in fp32.

    Biases that the class does not have are set to zero. Raises ValueError if a parameter is unknown, or if a tied head
    differs from the embedding. Also raises ValueError if the attention's output layer has a nonzero bias, but our
    network has no bias there.
    """
    modules = {stock_name: module for module, stock_name in _rotary_names(kind).items()}
    plain: dict[str, Tensor] = {}
    separate: dict[str, dict[str, Tensor]] = {}  # queries, keys and values of each fused parameter
    for name, value in weights.items():
        block = re.match(rf"{re.escape(ROTARY_BLOCKS)}\.(\d+)\.", name)
        module, _, leaf = (name[block.end() :] if block else name).rpartition(".")
        where = f"blocks.{block[1]}." if block else ""
        projection = module.removeprefix("self_attn.")
        if leaf == "inv_freq":
            continue  # this buffer was stored by older versions of transformers
        if projection in STOCK_QKV:
            separate.setdefault(f"{where}attention.qkv.{leaf}", {})[projection] = value.float()
        elif module in modules:
            plain[f"{where}{modules[module]}.{leaf}"] = value.float()
        else:
            raise ValueError(f"parameter {name} does not belong to a {CLASSES[kind]}")
    for name in [name for name in plain if name.endswith("attention.output.bias") and not config.biases]:
        if plain.pop(name).any():
            raise ValueError(
                f"parameter {name}: got a bias, wanted zeros, because a {CLASSES[kind]} has no biases in Lockstep"
            )
    for name, parts in separate.items():
        plain[name] = _fused(name, parts, config, swapped=kind == NANOCHAT)
    head = plain.pop("head.weight", None) if config.tie_weights else None
    if head is not None and not torch.equal(head, plain.setdefault("token_embedding.weight", head)):
        raise ValueError("its configuration ties the output head to the token embedding, but their weights differ")
    return _zero_biases(config, plain) | plain


def swap_halves(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of queries or keys with the halves of each head exchanged.

    NanoChat rotates by the negative angle. Exchanging the two elements of each pair makes NanoChat's rotation exactly
    ours. The order of the elements does not affect a norm without gain, or the product of queries and keys.
    """
    first, second = rows.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack((second, first), dim=1).flatten(0, 2)


def _rotary_names(kind: str) -> dict[str, str]:
    return ROTARY_NAMES | (NANOCHAT_NAMES if kind == NANOCHAT else {})


def _with_normalized_table(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights with a token-embedding table that is already normalized, for classes without an embedding norm.

    A tied output head becomes a separate parameter with the original table.
    """
    state = {name: value for name, value in plain.items() if not name.startswith("embedding_norm.")}
    table, gain = plain["token_embedding.weight"], plain.get("embedding_norm.weight")
    if config.norm == "rmsnorm":
        state["token_embedding.weight"] = F.rms_norm(table, table.shape[1:], gain, config.norm_eps)
    else:
        bias = plain.get("embedding_norm.bias")
        state["token_embedding.weight"] = F.layer_norm(table, table.shape[1:], gain, bias, config.norm_eps)
    state.setdefault("head.weight", table)
    return state


def _neutral_parameters(config: ModelConfig, kind: str) -> dict[str, Tensor]:
    """Return the gains and biases that the class always has, as a state dict. Gains are ones, and biases are zeros."""
    width = config.emb_dim
    norms = {"attention_norm": width, "mlp_norm": width}
    norms |= {f"attention.{part}_norm": config.head_width for part in ("query", "key") if config.qk_norm}
    outer = {"final_norm.weight": torch.ones(width)}
    if kind == NANOCHAT:
        norms, outer = {}, {}
    attention_bias = config.qkv_bias or config.biases or kind == GPT2
    biases = {"attention.qkv": config.qkv_width, "attention.output": width} if attention_bias else {}
    if kind == GPT2:
        biases |= {"attention_norm": width, "mlp_norm": width, "mlp.up": config.hidden_width, "mlp.down": width}
        outer |= {"final_norm.bias": torch.zeros(width)}
    block = {f"{module}.weight": torch.ones(size) for module, size in norms.items()}
    block |= {f"{module}.bias": torch.zeros(size) for module, size in biases.items()}
    blocks = range(config.n_layers)
    return outer | {f"blocks.{layer}.{name}": value.clone() for layer in blocks for name, value in block.items()}


def _fused(name: str, parts: dict[str, Tensor], config: ModelConfig, *, swapped: bool) -> Tensor:
    """Join queries, keys and values into one parameter. Raises ValueError if any is missing or has a wrong size."""
    rows = []
    for projection, heads in zip(STOCK_QKV, config.qkv_heads, strict=True):
        part, row_count = parts.get(projection), heads * config.head_width
        if part is None or len(part) != row_count:
            got = "nothing" if part is None else f"{len(part)} rows"
            raise ValueError(f"parameter {name}: {projection}: got {got}, wanted {row_count} rows")
        rows.append(swap_halves(part, heads) if swapped and projection != "v_proj" else part)
    return torch.cat(rows)


def _zero_biases(config: ModelConfig, plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the biases of attention or MLP if `plain` does not have these biases.

    In our networks, one option gives biases to attention and MLP. The stock classes have an option for each of the two.
    """
    if not config.biases:
        return {}
    blocks = range(config.n_layers)
    groups: list[dict[str, int]] = [{"attention.output": config.emb_dim}]
    groups.append({"mlp.up": config.hidden_width, "mlp.down": config.emb_dim})
    groups[1] |= {"mlp.gate": config.hidden_width} if config.activation in GATED else {}
    zeros: dict[str, Tensor] = {}
    for group in groups:
        names = {f"blocks.{layer}.{module}.bias": size for layer in blocks for module, size in group.items()}
        if not names.keys() & plain.keys():
            zeros |= {name: torch.zeros(size) for name, size in names.items()}
    return zeros
