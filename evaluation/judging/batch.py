"""Batch API: requests handed over together, at the provider's lower price for replies within a day.

Each step of a batch is stored before the next one is taken: a session that is killed at any point finds its batch
again, by its id or by its uploaded file, and pays for no second one.
"""

import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
from openai import APIConnectionError, APIStatusError, NotFoundError
from openai.types import Batch as RemoteBatch

from common.errors import BadInput
from common.json_files import parse_json
from evaluation.judging.prompt import Prompt
from evaluation.judging.replies import ODD_SHAPE, message_in, one_line, read_reply
from evaluation.judging.request import (
    NO_CREDIT,
    PATHS,
    RETRIES,
    UNBILLED,
    Failure,
    NoReply,
    explained,
    may_be_done,
    refusal_of,
)
from evaluation.judging.store import Asked, StoredBatch, StoreLine

if TYPE_CHECKING:
    from evaluation.judging.session import Session

MOST_REQUESTS, MOST_BYTES = 50_000, 200_000_000  # of one batch: OpenAI's limits
NOT_RUN = ("failed", "expired", "cancelled")  # a request without a line in the output was not run
ENDED = ("completed", *NOT_RUN)
RETRY_SECONDS = 0.5  # the first wait if the server takes no more for now, doubled each time


async def ask_in_batches(session: "Session") -> None:
    """Send what is outstanding in batches that fit into the budget; invalid replies are asked again.

    Raises BadInput if the server takes no batch.
    """
    histories = session.store.prompts
    failed: set[str] = set()  # keys without any reply: not again in this session
    while not session.stopping:
        waiting = deque(prompt for prompt in session.judgement.outstanding() if prompt.key not in failed)
        before = {prompt.key: len(histories[prompt.key].replies) for prompt in waiting}
        while waiting and await _hand_over(session, waiting):
            pass
        handed_over = before.keys() - {prompt.key for prompt in waiting}
        if not handed_over:
            if waiting:
                asked, _ = session.budget.plan(waiting[0], batch=True)
                session.ending.over_budget = session.budget.most_usd(asked)
            return
        await collect(session)
        failed |= {key for key in handed_over if len(histories[key].replies) == before[key]}


async def collect(session: "Session") -> None:
    """Wait for every batch that holds outstanding requests, from this session or an earlier one; keep its replies.

    Raises BadInput if the server does not answer.
    """
    url = session.judge.base_url
    wanted = {prompt.key for prompt in session.judgement.outstanding()}
    for batch in session.store.open_batches(url):
        if wanted.isdisjoint(batch.keys):
            continue
        ended = None
        with _one_line_errors(session):
            found = batch if batch.id is not None else await _find(session, batch)
            if found is None:  # it may run all the same, and counts at its most
                _note(
                    f"{url} lists no batch of file {one_line(batch.upload)}; its {len(batch.keys):,} requests count at "
                    "the most that they can cost"
                )
            else:
                ended = await _wait(session, found)
                if ended is None:
                    return
                await _fetch(session, batch, ended)
        session.store.append(StoreLine(batch_done=batch.upload))
        session.budget.update(*batch.keys)
        if ended is not None and ended.status == "failed":
            errors = (ended.errors and ended.errors.data) or []
            reason = one_line(str(errors[0].message)) if errors else "no reason"
            raise BadInput(f"{url}: batch {ended.id} failed: {reason}")


async def _hand_over(session: "Session", waiting: deque[Prompt]) -> bool:
    """Upload and create one batch of the first waiting prompts; False if the budget has no room for even one."""
    asked: list[Asked] = []
    lines, size, usd = [], 0, 0.0
    while waiting and len(asked) < MOST_REQUESTS:
        one, body = session.budget.plan(waiting[0], batch=True)
        row = {"custom_id": one.key, "method": "POST", "url": "/v1" + PATHS[session.judge.api], "body": body}
        line = json.dumps(row).encode() + b"\n"
        size, usd = size + len(line), usd + session.budget.most_usd(one)
        if (asked and size > MOST_BYTES) or not session.budget.allows(usd):
            break
        asked.append(one)
        lines.append(line)
        waiting.popleft()
    if not asked:
        return False
    with _one_line_errors(session):
        try:
            file = await session.retrying.files.create(file=("requests.jsonl", b"".join(lines)), purpose="batch")
            keys = [one.key for one in asked]
            batch = StoredBatch(upload=file.id, base_url=session.judge.base_url, keys=keys, asked=asked)
            session.store.append(StoreLine(batch=batch))
            session.budget.update(*keys)
            await _create(session, batch)
        except NotFoundError as error:
            raise BadInput(f"{session.judge.base_url}: this server takes no batches; leave out --batch") from error
    return True


