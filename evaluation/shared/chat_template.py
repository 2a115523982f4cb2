"""Read what a conversation needs from a Hugging Face model directory: the chat template and the end-of-answer ids."""

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
    """Return a directory's chat template with the special tokens that it may use, or None if there is no template.

    A separate template file takes precedence over the key in tokenizer_config.json, as it does in transformers.
    Raises BadInput.
    """
    settings, path = _values(directory / SPECIAL) | _values(directory / SETTINGS), directory / CHAT_TEMPLATE
    text = settings.get("chat_template")
    # A list holds several named templates, for example a second one for the use of tools.
    if isinstance(text, list) and all(isinstance(entry, dict) for entry in text):
        names = [entry.get("name") for entry in text]
        if text and "default" not in names:
            raise BadInput(
                f"{directory / SETTINGS}: chat_template: got the names {quoted(names)}, wanted one named 'default'"
            )
        text = next((entry.get("template") for entry in text if entry.get("name") == "default"), None)
    if path.is_file():
        with refusing(path, kinds=(OSError, ValueError)):
            separate = read_regular(path, 4 * TEMPLATE_CHARACTERS).decode()
        if isinstance(text, str) and text != separate:
            show(note(f"{path}: differs from chat_template in {SETTINGS}; this file is used, as in transformers"))
        text = separate
    if not isinstance(text, str) and not is_absent(text):
        raise BadInput(
            f"{directory / SETTINGS}: chat_template: got {quoted(text)}, wanted the text of a Jinja template"
        )
    # Some flags, such as add_bos_token, also have names that end in "_token".
    special = {key: value for key, value in settings.items() if key.endswith("_token") and type(value) is not bool}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in special.items()}
    for key, value in contents.items():
        if not isinstance(value, str) and (special[key] is not None):
            raise BadInput(
                f"{directory}: {key}: got {quoted(special[key])}, wanted a string or an object with a string 'content'"
            )
    variables = {key: value for key, value in contents.items() if value is not None}
    return Template(text, variables=variables) if isinstance(text, str) and not is_absent(text) else None


def end_ids(directory: Path) -> frozenset[int]:
    """Return the token ids that `eos_token_id` lists. Each of them ends an answer. Raises BadInput."""
    ends: set[int] = set()
    for path in (directory / CONFIG, directory / GENERATION):  # the two files may name different ids
        configured = _values(path).get("eos_token_id")
        ids = configured if isinstance(configured, list) else [] if configured is None else [configured]
        if not all(type(token_id) is int for token_id in ids):
            raise BadInput(f"{path}: eos_token_id: got {quoted(configured)}, wanted an id or a list of ids")
        ends.update(ids)
    return frozenset(ends)


def _values(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
