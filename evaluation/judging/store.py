"""Verdict store: an append-only JSON Lines file of requests, replies and batches.

A line is a request about to be sent, with the most that it can be billed; a reply, under the key of its prompt; the ids
of requests that ended unbilled; or a step of a batch: uploaded, created, done. Whatever may be paid for is on the disk
before it is sent. A request without an outcome may have been billed, and counts at its most for ever. Torn lines, and
fields of other versions, are skipped.
"""

import fcntl
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import attrs

from common.clock import utc_now
from common.errors import BadInput
from common.files import writing
from common.json_files import JsonLog, read_json_lines
from evaluation.judging.verdict import Grade, read_grades

_INTEGER, _TEXT = attrs.validators.instance_of(int), attrs.validators.instance_of(str)
_COUNT = [_INTEGER, attrs.validators.ge(0), attrs.validators.le(1 << 50)]
Line = TypeVar("Line", bound=attrs.AttrsInstance)


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens that the server has counted."""

    input: int = attrs.field(validator=_COUNT)  # with the two below
    cached_input: int = attrs.field(default=0, validator=_COUNT)
    cache_write: int = attrs.field(default=0, validator=_COUNT)
    output: int = attrs.field(validator=_COUNT)

    def __attrs_post_init__(self) -> None:
        if self.cached_input + self.cache_write > self.input:
            raise ValueError("more cached tokens than tokens")


@attrs.frozen(kw_only=True)
class Asked:
    """A request about to be sent."""

    id: str  # of this sending; empty in replies to a batch of an earlier version
    key: str  # of the prompt
    judge: str  # Judge.label
    answers: int = attrs.field(validator=_INTEGER)
    sent_bytes: int = attrs.field(validator=_INTEGER)
    limit: int  # max_output_tokens, as sent
    most: Usage  # that can be billed
    batch: bool = False


@attrs.frozen(kw_only=True)
class Reply:
    """A judge's reply to a prompt, valid or not: it is paid for."""

    key: str = attrs.field(validator=_TEXT)
    id: str | None  # the server's
    text: str = attrs.field(validator=_TEXT)
    refusal: str | None
    usage: Usage | None  # None: not counted by the server
    batch: bool  # at the price of a batch
    asked: str | None = None  # Asked.id; None: from an earlier version
    model: str | None = None  # the dated snapshot that answered, by the server's name
    cut: bool = False  # ended at the limit
    error: str | None = None  # the server's message in place of an answer

    def problem(self, answers: int) -> str | None:
        """Return what is wrong with the verdict; None for a valid one."""
        if self.error is not None:
            return f"the server says: {self.error}"
        try:
            read_grades(self.text, answers)
        except ValueError as error:
            return str(error)
        return None


@attrs.frozen(kw_only=True)
class StoredBatch:
    """Requests handed over together."""

    upload: str  # the server's id of their file
    base_url: str
    keys: list[str]
    id: str | None = None  # the server's; None: not known to have been created
    asked: list[Asked] = attrs.field(factory=list)  # by key; empty from an earlier version


@attrs.define
class PromptHistory:
    """Requests and replies of one prompt, oldest first."""

    last_asked: Asked | None = None
    open: dict[str, Asked] = attrs.field(factory=dict)  # by id: requests without an outcome
    replies: list[Reply] = attrs.field(factory=list)

    def verdict(self, answers: int) -> list[Grade] | None:
        """Return the first valid verdict."""
        valid = (reply.text for reply in self.replies if reply.problem(answers) is None)
        return next((read_grades(text, answers) for text in valid), None)

    def refused(self) -> bool:
        """Tell whether the judge has refused the prompt."""
        return any(reply.refusal is not None for reply in self.replies)

    def is_settled(self, answers: int, tries: int) -> bool:
        """Tell whether nothing is left to ask: there is a verdict, a refusal, or `tries` invalid replies."""
        return len(self.replies) >= tries or self.refused() or self.verdict(answers) is not None


@attrs.define
class JudgeUsage:
    """Tokens that the counted replies of one judge have used."""

    replies: int = 0
    sent_bytes: int = 0
    answers: int = 0
    input: int = 0
    output: int = 0
    longest: int = 0  # output of a reply
    excess: float = 1.0  # above 1: a reply used so many times what it was limited to

    def add(self, asked: Asked, usage: Usage) -> None:
        """Count a reply. One without output, as a refusal by status, moves no average."""
        if usage.output:
            self.replies += 1
            self.sent_bytes += asked.sent_bytes
            self.answers += asked.answers
            self.input += usage.input
            self.output += usage.output
        self.longest = max(self.longest, usage.output)
        used = max(usage.input / max(asked.sent_bytes, 1), usage.output / max(asked.limit, 1))
        self.excess = max(self.excess, used)


