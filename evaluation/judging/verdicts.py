"""The file of verdicts: append-only JSON Lines; what may be paid for is on the disk before it is sent.

A line is a request that is about to be sent, with the most that it can use; a reply of the judge, under the key of what
was asked; a request that ended without being billed; or a step in the life of a batch: its requests are uploaded, it is
created, it is done. A request without an outcome may have been billed: it counts at its most for ever. A line that a
crash has cut is passed over, and so is a key that is not known.
"""

import fcntl
from pathlib import Path
from typing import Any

import attrs

from common.clock import utc_now
from common.errors import BadInput
from common.files import write_error, writing
from common.json_files import JsonLog, read_json_lines

_INTEGER, _TEXT = attrs.validators.instance_of(int), attrs.validators.instance_of(str)
_COUNT = [_INTEGER, attrs.validators.ge(0), attrs.validators.le(1 << 50)]


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
    """A request that is about to be sent."""

    id: str  # of this one sending
    key: str  # of what is asked
    judge: str  # model, effort and server, whose replies tell what the next ones will use
    answers: int = attrs.field(validator=_INTEGER)
    sent_bytes: int = attrs.field(validator=_INTEGER)
    limit: int  # of the tokens of its reply, as the server is told
    most: Usage  # that it can be billed for
    batch: bool = False


@attrs.frozen(kw_only=True)
class Reply:
    """What a judge has answered to a prompt, right or wrong: it is paid for."""

    key: str = attrs.field(validator=_TEXT)
    id: str | None  # the server's
    text: str = attrs.field(validator=_TEXT)  # a verdict, if it is right
    refusal: str | None
    usage: Usage | None  # None: the server did not say
    batch: bool  # at the price of a batch
    asked: str | None = None  # id of the request; None: of an earlier version
    model: str | None = None  # what the server calls the model that answered: a dated snapshot
    cut: bool = False  # it ended at the limit that it was told
    error: str | None = None  # the server's message, where it sent one in place of an answer


@attrs.frozen(kw_only=True)
class StoredBatch:
    """Requests handed over together."""

    upload: str  # the server's id of their file
    base_url: str
    keys: list[str]
    id: str | None = None  # the server's; None: not known to have been created
    asked: list[Asked] = attrs.field(factory=list)  # by key; none of an earlier version


