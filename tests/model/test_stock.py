"""The stock class of a configuration: every field is exported or refused, before training and before an export."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from model.config import ModelConfig
from model.stock import stock_class
from tests.conftest import TINY_MODEL, MakeRun, complete, only_line
from tests.evaluation.comparison.stored import evaluate
from tests.model.architectures import CASES, NANOCHAT, PLAIN, QWEN3, SWIGLU
from tests.model.test_gpt import SMALL
from training.config.train_config import load_run


@attrs.frozen(kw_only=True)
class MixtureConfig(ModelConfig):
    """A configuration with an option that has no row in model/config.py."""

    experts: int | None = None


def test_config_json_contains_every_field() -> None:
    stock = stock_class(attrs.evolve(SMALL, drop_rate=0.25, tie_weights=False))
    assert stock.name == "GPT2LMHeadModel"
    assert stock.config == {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 211,
        "n_positions": 48,
        "n_ctx": 48,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attn_pdrop": 0.25,
        "embd_pdrop": 0.25,
        "resid_pdrop": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
    }


@pytest.mark.parametrize(("name", "options"), CASES)
def test_options_determine_the_class(name: str, options: dict[str, Any]) -> None:
    assert stock_class(attrs.evolve(SMALL, **options)).name == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PLAIN | {"positions": "rope"}, 'positions "rope", .* GPT2LMHeadModel requires positions "learned"'),
        (PLAIN | {"norm": "rmsnorm"}, 'norm "rmsnorm", .* GPT2LMHeadModel requires norm "layernorm"'),
        (PLAIN | {"qk_norm": True}, "qk_norm true, .* GPT2LMHeadModel requires qk_norm false"),
        (
            PLAIN | {"activation": "swiglu"},
            'activation "swiglu", .* requires activation "gelu_tanh", "gelu" or "relu2"',
        ),
        (PLAIN | {"n_kv_heads": 2}, "n_kv_heads 2, .* GPT2LMHeadModel requires n_kv_heads null"),
        (PLAIN | {"logit_softcap": 15.0}, "logit_softcap 15.0, .* GPT2LMHeadModel requires logit_softcap null"),
        (SWIGLU | {"logit_softcap": 15.0}, "logit_softcap 15.0, .* LlamaForCausalLM requires logit_softcap null"),
        (SWIGLU | {"scale_attention_by_inverse_layer": True}, "scale_attention_by_inverse_layer true, .* requires "),
        (QWEN3 | {"biases": True}, "qk_norm true, biases true, .* Qwen3ForCausalLM requires biases false"),
        (NANOCHAT | {"norm_gain": True}, "qk_norm true, .* NanoChatForCausalLM requires norm_gain false"),
        (NANOCHAT | {"embedding_norm": False}, "qk_norm true, .* NanoChatForCausalLM requires embedding_norm true"),
    ],
)
def test_unsupported_networks_are_refused_with_the_nearest_class(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"^model.json: got {message}"):
        stock_class(attrs.evolve(SMALL, **options))


@pytest.mark.parametrize("experts", [None, 8])
def test_fields_without_a_row_are_refused(experts: int | None) -> None:
    with pytest.raises(BadInput, match=r"^model\.json: experts: got .*no class .* option.* model/config\.py$"):
        stock_class(MixtureConfig(**TINY_MODEL, experts=experts))


def test_training_refuses_networks_without_a_stock_class(make_run: MakeRun) -> None:
    run = make_run(model={"positions": "rope"})
    advice = "or set require_stock_class to false in train.json"
    with pytest.raises(BadInput, match=rf'run/model\.json: got positions "rope", .* but .*; {advice}'):
        load_run(run, [])
    assert load_run(run, ["require_stock_class=false"]).model.positions == "rope"


def test_run_without_a_stock_class_trains_but_is_not_exported(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(model={"positions": "rope"}, require_stock_class=False)
    complete(run, "--max-steps", "2")
    assert evaluate("smoke", run, "--prompt", "def").returncode == 0
    message = only_line(evaluate("export", run, tmp_path / "out"))
    assert 'got positions "rope", norm "layernorm", but no class' in message
    assert not (tmp_path / "out").exists()
