"""Chat messages in the forms that other programs write: the fields and values that training data and requests may have.

A field of a message is either read, or listed here because it changes nothing. A message with any other field is
refused. So an unknown field, such as the reasoning behind an answer or a flag that excludes the answer from the loss,
is never silently dropped.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from common.checks import is_absent
from common.text import quoted
from tokens.tokenizer.template import ASSISTANT, ROLES, SYSTEM, USER, Message

OPENAI_ROLES = {**{role: role for role in ROLES}, "developer": SYSTEM}
SHARE_GPT_ROLES = OPENAI_ROLES | {"human": USER, "gpt": ASSISTANT}
SHARE_GPT = ("from", "value")  # ShareGPT's names for role and content
# Fields that say whether a message counts in the loss. Their values must agree with our rule: only answers count.
LOSS_FIELDS = ("weight", "train", "training", "loss")
# These fields describe a message. They change neither its text nor what is learned from it.
DESCRIPTIONS = frozenset(
    [
        *("id", "uuid", "message_id", "parent_id", "conversation_id", "turn_id", "turn", "index"),
        *("timestamp", "created_at", "created", "create_time", "date", "time"),
        *("model", "model_name", "lang", "language", "source", "tokens", "token_count", "num_tokens"),
    ]
)
TEXT_PART = "{'type': 'text', 'text': '...'}"


class ReadMessage(NamedTuple):
    """A message, and the names of its fields that were not read."""

    message: Message
    unread: tuple[str, ...]


def read_message(value: Any, where: str, roles: Mapping[str, str] = OPENAI_ROLES) -> ReadMessage:
    """Return a message. Raises ValueError with the kind of the problem, and with details that begin with `where`."""
    if not isinstance(value, dict):
        raise ValueError("no message", f"{where}: got {quoted(value)}, wanted an object with role and content")
    names = ("role", "content")
    if roles is SHARE_GPT_ROLES and all(is_absent(value.get(name)) for name in names) and {*SHARE_GPT} & value.keys():
        names = SHARE_GPT
    role_name, content = (value.get(name) for name in names)
    role = roles.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise ValueError("unknown role", f"{where}: got {quoted(role_name)}, wanted {', '.join(roles)}")
    unread = list[str]()
    for name, field in value.items():
        if name in names or is_absent(field):
            continue
        if name in LOSS_FIELDS:
            _check_loss_field(name, field, role, where)
        elif name in DESCRIPTIONS:
            unread.append(name)
        else:
            advice = "remove the field, or the message"
            raise ValueError("no message", f"{where}: got {quoted(name)}, wanted only {' and '.join(names)}; {advice}")
    return ReadMessage(Message(role, read_content(content, where)), tuple(unread))


def read_content(content: Any, where: str) -> str:
    """Return the text of a message's content, which is a string or a list of text parts.

    Raises ValueError like `read_message`.
    """
    if isinstance(content, str):
        return content
    expected = f"wanted a string, or a list of parts of the form {TEXT_PART}"
    if not isinstance(content, list):
        raise ValueError("not a string", f"{where}: got {quoted(content)}, {expected}")
    texts = list[str]()
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("not a string", f"{where}: got a part {quoted(part)}, {expected}")
        if unexpected_fields := [
            name for name, field in part.items() if name not in ("type", "text") and not is_absent(field)
        ]:
            raise ValueError("not a string", f"{where}: got a part with {quoted(unexpected_fields[0])}, {expected}")
        texts.append(part["text"])
    return "".join(texts)


def excluded_by(record: Mapping[str, Any]) -> str | None:
    """Return the name of a field that excludes the whole record from the loss, or None."""
    return next(
        (name for name in LOSS_FIELDS if type(record.get(name)) in (bool, int, float) and not record[name]), None
    )


def _check_loss_field(name: str, value: Any, role: str, where: str) -> None:
    """Raise ValueError if a field contradicts our rule: answers count in the loss, and no other message does."""
    if type(value) not in (bool, int, float) or value not in (0, 1) or bool(value) != (role == ASSISTANT):
        rule = "every answer counts in the loss, and no other message does"
        raise ValueError("no message", f"{where}: got {quoted(name)}: {quoted(value)} for {role}, but {rule}")
