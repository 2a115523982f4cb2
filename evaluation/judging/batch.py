"""Requests handed over together, at the provider's price for replies within a day.

What a batch is goes into the store before the next step is taken: a session that is killed at any point finds its
batch again, by its id or by the file that was uploaded for it, and pays for no second one.
"""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from errors import BadInput
from evaluation.judging.asking import TIMES, Asking, outstanding
from evaluation.judging.client import NO_CREDIT, NOT_TAKEN, PATHS, REFUSED, RETRIES, Request, explained, read_reply
from evaluation.judging.verdicts import Batch, Reply

if TYPE_CHECKING:
    from openai.types import Batch as RemoteBatch

MOST_REQUESTS, MOST_BYTES = 50_000, 200_000_000  # of one batch, OpenAI's limits
ENDED = ("completed", "failed", "expired", "cancelled")
RETRY_SECONDS = 0.5  # the first wait; where the server takes no more for now, twice as long each time


async def in_batches(asking: Asking, requests: list[Request], poll_seconds: float) -> None:
    """Ask in batches; what got a wrong verdict once more. Raises BadInput when the server takes no batch."""
    for time in range(TIMES):
        left = [r for r in outstanding(requests, asking.store) if time == 0 or r.key in asking.store.replies]
        if asking.stopping or not left:
            return
        estimate = sum(asking.estimate(request, batch=True) for request in left)
        if not asking.budget.reserve(estimate):
            asking.out_of_money = True
            return
        for part in _parts(left, asking):
            await _hand_over(asking, part)
        await collect(asking, requests, poll_seconds)
        asking.budget.release(estimate)


async def collect(asking: Asking, requests: list[Request], poll_seconds: float) -> None:
    """Wait for every batch that was handed over for these requests, by this session or another, and keep its replies.

    Raises BadInput when the server does not answer.
    """
    wanted = {request.key for request in outstanding(requests, asking.store)}
    estimates = {request.key: asking.estimate(request, batch=True) for request in requests}
    for batch in asking.store.open_batches(asking.judge.base_url):
        if wanted.isdisjoint(batch.keys):
            continue
        try:
            found = batch if batch.id is not None else await _find(asking, batch)
            ended = None if found is None else await _wait(asking, found, poll_seconds)
            if ended is not None:
                await _fetch(asking, ended, estimates)
        except Exception as error:  # the client raises errors of its own and lets its transport's through
            raise _unreadable(asking, error) from error
        if asking.interrupted:
            return
        asking.store.close_batch(batch)
        if ended is not None and ended.status == "failed":
            said = (ended.errors and ended.errors.data) or []
            raise BadInput(
                f"{asking.judge.base_url}: batch {ended.id} failed: {said[0].message if said else 'no reason'}"
            )


async def _hand_over(asking: Asking, lines: dict[str, bytes]) -> None:
    from openai import NotFoundError

    try:
        content = b"\n".join(lines.values()) + b"\n"
        file = await asking.client.files.create(file=("requests.jsonl", content), purpose="batch")
        batch = Batch(upload=file.id, base_url=asking.judge.base_url, keys=list(lines))
        asking.store.note_batch(batch)
        await _create(asking, batch)
    except NotFoundError as error:
        raise BadInput(f"{asking.judge.base_url}: this server takes no batches; leave out --batch") from error
    except Exception as error:  # as above
        raise _unreadable(asking, error) from error


async def _create(asking: Asking, batch: Batch) -> None:
    """Create a batch of what was uploaded, and note it. The client must not repeat this: each would be paid for."""
    from openai import APIConnectionError, InternalServerError, RateLimitError

    once = asking.client.with_options(max_retries=0)
    endpoint: Any = "/v1" + PATHS[asking.judge.api]
    for time in range(RETRIES + 1):
        try:
            created = await once.batches.create(input_file_id=batch.upload, endpoint=endpoint, completion_window="24h")
        except RateLimitError as error:  # nothing was created
            if error.code == NO_CREDIT or time == RETRIES or asking.interrupted:
                raise
            await asking.pause(RETRY_SECONDS * 2**time)
        except (APIConnectionError, InternalServerError):  # or only the reply was lost
            await asking.pause(RETRY_SECONDS)
            if await _find(asking, batch) is None:
                raise
            return
        else:
            asking.store.note_batch(attrs.evolve(batch, id=created.id))
            return


