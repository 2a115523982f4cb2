"""Judge session: requests within the budget, adaptive concurrency, retries, and the conditions that stop it."""

import asyncio
import random
import signal
import sys
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI
from tqdm import tqdm

from common.errors import BadInput
from evaluation.judging.batch import ask_in_batches, collect
from evaluation.judging.client import Credentials, open_client
from evaluation.judging.judgement import DEAD, Judgement
from evaluation.judging.prices import money
from evaluation.judging.prompt import Prompt
from evaluation.judging.request import RETRIES, Failure, NoReply, send
from evaluation.judging.store import Asked, Reply, StoreLine

LOST_RETRIES = 2  # of one that may have been billed
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds, doubled each time, unless the server sends Retry-After


def ask(judgement: Judgement, credentials: Credentials) -> None:
    """Send what is outstanding. Raises BadInput if no server listens; `judgement.ending` takes all later errors."""
    asyncio.run(_ask(judgement, credentials))


async def _ask(judgement: Judgement, credentials: Credentials) -> None:
    options = judgement.options
    client = open_client(judgement.judge.base_url, credentials, options.timeout_seconds, options.concurrency)
    session = Session(client, judgement)
    session.handle_signals()
    try:
        with suppress(asyncio.CancelledError):  # a second Ctrl-C
            async with client:
                await collect(session)
                await (ask_in_batches(session) if options.batch else session.ask_directly())
        session.check_taken()
    except BadInput as error:
        judgement.ending.fail(error)


