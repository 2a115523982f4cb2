"""Weights of a network as its stock class of Hugging Face's transformers has them, and back.

C embedding width, H heads, K heads of keys and values, D head width, V vocabulary size.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import GATED, GPT2, NANOCHAT, ModelConfig
from model.naming import HUGGING_FACE, PROJECTIONS
from model.stock import CLASSES, stock_kind

# Our module -> its name in GPT-2's class, outside the blocks with its prefix.
GPT2_OUTSIDE_BLOCKS = ("token_embedding", "position_embedding", "final_norm")
GPT2_NAMES = HUGGING_FACE | {name: f"transformer.{HUGGING_FACE[name]}" for name in GPT2_OUTSIDE_BLOCKS}
# Our module -> its name in Llama and in those that follow it; outside the blocks with its prefix.
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
    """Convert a plain state dict to the names and layout of its stock class. Raises BadInput if there is none."""
    kind = stock_kind(config)
    state = _folded(plain, config) if config.folds_embedding_norm(kind) else plain
    names, blocks = (GPT2_NAMES, GPT2_BLOCKS) if kind == GPT2 else (_rotary_names(kind), ROTARY_BLOCKS)
    theirs = {}
    for name, value in {**_neutral(config, kind), **state}.items():
        module, _, leaf = name.rpartition(".")
        block = BLOCK_NAME.match(module)
        part, where = (module[block.end() :], f"{blocks}.{block[1]}.") if block else (module, "")
        if part == "attention.qkv" and kind != GPT2:
            parts = value.split([heads * config.head_width for heads in config.qkv_heads])
            for projection, heads, own in zip(STOCK_QKV, config.qkv_heads, parts, strict=True):
                rows = swap_halves(own, heads) if kind == NANOCHAT and projection != "v_proj" else own
                theirs[f"{where}self_attn.{projection}.{leaf}"] = rows.contiguous()
            continue
        transposed = kind == GPT2 and part in PROJECTIONS and leaf == "weight"
        theirs[f"{where}{names[part]}.{leaf}"] = (value.t() if transposed else value).contiguous()
    return theirs


def from_stock(weights: dict[str, Tensor], config: ModelConfig, kind: str) -> dict[str, Tensor]:
    """Convert a state dict of a class with RoPE to a plain one, in fp32; biases that only we have are zero.

    Raises ValueError naming an unknown parameter, a tied head that differs from the embedding, or a bias of the
    attention output, other than zero, that this network lacks.
    """
    modules = {theirs: ours for ours, theirs in _rotary_names(kind).items()}
    plain: dict[str, Tensor] = {}
    apart: dict[str, dict[str, Tensor]] = {}  # queries, keys and values of each fused parameter
    for name, value in weights.items():
        block = re.match(rf"{re.escape(ROTARY_BLOCKS)}\.(\d+)\.", name)
        module, _, leaf = (name[block.end() :] if block else name).rpartition(".")
        where = f"blocks.{block[1]}." if block else ""
        projection = module.removeprefix("self_attn.")
        if leaf == "inv_freq":
            continue  # a buffer of older versions
        if projection in STOCK_QKV:
            apart.setdefault(f"{where}attention.qkv.{leaf}", {})[projection] = value.float()
        elif module in modules:
            plain[f"{where}{modules[module]}.{leaf}"] = value.float()
        else:
            raise ValueError(f"parameter {name} is none of {CLASSES[kind]}'s")
    for name in [name for name in plain if name.endswith("attention.output.bias") and not config.biases]:
        if plain.pop(name).any():
            raise ValueError(f"parameter {name}: got a bias, wanted zeros: {CLASSES[kind]} has no option biases here")
    for name, parts in apart.items():
        plain[name] = _fused(name, parts, config, swapped=kind == NANOCHAT)
    head = plain.pop("head.weight", None) if config.tie_weights else None
    if head is not None and not torch.equal(head, plain.setdefault("token_embedding.weight", head)):
        raise ValueError("its configuration ties head and token embedding, but its weights have two that differ")
    return _zero_biases(config, plain) | plain


def swap_halves(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of queries or keys with the halves of each head exchanged.

    NanoChat rotates by the negative angle. With the elements of each pair exchanged that is our rotation, exactly, and
    a norm without gain and the product of queries and keys do not see the order.
    """
    first, second = rows.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack((second, first), dim=1).flatten(0, 2)


def _rotary_names(kind: str) -> dict[str, str]:
    return ROTARY_NAMES | (NANOCHAT_NAMES if kind == NANOCHAT else {})


def _folded(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights whose token embedding is normalized already; a tied head keeps the table as it was."""
    state = {name: value for name, value in plain.items() if not name.startswith("embedding_norm.")}
    table, gain = plain["token_embedding.weight"], plain.get("embedding_norm.weight")
    if config.norm == "rmsnorm":
        state["token_embedding.weight"] = F.rms_norm(table, table.shape[1:], gain, config.norm_eps)
    else:
        bias = plain.get("embedding_norm.bias")
        state["token_embedding.weight"] = F.layer_norm(table, table.shape[1:], gain, bias, config.norm_eps)
    state.setdefault("head.weight", table)
    return state


def _neutral(config: ModelConfig, kind: str) -> dict[str, Tensor]:
    """Return ones for gains and zeros for biases that the class has whatever the options: a state dict of those."""
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
    """Return queries, keys and values as one parameter. Raises ValueError where one is missing or of another size."""
    rows = []
    for projection, heads in zip(STOCK_QKV, config.qkv_heads, strict=True):
        part, wanted = parts.get(projection), heads * config.head_width
        if part is None or len(part) != wanted:
            got = "none" if part is None else f"{len(part)} rows"
            raise ValueError(f"parameter {name}: {projection}: got {got}, wanted {wanted} rows")
        rows.append(swap_halves(part, heads) if swapped and projection != "v_proj" else part)
    return torch.cat(rows)


def _zero_biases(config: ModelConfig, plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for biases of attention or MLP, which are one option here, where all of the other have one."""
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
