"""An exported chat model converses elsewhere as it does here: template, ends of a turn, tokens."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from evaluation.export.export import export
from evaluation.shared.load import ModelLocation, Trained, load, locate
from model.generate import Sampling
from tests.conftest import slow
from tests.model.architectures import QWEN3, SWIGLU
from tests.model.test_gpt import SMALL
from tests.model.test_naming import network
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import ASSISTANT, SYSTEM, TEMPLATES, USER, Message, Template

TEXTS = [
    "Hi!",
    "  both ends \n",
    "\n\n\nx\r\n\ty",
    "日本語 🚀 naïve",
    "if x:\n    '''{{ y }}''' # {% %}",
    "<|end|>",
    "",
]
CONVERSATIONS = [
    *([Message(USER, text)] for text in TEXTS),
    *([Message(SYSTEM, text), Message(USER, text), Message(ASSISTANT, text), Message(USER, "more")] for text in TEXTS),
]


def chat_model(folder: Path, template: Template, **options: Any) -> Trained:
    tokenizer = load_tokenizer("bytes").with_special_tokens(template.turn_tokens)
    config = attrs.evolve(SMALL, **options, vocab_size=tokenizer.vocabulary_size, context_length=400)
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template.text)
    return Trained(network(config), tokenizer, ModelLocation(folder, None, folder))


@pytest.mark.parametrize("options", [QWEN3, *slow({}, {"tie_weights": False}, SWIGLU, SWIGLU | {"tie_weights": True})])
def test_transformers_asks_and_answers_token_for_token(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = TEMPLATES["turns"]
    ours, out = chat_model(tmp_path, template, **options), tmp_path / "out"
    export(ours, out, None, None)
    back = load(locate(str(out), None), None, torch.device("cpu"))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    assert (out / "chat_template.jinja").read_bytes().decode() == tokenizer.chat_template == template.text
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == template.text
    assert theirs.generation_config.eos_token_id == sorted(ours.stop_ids) == sorted(back.stop_ids)
    for number, messages in enumerate(CONVERSATIONS):
        prompt = template.prompt(ours.tokenizer, messages)
        conversation = [message._asdict() for message in messages]
        asked = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
        )
        assert back.template is not None
        assert asked == back.template.prompt(back.tokenizer, messages) == prompt
        if number % 4:
            continue
        answer = [*ours.generate(prompt, 16, Sampling(temperature=0), ours.stop_ids)]
        assert answer == [*back.generate(prompt, 16, Sampling(temperature=0), back.stop_ids)]
        said = theirs.generate(torch.tensor([asked]), do_sample=False, max_new_tokens=16)[0, len(prompt) :].tolist()
        assert said[: len(answer)] == answer
        assert set(said[len(answer) :]) <= ours.stop_ids


def test_ollama_is_told_of_our_templates_and_not_of_others(tmp_path: Path) -> None:
    for name in TEMPLATES:
        export(chat_model(tmp_path, TEMPLATES[name]), tmp_path / name, None, None)
    written = (tmp_path / "turns" / "Modelfile").read_text()
    turns = "{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}<|end|>"
    assert written.startswith(f'FROM ./model.gguf\nTEMPLATE """{turns}')
    assert 'PARAMETER stop "<|end|>"\n' in written and 'PARAMETER stop "<|endoftext|>"\n' in written
    assert "PARAMETER num_ctx 400\n" in written
    assert "### Response:\n{{ .Content }}<|endoftext|>" in (tmp_path / "alpaca" / "Modelfile").read_text()
    own = Template("{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}")
    export(chat_model(tmp_path, own), tmp_path / "own", None, None)
    assert (tmp_path / "own" / "chat_template.jinja").is_file() and not (tmp_path / "own" / "Modelfile").exists()
