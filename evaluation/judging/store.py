"""Verdict store: an append-only JSON Lines file of requests, replies and batches.

A line is a request about to be sent, with the most that it can be billed; a reply, under the key of its prompt; the ids
of requests that ended unbilled; or a step of a batch: uploaded, created, done. Whatever may be paid for is on the disk
before it is sent. A request without an outcome may have been billed, and counts at its most forever. Torn lines, and
fields of other versions, are skipped.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs

from common.clock import utc_now
from common.errors import printable
from common.file_lock import lock
from common.files import writing
from common.json_files import JsonLog, read_json_lines
from common.structure import structured
from evaluation.judging.prompt import Grade, read_grades

_COUNT = [attrs.validators.ge(0), attrs.validators.le(1 << 50)]


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
    answers: int
    sent_bytes: int
    limit: int  # max_output_tokens, as sent
    most: Usage  # that can be billed
    batch: bool = False


@attrs.frozen(kw_only=True)
class Reply:
    """A judge's reply to a prompt, valid or not: it is paid for."""

    key: str
    id: str | None  # the server's
    text: str
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


@attrs.frozen(kw_only=True)
class StoreLine:
    """One line of the file, which has one of these keys."""

    asked: Asked | None = None
    reply: Reply | None = None
    unbilled: list[str] = attrs.field(factory=list)  # ids of requests that have ended unbilled
    why: str | None = None
    batch: StoredBatch | None = None  # uploaded or, with its id, created
    batch_done: str | None = None  # its `upload`


@attrs.define
class PromptHistory:
    """Requests and replies of one prompt, oldest first."""

    asked: dict[str, Asked] = attrs.field(factory=dict)  # by id
    replies: list[Reply] = attrs.field(factory=list)

    def verdict(self, answers: int) -> list[Grade] | None:
        """Return the first valid verdict."""
        valid = (reply.text for reply in self.replies if reply.problem(answers) is None)
        return next((read_grades(text, answers) for text in valid), None)

    @property
    def refusal(self) -> str | None:
        return next((reply.refusal for reply in self.replies if reply.refusal is not None), None)


@attrs.define
class JudgeUsage:
    """Tokens that the counted replies of one judge have used."""

    replies: int = 0  # with output: others, as refusals by status, move no average
    sent_bytes: int = 0
    answers: int = 0
    input: int = 0
    output: int = 0
    longest: int = 0  # output of a reply
    excess: float = 1.0  # above 1: a reply used so many times what it was limited to

    def add(self, asked: Asked, usage: Usage) -> None:
        if usage.output:
            self.replies += 1
            self.sent_bytes += asked.sent_bytes
            self.answers += asked.answers
            self.input += usage.input
            self.output += usage.output
        self.longest = max(self.longest, usage.output)
        used = max(usage.input / max(asked.sent_bytes, 1), usage.output / max(asked.limit, 1))
        self.excess = max(self.excess, used)

    def scaled_to(self, asked: Asked) -> Usage:
        return Usage(
            input=math.ceil(self.input / self.sent_bytes * asked.sent_bytes),
            output=math.ceil(self.output / self.answers * asked.answers),
        )


class VerdictStore:
    """Requests and replies by prompt, and open batches. One process at a time holds a file."""

    def __init__(self, path: Path):
        """Open and read it. Raises BadInput if it cannot be written, or another process holds it."""
        self.path = path
        self.open: dict[str, Asked] = {}  # by id: requests without an outcome
        self.prompts: defaultdict[str, PromptHistory] = defaultdict(PromptHistory)  # by key
        self.usage: defaultdict[str, JudgeUsage] = defaultdict(JudgeUsage)  # by Judge.label
        self.in_order: list[Reply] = []
        self._batches: dict[str, StoredBatch] = {}  # by upload
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._locked = JsonLog(path)
            lock(self._locked.file, path, f"{path}: another judge holds it; wait for it, or pass another --verdicts")
            self._log = JsonLog(path)  # opened under the lock: it checks whether the last line is whole
        lines = read_json_lines(path)
        unread = len(lines.damaged)
        for record in lines.records:
            try:
                self._take(_structured_line(record))
            except (ValueError, KeyError, TypeError):
                unread += 1
        if unread:
            note = f"NOTE: {path}: skipped {unread:,} unreadable lines, as a crash leaves them; their content is lost"
            print(printable(note))

    def append(self, line: StoreLine) -> set[str]:
        """Store a line, synced to the disk, and return the keys of the prompts that it changes.

        A stored reply and ids of requests with an outcome are not repeated. Raises BadInput if the disk is full, say.
        """
        unbilled = [id for id in dict.fromkeys(line.unbilled) if id in self.open]
        if (line.reply is not None and self._is_stored(line.reply)) or (line.unbilled and not unbilled):
            return set()
        line = attrs.evolve(line, unbilled=unbilled)
        record = {key: value for key, value in attrs.asdict(line).items() if value}
        with writing(self.path):  # what is unbilled counts as billed if this line is lost
            self._log.append({**record, "time": utc_now()}, durable=not unbilled)
        return self._take(line)

    def open_batches(self, base_url: str) -> list[StoredBatch]:
        """Return the batches at a server whose replies have not been fetched."""
        return [batch for batch in self._batches.values() if batch.base_url == base_url]

    def close(self) -> None:
        self._log.close()
        self._locked.close()

    def _is_stored(self, reply: Reply) -> bool:
        stored = self.prompts[reply.key].replies
        return reply in stored or (reply.asked is not None and any(one.asked == reply.asked for one in stored))

    def _take(self, line: StoreLine) -> set[str]:
        asked = [line.asked] if line.asked else line.batch.asked if line.batch else []
        for one in asked:
            self.prompts[one.key].asked[one.id] = self.open[one.id] = one
        ended = [self.open.pop(id) for id in line.unbilled if id in self.open]
        if line.batch is not None:
            self._batches[line.batch.upload] = line.batch
        self._batches.pop(line.batch_done or "", None)
        changed = {one.key for one in (*asked, *ended)}
        return changed if line.reply is None else changed | {self._take_reply(line.reply)}

    def _take_reply(self, reply: Reply) -> str:
        history = self.prompts[reply.key]
        history.replies.append(reply)
        self.in_order.append(reply)
        answered = history.asked.get(reply.asked or "")
        if answered is not None:
            self.open.pop(answered.id, None)
            if reply.usage is not None:
                self.usage[answered.judge].add(answered, reply.usage)
        return reply.key


def _structured_line(record: dict[str, Any]) -> StoreLine:
    """Structure a line; keys of other versions are ignored. Raises ValueError, KeyError or TypeError."""
    try:
        return structured(record, StoreLine, unknown_keys=True)
    except ValueError:  # earlier versions stored whatever counts a server sent
        return structured({"reply": {**record["reply"], "usage": None}}, StoreLine, unknown_keys=True)