async def _create(session: "Session", batch: StoredBatch) -> None:
    """Create a batch of an uploaded file, and store its id. A blind retry could create and bill a second one."""
    endpoint: Any = "/v1" + PATHS[session.judge.api]
    for attempt in range(RETRIES + 1):
        try:
            created = await session.client.batches.create(
                input_file_id=batch.upload, endpoint=endpoint, completion_window="24h"
            )
        except (APIConnectionError, APIStatusError) as error:
            status = error.status_code if isinstance(error, APIStatusError) else None
            if status == 429 and error.code != NO_CREDIT and attempt < RETRIES and not session.stopping:
                await session.pause(RETRY_SECONDS * 2**attempt)  # nothing was created
                continue
            lost = not isinstance(error, APIStatusError) or may_be_done(error)
            if lost or (status or 0) >= 500:  # perhaps only the reply was lost
                await session.pause(RETRY_SECONDS)
                if await _find(session, batch) is not None:
                    return
            if not lost:
                session.store.note_unbilled(batch.asked, "never created")
                session.store.append(StoreLine(batch_done=batch.upload))
            raise
        session.store.append(StoreLine(batch=attrs.evolve(batch, id=created.id)))
        return


async def _find(session: "Session", batch: StoredBatch) -> StoredBatch | None:
    """Return the batch that was created from an uploaded file, with its id; None if the server lists none."""
    seen: set[str] = set()
    async for other in session.retrying.batches.list(limit=100):
        if other.input_file_id == batch.upload:
            found = attrs.evolve(batch, id=other.id)
            session.store.append(StoreLine(batch=found))
            return found
        if other.id in seen:  # a server without pages begins again
            break
        seen.add(other.id)
    return None


async def _wait(session: "Session", batch: StoredBatch) -> RemoteBatch | None:
    """Return a batch when it has ended; None if interrupted. Raises BadInput if the server does not know it."""
    assert batch.id is not None
    shown = None
    while not session.ending.interrupted:
        try:
            state = await session.retrying.batches.retrieve(batch.id)
        except NotFoundError as error:
            raise BadInput(
                f"{session.judge.base_url}: batch {one_line(batch.id)}: the server does not know it; its "
                f"{len(batch.keys):,} requests may be paid for: use the key of the project that it was created with, "
                f"or, to pay for them again, append this line to {session.store.path}: "
                f"{json.dumps({'batch_done': batch.upload})}"
            ) from error
        done = state.request_counts.completed if state.request_counts else 0
        line = f"batch {batch.id}: {state.status}, {done:,} of {len(batch.keys):,} done"
        if line != shown:
            print(line, file=sys.stderr)
            shown = line
        if state.status in ENDED:
            return state
        await session.pause(session.judgement.options.poll_seconds)
    return None


async def _fetch(session: "Session", batch: StoredBatch, ended: RemoteBatch) -> None:
    """Keep each line of a batch's output by itself. A line that cannot be read may have been billed."""
    unknown: dict[str, Any] = {"id": "", "judge": "", "answers": 0, "sent_bytes": 0, "limit": 0, "most": UNBILLED}
    by_key = {key: Asked(key=key, batch=True, **unknown) for key in batch.keys}  # of an earlier version
    by_key |= {one.key: one for one in batch.asked}
    odd = 0
    for name in (ended.output_file_id, ended.error_file_id):
        if name is None:
            continue
        try:
            content = await session.retrying.files.content(name)
        except NotFoundError:
            _note(f"batch {ended.id}: the server has no file {one_line(name)} any more")
            odd += 1
            continue
        lines = content.text.split("\n")  # not splitlines: JSON may hold other line ends
        odd += sum(not _take(session, line, by_key) for line in lines if line.strip())
    if not odd and ended.status in NOT_RUN:
        session.store.note_unbilled(batch.asked, f"batch {ended.status}")
    without = sum(one.id in session.store.prompts[one.key].open for one in batch.asked)
    if odd or without:
        session.ending.unanswered += ["no readable line in the batch's output"] * max(odd, without)
        _note(
            f"batch {ended.id}: {odd:,} lines cannot be read; {without:,} requests without a reply count at the most "
            "that they can cost"
        )


def _take(session: "Session", line: str, by_key: dict[str, Asked]) -> bool:
    """Keep one line of a batch's output; False if it cannot be read."""
    try:
        row = parse_json(line, unique=False)  # paid for, so duplicate keys are accepted
        asked, response = by_key[row["custom_id"]], row.get("response") or {}
        status, body = response.get("status_code"), response.get("body")
        error = row.get("error") or (body.get("error") if isinstance(body, dict) else None)
        code = error.get("code") if isinstance(error, dict) else None
        if status is None and error is None:
            raise ValueError("neither a response nor an error")
    except ODD_SHAPE:
        return False
    said = [part for part in (status and one_line(str(status)), message_in(error)) if part]
    otherwise = NoReply(": ".join(said), Failure.FAILED)  # errors in a batch's output are not billed
    try:
        session.keep(read_reply(asked, body) if status == 200 else refusal_of(asked, status, code, otherwise))
    except NoReply as failure:
        session.note_failure(asked, failure)
        if failure.failure is Failure.FAILED:
            session.ending.unanswered.append(str(failure))
    return True


def _note(message: str) -> None:
    print(f"NOTE: {message}", file=sys.stderr)


@contextmanager
def _one_line_errors(session: "Session") -> Iterator[None]:
    """Turn errors of the client and of its transport, which it lets through, into BadInput."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"{session.judge.base_url}: batch: {explained(error)}; rerun the same command to continue"
        ) from error
