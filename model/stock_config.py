"""config.json of a stock class of Hugging Face's transformers: of our configuration, and back."""

from typing import Any

import attrs

from common.errors import either, quoted
from model.config import INITIAL_STD, ModelConfig
from model.stock import ARCEE, GPT2, LLAMA, NANOCHAT, QWEN3, Architecture, architecture_of, folds_embedding_norm

# Our activation -> theirs.
GPT2_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}
STOCK_ACTIVATIONS = GPT2_ACTIVATIONS | {"swiglu": "silu"}
DEFAULT_EPS = {"llama": 1e-6, "qwen3": 1e-6, "nanochat": 1e-6, "arcee": 1e-5}  # where config.json has no rms_norm_eps


@attrs.frozen
class StockClass:
    """A model class of transformers and the values of its configuration."""

    name: str
    config: dict[str, Any]  # config.json


def stock_class(config: ModelConfig, where: str = "model.json") -> StockClass:
    """Return the class that computes the same network. Raises BadInput, beginning with `where`, if there is none."""
    architecture = architecture_of(config, where)
    values = _gpt2_values(config) if architecture is GPT2 else _rotary_values(config, architecture)
    head = {"architectures": [architecture.name], "model_type": architecture.model_type}
    return StockClass(architecture.name, head | values)


def config_of_stock(values: dict[str, Any], architecture: Architecture) -> ModelConfig:
    """Return the configuration of a network by the config.json of a class with RoPE.

    Raises ValueError, "KEY: got ..., wanted ...", for a key that is missing or a value that would be another network.
    """
    for key in ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if type(values.get(key)) is not int or values[key] < 1:
            raise ValueError(f"{key}: got {quoted(values.get(key))}, wanted an integer of at least 1")
    rope = _rope(values)
    ours = {theirs: name for name, theirs in STOCK_ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    default_act = "silu" if architecture in (LLAMA, QWEN3) else "relu2"
    width, heads = values["hidden_size"], values["num_attention_heads"]
    wanted: dict[str, tuple[Any, ...]] = {
        "head_dim": (None, width // heads),
        "hidden_act": tuple(theirs for theirs, name in ours.items() if name in architecture.options["activation"]),
        "use_sliding_window": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for key, known in wanted.items():
        if key in values and values[key] not in known:
            raise ValueError(f"{key}: got {quoted(values[key])}, wanted {either(map(repr, known))}")
    fixed = {field: only[0] for field, only in architecture.options.items() if len(only) == 1}
    attention_bias, mlp_bias = values.get("attention_bias", False), values.get("mlp_bias", False)
    return ModelConfig(
        **{
            "vocab_size": values["vocab_size"],
            "context_length": values["max_position_embeddings"],
            "emb_dim": width,
            "n_layers": values["num_hidden_layers"],
            "n_heads": heads,
            "n_kv_heads": values.get("num_key_value_heads"),
            "mlp_width": values.get("intermediate_size"),
            "activation": ours[values.get("hidden_act", default_act)],
            "norm_eps": values.get("rms_norm_eps", DEFAULT_EPS[architecture.model_type]),
            "rope_base": rope,
            "qkv_bias": attention_bias,
            "biases": attention_bias or mlp_bias,
            "tie_weights": values.get("tie_word_embeddings", False),
            "logit_softcap": values.get("final_logit_softcapping", 15.0) if architecture is NANOCHAT else None,
        }
        | fixed
    )


def _gpt2_values(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "n_embd": config.emb_dim,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "attn_pdrop": config.drop_rate,
        "embd_pdrop": config.drop_rate,
        "resid_pdrop": config.drop_rate,
        "n_inner": config.mlp_width,  # None: 4 C
        "activation_function": GPT2_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_eps,
        **({"scale_attn_by_inverse_layer_idx": True} if config.scale_attention_by_inverse_layer else {}),
        **_common_values(config),
    }


def _rotary_values(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.emb_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.hidden_width,
        "hidden_act": STOCK_ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "rope_theta": config.rope_base,  # for loaders before transformers 5
        "attention_bias": config.qkv_bias or config.biases,
        "attention_dropout": config.drop_rate,  # these classes have no other dropout
        **({"mlp_bias": config.biases} if architecture in (LLAMA, ARCEE) else {}),
        **({"final_logit_softcapping": config.logit_softcap} if architecture is NANOCHAT else {}),
        **_common_values(config),
    }


def _common_values(config: ModelConfig) -> dict[str, Any]:
    return {
        "tie_word_embeddings": config.tie_weights and not folds_embedding_norm(config),
        "initializer_range": INITIAL_STD,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _rope(values: dict[str, Any]) -> float:
    """Return RoPE's base. Raises ValueError for angles that are scaled."""
    found = [name for name in ("rope_parameters", "rope_scaling") if values.get(name) is not None]
    key, parameters = (found[0], values[found[0]]) if found else ("rope_parameters", {})
    if not isinstance(parameters, dict):
        raise ValueError(f"{key}: got {quoted(parameters)}, wanted an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type: got {quoted(kind)}, wanted 'default': angles without scaling")
    base: float = parameters.get("rope_theta", values.get("rope_theta", 10_000.0))
    return base
