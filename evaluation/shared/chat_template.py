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
    settings, path = _values(directory / SPECIAL) | _values(directory / SETTINGS), directory / CHAT_TEMPLATE
    text = settings.get("chat_template")
    if isinstance(text, list) and all(isinstance(each, dict) for each in text):  # several by name, as of tools
        text = next((each.get("template") for each in text if each.get("name") == "default"), None)
    if path.is_file():
        with refusing(path, kinds=(OSError, ValueError)):
            text = read_regular(path).decode()
    if not isinstance(text, str | None):
        raise BadInput(f"{directory / SETTINGS}: chat_template: got {quoted(text)}, wanted a Jinja text")
    special = {name: value for name, value in settings.items() if name.endswith("_token")}
    if wrong := [name for name, value in special.items() if isinstance(value, dict) and "content" not in value]:
        raise BadInput(f"{directory}: {wrong[0]}: got {quoted(special[wrong[0]])}, wanted a text, or its content")
    spelled = {name: value["content"] if isinstance(value, dict) else value for name, value in special.items()}
    named = {name: value for name, value in spelled.items() if isinstance(value, str)}
    return None if text is None else Template(text, variables=named)


def end_ids(directory: Path) -> frozenset[int]:
    """Return the ids of `eos_token_id`: any of them ends an answer. Raises BadInput."""
    found = (_values(directory / CONFIG) | _values(directory / GENERATION)).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) for each in ids):
        raise BadInput(f"{directory}: eos_token_id: got {quoted(found)}, wanted an id, or a list of ids")
    return frozenset(ids)


def _values(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
