"""Reading requests without a server: hostile templates are refused, and equivalent requests give equal prompts."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.serve.api_request import ApiError, ServedModel, read_request
from evaluation.shared.model_location import ModelLocation
from tests.evaluation.generation.test_chat import Talker
from tokens.tokenizer import rendering
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import TEMPLATES, TURN_TOKENS, Template

HELLO: Any = {"role": "user", "content": "Hello"}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def prompt(template: Template, *messages: Any, **options: Any) -> str:
    """Return the prompt of a chat completion as text."""
    tokenizer = load_tokenizer("bytes").with_special_tokens(TURN_TOKENS)
    network: Any = SimpleNamespace(config=SimpleNamespace(context_length=512, vocab_size=261))
    trained = Talker(network, tokenizer, ModelLocation(Path("m"), None, Path("m")), template)
    body = json.dumps({"model": "m", "messages": messages, **options}).encode()
    served = ServedModel(trained=trained, name="m", longest_answer=9, most_answers=9)
    return tokenizer.decode(read_request(body, served, chat=True)[0].prompt)


def test_hostile_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering._process_of(os.getpid())._end()  # a process from an earlier test would have the usual limits
    monkeypatch.setattr(rendering, "SECONDS", 0.2)
    for text, problem in ((LOOP, "seconds of processor time"), ("{{ 'a' * 2000000 }}", "writes 2,000,000 characters")):
        with pytest.raises(ApiError, match=problem) as raised:
            prompt(Template(text), HELLO)
        assert raised.value.status == 400
    rendering._process_of(os.getpid())._end()


def test_equivalent_requests_give_equal_prompts() -> None:
    turns = TEMPLATES["turns"]
    plain = prompt(turns, HELLO)
    assert plain == "<|user|>Hello<|end|><|assistant|>"
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    empty = {"name": None, "tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": {}}
    assert prompt(turns, HELLO | empty) == prompt(turns, HELLO | {"content": parts}) == plain
    neutral = {
        "n": 1,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "suffix": "",
        "user": "u",
        "store": False,
    }
    assert prompt(turns, HELLO, **neutral, stop=None, max_tokens=5, max_completion_tokens=5) == plain
    texts = [prompt(turns, {"role": role, "content": "S"}, HELLO) for role in ("developer", "system")]
    assert texts == [f"<|system|>S<|end|>{plain}"] * 2
