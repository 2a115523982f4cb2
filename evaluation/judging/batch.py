"""Requests handed over together, at the provider's price for replies within a day.

What a batch is goes into the store before the next step is taken: a session that is killed at any point finds its
batch again, by its id or by the file that was uploaded for it, and pays for no second one.
"""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from common.errors import BadInput
from common.json_files import parse_json
from evaluation.judging.asking import RETRIES, Asking
from evaluation.judging.client import NO_CREDIT, NOT_TAKEN, PATHS, REFUSED, UNBILLED, explained, maybe_done
from evaluation.judging.replies import SHAPES, message_in, one_line, read_reply
from evaluation.judging.verdicts import Asked, Reply, StoredBatch

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import Batch as RemoteBatch

MOST_REQUESTS, MOST_BYTES = 50_000, 200_000_000  # of one batch, OpenAI's limits
ENDED = ("completed", "failed", "expired", "cancelled")
NOT_RUN = ("failed", "expired", "cancelled")  # what has no line then has not been run
RETRY_SECONDS = 0.5  # the first wait; where the server takes no more for now, twice as long each time
Line = tuple[Asked, bytes]


async def in_batches(asking: Asking, poll_seconds: float) -> None:
    """Ask in batches, each with what the budget has room for; what got a wrong verdict once more.

    Raises BadInput when the server takes no batch.
    """
    failed: set[str] = set()  # keys without any reply: not again in this session
    while not asking.stopping:
        left = [request for request in asking.outstanding() if request.key not in failed]
        lines: list[Line] = []
        for request in left:
            asked, body = asking.about_to_ask(request, batch=True)
            if not asking.budget.reserve(asked):
                asking.over_budget = None if lines else asking.budget.cost(asked.most, batch=True)
                break
            row = {"custom_id": asked.key, "method": "POST", "url": "/v1" + PATHS[asking.judge.api], "body": body}
            lines.append((asked, json.dumps(row).encode()))
        if not lines:
            return
        before = {asked.key: len(asking.store.replies.get(asked.key, [])) for asked, _ in lines}
        for part in _parts(lines):
            await _hand_over(asking, part)
        await collect(asking, poll_seconds)
        failed |= {key for key, count in before.items() if len(asking.store.replies.get(key, [])) == count}


async def collect(asking: Asking, poll_seconds: float) -> None:
    """Wait for every batch that was handed over for these requests, by this session or another, and keep its replies.

    Raises BadInput when the server does not answer.
    """
    wanted = {request.key for request in asking.outstanding()}
    for batch in asking.store.open_batches(asking.judge.base_url):
        if wanted.isdisjoint(batch.keys):
            continue
        ended = None
        try:
            found = batch if batch.id is not None else await _find(asking, batch)
            if found is None:  # it may run all the same, and counts at its most
                print(
                    f"NOTE: {asking.judge.base_url} lists no batch of file {one_line(batch.upload)}; its "
                    f"{len(batch.keys):,} requests count at the most that they can cost",
                    file=sys.stderr,
                )
            else:
                ended = await _wait(asking, found, poll_seconds)
            if ended is not None:
                await _fetch(asking, batch, ended)
        except Exception as error:  # the client raises errors of its own and lets its transport's through
            raise _unreadable(asking, error) from error
        if asking.interrupted and ended is None:
            return
        asking.store.close_batch(batch)
        asking.recount()
        if ended is not None and ended.status == "failed":
            said = (ended.errors and ended.errors.data) or []
            reason = one_line(str(said[0].message)) if said else "no reason"
            raise BadInput(f"{asking.judge.base_url}: batch {ended.id} failed: {reason}")


async def _hand_over(asking: Asking, lines: list[Line]) -> None:
    from openai import NotFoundError

    try:
        content = b"\n".join(line for _, line in lines) + b"\n"
        file = await _patient(asking).files.create(file=("requests.jsonl", content), purpose="batch")
        asked = [asked for asked, _ in lines]
        keys = [one.key for one in asked]
        batch = StoredBatch(upload=file.id, base_url=asking.judge.base_url, keys=keys, asked=asked)
        asking.store.note_batch(batch)
        await _create(asking, batch)
    except NotFoundError as error:
        raise BadInput(f"{asking.judge.base_url}: this server takes no batches; leave out --batch") from error
    except Exception as error:  # as above
        raise _unreadable(asking, error) from error


async def _create(asking: Asking, batch: StoredBatch) -> None:
    """Create a batch of what was uploaded, and note it. The client must not repeat this: each would be paid for."""
    from openai import APIConnectionError, APIStatusError, InternalServerError, RateLimitError

    endpoint: Any = "/v1" + PATHS[asking.judge.api]
    for time in range(RETRIES + 1):
        try:
            created = await asking.client.batches.create(
                input_file_id=batch.upload, endpoint=endpoint, completion_window="24h"
            )
        except RateLimitError as error:  # nothing was created
            if error.code == NO_CREDIT or time == RETRIES or asking.interrupted:
                _forget(asking, batch)
                raise
            await asking.pause(RETRY_SECONDS * 2**time)
        except (APIConnectionError, InternalServerError) as error:  # or only the reply was lost
            await asking.pause(RETRY_SECONDS)
            if await _find(asking, batch) is not None:
                return
            if isinstance(error, InternalServerError) and not maybe_done(error):
                _forget(asking, batch)
            raise
        except APIStatusError as error:
            if not maybe_done(error):
                _forget(asking, batch)
            raise
        else:
            asking.store.note_batch(attrs.evolve(batch, id=created.id))
            return


