"""Stock classes of Hugging Face transformers: find the class that computes a network, or explain why there is none.

If no class supports an option, training and export refuse it, and the error names the option. They also refuse a field
of ModelConfig that is not declared with `option` (model/config.py). The weights are converted in `stock_weights.py`.
"""

import json
from typing import Any

import attrs

from common.errors import BadInput
from common.text import either, quoted
from model.config import (
    ARCEE,
    GPT2,
    INITIAL_STD,
    LLAMA,
    NANOCHAT,
    OUR_ACTIVATIONS,
    QWEN3,
    ROTARY,
    ModelConfig,
    rows,
    stock_keys,
)

CLASSES = {
    GPT2: "GPT2LMHeadModel",
    LLAMA: "LlamaForCausalLM",
    ARCEE: "ArceeForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    NANOCHAT: "NanoChatForCausalLM",
}
# The epsilon of the norms if config.json does not state it
DEFAULT_EPS = {LLAMA: 1e-6, QWEN3: 1e-6, NANOCHAT: 1e-6, ARCEE: 1e-5}


@attrs.frozen
class StockClass:
    """A model class of transformers, with the values of its configuration."""

    model_type: str
    config: dict[str, Any]  # the content of config.json

    @property
    def name(self) -> str:
        return CLASSES[self.model_type]


def stock_class(config: ModelConfig, where: str = "model.json") -> StockClass:
    """Return the stock class that computes the network of this configuration.

    Raises BadInput if there is none; the error begins with `where`.
    """
    kind = stock_kind(config, where)
    values: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind}
    for name, row in rows(type(config)).items():
        value = getattr(config, name) if row.stock_value is None else row.stock_value(config, kind)
        values |= {} if value is attrs.NOTHING else dict.fromkeys(row.keys.get(kind, ()), value)
    if kind in ROTARY:
        # RoPE's base belongs in `rope_parameters`. Before version 5, transformers reads the base from a separate key.
        # The loop above has written this key, too.
        rope = {"rope_type": "default", stock_keys(kind)["rope_base"]: config.rope_base}
        values |= {"head_dim": config.head_width, "rope_parameters": rope}
    return StockClass(kind, values | {"initializer_range": INITIAL_STD, "torch_dtype": "float32", "use_cache": True})


def stock_kind(config: ModelConfig, where: str = "model.json") -> str:
    """Return the `model_type` of the class. If no class computes the network, raises BadInput, which says why."""
    table, values = rows(type(config)), attrs.asdict(config)
    for field in values.keys() - table.keys():
        raise BadInput(
            f"{where}: {field}: got {quoted(values[field])}, but no class of Hugging Face transformers has this "
            "option, so the trained model could not be exported; remove it, or declare it with option() in "
            "model/config.py"
        )
    defaults = attrs.fields_dict(type(config))
    computed = {  # for each class, the supported values of each option; None means that all values are supported
        kind: {field: row.stock.get(kind, (defaults[field].default,)) for field, row in table.items()}
        for kind in CLASSES
    }
    misfits = {
        kind: [field for field, choices in fields.items() if choices is not None and values[field] not in choices]
        for kind, fields in computed.items()
    }
    fewest = min(map(len, misfits.values()))
    nearest = [kind for kind in CLASSES if len(misfits[kind]) == fewest]
    if fewest == 0:
        return nearest[0]
    wrong = dict.fromkeys(field for kind in nearest for field in misfits[kind])
    got = ", ".join(f"{field} {json.dumps(values[field])}" for field in wrong)
    requirements = [
        f"{CLASSES[kind]} requires "
        + " and ".join(f"{field} {either(map(json.dumps, computed[kind][field] or ()))}" for field in misfits[kind])
        for kind in nearest
    ]
    raise BadInput(
        f"{where}: got {got}, but no class of Hugging Face transformers computes this network, so the trained model "
        f"could not be exported; {'; '.join(requirements)}"
    )


def config_of_stock(values: dict[str, Any], kind: str) -> ModelConfig:
    """Return the configuration of a network, given the config.json of a class with RoPE.

    Raises ValueError ("KEY: got ..., wanted ...") for a value that our network cannot have.
    """
    table, keys = rows(ModelConfig), stock_keys(kind)
    for name in ("vocab_size", "context_length", "emb_dim", "n_layers", "n_heads"):
        value = values.get(keys[name])
        if type(value) is not int or value < 1:
            raise ValueError(f"{keys[name]}: got {quoted(value)}, wanted an integer of at least 1")
    rope = _rope(values, keys["rope_base"])
    activations = table["activation"].stock[kind] or ()
    choices: dict[str, tuple[Any, ...]] = {
        "head_dim": (None, values[keys["emb_dim"]] // values[keys["n_heads"]]),
        keys["activation"]: tuple(stock_name for stock_name, name in OUR_ACTIVATIONS.items() if name in activations),
        "use_sliding_window": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for key, accepted in choices.items():
        if key in values and values[key] not in accepted:
            raise ValueError(f"{key}: got {quoted(values[key])}, wanted {either(map(repr, accepted))}")
    activation = "swiglu" if kind in (LLAMA, QWEN3) else "relu2"  # the defaults of the classes
    if keys["activation"] in values:
        activation = OUR_ACTIVATIONS[values[keys["activation"]]]
    attention_bias = values.get(keys["qkv_bias"], False)
    stated = {name: values[key] for name, key in keys.items() if key in values and name != "drop_rate"}
    fixed = {name: row.stock[kind][0] for name, row in table.items() if len(row.stock.get(kind) or ()) == 1}  # type: ignore[index]
    return ModelConfig(
        **{"norm_eps": DEFAULT_EPS[kind], "logit_softcap": 15.0 if kind == NANOCHAT else None}
        | stated
        | {"activation": activation, "rope_base": rope}
        | {"biases": attention_bias or values.get(keys.get("biases", ""), False)}
        | fixed
    )


def _rope(values: dict[str, Any], base_key: str) -> float:
    """Return RoPE's base. Raises ValueError if the angles are scaled."""
    names = [name for name in ("rope_parameters", "rope_scaling") if values.get(name) is not None]
    key, parameters = (names[0], values[names[0]]) if names else ("rope_parameters", {})
    if not isinstance(parameters, dict):
        raise ValueError(f"{key}: got {quoted(parameters)}, wanted an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type: got {quoted(kind)}, wanted 'default', because scaled angles are not supported")
    base: float = parameters.get(base_key, values.get(base_key, 10_000.0))
    return base
