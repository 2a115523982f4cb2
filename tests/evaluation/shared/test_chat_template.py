"""Chat templates of Hugging Face are rendered as transformers renders them; damaged ones give one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.shared.chat_template import end_ids, read_template
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import ASSISTANT, SYSTEM, USER, Message

CHAT_ML = """{%- if not tools is none %}{{ raise_exception('tools') }}{%- endif %}
{{- bos_token }}{% for message in messages %}
    {%- if loop.index0 > 9 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'system' %}{{ strftime_now('%Y') | tojson }}<é> {% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|im_end|>{%- endgeneration -%}
    {%- else %}{{ message.content + eos_token }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ROLES, TEXTS = (SYSTEM, USER, ASSISTANT, USER), ("Be brief.", "¿Qué?\n <|im_end|>", "Nada.", "")
MESSAGES = [*map(Message, ROLES, TEXTS)]


def write(folder: Path, settings: dict[str, Any], template: str | None = None) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize("where", ["file", "settings", "named"])
def test_a_chat_template_renders_as_in_transformers(tmp_path: Path, where: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT_ML}]
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "pad_token": None}
    inside = {"file": "another", "settings": CHAT_ML, "named": named}[where]
    write(tmp_path, {**settings, "chat_template": inside}, CHAT_ML if where == "file" else None)
    template = read_template(tmp_path)
    assert template is not None
    tokenizer = load_tokenizer("bytes").with_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    prompt = template.prompt(tokenizer, MESSAGES)
    conversation = [message._asdict() for message in MESSAGES]
    tokens: Any = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    rendered, _ = render_jinja_template([conversation], chat_template=CHAT_ML, add_generation_prompt=True, **tokens)
    assert tokenizer.decode(prompt) == rendered[0]
    end = tokenizer.special_tokens["<|im_end|>"]
    assert prompt.count(end) == 4  # the end token that the user typed is ordinary text
    assert template.ends(tokenizer) == [end, end]


def test_damaged_chat_template_is_refused(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    for settings, problem in (
        ({"chat_template": 5}, "wanted the text of a Jinja template"),
        ({"chat_template": ["a"]}, "wanted the text of a Jinja template"),
        ({"chat_template": "{{ 1 / 0 }}"}, "zero"),
        ({"chat_template": "{% if %}"}, "Expected"),
        ({"pad_token": {"lstrip": False}}, "pad_token: got"),
        ({"eos_token": 5}, "eos_token: got 5"),
        ({"chat_template": [{"name": "tool_use", "template": "a"}]}, "wanted one named 'default'"),
    ):
        write(tmp_path, settings)
        with pytest.raises(BadInput, match=problem):
            read_template(tmp_path).prompt(load_tokenizer("bytes"), [])  # type: ignore[union-attr]


def test_end_ids_may_be_one_or_several(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert end_ids(tmp_path) == {7, 9}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": true}')
    with pytest.raises(BadInput, match=r"eos_token_id: got True"):
        end_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(BadInput, match=r"eos_token_id: got 'x'"):
        end_ids(tmp_path)