class VerdictStore:
    """Requests, replies by key, and batches that are not done. One process at a time holds a file."""

    def __init__(self, path: Path):
        """Open and read it. Raises BadInput where it cannot be written, or another process has it."""
        self.path = path
        self.asked: dict[str, Asked] = {}  # by id
        self.unanswered: dict[str, Asked] = {}  # those of them without an outcome
        self._last_asked: dict[str, Asked] = {}  # by key
        self.replies: dict[str, list[Reply]] = {}
        self.in_order: list[Reply] = []
        self.longest: dict[str, tuple[int, int]] = {}  # by judge: how many replies, and tokens of the longest
        self.excess: dict[str, float] = {}  # by judge: above 1 where a reply used so many times what it was limited to
        self._batches: dict[str, StoredBatch] = {}  # by upload
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._locked = JsonLog(path)
            self._lock()
            self._log = JsonLog(path)  # once it is ours: whether its last line is whole is looked at here
        except OSError as error:
            raise write_error(path, error) from error
        lines = read_json_lines(path)
        unread = lines.unreadable
        for record in lines.records:
            try:
                self._take(record)
            except (ValueError, TypeError, KeyError, AttributeError):
                unread += 1
        if unread:
            print(f"NOTE: {path}: {unread:,} lines passed over, as a crash may have cut them; what they held is lost")

    def note_asked(self, asked: Asked) -> None:
        """Keep that a request is about to be sent. Raises BadInput when the disk does not take it."""
        self._append({"asked": attrs.asdict(asked)})

    def note_unbilled(self, ids: list[str], why: str) -> None:
        """Keep that requests have ended without being billed."""
        if ids:
            self._append({"unbilled": ids, "why": why}, durable=False)  # lost, it counts as if billed

    def add(self, reply: Reply) -> None:
        """Keep a reply; one that the file has already is left out. Raises BadInput when the disk does not take it."""
        if reply.id is None or reply not in self.replies.get(reply.key, []):
            self._append({"reply": attrs.asdict(reply)})

    def unanswered_of(self, key: str) -> Asked | None:
        """Return the last request that asked this, if it is without an outcome."""
        asked = self._last_asked.get(key)
        return asked if asked is not None and asked.id in self.unanswered else None

    def open_batches(self, base_url: str) -> list[StoredBatch]:
        """Return the batches at this server whose replies have not been fetched."""
        return [batch for batch in self._batches.values() if batch.base_url == base_url]

    def note_batch(self, batch: StoredBatch) -> None:
        """Keep that a batch is uploaded, or, with its id, created."""
        self._append({"batch": attrs.asdict(batch)})

    def close_batch(self, batch: StoredBatch) -> None:
        """Keep that nothing more is to be had from a batch."""
        self._append({"batch_done": batch.upload})

    def close(self) -> None:
        """Let another process have it."""
        self._log.close()
        self._locked.close()

    def _take(self, record: dict[str, Any]) -> None:
        if "reply" in record:
            values = record["reply"]
            usage = _usage(values["usage"])
            reply = Reply(**{**_known(Reply, values), "usage": usage})
            self.replies.setdefault(reply.key, []).append(reply)
            self.in_order.append(reply)
            self.unanswered.pop(reply.asked or "", None)
            asked = self.asked.get(reply.asked or "")
            if asked is not None and usage is not None:
                count, longest = self.longest.get(asked.judge, (0, 0))
                self.longest[asked.judge] = count + 1, max(longest, usage.output)
                used = max(usage.input / max(asked.sent_bytes, 1), usage.output / max(asked.limit, 1))
                self.excess[asked.judge] = max(used, self.excess.get(asked.judge, 1.0))
        elif "asked" in record:
            self._take_asked(_asked(record["asked"]))
        elif "unbilled" in record:
            for id in record["unbilled"]:
                self.unanswered.pop(id, None)
        elif "batch" in record:
            values = record["batch"]
            of_batch = [_asked(one) for one in values.get("asked", [])]
            batch = StoredBatch(**{**_known(StoredBatch, values), "asked": of_batch})
            self._batches[batch.upload] = batch
            for one in of_batch:
                self._take_asked(one)
        else:
            self._batches.pop(record["batch_done"], None)

    def _take_asked(self, asked: Asked) -> None:
        self.asked[asked.id] = self.unanswered[asked.id] = self._last_asked[asked.key] = asked

    def _append(self, record: dict[str, Any], *, durable: bool = True) -> None:
        with writing(self.path):
            self._log.append({**record, "time": utc_now()}, durable=durable)
        self._take(record)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._locked.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{self.path}: another judge writes it; wait for it, or pass another --verdicts") from None
        except OSError as error:  # a file system without locks
            print(f"NOTE: {self.path}: cannot be locked ({error}); see that no other judge writes it", flush=True)


def _asked(values: dict[str, Any]) -> Asked:
    return Asked(**{**_known(Asked, values), "most": Usage(**_known(Usage, values["most"]))})


def _usage(values: Any) -> Usage | None:
    """Return counts that a file holds; None where they cannot be: earlier versions noted whatever a server said."""
    try:
        return None if values is None else Usage(**_known(Usage, values))
    except (ValueError, TypeError):
        return None


def _known(kind: type[attrs.AttrsInstance], values: dict[str, Any]) -> dict[str, Any]:
    """Return what a class has fields for."""
    return {field.name: values[field.name] for field in attrs.fields(kind) if field.name in values}
