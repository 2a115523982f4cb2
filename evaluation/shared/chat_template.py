"""Conversations with a model of a Hugging Face directory: its chat template, and the ids that end an answer."""

from pathlib import Path
from typing import Any

from common.checks import is_absent
from common.errors import BadInput, refusing
from common.json_files import read_json, read_regular
from common.output import note, show
from common.text import quoted
from tokens.tokenizer.hugging_face_files import CHAT_TEMPLATE, SETTINGS, SPECIAL
from tokens.tokenizer.rendering import TEMPLATE_CHARACTERS
from tokens.tokenizer.template import Template

GENERATION, CONFIG = "generation_config.json", "config.json"


def read_template(directory: Path) -> Template | None:
    """Return the chat template, with the special tokens that it may name, or None without one. Raises BadInput."""
    settings, path = _values(directory / SPECIAL) | _values(directory / SETTINGS), directory / CHAT_TEMPLATE
    text = settings.get("chat_template")
    if isinstance(text, list) and all(isinstance(each, dict) for each in text):  # several by name, as of tools
        names = [each.get("name") for each in text]
        if text and "default" not in names:
            raise BadInput(f"{directory / SETTINGS}: chat_template: got {quoted(names)}, wanted one named 'default'")
        text = next((each.get("template") for each in text if each.get("name") == "default"), None)
    if path.is_file():
        with refusing(path, kinds=(OSError, ValueError)):
            separate = read_regular(path, 4 * TEMPLATE_CHARACTERS).decode()
        if isinstance(text, str) and text != separate:
            show(note(f"{path}: differs from chat_template in {SETTINGS}, and is used instead, as by transformers"))
        text = separate
    if not isinstance(text, str) and not is_absent(text):
        raise BadInput(f"{directory / SETTINGS}: chat_template: got {quoted(text)}, wanted a Jinja text")
    # There are flags with such names, for example add_bos_token.
    special = {key: value for key, value in settings.items() if key.endswith("_token") and type(value) is not bool}
    spelled = {key: value.get("content") if isinstance(value, dict) else value for key, value in special.items()}
    for key, value in spelled.items():
        if not isinstance(value, str) and (special[key] is not None):
            raise BadInput(f"{directory}: {key}: got {quoted(special[key])}, wanted a text, or its content")
    named = {key: value for key, value in spelled.items() if value is not None}
    return Template(text, variables=named) if isinstance(text, str) and not is_absent(text) else None


def end_ids(directory: Path) -> frozenset[int]:
    """Return the ids of `eos_token_id`: any of them ends an answer. Raises BadInput."""
    ends: set[int] = set()
    for path in (directory / CONFIG, directory / GENERATION):  # which may name different ones
        found = _values(path).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(each) is int for each in ids):
            raise BadInput(f"{path}: eos_token_id: got {quoted(found)}, wanted an id, or a list of ids")
        ends.update(ids)
    return frozenset(ends)


def _values(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
