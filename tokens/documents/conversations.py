"""Conversations: records of `messages`, or of Alpaca's fields, as messages of known roles in their order."""

import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

from common.errors import quoted
from tokens.documents.inputs import Damaged, Extent, Input
from tokens.documents.parquet import REFUSED_FIELDS
from tokens.documents.reader import HEAD_CHARACTERS, SHOWN_FIELDS, Piece, Reader
from tokens.documents.text_file import BYTE_ORDER_MARK, GAP, LONGEST_GAP, Line, gap_position
from tokens.tokenizer.template import ASSISTANT, ROLES, SYSTEM, USER, Message

LARGEST_ARRAY = 1 << 30  # bytes of a JSON array, which is read as a whole
REFUSED_KEYS = ("weight", "tool_calls", "function_call", "reasoning_content")  # of a message: it meant something else


class ConversationReader(Reader):
    """Reader of units whose documents are conversations: pieces with messages."""

    longest_line: ClassVar[int] = LARGEST_ARRAY  # which has no line end, mostly

    def __init__(self, inputs: tuple[Input, ...], special_tokens: Collection[str]):
        """`special_tokens`: the spellings that no message may hold."""
        super().__init__(inputs, text_field=None)
        self._special_tokens = special_tokens

    def _records(self, item: Input, extent: Extent, lines: Iterator[Line], counted: str) -> Iterator[Piece]:
        blank, first, begins = 0, list[Line](), b""
        try:
            while not begins and (each := next(lines, None)) is not None:
                blank, first = blank + len(first), [each]
                begins = b"?" if each[0] is None else each[0].removeprefix(BYTE_ORDER_MARK).strip()[:1]
        except Damaged as error:
            self.problems.add("damaged file", item.path, str(error), 1, max(1, item.size_bytes))
            return
        is_array = begins == b"[" and ".jsonl" not in item.path
        lines = itertools.chain(itertools.repeat((b"\n", 0, 0), blank), first, lines)
        counted = "line" if extent.begin == 0 else counted
        yield from super()._records(item, extent, *((_elements(lines), "record") if is_array else (lines, counted)))

    def _record(self, record: Any, where: str, line: bytes) -> Iterator[Piece]:
        try:
            messages = conversation(record, self._special_tokens)
        except ValueError as problem:
            kind, detail = problem.args
            self.problems.add(kind, where, detail)
            return
        if messages[-1].role == USER:
            self.problems.add("unanswered message", where, "the last message, a user's, is left out", documents=0)
            messages.pop()
        messages = [Message(role, self._without_lone_surrogates(text, where)) for role, text in messages]
        text = "\n".join(message.content for message in messages)
        asked = next(message.content for message in messages if message.role == USER)
        yield Piece(text, True, asked[:HEAD_CHARACTERS], tuple(messages), where)

    def _value(self, value: Any, where: str) -> Iterator[Piece]:
        yield from self._record(value, where, b"")


def conversation(record: Any, special_tokens: Collection[str]) -> list[Message]:
    """Return the messages of a record. Raises ValueError with the kind of its problem, and the details."""
    fields = record if isinstance(record, dict) else {}
    if refused := [key for key in REFUSED_FIELDS if fields.get(key)]:
        raise ValueError("no conversation", f"got '{refused[0]}', which is not read")
    if "messages" in fields and isinstance(fields["messages"], list):
        messages = [_message(number, value) for number, value in enumerate(fields["messages"], 1)]
    elif "messages" in fields or not {"instruction", "output"} <= fields.keys():
        has = ", ".join(itertools.islice(fields, SHOWN_FIELDS)) or quoted(record)
        raise ValueError("no conversation", f"got {has}, wanted a list 'messages', or 'instruction' and 'output'")
    else:
        question, more = fields["instruction"], fields.get("input")
        if not isinstance(more, str | None):
            raise ValueError("not a string", f"input: got {quoted(more)}, wanted a text")
        if isinstance(question, str) and more is not None and more.strip():
            question += f"\n\n### Input:\n{more}"
        messages = [Message(USER, question), Message(ASSISTANT, fields["output"])]
    _check(messages, special_tokens)
    return messages


def _elements(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the elements of a JSON array as lines. Raises Damaged."""
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


def _message(number: int, value: Any) -> Message:
    """Return a message as it is; its role and content are checked with the others'."""
    refused = [key for key in REFUSED_KEYS if isinstance(value, dict) and value.get(key) is not None]
    if refused or not isinstance(value, dict):
        got = f"'{refused[0]}'" if refused else quoted(value)
        raise ValueError("no message", f"message {number}: got {got}, wanted role and content alone")
    return Message(value.get("role", ""), value.get("content", ""))


def _check(messages: list[Message], special_tokens: Collection[str]) -> None:
    """Raise ValueError unless messages are a system's, if any, and then a user's and an assistant's in turn."""
    begins = [message.role for message in messages[:1]] == [SYSTEM]
    for number, (role, text) in enumerate(messages, 1):
        where, wanted = f"message {number}", ROLES[1:][(number - 1 - begins) % 2]
        if role not in ROLES:
            raise ValueError("unknown role", f"{where}: got {quoted(role)}, wanted {', '.join(ROLES)}")
        if role != wanted and not (begins and number == 1):
            raise ValueError("roles out of order", f"{where}: got {role}, wanted {wanted}")
        if not isinstance(text, str) or not text.strip():
            kind = "empty message" if isinstance(text, str) else "not a string"
            raise ValueError(kind, f"{where}: got {quoted(text)}, wanted more than white space")
        if (found := next((token for token in special_tokens if token in text), None)) is not None:
            raise ValueError("special token in a text", f"{where}: holds {found}, which only the template may place")
        if len(text) >= LONGEST_GAP and gap_position(text) is not None:
            raise ValueError("no text", f"{where}: {GAP}")
    if not any(message.role == ASSISTANT for message in messages):
        raise ValueError("no answer", "no message is the assistant's")
