"""Conversations: records of `messages`, ShareGPT's `conversations` or Alpaca's fields, as messages of known roles."""

import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from common.errors import BadInput, quoted
from tokens.documents.inputs import Damaged, Extent, Input
from tokens.documents.reader import HEAD_CHARACTERS, SHOWN_FIELDS, Piece, Reader
from tokens.documents.text_file import BYTE_ORDER_MARK, GAP, LONGEST_GAP, Line, gap_position
from tokens.tokenizer.template import ASSISTANT, ROLES, SYSTEM, USER, Message

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ALPACA = ("instruction", "input", "output")
WANTED = "wanted 'messages', or 'instruction' and 'output'"
SHAREGPT = {"system": SYSTEM, "human": USER, "gpt": ASSISTANT}
LARGEST_ARRAY = 1 << 30  # bytes of a JSON array
REFUSED_KEYS = ("weight", "tool_calls", "function_call")  # of a message: without them it would mean something else


class Unfit(Exception):
    """A record that is no conversation to train on: the kind of its problem, and the details."""


class ConversationReader(Reader):
    """Reader of units whose documents are conversations: pieces with messages."""

    def __init__(self, inputs: tuple[Input, ...], special_tokens: Collection[str]):
        """`special_tokens`: the spellings that no message may hold."""
        super().__init__(inputs, text_field="")
        self._special_tokens = special_tokens

    def _records(self, item: Input, extent: Extent, lines: Iterator[Line], counted: str) -> Iterator[Piece]:
        first = next(lines, None)
        lines = itertools.chain([] if first is None else [first], lines)
        if first is not None and (first[0] or b"").removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            yield from super()._records(item, extent, array_elements(lines), "record")
        else:
            yield from super()._records(item, extent, lines, "line" if extent.begin == 0 else counted)

    def _record(self, record: Any, where: str, *, surrogates: bool) -> Iterator[Piece]:
        try:
            messages = conversation(record, self._special_tokens)
        except Unfit as problem:
            kind, detail = problem.args
            self.problems.add(kind, where, detail)
            return
        if surrogates:
            messages = [Message(role, self._without_lone_surrogates(text, where)) for role, text in messages]
        if messages[-1].role == USER:
            self.problems.add("unanswered message", where, "the last message, a user's, is left out", documents=0)
            messages.pop()
        text = "\n".join(message.content for message in messages)
        yield Piece(text, True, messages[0].content[:HEAD_CHARACTERS], tuple(messages), where)

    def _columns(self, table: "ParquetFile") -> list[str]:
        return fields_of(table.schema_arrow.names)

    def _value(self, value: Any, where: str) -> Iterator[Piece]:
        if isinstance(value, UnicodeDecodeError):
            self.problems.add("not UTF-8", where, str(value))
        else:
            yield from self._record(value, where, surrogates=False)


def fields_of(names: Iterable[str]) -> list[str]:
    """Return those fields of a record, of all their names, that hold its conversation; none where it has none."""
    names = set(names)
    for wanted in ("messages", "conversations"):
        if wanted in names:
            return [wanted]
    return [name for name in ALPACA if name in names] if {"instruction", "output"} <= names else []


def conversation(record: Any, special_tokens: Collection[str]) -> list[Message]:
    """Return the messages of a record. Raises Unfit."""
    fields = fields_of(record) if isinstance(record, dict) else []
    if not fields:
        has = ", ".join(itertools.islice(record, SHOWN_FIELDS)) if isinstance(record, dict) else quoted(record)
        raise Unfit("no conversation", f"got {has or 'no field'}, {WANTED}")
    found = record[fields[0]]
    if len(fields) == 1 and not isinstance(found, list):
        raise Unfit("not messages", f"{fields[0]}: got {quoted(found)}, wanted a list of messages")
    if len(fields) == 1:
        messages = [_message(number, each, fields[0]) for number, each in enumerate(found, 1)]
    else:
        more = record.get("input")
        if isinstance(found, str) and isinstance(more, str) and more.strip():
            found += f"\n\n### Input:\n{more}"
        messages = [Message(USER, found), Message(ASSISTANT, record["output"])]
    _check(messages, special_tokens)
    return messages


def columns_of(table: "ParquetFile", path: str) -> list[str]:
    """Return the columns of a Parquet file that hold its conversations. Raises BadInput where it has none."""
    columns = fields_of(table.schema_arrow.names)
    if not columns:
        raise BadInput(f"{path}: no conversations: it has {', '.join(table.schema_arrow.names)}; {WANTED}")
    return columns


def array_elements(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the elements of a JSON array, which is read as a whole, as lines. Raises Damaged."""
    data = bytearray()
    for line, _, _ in lines:
        if line is None or len(data) + len(line) > LARGEST_ARRAY:
            raise Damaged(f"a JSON array of more than {LARGEST_ARRAY:,} bytes; wanted one record a line")
        data += line
    try:
        elements = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not a JSON array: {error}") from error
    for element in elements:
        yield json.dumps(element).encode(), 0, 0


def _message(number: int, value: Any, name: str) -> Message:
    """Return a message as it is; its role and content are checked with the others'."""
    if not isinstance(value, dict):
        raise Unfit("not messages", f"{name}: message {number}: got {quoted(value)}, wanted role and content")
    refused = next((key for key in REFUSED_KEYS if value.get(key) is not None), None)
    if refused is not None:
        raise Unfit("unknown field", f"message {number}: '{refused}' is not supported; remove it")
    if name == "messages":
        return Message(value.get("role", ""), value.get("content", ""))
    role = value.get("from", "")
    return Message(SHAREGPT.get(role, role) if isinstance(role, str) else role, value.get("value", ""))


def _check(messages: list[Message], special_tokens: Collection[str]) -> None:
    """Raise Unfit unless messages are a system's, if any, and then a user's and an assistant's in turn."""
    for number, (role, text) in enumerate(messages, 1):
        where = f"message {number}"
        if role not in ROLES:
            raise Unfit("unknown role", f"{where}: got {quoted(role)}, wanted {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise Unfit("not a string", f"{where}: got {quoted(text)}, wanted a text")
        if not text.strip():
            raise Unfit("empty message", f"{where}: the {role}'s text is empty")
        if (found := next((token for token in special_tokens if token in text), None)) is not None:
            raise Unfit("special token in a text", f"{where}: holds {found}, which only the template may place")
        if len(text) >= LONGEST_GAP and gap_position(text) is not None:
            raise Unfit("no text", f"{where}: {GAP}")
    begin = bool(messages) and messages[0].role == SYSTEM
    for number, message in enumerate(messages[begin:]):
        if message.role != (wanted := (USER, ASSISTANT)[number % 2]):
            raise Unfit("roles out of order", f"message {number + begin + 1}: got {message.role}, wanted {wanted}")
    if not any(message.role == ASSISTANT for message in messages):
        raise Unfit("no answer", "no message is the assistant's")