async def _find(asking: Asking, batch: StoredBatch) -> StoredBatch | None:
    """Return a batch that was created from a file, though nobody could note it; None when there is none."""
    seen: set[str] = set()
    async for other in _patient(asking).batches.list(limit=100):
        if other.input_file_id == batch.upload:
            found = attrs.evolve(batch, id=other.id)
            asking.store.note_batch(found)
            return found
        if other.id in seen:  # a server that knows no pages begins again
            break
        seen.add(other.id)
    return None


def _forget(asking: Asking, batch: StoredBatch) -> None:
    """Keep that a batch was not created, by what the server says itself."""
    _note_unbilled(asking, batch.asked, "never created")
    asking.store.close_batch(batch)


async def _wait(asking: Asking, batch: StoredBatch, poll_seconds: float) -> "RemoteBatch | None":
    """Return a batch when it has ended; None when told to stop. Raises BadInput where the server does not know it."""
    from openai import NotFoundError

    assert batch.id is not None
    shown = None
    while True:
        try:
            state = await _patient(asking).batches.retrieve(batch.id)
        except NotFoundError as error:
            raise BadInput(
                f"{asking.judge.base_url}: batch {one_line(batch.id)}: the server does not know it; its "
                f"{len(batch.keys):,} requests may be paid for: use the key of the project that it was created with, "
                f"or, to pay for them again, append this line to {asking.store.path}: "
                f"{json.dumps({'batch_done': batch.upload})}"
            ) from error
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


async def _fetch(asking: Asking, batch: StoredBatch, ended: "RemoteBatch") -> None:
    """Keep what a batch has answered, each line on its own. A line that cannot be read may have been billed."""
    from openai import NotFoundError

    asked: dict[str, Asked | None] = {**dict.fromkeys(batch.keys), **{one.key: one for one in batch.asked}}
    unbilled: list[Asked] = []
    odd = 0
    for name in (ended.output_file_id, ended.error_file_id):
        if name is None:
            continue
        try:
            content = await _patient(asking).files.content(name)
        except NotFoundError:
            print(f"NOTE: batch {ended.id}: the server has no file {one_line(name)} any more", file=sys.stderr)
            odd += 1
            continue
        for line in content.text.split("\n"):  # not splitlines: JSON may hold other ends of lines
            if line.strip():
                odd += not _take(asking, line, asked, unbilled)
    if not odd and ended.status in NOT_RUN:
        unbilled = batch.asked
    _note_unbilled(asking, unbilled, f"batch {ended.status}")
    without = sum(one.id in asking.store.unanswered for one in batch.asked)
    if odd or without:
        asking.unanswered += ["no readable line in the batch's output"] * max(odd, without)
        print(
            f"NOTE: batch {ended.id}: {odd:,} lines cannot be read; {without:,} requests without a reply count at the "
            "most that they can cost",
            file=sys.stderr,
        )


def _take(asking: Asking, line: str, by_key: dict[str, Asked | None], unbilled: list[Asked]) -> bool:
    """Keep one line of what a batch has answered; False where it cannot be read. What was not billed is added."""
    try:
        row = parse_json(line, unique=False)  # it is paid for, however it is spelled
        key, response = row["custom_id"], row.get("response") or {}
        asked, status, body = by_key[key], response.get("status_code"), response.get("body")
        error = row.get("error") or (body.get("error") if isinstance(body, dict) else None)
        code = error.get("code") if isinstance(error, dict) else None
        if status is None and error is None:
            raise ValueError("neither a response nor an error")
    except SHAPES:
        return False
    if asked is not None and any(reply.asked == asked.id for reply in asking.store.replies.get(key, [])):
        return True  # the same line again
    asked_id, said = None if asked is None else asked.id, message_in(error) or f"status {one_line(str(status))}"
    if status == 200:
        asking.keep(read_reply(key, body, asked=asked_id, batch=True), asked)
        return True
    if code in REFUSED:
        refusal = Reply(key=key, id=None, text="", refusal=said, usage=UNBILLED, batch=True, asked=asked_id)
        asking.keep(refusal, asked)
    elif status in NOT_TAKEN:
        asking.not_taken[key] = f"{status}: {said}"
    else:
        asking.unanswered.append(said)
    unbilled += [] if asked is None else [asked]
    return True


def _note_unbilled(asking: Asking, asked: list[Asked], why: str) -> None:
    """Keep that those of these requests that are without an outcome were not billed."""
    ids = dict.fromkeys(one.id for one in asked)  # each once: a file may hold a line twice
    asking.store.note_unbilled([id for id in ids if id in asking.store.unanswered], why)


def _parts(lines: list[Line]) -> Iterator[list[Line]]:
    """Yield the lines of batches, each batch within the limits."""
    part: list[Line] = []
    size = 0
    for asked, line in lines:
        if part and (len(part) == MOST_REQUESTS or size + len(line) + 1 > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append((asked, line))
        size += len(line) + 1
    yield part


def _patient(asking: Asking) -> "AsyncOpenAI":
    """Return a client that repeats what costs nothing."""
    return asking.client.with_options(max_retries=RETRIES)


def _unreadable(asking: Asking, error: Exception) -> BadInput:
    """Return what to say of a batch that could not be handed over or fetched."""
    if isinstance(error, BadInput):
        return error
    return BadInput(f"{asking.judge.base_url}: batch: {explained(error)}; the same command goes on")
