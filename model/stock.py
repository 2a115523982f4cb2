"""Stock classes: the class of Hugging Face's transformers that computes a configuration's network, or why none does.

An option that a class lacks is refused in training and in export, by name, and so is a field of ModelConfig that is not
in the tables below. `stock_config.py` has its config.json, `stock_weights.py` the weights.
"""

import json
from typing import Any

import attrs

from common.errors import BadInput, either, quoted
from model.config import ACTIVATIONS, GATED, ModelConfig

UNGATED = tuple(name for name in ACTIVATIONS if name not in GATED)
# Fields that every class has, or that its weights express: a missing bias is zero, a missing gain one; a norm of the
# token embedding is folded into the table.
EXPRESSED = {
    *("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias", "tie_weights"),
    *("mlp_width", "norm_eps", "rope_base", "zero_init_projections", "zero_init_head"),
}


@attrs.frozen(kw_only=True)
class Architecture:
    """A model class of transformers: its name, its `model_type`, and the values of our options that it computes."""

    name: str
    model_type: str
    options: dict[str, tuple[Any, ...]]  # any value of those that are not here


ROTARY = {"norm": ("rmsnorm",), "positions": ("rope",), "scale_attention_by_inverse_layer": (False,)}
UNCAPPED = {"logit_softcap": (None,)}
GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    options={"norm": ("layernorm",), "positions": ("learned",), "qk_norm": (False,), "activation": UNGATED}
    | {"n_kv_heads": (None,)}
    | UNCAPPED,
)
LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    options=ROTARY | {"qk_norm": (False,), "activation": GATED} | UNCAPPED,
)
ARCEE = Architecture(
    name="ArceeForCausalLM",
    model_type="arcee",
    options=ROTARY | {"qk_norm": (False,), "activation": UNGATED} | UNCAPPED,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    options=ROTARY | {"qk_norm": (True,), "activation": GATED, "biases": (False,)} | UNCAPPED,
)
NANOCHAT = Architecture(
    name="NanoChatForCausalLM",
    model_type="nanochat",
    options=ROTARY
    | {"qk_norm": (True,), "activation": UNGATED, "biases": (False,), "norm_gain": (False,), "embedding_norm": (True,)},
)
CLASSES = (GPT2, LLAMA, ARCEE, QWEN3, NANOCHAT)


def architecture_of(config: ModelConfig, where: str = "model.json") -> Architecture:
    """Return the class that computes the same network. Raises BadInput naming options that no class has together."""
    values = attrs.asdict(config)
    known = EXPRESSED.union(*(each.options for each in CLASSES))
    for field in values.keys() - known:
        raise BadInput(
            f"{where}: {field}: got {quoted(values[field])}, but no class of Hugging Face's transformers has such an "
            "option, so the trained model could not be exported; remove it, or map it in model/stock.py"
        )
    misfits = {
        each.name: [field for field in each.options if values[field] not in each.options[field]] for each in CLASSES
    }
    least = min(map(len, misfits.values()))
    nearest = [each for each in CLASSES if len(misfits[each.name]) == least]
    if least == 0:
        return nearest[0]
    wrong = dict.fromkeys(field for each in nearest for field in misfits[each.name])
    got = ", ".join(f"{field} {json.dumps(values[field])}" for field in wrong)
    wants = "; ".join(f"{each.name} wants {_wanted(each, misfits[each.name])}" for each in nearest)
    raise BadInput(
        f"{where}: got {got}, but no class of Hugging Face's transformers computes this network, so the trained model "
        f"could not be exported; {wants}"
    )


def folds_embedding_norm(config: ModelConfig) -> bool:
    """Tell whether the class lacks the norm of the token embedding: it is folded into the table, away from the head."""
    return config.embedding_norm and architecture_of(config) is not NANOCHAT


def _wanted(architecture: Architecture, fields: list[str]) -> str:
    return " and ".join(f"{field} {either(map(json.dumps, architecture.options[field]))}" for field in fields)
