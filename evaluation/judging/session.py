"""Judge session: requests within the budget, adaptive concurrency, retries, and the conditions that stop it."""

import asyncio
import random
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
from tqdm import tqdm

from common.errors import BadInput
from evaluation.judging.cost import JudgeBudget
from evaluation.judging.prices import money
from evaluation.judging.prompt import Judge, Prompt
from evaluation.judging.replies import one_line
from evaluation.judging.request import Failure, NoReply, send
from evaluation.judging.store import Asked, Reply

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DEAD = 8  # requests in a row without a reply, or with an invalid one: the fault is common to all
RETRIES = 6  # of a request that was not billed
LOST_RETRIES = 2  # of one that may have been billed
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds, doubled each time, unless the server sends Retry-After


@attrs.define(kw_only=True)
class Ending:
    """How a session ends."""

    interrupted: bool = False
    over_budget: float | None = None  # dollars of the next request at its most, if --max-usd ended the session
    unanswered: list[str] = attrs.field(factory=list)  # why, for each request without a reply
    not_taken: dict[str, str] = attrs.field(factory=dict)  # why, by key, for each prompt that the server rejects
    fatal: Exception | None = None


class Session:
    """One session with a judge. Each request is stored before it is sent, each reply before it counts."""

    def __init__(self, client: "AsyncOpenAI", budget: JudgeBudget, tries: dict[str, int]):
        """`tries`: by key, the number of invalid replies after which a prompt is given up."""
        self.client, self.budget, self._tries = client, budget, tries
        self.retrying = client.with_options(max_retries=RETRIES)  # for requests that cost nothing
        self.judge, self.store = budget.judge, budget.store
        self.ending = Ending()
        self._unanswered_in_a_row = self._invalid_in_a_row = 0
        self._in_flight, self._at_once, self._most_at_once = 0, 1, 1
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

    def outstanding(self) -> list[Prompt]:
        """Return the prompts that are still to be asked."""
        return outstanding(self.budget, self._tries)

    async def ask_directly(self, concurrency: int) -> None:
        """Send what is outstanding: one request at a time, one more with each verdict, up to `concurrency`.

        The first replies show what the next ones cost, and whether the judge is usable at all.
        """
        prompts = self.outstanding()
        waiting = iter(prompts)
        self._most_at_once = concurrency
        with tqdm(total=len(prompts), disable=None, unit="verdict") as bar:

            async def work() -> None:
                for prompt in waiting:
                    if self.stopping:
                        return
                    try:
                        await self._ask(prompt)
                    except Exception as error:  # noqa: BLE001  # the other workers' replies are paid for: keep them
                        self.ending.fatal = self.ending.fatal or error
                        async with self._turn:
                            self._turn.notify_all()
                    bar.set_postfix_str(money(self.budget.usd))
                    bar.update()

            await asyncio.gather(*(work() for _ in range(min(concurrency, len(prompts)))))

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
        prompt = self.budget.prompts.get(reply.key)
        problem = None if prompt is None or reply.refusal else reply.problem(prompt.answers)
        if problem is None:
            self._invalid_in_a_row = 0
            self._at_once = min(self._at_once + 1, self._most_at_once)
            return
        self._invalid_in_a_row += 1
        if self._invalid_in_a_row >= DEAD:
            self.ending.fatal = self.ending.fatal or invalid_in_a_row(self.judge, reply, problem)

    def note_failure(self, asked: Asked, error: NoReply) -> None:
        """Store that a request has ended without a reply, unless it may have been billed."""
        if error.failure is not Failure.LOST:
            self.store.note_unbilled([asked], str(error))
            self.budget.update(asked.key)
        if error.failure is Failure.UNUSABLE:
            self.ending.fatal = self.ending.fatal or BadInput(f"{self.judge.base_url}: {error}")
        if error.failure is Failure.NOT_TAKEN:
            self.ending.not_taken[asked.key] = str(error)
            if len(self.ending.not_taken) >= DEAD and not self._answered():
                self.check_taken()

    def check_taken(self) -> None:
        """Stop if the server has rejected more prompts than were ever answered."""
        rejected = self.ending.not_taken
        if len(rejected) > self._answered():
            why = BadInput(f"{self.judge.base_url}: {next(iter(rejected.values()))}")
            self.ending.fatal = self.ending.fatal or why

    def _answered(self) -> int:
        return sum(bool(self.store.prompts[key].replies) for key in self.budget.prompts)

    async def _ask(self, prompt: Prompt) -> None:
        """Ask a prompt until it is settled, or nothing more is to be sent."""
        retries = {Failure.FAILED: RETRIES, Failure.LOST: LOST_RETRIES}  # left
        wait = FIRST_WAIT
        while not self.store.prompts[prompt.key].is_settled(prompt.answers, self._tries[prompt.key]):
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
                        self.store.note_asked(asked)
                        self.budget.update(prompt.key)
                        self._in_flight += 1
                        return asked, body
                    if not self._in_flight:
                        self.ending.over_budget = usd
                        break
                await self._turn.wait()
            self._turn.notify_all()
            return None


def outstanding(budget: JudgeBudget, tries: dict[str, int]) -> list[Prompt]:
    """Return the prompts that are not settled. `tries`: by key, how many invalid replies settle one."""
    histories = budget.store.prompts
    return [one for key, one in budget.prompts.items() if not histories[key].is_settled(one.answers, tries[key])]


def invalid_in_a_row(judge: Judge, reply: Reply, problem: str) -> BadInput:
    """Return the error for a judge whose replies are invalid, quoting one of them."""
    quoted = "" if reply.error is not None else f"; it says '{one_line(reply.text)[:200]}'"
    return BadInput(
        f"{judge.model}: {DEAD} replies in a row are not valid verdicts, the last one: {problem}{quoted}; they are "
        "stored, and not paid for again: pass another --model, or --retry-wrong, perhaps with another --api"
    )
