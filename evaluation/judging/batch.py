"""Batch API: requests handed over together, at the provider's lower price for replies within a day.

Each step of a batch is stored before the next one is taken: a session that is killed at any point finds its batch
again, by its id or by its uploaded file, and pays for no second one.
"""

import json
import sys
from collections import deque
from typing import Any, cast

import attrs
from openai import APIError, APIStatusError, AsyncOpenAI, NotFoundError
from openai.types import Batch as RemoteBatch

from common.errors import BadInput
from evaluation.judging.client import PATHS, may_be_done
from evaluation.judging.judgement import Judgement
from evaluation.judging.prompt import Prompt
from evaluation.judging.replies import NO_CREDIT, UNBILLED, Failure, NoReply, one_line, read_batch_line
from evaluation.judging.store import Asked, StoredBatch, StoreLine

RETRIES = 6  # of a request that was not billed
MOST_REQUESTS, MOST_BYTES = 50_000, 200_000_000  # of one batch: OpenAI's limits
NOT_RUN = ("failed", "expired", "cancelled")  # a request without a line in the output was not run
RETRY_SECONDS = 0.5  # the first wait if the server takes no more for now, doubled each time


class BatchAsker:
    """Batches of a judgement, from this session and earlier ones."""

    def __init__(self, client: AsyncOpenAI, judgement: Judgement):
        self._client, self._judgement, self._budget = client, judgement, judgement.budget
        self._retrying = client.with_options(max_retries=RETRIES)  # for requests that cost nothing
        self._url, self._endpoint = judgement.judge.base_url, "/v1" + PATHS[judgement.judge.api]
        self._handed_over: dict[str, int] = {}  # by key, the replies that a prompt had when it was handed over

    async def ask(self) -> None:
        """Send what is outstanding in batches that fit into the budget. Raises BadInput if the server takes none."""
        judgement = self._judgement
        while not judgement.stopping and (waiting := self._waiting()):
            if not await self._hand_over(waiting):
                judgement.over_budget = self._budget.most_usd(self._budget.plan(waiting[0], batch=True)[0])
                return
            while waiting and await self._hand_over(waiting):
                pass
            await self.collect()

    async def collect(self) -> None:
        """Wait for every batch that holds outstanding requests, and keep its replies. Raises BadInput if one failed."""
        wanted = {prompt.key for prompt in self._judgement.outstanding()}
        for batch in self._judgement.store.open_batches(self._url):
            if wanted.isdisjoint(batch.keys):
                continue
            id = batch.id or await self._find(batch)
            if id is None:  # it may run all the same, and counts at its most
                _note(
                    f"{self._url} lists no batch of file {one_line(batch.upload)}; its {len(batch.keys):,} requests "
                    "count at the most that they can cost"
                )
                self._budget.note(StoreLine(batch_done=batch.upload))
                continue
            ended = await self._wait(batch, id)
            if ended is None:
                return
            await self._fetch(batch, ended)
            self._budget.note(StoreLine(batch_done=batch.upload))
            if ended.status == "failed":
                errors = (ended.errors and ended.errors.data) or []
                reason = one_line(str(errors[0].message)) if errors else "no reason"
                raise BadInput(f"{self._url}: batch {ended.id} failed: {reason}")

    def _waiting(self) -> deque[Prompt]:
        """Return the prompts to hand over. One that got no reply is not asked again in this session."""
        history = self._judgement.history
        prompts = self._judgement.outstanding()
        return deque(one for one in prompts if self._handed_over.get(one.key) != len(history(one).replies))

    async def _hand_over(self, waiting: deque[Prompt]) -> bool:
        """Upload and create one batch of the first waiting prompts; False if the budget has no room for even one."""
        asked: list[Asked] = []
        lines, size, usd = [], 0, 0.0
        while waiting and len(asked) < MOST_REQUESTS:
            one, body = self._budget.plan(waiting[0], batch=True)
            row = {"custom_id": one.key, "method": "POST", "url": self._endpoint, "body": body}
            lines.append(json.dumps(row).encode() + b"\n")
            size, usd = size + len(lines[-1]), usd + self._budget.most_usd(one)
            if (asked and size > MOST_BYTES) or not self._budget.allows(usd):
                break
            asked.append(one)
            self._handed_over[one.key] = len(self._judgement.history(waiting.popleft()).replies)
        if not asked:
            return False
        content = b"".join(lines[: len(asked)])
        try:
            file = await self._retrying.files.create(file=("requests.jsonl", content), purpose="batch")
            batch = StoredBatch(upload=file.id, base_url=self._url, keys=[one.key for one in asked], asked=asked)
            self._budget.note(StoreLine(batch=batch))
            await self._create(batch)
        except NotFoundError as error:
            raise BadInput(f"{self._url}: this server takes no batches; leave out --batch") from error
        return True

    async def _create(self, batch: StoredBatch) -> None:
        """Create a batch of an uploaded file, and store its id. A blind retry could create and bill a second one."""
        judgement, endpoint = self._judgement, cast(Any, self._endpoint)
        for attempt in range(RETRIES + 1):
            try:
                created = await self._client.batches.create(
                    input_file_id=batch.upload, endpoint=endpoint, completion_window="24h"
                )
                self._budget.note(StoreLine(batch=attrs.evolve(batch, id=created.id)))
                return
            except APIError as error:
                status = error.status_code if isinstance(error, APIStatusError) else 0
                if status == 429 and error.code != NO_CREDIT and attempt < RETRIES and not judgement.stopping:
                    await judgement.pause(RETRY_SECONDS * 2**attempt)  # nothing was created
                    continue
                lost = may_be_done(error)
                if lost or status >= 500:  # perhaps only the reply was lost
                    await judgement.pause(RETRY_SECONDS)
                    if await self._find(batch) is not None:
                        return
                if not lost:
                    self._budget.note(StoreLine(unbilled=[one.id for one in batch.asked], why="never created"))
                    self._budget.note(StoreLine(batch_done=batch.upload))
                raise

    async def _find(self, batch: StoredBatch) -> str | None:
        """Return the id of the batch that was created from an uploaded file; None if the server lists none."""
        seen: set[str] = set()
        async for other in self._retrying.batches.list(limit=100):
            if other.input_file_id == batch.upload:
                self._budget.note(StoreLine(batch=attrs.evolve(batch, id=other.id)))
                return other.id
            if other.id in seen:  # a server without pages begins again
                break
            seen.add(other.id)
        return None

    async def _wait(self, batch: StoredBatch, id: str) -> RemoteBatch | None:
        """Return a batch when it has ended; None if interrupted. Raises BadInput if the server does not know it."""
        judgement, shown = self._judgement, None
        while not judgement.interrupted.is_set():
            try:
                state = await self._retrying.batches.retrieve(id)
            except NotFoundError as error:
                raise BadInput(
                    f"{self._url}: batch {one_line(id)}: the server does not know it; its {len(batch.keys):,} requests "
                    "may be paid for: use the key of the project that it was created with, or, to pay for them again, "
                    f"append this line to {judgement.store.path}: {json.dumps({'batch_done': batch.upload})}"
                ) from error
            done = state.request_counts.completed if state.request_counts else 0
            line = f"batch {id}: {state.status}, {done:,} of {len(batch.keys):,} done"
            if line != shown:
                print(line, file=sys.stderr)
                shown = line
            if state.status in ("completed", *NOT_RUN):
                return state
            await judgement.pause(judgement.options.poll_seconds)
        return None

    async def _fetch(self, batch: StoredBatch, ended: RemoteBatch) -> None:
        """Keep each line of a batch's output by itself. A line that cannot be read may have been billed."""
        unknown = Asked(id="", key="", judge="", answers=0, sent_bytes=0, limit=0, most=UNBILLED, batch=True)
        by_key = {key: attrs.evolve(unknown, key=key) for key in batch.keys}  # of an earlier version
        by_key |= {one.key: one for one in batch.asked}
        odd = 0
        for name in filter(None, (ended.output_file_id, ended.error_file_id)):
            try:
                content = await self._retrying.files.content(name)
            except NotFoundError:
                _note(f"batch {ended.id}: the server has no file {one_line(name)} any more")
                odd += 1
                continue
            for line in filter(str.strip, content.text.split("\n")):  # not splitlines: JSON may hold other line ends
                outcome = read_batch_line(line, by_key)
                if outcome is None:
                    odd += 1
                else:
                    self._judgement.take(*outcome)
        if not odd and ended.status in NOT_RUN:
            self._budget.note(StoreLine(unbilled=[one.id for one in batch.asked], why=f"batch {ended.status}"))
        without = [one for one in batch.asked if one.id in self._judgement.store.open]
        for one in without:
            self._judgement.take(one, NoReply("no readable line in the batch's output", Failure.LOST))
        if odd or without:
            _note(
                f"batch {ended.id}: {odd:,} lines cannot be read; {len(without):,} requests without a reply count at "
                "the most that they can cost"
            )


def _note(message: str) -> None:
    print(f"NOTE: {message}", file=sys.stderr)
