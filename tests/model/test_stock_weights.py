"""Exported weights give the same network in transformers, and can be imported again.

The logits are equal, and so are the tokens that are generated with a cache.
"""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from evaluation.export.export import save_network
from evaluation.shared.foreign import load_foreign
from model.generate import Sampling
from model.stock import stock_class
from tests.conftest import slow
from tests.model.architectures import CASES
from tests.model.test_generate import generate
from tests.model.test_gpt import SMALL
from tests.model.test_naming import TOKENS, network


@pytest.mark.parametrize(("name", "options"), [*CASES[1::3], *slow(*CASES[::3], *CASES[2::3])])
def test_stock_class_computes_the_same_logits_and_tokens(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = network(attrs.evolve(SMALL, **options))
    save_network(model, tmp_path, bos_token_id=0, eos_token_id=0)
    stock_model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    assert type(stock_model).__name__ == name
    prompt = TOKENS[:1, :5]
    with torch.no_grad():
        logits = stock_model(TOKENS).logits
        assert (model(TOKENS) - logits).abs().max() < 1e-5
        generated = stock_model.generate(prompt, max_new_tokens=43, do_sample=False, eos_token_id=None, pad_token_id=0)
    stock_model.save_pretrained(tmp_path / "stock", max_shard_size="50KB")
    assert (tmp_path / "stock" / "model.safetensors.index.json").is_file()
    imported = load_foreign(tmp_path / "stock", None)  # the export consists of several files
    with torch.no_grad():
        assert (imported(TOKENS) - logits).abs().max() < 1e-5
    assert stock_class(imported.config).name == name  # it can be exported again
    assert generated[0, 5:].tolist() == generate(model, prompt[0].tolist(), 43, Sampling(temperature=0))
