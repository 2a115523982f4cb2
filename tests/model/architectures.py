"""Configurations for every stock class. Each option that a class supports is set at least once."""

from typing import Any

import attrs

from model.config import ModelConfig
from tests.model.test_gpt import SMALL

PLAIN: dict[str, Any] = {"tie_weights": False, "qkv_bias": False}
ROTARY: dict[str, Any] = PLAIN | {"norm": "rmsnorm", "positions": "rope", "biases": False}
SWIGLU = ROTARY | {"activation": "swiglu"}
QWEN3 = SWIGLU | {"qk_norm": True}
ARCEE = ROTARY | {"activation": "relu2"}
NANOCHAT = ARCEE | {"qk_norm": True, "norm_gain": False, "embedding_norm": True}
MUON_RECIPE: dict[str, Any] = {  # keys of train.json, as in NanoChat's speed records
    "optimizer": "muon",
    "muon_split_qkv": True,
    "muon_momentum_warmup_steps": 4,
    "matrix_learning_rate": 0.02,
    "head_learning_rate": 0.004,
    "schedule_learning_rate": "warmup_stable_decay",
    "decay_period_percent": 50,
}
TIED_NORM = {"embedding_norm": True, "tie_weights": True}  # the export folds the norm and unties the head

CASES: list[tuple[str, dict[str, Any]]] = [
    ("GPT2LMHeadModel", {}),
    ("GPT2LMHeadModel", PLAIN),
    ("GPT2LMHeadModel", {"norm_gain": False}),
    ("GPT2LMHeadModel", {"biases": False}),
    ("GPT2LMHeadModel", PLAIN | {"mlp_width": 100, "activation": "relu2", "norm_eps": 1e-3}),
    ("GPT2LMHeadModel", PLAIN | {"embedding_norm": True}),
    ("GPT2LMHeadModel", TIED_NORM),
    ("GPT2LMHeadModel", {"scale_attention_by_inverse_layer": True, "drop_rate": 0.25}),
    ("LlamaForCausalLM", SWIGLU),
    ("LlamaForCausalLM", SWIGLU | {"biases": True, "qkv_bias": True, "n_kv_heads": 2, "mlp_width": 100}),
    ("LlamaForCausalLM", SWIGLU | {"biases": True, "tie_weights": True, "rope_base": 500.0}),
    ("LlamaForCausalLM", SWIGLU | {"qkv_bias": True, "norm_gain": False, "embedding_norm": True}),
    ("LlamaForCausalLM", SWIGLU | TIED_NORM | {"norm_eps": 1e-3}),
    ("Qwen3ForCausalLM", QWEN3 | {"zero_init_projections": True, "zero_init_head": True}),
    ("Qwen3ForCausalLM", QWEN3 | TIED_NORM | {"norm_gain": False, "qkv_bias": True, "n_kv_heads": 1}),
    ("ArceeForCausalLM", ARCEE),
    ("ArceeForCausalLM", ARCEE | {"activation": "gelu_tanh", "biases": True, "n_kv_heads": 2, "mlp_width": 100}),
    ("ArceeForCausalLM", ARCEE | {"activation": "gelu", "norm_gain": False, "embedding_norm": True}),
    ("NanoChatForCausalLM", NANOCHAT),
    ("NanoChatForCausalLM", NANOCHAT | {"logit_softcap": 2.0, "n_kv_heads": 2, "qkv_bias": True}),
    ("NanoChatForCausalLM", NANOCHAT | {"activation": "gelu_tanh", "tie_weights": True, "mlp_width": 100}),
    ("GPT2LMHeadModel", {"activation": "gelu"}),
]
# Networks for tests that do not depend on stock classes. Every option is used by at least one of them.
MODERN: dict[str, ModelConfig] = {
    "NanoChat": attrs.evolve(SMALL, **NANOCHAT, logit_softcap=2.0, n_kv_heads=2),
    "Qwen3": attrs.evolve(SMALL, **QWEN3, mlp_width=100, n_kv_heads=1),
    "no stock class": attrs.evolve(
        SMALL, positions="rope", embedding_norm=True, scale_attention_by_inverse_layer=True, activation="relu2"
    ),
}