class VerdictStore:
    """Requests and replies by prompt, and open batches. One process at a time holds a file."""

    def __init__(self, path: Path):
        """Open and read it. Raises BadInput if it cannot be written, or another process holds it."""
        self.path = path
        self.asked: dict[str, Asked] = {}  # by id
        self.prompts: defaultdict[str, PromptHistory] = defaultdict(PromptHistory)  # by key
        self.usage: defaultdict[str, JudgeUsage] = defaultdict(JudgeUsage)  # by Judge.label
        self.in_order: list[Reply] = []
        self._batches: dict[str, StoredBatch] = {}  # by upload
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._locked = JsonLog(path)
            self._lock()
            self._log = JsonLog(path)  # opened under the lock: it checks whether the last line is whole
        lines = read_json_lines(path)
        unread = lines.unreadable
        for record in lines.records:
            try:
                self._take(record)
            except (ValueError, TypeError, KeyError, AttributeError):
                unread += 1
        if unread:
            print(f"NOTE: {path}: skipped {unread:,} unreadable lines, as a crash leaves them; their content is lost")

    def note_asked(self, asked: Asked) -> None:
        """Store a request before it is sent. Raises BadInput if the disk does not take it."""
        self._append({"asked": attrs.asdict(asked)})

    def note_unbilled(self, asked: Iterable[Asked], why: str) -> None:
        """Store that those of these requests that have no outcome have ended unbilled."""
        ids = list(dict.fromkeys(one.id for one in asked if one.id in self.prompts[one.key].open))
        if ids:
            self._append({"unbilled": ids, "why": why}, durable=False)  # if lost, they count as billed

    def add(self, reply: Reply) -> bool:
        """Store a reply; False if it is stored already. Raises BadInput if the disk does not take it."""
        stored = self.prompts[reply.key].replies
        if reply in stored or (reply.asked is not None and any(one.asked == reply.asked for one in stored)):
            return False
        self._append({"reply": attrs.asdict(reply)})
        return True

    def open_batches(self, base_url: str) -> list[StoredBatch]:
        """Return the batches at this server whose replies have not been fetched."""
        return [batch for batch in self._batches.values() if batch.base_url == base_url]

    def note_batch(self, batch: StoredBatch) -> None:
        """Store that a batch is uploaded or, with its id, created."""
        self._append({"batch": attrs.asdict(batch)})

    def close_batch(self, batch: StoredBatch) -> None:
        """Store that a batch is done."""
        self._append({"batch_done": batch.upload})

    def close(self) -> None:
        """Release the file."""
        self._log.close()
        self._locked.close()

    def _take(self, record: dict[str, Any]) -> None:
        if "reply" in record:
            values = record["reply"]
            self._take_reply(_build(Reply, values, usage=_counted(values["usage"])))
        elif "asked" in record:
            self._take_asked(_build_asked(record["asked"]))
        elif "unbilled" in record:
            for id in record["unbilled"]:
                self._end(id)
        elif "batch" in record:
            values = record["batch"]
            batch = _build(StoredBatch, values, asked=[_build_asked(one) for one in values.get("asked", [])])
            self._batches[batch.upload] = batch
            for asked in batch.asked:
                self._take_asked(asked)
        else:
            self._batches.pop(record["batch_done"], None)

    def _take_asked(self, asked: Asked) -> None:
        history = self.prompts[asked.key]
        self.asked[asked.id] = history.open[asked.id] = history.last_asked = asked

    def _take_reply(self, reply: Reply) -> None:
        self.prompts[reply.key].replies.append(reply)
        self.in_order.append(reply)
        asked = self._end(reply.asked)
        if asked is not None and reply.usage is not None:
            self.usage[asked.judge].add(asked, reply.usage)

    def _end(self, id: str | None) -> Asked | None:
        """Note that a request has an outcome, and return it."""
        asked = self.asked.get(id or "")
        if asked is not None:
            self.prompts[asked.key].open.pop(asked.id, None)
        return asked

    def _append(self, record: dict[str, Any], *, durable: bool = True) -> None:
        with writing(self.path):
            self._log.append({**record, "time": utc_now()}, durable=durable)
        self._take(record)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._locked.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{self.path}: another judge holds it; wait for it, or pass another --verdicts") from None
        except OSError as error:  # a file system without locks
            print(f"NOTE: {self.path}: cannot be locked ({error}); let no other judge write it", flush=True)


def _build(kind: type[Line], values: dict[str, Any], **parts: Any) -> Line:
    """Build a record from a line; fields of other versions are ignored. `parts`: fields that are built already."""
    known = {field.name: values[field.name] for field in attrs.fields(kind) if field.name in values}
    return kind(**{**known, **parts})


def _build_asked(values: dict[str, Any]) -> Asked:
    return _build(Asked, values, most=_build(Usage, values["most"]))


def _counted(values: Any) -> Usage | None:
    """Return stored counts; None if they cannot be right: earlier versions stored whatever a server said."""
    try:
        return None if values is None else _build(Usage, values)
    except (ValueError, TypeError):
        return None
