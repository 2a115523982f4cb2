"""Weights in and out of a GPT: plain state dicts without vocabulary padding, and Hugging Face's names.

A plain state dict has the module's own parameter names and `vocab_size` rows in the embedding and head.
"""

import torch
from torch import Tensor

from model.config import ModelConfig
from model.gpt import GPT, is_padded

# Hugging Face stores the block's four projections as Conv1D, (in, out): transposed against nn.Linear.
_HUGGING_FACE_BLOCK = {
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.output": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}


def unpadded(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Return the value without the rows beyond the vocabulary: what a checkpoint stores."""
    return value[: config.vocab_size] if is_padded(name) else value


def stored_rows(name: str, rows: int, config: ModelConfig) -> int:
    """Return how many of a parameter's rows a checkpoint stores: all but the vocabulary's padding."""
    return config.vocab_size if is_padded(name) else rows


def padded(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Return the value with zero rows up to `padded_vocab_size`: what the module holds."""
    if not is_padded(name):
        return value
    return torch.nn.functional.pad(value, (0, 0, 0, config.padded_vocab_size - value.shape[0]))


def load_plain(model: GPT, state: dict[str, Tensor]) -> None:
    """Load a plain state dict into a model on one device.

    Raises ValueError naming the first parameter that is missing, unknown or of another shape.
    """
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ state.keys()):
        raise ValueError(f"parameter {name} is {'missing' if name in parameters else 'unknown'}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = padded(name, state[name], model.config)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"parameter {name}: got shape {tuple(state[name].shape)}, "
                    f"wanted {tuple(unpadded(name, parameter, model.config).shape)}"
                )
            parameter.copy_(value)


def from_hugging_face(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the plain state dict of a Hugging Face GPT2LMHeadModel's state dict.

    Its query, key and value projections always have a bias, so `config.qkv_bias` must be true.
    """
    plain = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
        "final_norm.weight": state["transformer.ln_f.weight"],
        "final_norm.bias": state["transformer.ln_f.bias"],
    }
    if not config.tie_weights:
        plain["head.weight"] = state["lm_head.weight"]
    for layer in range(config.n_layers):
        for ours, (theirs, transposed) in _HUGGING_FACE_BLOCK.items():
            source = f"transformer.h.{layer}.{theirs}"
            weight = state[f"{source}.weight"]
            plain[f"blocks.{layer}.{ours}.weight"] = weight.t() if transposed else weight
            plain[f"blocks.{layer}.{ours}.bias"] = state[f"{source}.bias"]
    return plain