class Session:
    """One session with a judge. Each request is stored before it is sent, each reply before it counts."""

    def __init__(self, client: AsyncOpenAI, judgement: Judgement):
        self.client, self.judgement = client, judgement
        self.retrying = client.with_options(max_retries=RETRIES)  # for requests that cost nothing
        self.judge, self.store, self.budget = judgement.judge, judgement.store, judgement.budget
        self.ending = judgement.ending
        self._unanswered_in_a_row = self._invalid_in_a_row = 0
        self._in_flight, self._at_once = 0, 1
        self._turn = asyncio.Condition()
        self._interrupted = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """True if nothing more is to be sent."""
        ending = self.ending
        stopped = ending.interrupted or ending.over_budget is not None or ending.fatal is not None
        return stopped or self._unanswered_in_a_row >= DEAD

    def handle_signals(self) -> None:
        """Stop sending at the first SIGINT, SIGTERM or SIGHUP, and waiting at the second."""
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if self.ending.interrupted:
                task.cancel()
                return
            self.ending.interrupted = True
            self._interrupted.set()
            print("stopping: waiting for requests in flight; press Ctrl-C again to abandon them", file=sys.stderr)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    async def pause(self, seconds: float) -> None:
        """Wait, until interrupted."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._interrupted.wait(), seconds)

    async def ask_directly(self) -> None:
        """Send what is outstanding: one request at a time, one more with each verdict, up to --concurrency.

        The first replies show what the next ones cost, and whether the judge is usable at all.
        """
        prompts = self.judgement.outstanding()
        waiting = iter(prompts)
        with tqdm(total=len(prompts), disable=None, unit="verdict") as bar:

            async def work() -> None:
                for prompt in waiting:
                    if self.stopping:
                        return
                    try:
                        await self._ask(prompt)
                    except Exception as error:  # noqa: BLE001  # the other workers' replies are paid for: keep them
                        self.ending.fail(error)
                        async with self._turn:
                            self._turn.notify_all()
                    bar.set_postfix_str(money(self.budget.usd))
                    bar.update()

            await asyncio.gather(*(work() for _ in range(min(self.judgement.options.concurrency, len(prompts)))))

    def keep(self, reply: Reply) -> None:
        """Store a reply and count its cost: its most if the server did not count. Raises BadInput."""
        usage = self.store.usage[self.judge.label]
        before = usage.excess
        if not self.store.add(reply):
            return
        self.budget.update(reply.key)
        if before == 1.0 < usage.excess:
            print(
                f"NOTE: a reply of {self.judge.model} used more tokens than its limit: this server ignores limits; "
                "from now on requests count at the larger size",
                file=sys.stderr,
            )
        self._unanswered_in_a_row = 0
        prompt = self.judgement.by_key.get(reply.key)
        problem = None if prompt is None or reply.refusal else reply.problem(prompt.answers)
        if problem is None:
            self._invalid_in_a_row = 0
            self._at_once = min(self._at_once + 1, self.judgement.options.concurrency)
            return
        self._invalid_in_a_row += 1
        if self._invalid_in_a_row >= DEAD:
            self.ending.fail(self.judgement.invalid_in_a_row(reply, problem))

    def note_failure(self, asked: Asked, error: NoReply) -> None:
        """Store that a request has ended without a reply, unless it may have been billed."""
        if error.failure is not Failure.LOST:
            self.store.note_unbilled([asked], str(error))
            self.budget.update(asked.key)
        if error.failure is Failure.UNUSABLE:
            self.ending.fail(BadInput(f"{self.judge.base_url}: {error}"))
        if error.failure is Failure.NOT_TAKEN:
            self.ending.not_taken[asked.key] = str(error)
            if len(self.ending.not_taken) >= DEAD and not self._answered():
                self.check_taken()

    def check_taken(self) -> None:
        """Stop if the server has rejected more prompts than were ever answered."""
        rejected = self.ending.not_taken
        if len(rejected) > self._answered():
            self.ending.fail(BadInput(f"{self.judge.base_url}: {next(iter(rejected.values()))}"))

    def _answered(self) -> int:
        return sum(bool(self.store.prompts[key].replies) for key in self.judgement.by_key)

    async def _ask(self, prompt: Prompt) -> None:
        """Ask a prompt until it is settled, or nothing more is to be sent."""
        retries = {Failure.FAILED: RETRIES, Failure.LOST: LOST_RETRIES}  # left
        wait = FIRST_WAIT
        while not self.judgement.is_settled(prompt):
            try:
                if not await self._send_once(prompt):
                    return
            except NoReply as error:
                if error.failure not in retries:
                    return
                last = retries[error.failure] == 0
                retries[error.failure] -= 1
                self._at_once = max(1, self._at_once // 2)
                self._unanswered_in_a_row += error.failure is Failure.LOST or last
                if last or self.stopping:
                    self.ending.unanswered.append(str(error))
                    return
                seconds = error.wait_seconds
                await self.pause(wait * random.uniform(0.75, 1) if seconds is None else seconds)
                wait = min(2 * wait, LONGEST_WAIT)

    async def _send_once(self, prompt: Prompt) -> bool:
        """Ask a prompt once, in its turn, and keep the reply; False: nothing more is to be sent. Raises NoReply."""
        admitted = await self._admit(prompt)
        if admitted is None:
            return False
        asked, body = admitted
        # A server that knows Idempotency-Key accepts it again with the same body only.
        attempt = f"{len(self.store.prompts[asked.key].replies)}-{asked.limit}"
        try:
            self.keep(await send(self.client, self.judge.api, body, asked, attempt))
        except NoReply as error:
            self.note_failure(asked, error)
            raise
        finally:
            async with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()
        return True

    async def _admit(self, prompt: Prompt) -> tuple[Asked, dict[str, Any]] | None:
        """Wait for a turn and for room in the budget, and store the request; None: nothing more is to be sent."""
        async with self._turn:
            while not self.stopping:
                if self._in_flight < self._at_once:
                    asked, body = self.budget.plan(prompt)  # by the latest usage
                    usd = self.budget.most_usd(asked)
                    if self.budget.allows(usd):
                        self.store.append(StoreLine(asked=asked))
                        self.budget.update(prompt.key)
                        self._in_flight += 1
                        return asked, body
                    if not self._in_flight:
                        self.ending.over_budget = usd
                        break
                await self._turn.wait()
            self._turn.notify_all()
            return None
