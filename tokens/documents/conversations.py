"""Conversations: convert records to lists of messages. tokens/documents/parquet.py lists the forms of a record."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from common.checks import is_absent
from common.text import either, quoted
from tokens.documents.inputs import Damaged, Extent, Input
from tokens.documents.messages import OPENAI_ROLES, SHARE_GPT_ROLES, excluded_by, read_message
from tokens.documents.parquet import FORMS, REFUSED_FIELDS, unread_columns
from tokens.documents.reader import HEAD_CHARACTERS, SHOWN_FIELDS, Piece, Reader, parse
from tokens.documents.text_file import BYTE_ORDER_MARK, GAP, LONGEST_GAP, Line, gap_position
from tokens.tokenizer.template import ASSISTANT, ROLES, SYSTEM, USER, Message

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

LARGEST_ARRAY = 1 << 30  # bytes of a JSON array, which has to be read completely
UNREAD = "with a field {} that is not read"  # a kind of problem that causes no loss
# The first 30 unread fields are counted under their own names, and a message shows at most 40 characters of a name.
NAMED_FIELDS, NAME_CHARACTERS = 30, 40
# If a key occurs twice in an object, the key's name is stored in the object under REPEATED, which no file contains.
REPEATED = "a key given twice\0"


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. If a key occurs twice in it, store the key's name under REPEATED.

    Otherwise the duplicate would not be noticed, because `json.loads` keeps only the last value.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        values[REPEATED] = next(key for key, count in counts.items() if count > 1)
    return values


class ReadConversation(NamedTuple):
    """The messages of a record, and the names of its fields that were not read."""

    messages: list[Message]
    unread: frozenset[str]


class ConversationReader(Reader):
    """Reads units whose documents are conversations, and yields pieces that contain messages."""

    longest_line: ClassVar[int] = LARGEST_ARRAY  # bytes; a JSON array is usually one long line

    def __init__(self, inputs: tuple[Input, ...], special_tokens: Collection[str]):
        """`special_tokens` are the spellings that no message may contain."""
        super().__init__(inputs, text_field=None)
        self._special_tokens = special_tokens
        self._named_fields = set[str]()

    def _records(self, item: Input, extent: Extent, lines: Iterator[Line], unit: str) -> Iterator[Piece]:
        blank_lines, first_line, first_byte = 0, list[Line](), b""
        try:
            while not first_byte and (line := next(lines, None)) is not None:
                blank_lines, first_line = blank_lines + len(first_line), [line]
                first_byte = b"?" if line[0] is None else line[0].removeprefix(BYTE_ORDER_MARK).strip()[:1]
        except Damaged as error:
            self.problems.add("damaged file", item.path, str(error), 1, max(1, item.size_bytes))
            return
        is_array = first_byte == b"[" and ".jsonl" not in item.path
        lines = itertools.chain(itertools.repeat((b"\n", 0, 0), blank_lines), first_line, lines)
        unit = "line" if extent.begin == 0 else unit
        yield from super()._records(item, extent, *((_elements(lines), "record") if is_array else (lines, unit)))

    def _load(self, text: str) -> Any:
        return parse(text, object_of)

    def _record(self, record: Any, where: str, line: bytes) -> Iterator[Piece]:
        try:
            messages, unread = conversation(record, self._special_tokens)
        except ValueError as problem:
            kind, detail = problem.args
            self.problems.add(kind, where, detail)
            return
        self._count_unread(unread)
        if messages[-1].role == USER:
            detail = "the last message is from the user, so it is left out"
            self.problems.add("unanswered message", where, detail, documents=0)
            messages.pop()
        messages = [Message(role, self._without_lone_surrogates(text, where)) for role, text in messages]
        text = "\n".join(message.content for message in messages)
        first_question = next(message.content for message in messages if message.role == USER)
        yield Piece(text, True, first_question[:HEAD_CHARACTERS], tuple(messages), where)

    def _value(self, value: Any, where: str) -> Iterator[Piece]:
        yield from self._record(value, where, b"")

    def _note_columns(self, table: "ParquetFile", extent: Extent) -> None:
        rows = sum(table.metadata.row_group(group).num_rows for group in range(extent.begin, extent.end))
        self._count_unread(frozenset(unread_columns(table)), rows)

    def _count_unread(self, names: frozenset[str], times: int = 1) -> None:
        """Count records with fields that were not read.

        At most NAMED_FIELDS names are counted separately, because a file may have any number of fields.
        """
        for name in sorted(names):
            if len(self._named_fields) < NAMED_FIELDS:
                self._named_fields.add(name)
            label = quoted(name[:NAME_CHARACTERS]) if name in self._named_fields else "of another name"
            self.problems.count(UNREAD.format(label), times)


def conversation(record: Any, special_tokens: Collection[str]) -> ReadConversation:
    """Return the messages of a record. Raises ValueError with the kind of the problem and the details."""
    fields = record if isinstance(record, dict) else {}
    _check_unique("the record", fields)
    _check_loss_field(fields)
    filled = {name for name, value in fields.items() if not is_absent(value)}
    if refused_fields := [name for name in REFUSED_FIELDS if name in filled]:
        raise ValueError("no conversation", f"got '{refused_fields[0]}', which is not supported")
    if len(complete := [form for form in FORMS if {*form} <= filled]) > 1:
        alternatives = " and as ".join(" and ".join(map(repr, form)) for form in complete)
        got = f"got a conversation both as {alternatives}"
        raise ValueError("no conversation", f"{got}, wanted only one of these; remove the other fields")
    forms = complete or [form for form in FORMS if {*form} <= fields.keys()]
    if not forms or (len(forms[0]) == 1 and not isinstance(fields[forms[0][0]], list)):
        field_names = ", ".join(itertools.islice(fields, SHOWN_FIELDS)) or quoted(record)
        lists, pairs = ([form for form in FORMS if len(form) == count] for count in (1, 2))
        forms_text = [f"a list '{name}'" for [name] in lists] + [f"'{first}' and '{second}'" for first, second in pairs]
        raise ValueError("no conversation", f"got {field_names}, wanted {either(forms_text)}")
    form = forms[0]
    messages, unread = _MESSAGES[form](fields)
    _check(messages, special_tokens)
    return ReadConversation(messages, unread | (filled - {*form, *FORMS[form]}))


def _elements(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the elements of a JSON array as lines. Raises Damaged if the text is not an array, or is too large."""
    data = bytearray()
    for line, _, _ in lines:
        if line is None or len(data) + len(line) > LARGEST_ARRAY:
            raise Damaged(f"a JSON array of more than {LARGEST_ARRAY:,} bytes; wanted one record per line")
        data += line
    try:
        elements = json.loads(data.decode("utf-8-sig"), object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not a JSON array: {error}") from error
    for element in elements:
        yield json.dumps(element).encode(), 0, 0


def _from_list(values: list[Any], roles: Mapping[str, str] = OPENAI_ROLES, first: int = 1) -> ReadConversation:
    """Return the messages of a list. In errors, messages are numbered from `first` on."""
    for number, value in enumerate(values, first):
        _check_unique(f"message {number}", value)
    messages = [read_message(value, f"message {number}", roles) for number, value in enumerate(values, first)]
    unread = {f"messages[].{name}" for message in messages for name in message.unread}
    return ReadConversation([message.message for message in messages], frozenset(unread))


def _alpaca(fields: dict[str, Any]) -> ReadConversation:
    question, question_input = fields["instruction"], fields.get("input")
    if not isinstance(question_input, str) and not is_absent(question_input):
        raise ValueError("not a string", f"input: got {quoted(question_input)}, wanted a string")
    if isinstance(question, str) and isinstance(question_input, str) and not is_absent(question_input):
        question += f"\n\n### Input:\n{question_input}"
    return ReadConversation([Message(USER, question), Message(ASSISTANT, fields["output"])], frozenset())


def _prompt_and_completion(fields: dict[str, Any]) -> ReadConversation:
    """Return a prompt and its completion as messages. Both are strings, or both are lists of messages."""
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return ReadConversation([Message(USER, prompt), Message(ASSISTANT, completion)], frozenset())
    if not isinstance(prompt, list) or not isinstance(completion, list):
        got = f"got {quoted(prompt)} and {quoted(completion)}"
        raise ValueError("not a string", f"prompt and completion: {got}, wanted two strings, or two lists of messages")
    question, answer = _from_list(prompt), _from_list(completion, first=1 + len(prompt))
    if any(message.role == ASSISTANT for message in question.messages):
        raise ValueError(
            "answer in a prompt", "every answer counts in the loss, but this one should not; use 'messages' instead"
        )
    if any(message.role != ASSISTANT for message in answer.messages):
        raise ValueError(
            "question in a completion", "wanted only an answer, with the role assistant; use 'messages' instead"
        )
    return ReadConversation([*question.messages, *answer.messages], question.unread | answer.unread)


_MESSAGES: dict[tuple[str, ...], Callable[[dict[str, Any]], ReadConversation]] = {
    ("messages",): lambda fields: _from_list(fields["messages"]),
    ("conversations",): lambda fields: _from_list(fields["conversations"], SHARE_GPT_ROLES),
    ("instruction", "output"): _alpaca,
    ("prompt", "completion"): _prompt_and_completion,
}


def _check_unique(where: str, value: Any) -> None:
    """Raise ValueError if a key occurs twice in an object, because nothing says which of its values is meant."""
    if isinstance(value, dict) and REPEATED in value:
        raise ValueError("field given twice", f"{where}: has {quoted(value[REPEATED])} twice; remove one of them")


def _check_loss_field(fields: dict[str, Any]) -> None:
    """Raise ValueError if a field says that the record does not count in the loss. In our rule, every answer counts."""
    if (name := excluded_by(fields)) is not None:
        got = f"got {quoted(name)}: {quoted(fields[name])}"
        raise ValueError("no conversation", f"{got}, but every answer counts in the loss; remove the record")


def _check(messages: list[Message], special_tokens: Collection[str]) -> None:
    """Check that user and assistant messages alternate after an optional system message, and that each has a text.

    Raises ValueError.
    """
    has_system = [message.role for message in messages[:1]] == [SYSTEM]
    for number, (role, text) in enumerate(messages, 1):
        where, expected_role = f"message {number}", ROLES[1:][(number - 1 - has_system) % 2]
        if role != expected_role and not (has_system and number == 1):
            raise ValueError("roles out of order", f"{where}: got {role}, wanted {expected_role}")
        if not isinstance(text, str) or not text.strip():
            kind = "empty message" if isinstance(text, str) else "not a string"
            raise ValueError(kind, f"{where}: got {quoted(text)}, wanted text that is not blank")
        special_token = next((token for token in special_tokens if token in text), None)
        if special_token is not None:
            detail = f"{where}: contains {special_token}, which only the template may insert"
            raise ValueError("special token in a text", detail)
        if len(text) >= LONGEST_GAP and gap_position(text) is not None:
            raise ValueError("no text", f"{where}: {GAP}")
    if not any(message.role == ASSISTANT for message in messages):
        raise ValueError("no answer", "no message has the role assistant")
