"""Stock Hugging Face class of a model configuration: GPT2LMHeadModel and its config.json, or a refusal.

A field of ModelConfig that is not in the table below has no equivalent there: it is refused in training and in export.
"""

from typing import Any

import attrs

from common.errors import BadInput
from model.config import INITIAL_STD, ModelConfig

# Keys of transformers' GPT2Config, by the field of ModelConfig that gives their value.
GPT2_KEYS = {
    "vocab_size": ("vocab_size",),
    "context_length": ("n_positions", "n_ctx"),
    "emb_dim": ("n_embd",),
    "n_layers": ("n_layer",),
    "n_heads": ("n_head",),
    "drop_rate": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "qkv_bias": (),  # GPT2LMHeadModel always has one: model/naming.py exports zeros where a model has none
    "tie_weights": ("tie_word_embeddings",),
    "activation": ("activation_function",),
}
GPT2_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu"}  # ours -> theirs
GPT2_CONSTANTS = {
    "n_inner": None,  # 4 C
    "layer_norm_epsilon": 1e-5,
    "initializer_range": INITIAL_STD,
    "torch_dtype": "float32",
    "use_cache": True,
}


@attrs.frozen
class StockClass:
    """A model class of transformers and the values of its configuration."""

    name: str
    config: dict[str, Any]  # config.json


def stock_class(config: ModelConfig, where: str = "model.json") -> StockClass:
    """Return the class that computes the same network. Raises BadInput, beginning with `where`, if there is none."""
    values = attrs.asdict(config)
    for field, value in values.items():
        if field not in GPT2_KEYS:
            raise BadInput(
                f"{where}: {field}: got {value!r}, but Hugging Face's GPT-2 has no such option, so the trained model "
                "could not be exported; remove it, or map it to a stock class in model/stock.py"
            )
    if config.activation not in GPT2_ACTIVATIONS:
        raise BadInput(
            f"{where}: activation: got {config.activation!r}, wanted one that Hugging Face's GPT-2 has: "
            f"{', '.join(map(repr, GPT2_ACTIVATIONS))}"
        )
    values["activation"] = GPT2_ACTIVATIONS[config.activation]
    mapped = {key: values[field] for field, keys in GPT2_KEYS.items() for key in keys}
    name = "GPT2LMHeadModel"
    return StockClass(name, {"architectures": [name], "model_type": "gpt2"} | mapped | GPT2_CONSTANTS)
