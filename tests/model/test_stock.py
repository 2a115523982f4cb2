"""Stock class of a configuration: every field is expressed or refused, before training and before an export."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from common.errors import BadInput
from evaluation.export.export import save_network
from model.config import ACTIVATIONS, ModelConfig
from model.gpt import GPT
from model.stock import stock_class
from tests.conftest import TINY_MODEL
from tests.model.test_gpt import SMALL
from training.config import train_config


@attrs.frozen(kw_only=True)
class RotaryConfig(ModelConfig):
    """A configuration with an option that GPT-2 does not have."""

    rope_base: float | None = None


def test_every_field_of_a_configuration_is_expressed() -> None:
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


def test_every_activation_is_expressed() -> None:
    names = [stock_class(attrs.evolve(SMALL, activation=name)).config["activation_function"] for name in ACTIVATIONS]
    assert names == ["gelu_new", "gelu"]


@pytest.mark.parametrize("rope_base", [None, 10_000.0])
def test_a_field_without_an_equivalent_is_refused_whatever_its_value(rope_base: float | None) -> None:
    with pytest.raises(BadInput, match=r"^model\.json: rope_base: got .*GPT-2 has no such option.* model/stock\.py$"):
        stock_class(RotaryConfig(**TINY_MODEL, rope_base=rope_base))


def test_training_refuses_it_by_file_and_field_before_anything_else(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run / "model.json").write_text(json.dumps(TINY_MODEL | {"rope_base": 10_000.0}))
    monkeypatch.setattr(train_config, "ModelConfig", RotaryConfig)
    monkeypatch.setitem(train_config.KEYS, "model", dict(attrs.fields_dict(RotaryConfig)))
    with pytest.raises(BadInput, match=r"run/model\.json: rope_base: got 10000\.0, but"):
        train_config.load_run(run, [])


def test_an_export_refuses_it_and_writes_nothing(tmp_path: Path) -> None:
    network = GPT(RotaryConfig(**TINY_MODEL, rope_base=10_000.0))
    with pytest.raises(BadInput, match=r"rope_base: got 10000\.0"):
        save_network(network, tmp_path)
    assert list(tmp_path.iterdir()) == []
