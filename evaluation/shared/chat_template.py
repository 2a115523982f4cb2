"""Conversations with a model of a Hugging Face directory: its chat template, and the ids that end an answer."""

from pathlib import Path
from typing import Any

from common.errors import BadInput, quoted, refusing
from common.json_files import read_json, read_regular
from tokens.tokenizer.hugging_face_files import CHAT_TEMPLATE, SETTINGS, SPECIAL
from tokens.tokenizer.template import Template

GENERATION, CONFIG = "generation_config.json", "config.json"


def read_template(directory: Path) -> Template | None:
    """Return the chat template, with the special tokens that it may name, or None without one. Raises BadInput."""
    special, settings = _values(directory / SPECIAL), _values(directory / SETTINGS)
    spelled = {name: _content(value) for name, value in {**special, **settings}.items() if name.endswith("_token")}
    text, path = settings.get("chat_template"), directory / CHAT_TEMPLATE
    if isinstance(text, list):  # several by name, as of tools
        text = next((each.get("template") for each in text if each.get("name") == "default"), None)
    if path.is_file():
        with refusing(path, kinds=(OSError, ValueError)):
            text = read_regular(path).decode()
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadInput(f"{directory / SETTINGS}: chat_template: got {quoted(text)}, wanted a Jinja text")
    return Template(text, variables={name: value for name, value in spelled.items() if isinstance(value, str)})


def end_ids(directory: Path) -> frozenset[int]:
    """Return the ids of `eos_token_id`: any of them ends an answer. Raises BadInput."""
    path = next((path for name in (GENERATION, CONFIG) if (path := directory / name).is_file()), directory / GENERATION)
    found = _values(path).get("eos_token_id") or []
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(each, int) for each in ids):
        raise BadInput(f"{path}: eos_token_id: got {quoted(found)}, wanted an id, or a list of ids")
    return frozenset(ids)


def _values(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
