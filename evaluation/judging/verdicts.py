"""The file of verdicts: append-only JSON Lines; what was paid for is on the disk before it counts.

A line is a reply of the judge, under the key of what was asked, or a step in the life of a batch: its requests are
uploaded, it is created, it is done. A line that a crash has cut is passed over, and so is a key that is not known.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from training.claim import utc_now


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens that the server has counted."""

    input: int  # with the two below
    cached_input: int = 0
    cache_write: int = 0
    output: int


@attrs.frozen(kw_only=True)
class Reply:
    """What a judge has answered to a prompt, right or wrong: it is paid for."""

    key: str
    id: str | None  # the server's
    text: str  # a verdict, if it is right
    refusal: str | None
    usage: Usage | None  # None: the server did not say
    batch: bool  # at the price of a batch


@attrs.frozen(kw_only=True)
class Batch:
    """Requests handed over together."""

    upload: str  # the server's id of their file
    base_url: str
    keys: list[str]
    id: str | None = None  # the server's; None: not known to have been created


class VerdictStore:
    """Replies by key, and batches that are not done. One process at a time holds a file."""

    def __init__(self, path: Path):
        """Open and read it. Raises BadInput where it cannot be written, or another process has it."""
        self.path = path
        self.replies: dict[str, list[Reply]] = {}
        self._batches: dict[str, Batch] = {}  # by upload
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._lock()
            self._file.seek(0)
            content = self._file.read()
        except OSError as error:
            raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from error
        self._torn = bool(content) and not content.endswith(b"\n")
        unread = 0
        for line in content.splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                unread += 1
        if unread:
            print(f"NOTE: {path}: {unread:,} lines passed over, as a crash may have cut them; what they held is lost")

    def add(self, reply: Reply) -> None:
        """Keep a reply; one that the file has already is left out. Raises BadInput when the disk does not take it."""
        if reply.id is None or reply not in self.replies.get(reply.key, []):
            self._append({"reply": attrs.asdict(reply)})

    def open_batches(self, base_url: str) -> list[Batch]:
        """Return the batches at this server whose replies have not been fetched."""
        return [batch for batch in self._batches.values() if batch.base_url == base_url]

    def note_batch(self, batch: Batch) -> None:
        """Keep that a batch is uploaded, or, with its id, created."""
        self._append({"batch": attrs.asdict(batch)})

    def close_batch(self, batch: Batch) -> None:
        """Keep that nothing more is to be had from a batch."""
        self._append({"batch_done": batch.upload})

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()

    def _take(self, record: dict[str, Any]) -> None:
        if "reply" in record:
            values = record["reply"]
            usage = None if values["usage"] is None else Usage(**_known(Usage, values["usage"]))
            reply = Reply(**{**_known(Reply, values), "usage": usage})
            self.replies.setdefault(reply.key, []).append(reply)
        elif "batch" in record:
            batch = Batch(**_known(Batch, record["batch"]))
            self._batches[batch.upload] = batch
        else:
            self._batches.pop(record["batch_done"], None)

    def _append(self, record: dict[str, Any]) -> None:
        line = (b"\n" if self._torn else b"") + json.dumps({**record, "time": utc_now()}).encode() + b"\n"
        self._torn = True
        try:
            if self._file.write(line) < len(line):
                raise OSError("no space left")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise BadInput(
                f"{self.path}: cannot be written: {error.strerror or error}; make room, then go on"
            ) from error
        self._torn = False
        self._take(record)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{self.path}: another judge writes it; wait for it, or pass another --verdicts") from None
        except OSError as error:  # a file system without locks
            print(f"NOTE: {self.path}: cannot be locked ({error}); see that no other judge writes it", flush=True)


def _known(kind: type[attrs.AttrsInstance], values: dict[str, Any]) -> dict[str, Any]:
    """Return what a class has fields for."""
    return {field.name: values[field.name] for field in attrs.fields(kind) if field.name in values}
