"""Weights are the same network in transformers' own class, in every logit and in cached generation, there and back."""

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
def test_the_stock_class_has_the_same_logits_and_generates_the_same_tokens(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    ours = network(attrs.evolve(SMALL, **options))
    save_network(ours, tmp_path, bos_token_id=0, eos_token_id=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    assert type(theirs).__name__ == name
    prompt = TOKENS[:1, :5]
    with torch.no_grad():
        logits = theirs(TOKENS).logits
        assert (ours(TOKENS) - logits).abs().max() < 1e-5
        spoken = theirs.generate(prompt, max_new_tokens=43, do_sample=False, eos_token_id=None, pad_token_id=0)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    back = load_foreign(tmp_path / "theirs", None)  # from shards
    with torch.no_grad():
        assert (back(TOKENS) - logits).abs().max() < 1e-5
    assert stock_class(back.config).name == name  # it can be exported again
    assert spoken[0, 5:].tolist() == generate(ours, prompt[0].tolist(), 43, Sampling(temperature=0))
