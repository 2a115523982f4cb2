"""Asking a judge what is not known yet: one at a time, then several, within a budget, until done or told to stop."""

import asyncio
import random
import signal
import sys
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from tqdm import tqdm

from common.errors import BadInput
from evaluation.judging.client import UNBILLED, JudgeRequest, NoReply, NotTaken, Unusable, ask, is_settled, problem_in
from evaluation.judging.cost import total_cost
from evaluation.judging.prices import JudgeBudget, money
from evaluation.judging.prompt import Judge
from evaluation.judging.questions import QuestionSet
from evaluation.judging.replies import one_line
from evaluation.judging.verdicts import Asked, Reply, VerdictStore

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DEAD = 8  # requests without a reply, or with a wrong one, one after the other: something is wrong for all
RETRIES = 6  # of a request that was not billed, after the first try
LOST_RETRIES = 2  # of one that may have been billed
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds, twice as long each time, where the server does not say


class Asking:
    """One session with a judge. Each request is in the store before it is sent, each reply before it counts."""

    def __init__(
        self,
        client: "AsyncOpenAI",
        questions: QuestionSet,
        tries: dict[str, int],
        store: VerdictStore,
        budget: JudgeBudget,
    ):
        # `tries`: by key, how many wrong verdicts are enough
        self.client = client
        self.questions = questions
        self.judge = questions.judge
        self.store = store
        self.budget = budget
        self.unanswered: list[str] = []  # why, for each request without a reply
        self.not_taken: dict[str, str] = {}  # why, by key, for each that the server found fault with
        self.over_budget: float | None = None  # dollars that the next request may cost, where that is too much
        self.interrupted = False
        self.fatal: BadInput | None = None
        self._tries = tries
        self._answered = sum(key in store.replies for key in questions.by_key)
        self._unanswered_in_a_row = self._wrong_in_a_row = 0
        self._in_flight, self._at_once, self._most_at_once = 0, 1, 1
        self._turn = asyncio.Condition()
        self._wake = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """True when nothing more is to be sent."""
        return (
            self.interrupted
            or self.over_budget is not None
            or self.fatal is not None
            or self._unanswered_in_a_row >= DEAD
        )

    def heed_signals(self) -> None:
        """Obey Ctrl-C and its kin: the first ends the sending, the second the waiting as well."""
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if self.interrupted:
                task.cancel()
                return
            self.interrupted = True
            self._wake.set()
            print("stopping; waiting for what is in flight, Ctrl-C again does not", file=sys.stderr)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    async def pause(self, seconds: float) -> None:
        """Wait, but not when told to stop."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def one_by_one(self, concurrency: int) -> None:
        """Ask what is outstanding, in the end `concurrency` at a time: one more with each right verdict.

        The first replies tell what the next ones cost, and whether the judge can be used at all.
        """
        requests = self.outstanding()
        waiting = iter(requests)
        self._most_at_once = concurrency
        with tqdm(total=len(requests), disable=None, unit="verdict") as bar:

            async def work() -> None:
                for request in waiting:
                    if self.stopping:
                        return
                    await self._ask(request)
                    bar.set_postfix_str(money(self.budget.usd))
                    bar.update()

            # An error in one leaves the others what they have paid for.
            ended = await asyncio.gather(
                *(work() for _ in range(min(concurrency, len(requests)))), return_exceptions=True
            )
        for error in ended:
            if error is not None:
                raise error

    def about_to_ask(self, request: JudgeRequest, *, batch: bool = False) -> tuple[Asked, dict[str, object]]:
        """Return what is noted of a request before it is sent, and its body."""
        body, sent, most = self.questions.body(request, self.store)
        asked = Asked(
            id=uuid.uuid4().hex,
            key=request.key,
            judge=self.questions.label,
            answers=request.answers,
            sent_bytes=sent,
            limit=self.questions.limit(request, self.store),
            most=most,
            batch=batch,
        )
        return asked, body

    def outstanding(self) -> list[JudgeRequest]:
        """Return the requests that are still to be asked."""
        return self.questions.outstanding(self.store, self._tries)

    def recount(self) -> None:
        """Count by the store again what has been spent: a batch may hold requests of other judgements, or old ones."""
        self.budget.usd = total_cost(self.questions, self.store, self.budget.price).usd

    def keep(self, reply: Reply, asked: Asked | None) -> None:
        """Store a reply and count what it has cost, its most where the server did not say. Raises BadInput."""
        before = self.store.excess.get(self.questions.label, 1.0)
        self.store.add(reply)
        if asked is not None:
            self.budget.settle(asked, reply.usage)
        if before == 1.0 < self.store.excess.get(self.questions.label, 1.0):
            print(
                f"NOTE: a reply of {self.judge.model} used more tokens than it was limited to: this server ignores the "
                "limit; what is sent from now on counts at the larger size",
                file=sys.stderr,
            )
        self._answered += 1
        self._unanswered_in_a_row = 0
        request = self.questions.by_key.get(reply.key)
        problem = None if request is None or reply.refusal else problem_in(reply, request.answers)
        if problem is None:
            self._wrong_in_a_row = 0
            self._at_once = min(self._at_once + 1, self._most_at_once)
            return
        self._wrong_in_a_row += 1
        if self._wrong_in_a_row >= DEAD:
            self.fatal = self.fatal or wrong_in_a_row(self.judge, reply, problem)

    def check_taken(self) -> None:
        """Raise BadInput where the server has found fault with more requests than were ever answered."""
        if len(self.not_taken) > self._answered:
            raise self._nothing_taken()

    async def _ask(self, request: JudgeRequest) -> None:
        """Ask until there is a verdict, or nothing more is to be sent."""
        retries = {False: RETRIES, True: LOST_RETRIES}  # left, by whether a request may have been billed
        wait = FIRST_WAIT
        try:
            while not is_settled(self.store, request, self._tries[request.key]):
                try:
                    if not await self._asked_once(request):
                        return
                except NotTaken as error:
                    self.not_taken[request.key] = str(error)
                    if not self._answered and len(self.not_taken) >= DEAD:
                        self.fatal = self._nothing_taken()
                    return
                except Unusable as error:
                    raise BadInput(f"{self.judge.base_url}: {error}") from error
                except NoReply as error:
                    self._at_once = max(1, self._at_once // 2)
                    last = retries[error.maybe_billed] == 0
                    self._unanswered_in_a_row += error.maybe_billed or last
                    if last or self.stopping:
                        self.unanswered.append(str(error))
                        return
                    retries[error.maybe_billed] -= 1
                    seconds = error.wait_seconds
                    await self.pause(wait * random.uniform(0.75, 1) if seconds is None else seconds)
                    wait = min(2 * wait, LONGEST_WAIT)
        except BadInput as error:
            self.fatal = self.fatal or error
        except Exception as error:
            self.fatal = self.fatal or BadInput(f"an error of this program: {error!r}")
            raise

    async def _asked_once(self, request: JudgeRequest) -> bool:
        """Send a request when it is its turn and keep its reply; False: nothing more is to be sent. Raises NoReply."""
        admitted = await self._admitted(request)
        if admitted is None:
            return False
        asked, body = admitted
        try:
            self.store.note_asked(asked)
            # A server that knows Idempotency-Key takes it again with the same body only.
            attempt = f"{len(self.store.replies.get(asked.key, []))}-{asked.limit}"
            self.keep(await ask(self.client, self.judge, body, asked, attempt), asked)
        except NoReply as error:
            if not error.maybe_billed:
                self.budget.settle(asked, UNBILLED)
                self.store.note_unbilled([asked.id], str(error))
            raise
        finally:
            async with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()
        return True

    async def _admitted(self, request: JudgeRequest) -> tuple[Asked, dict[str, object]] | None:
        """Wait for a turn, and until the budget has room; None: nothing more is to be sent."""
        async with self._turn:
            while not self.stopping:
                if self._in_flight < self._at_once:
                    asked, body = self.about_to_ask(request)  # now: by what replies have used until now
                    if self.budget.reserve(asked):
                        self._in_flight += 1
                        return asked, body
                    if not self._in_flight:
                        self.over_budget = self.budget.cost(asked.most, batch=asked.batch)
                        break
                await self._turn.wait()
            self._turn.notify_all()
            return None

    def _nothing_taken(self) -> BadInput:
        return BadInput(f"{self.judge.base_url}: {next(iter(self.not_taken.values()))}")


def wrong_in_a_row(judge: Judge, reply: Reply, problem: str) -> BadInput:
    """Return the error for a judge that gives no verdicts, quoting one of its replies."""
    quoted = "" if reply.error is not None else f"; it says '{one_line(reply.text)[:200]}'"
    return BadInput(
        f"{judge.model}: {DEAD} replies in a row are no verdicts, the last one: {problem}{quoted}; they are kept, and "
        "not paid for again: pass another --model, or --retry-wrong to ask once more, by another --api perhaps"
    )