async def _find(asking: Asking, batch: Batch) -> Batch | None:
    """Return a batch that was created from a file, though nobody could note it; None when there is none."""
    newest = await asking.client.batches.list(limit=100)
    for other in newest.data:
        if other.input_file_id == batch.upload:
            found = attrs.evolve(batch, id=other.id)
            asking.store.note_batch(found)
            return found
    return None


async def _wait(asking: Asking, batch: Batch, poll_seconds: float) -> "RemoteBatch | None":
    """Return a batch when it has ended; None when there is no such batch any more, or when told to stop."""
    from openai import NotFoundError

    assert batch.id is not None
    shown = None
    while True:
        try:
            state = await asking.client.batches.retrieve(batch.id)
        except NotFoundError:
            print(f"batch {batch.id}: the server does not know it any more", file=sys.stderr)
            return None
        done = state.request_counts.completed if state.request_counts else 0
        line = f"batch {batch.id}: {state.status}, {done:,} of {len(batch.keys):,} done"
        if line != shown:
            print(line, file=sys.stderr)
            shown = line
        if state.status in ENDED:
            return state
        await asking.pause(poll_seconds)
        if asking.interrupted:
            return None


async def _fetch(asking: Asking, ended: "RemoteBatch", estimates: dict[str, float]) -> None:
    for name in (ended.output_file_id, ended.error_file_id):
        if name is not None:
            content = await asking.client.files.content(name)
            for line in content.text.split("\n"):  # not splitlines: JSON may hold other ends of lines
                if line.strip():
                    _take(asking, line, estimates)


def _take(asking: Asking, line: str, estimates: dict[str, float]) -> None:
    """Keep one line of what a batch has answered. `estimates`: in dollars, by key of the request."""
    try:
        row = json.loads(line)
        key, response, error = row["custom_id"], row.get("response") or {}, row.get("error")
        body, status = response.get("body") or {}, response.get("status_code")
    except (ValueError, KeyError, AttributeError):
        asking.unanswered.append("a line of the batch that is not JSON")
        return
    error = error or body.get("error") or {}
    if status == 200:
        asking.keep(read_reply(key, body, batch=True), estimates.get(key, 0.0))
    elif error.get("code") in REFUSED:
        said = error.get("message") or "refused"
        asking.keep(Reply(key=key, id=None, text="", refusal=said, usage=None, batch=True), 0.0)
    elif status in NOT_TAKEN:
        asking.not_taken[key] = f"{status}: {error.get('message')}"
    else:
        asking.unanswered.append(error.get("message") or f"status {status}")


def _parts(requests: list[Request], asking: Asking) -> Iterator[dict[str, bytes]]:
    """Yield the lines of batches, by key, each batch within the limits."""
    part: dict[str, bytes] = {}
    size = 0
    for request in requests:
        row = {"custom_id": request.key, "method": "POST", "url": "/v1" + PATHS[asking.judge.api], "body": request.body}
        line = json.dumps(row).encode()
        if part and (len(part) == MOST_REQUESTS or size + len(line) + 1 > MOST_BYTES):
            yield part
            part, size = {}, 0
        part[request.key] = line
        size += len(line) + 1
    yield part


def _unreadable(asking: Asking, error: Exception) -> BadInput:
    """Return what to say of a batch that could not be handed over or fetched."""
    if isinstance(error, BadInput):
        return error
    return BadInput(f"{asking.judge.base_url}: batch: {explained(error)}; the same command goes on")
