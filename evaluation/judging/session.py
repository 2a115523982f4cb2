"""Judge session: batches that are out, then direct requests or new batches, until something stops it."""

import asyncio
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

from openai import AsyncOpenAI
from tqdm import tqdm

from common.errors import BadInput
from evaluation.judging.address import Credentials
from evaluation.judging.batch import RETRIES, BatchAsker
from evaluation.judging.client import explained, open_client, send
from evaluation.judging.judgement import Judgement
from evaluation.judging.prices import money
from evaluation.judging.prompt import Prompt
from evaluation.judging.replies import Failure, NoReply
from evaluation.judging.store import Reply

LOST_RETRIES = 2  # of one that may have been billed
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds, doubled each time, unless the server sends Retry-After


async def ask(judgement: Judgement, credentials: Credentials) -> None:
    """Send what is outstanding. Raises BadInput if no server listens; `judgement.fatal` takes all later errors."""
    url, options = judgement.judge.base_url, judgement.options
    client = open_client(url, credentials, options.timeout, options.concurrency)
    _handle_signals(judgement)
    try:
        with suppress(asyncio.CancelledError):  # a second Ctrl-C
            async with client:
                batches = BatchAsker(client, judgement)
                await batches.collect()
                await (batches.ask() if options.batch else DirectAsker(client, judgement).ask())
        judgement.check_taken()
    except Exception as error:  # noqa: BLE001  # of the client in batches, or of its transport, which it lets through
        otherwise = BadInput(f"{url}: batch: {explained(error)}; rerun the same command to continue")
        judgement.fail(error if isinstance(error, BadInput) else otherwise)


def _handle_signals(judgement: Judgement) -> None:
    """Stop sending at the first SIGINT, SIGTERM or SIGHUP, and waiting at the second."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if judgement.interrupted.is_set():
            task.cancel()
            return
        judgement.interrupted.set()
        print("stopping: waiting for requests in flight; press Ctrl-C again to abandon them", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)


class DirectAsker:
    """Direct requests: one at a time, one more with each verdict, up to --concurrency; half as many after a failure.

    The first replies show what the next ones cost, and whether the judge is usable at all.
    """

    def __init__(self, client: AsyncOpenAI, judgement: Judgement):
        self._client, self._judgement = client, judgement
        self._in_flight, self._at_once = 0, 1
        self._turn = asyncio.Condition()

    async def ask(self) -> None:
        """Send what is outstanding."""
        prompts = self._judgement.outstanding()
        with tqdm(total=len(prompts), disable=None, unit="verdict") as bar:
            waiting = iter(prompts)
            workers = min(self._judgement.options.concurrency, len(prompts))
            await asyncio.gather(*(self._work(waiting, bar) for _ in range(workers)))

    async def _work(self, waiting: Iterator[Prompt], bar: tqdm) -> None:
        for prompt in waiting:
            if self._judgement.stopping:
                return
            try:
                await self._ask(prompt)
            except Exception as error:  # noqa: BLE001  # the other workers' replies are paid for: keep them
                self._judgement.fail(error)
                async with self._turn:
                    self._turn.notify_all()
            bar.set_postfix_str(money(self._judgement.budget.usd))
            bar.update()

    async def _ask(self, prompt: Prompt) -> None:
        """Ask a prompt until it is settled, or nothing more is to be sent."""
        judgement = self._judgement
        retries = {Failure.FAILED: RETRIES, Failure.LOST: LOST_RETRIES}  # left
        wait = FIRST_WAIT
        while not judgement.is_settled(prompt):
            outcome = await self._send(prompt)
            if isinstance(outcome, Reply):
                continue
            if outcome is None or outcome.failure not in retries:
                return
            retries[outcome.failure] -= 1
            last = retries[outcome.failure] < 0
            self._at_once = max(1, self._at_once // 2)
            judgement.unanswered_in_a_row += outcome.failure is Failure.LOST or last
            if last or judgement.stopping:
                return
            seconds = outcome.wait_seconds
            await judgement.pause(wait * random.uniform(0.75, 1) if seconds is None else seconds)
            wait = min(2 * wait, LONGEST_WAIT)

    async def _send(self, prompt: Prompt) -> Reply | NoReply | None:
        """Send a prompt once, in its turn, and keep the outcome; None: nothing more is to be sent."""
        judgement, request = self._judgement, None
        async with self._turn:
            while request is None and not judgement.stopping:
                if self._in_flight < self._at_once:
                    request = judgement.admit(prompt, alone=not self._in_flight)
                if request is None and not judgement.stopping:
                    await self._turn.wait()
            self._turn.notify_all()
            if request is None:
                return None
            self._in_flight += 1
        asked, body = request
        # A server that knows Idempotency-Key accepts it again with the same body only.
        attempt = f"{len(judgement.history(prompt).replies)}-{asked.limit}"
        try:
            outcome = await send(self._client, judgement.judge.api, body, asked, attempt)
            if judgement.take(asked, outcome):
                self._at_once = min(self._at_once + 1, judgement.options.concurrency)
            return outcome
        finally:
            async with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()
