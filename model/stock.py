"""Stock classes of Hugging Face's transformers: the one that computes a configuration's network, or why none does.

An option that a class lacks is refused in training and in export, by name, and so is a field of ModelConfig that has no
row (model/config.py). `stock_weights.py` has the weights.
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
# Where config.json has no epsilon of the norms
DEFAULT_EPS = {LLAMA: 1e-6, QWEN3: 1e-6, NANOCHAT: 1e-6, ARCEE: 1e-5}


@attrs.frozen
class StockClass:
    """A model class of transformers and the values of its configuration."""

    model_type: str
    config: dict[str, Any]  # config.json

    @property
    def name(self) -> str:
        return CLASSES[self.model_type]


def stock_class(config: ModelConfig, where: str = "model.json") -> StockClass:
    """Return the class that computes the same network. Raises BadInput, beginning with `where`, if there is none."""
    kind = stock_kind(config, where)
    values: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind}
    for name, row in rows(type(config)).items():
        value = getattr(config, name) if row.stock_value is None else row.stock_value(config, kind)
        values |= {} if value is attrs.NOTHING else dict.fromkeys(row.keys.get(kind, ()), value)
    if kind in ROTARY:
        # The base is stated here and, for loaders before version 5, by its own key.
        rope = {"rope_type": "default", stock_keys(kind)["rope_base"]: config.rope_base}
        values |= {"head_dim": config.head_width, "rope_parameters": rope}
    return StockClass(kind, values | {"initializer_range": INITIAL_STD, "torch_dtype": "float32", "use_cache": True})


def stock_kind(config: ModelConfig, where: str = "model.json") -> str:
    """Return the `model_type` of the class. Raises BadInput naming options that no class has together."""
    table, values = rows(type(config)), attrs.asdict(config)
    for field in values.keys() - table.keys():
        raise BadInput(
            f"{where}: {field}: got {quoted(values[field])}, but no class of Hugging Face's transformers has such an "
            "option, so the trained model could not be exported; remove it, or give it a row in model/config.py"
        )
    defaults = attrs.fields_dict(type(config))
    computed = {  # values of each option that a class computes; None: all
        kind: {field: row.stock.get(kind, (defaults[field].default,)) for field, row in table.items()}
        for kind in CLASSES
    }
    misfits = {
        kind: [field for field, known in fields.items() if known is not None and values[field] not in known]
        for kind, fields in computed.items()
    }
    least = min(map(len, misfits.values()))
    nearest = [kind for kind in CLASSES if len(misfits[kind]) == least]
    if least == 0:
        return nearest[0]
    wrong = dict.fromkeys(field for kind in nearest for field in misfits[kind])
    got = ", ".join(f"{field} {json.dumps(values[field])}" for field in wrong)
    wants = {
        kind: " and ".join(f"{field} {either(map(json.dumps, computed[kind][field] or ()))}" for field in misfits[kind])
        for kind in nearest
    }
    raise BadInput(
        f"{where}: got {got}, but no class of Hugging Face's transformers computes this network, so the trained model "
        f"could not be exported; {'; '.join(f'{CLASSES[kind]} wants {wanted}' for kind, wanted in wants.items())}"
    )


def config_of_stock(values: dict[str, Any], kind: str) -> ModelConfig:
    """Return the configuration by config.json of a class with RoPE. Raises ValueError, "KEY: got ..., wanted ..."."""
    table, keys = rows(ModelConfig), stock_keys(kind)
    for name in ("vocab_size", "context_length", "emb_dim", "n_layers", "n_heads"):
        value = values.get(keys[name])
        if type(value) is not int or value < 1:
            raise ValueError(f"{keys[name]}: got {quoted(value)}, wanted an integer of at least 1")
    rope = _rope(values, keys["rope_base"])
    computed = table["activation"].stock[kind] or ()
    wanted: dict[str, tuple[Any, ...]] = {
        "head_dim": (None, values[keys["emb_dim"]] // values[keys["n_heads"]]),
        keys["activation"]: tuple(theirs for theirs, name in OUR_ACTIVATIONS.items() if name in computed),
        "use_sliding_window": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for key, known in wanted.items():
        if key in values and values[key] not in known:
            raise ValueError(f"{key}: got {quoted(values[key])}, wanted {either(map(repr, known))}")
    activation = "swiglu" if kind in (LLAMA, QWEN3) else "relu2"  # the classes' own defaults
    if keys["activation"] in values:
        activation = OUR_ACTIVATIONS[values[keys["activation"]]]
    attention_bias = values.get(keys["qkv_bias"], False)
    read = {name: values[key] for name, key in keys.items() if key in values and name != "drop_rate"}
    fixed = {name: row.stock[kind][0] for name, row in table.items() if len(row.stock.get(kind) or ()) == 1}  # type: ignore[index]
    return ModelConfig(
        **{"norm_eps": DEFAULT_EPS[kind], "logit_softcap": 15.0 if kind == NANOCHAT else None}
        | read
        | {"activation": activation, "rope_base": rope}
        | {"biases": attention_bias or values.get(keys.get("biases", ""), False)}
        | fixed
    )


def _rope(values: dict[str, Any], base_key: str) -> float:
    """Return RoPE's base. Raises ValueError for angles that are scaled."""
    found = [name for name in ("rope_parameters", "rope_scaling") if values.get(name) is not None]
    key, parameters = (found[0], values[found[0]]) if found else ("rope_parameters", {})
    if not isinstance(parameters, dict):
        raise ValueError(f"{key}: got {quoted(parameters)}, wanted an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type: got {quoted(kind)}, wanted 'default': angles without scaling")
    base: float = parameters.get(base_key, values.get(base_key, 10_000.0))
    return base
