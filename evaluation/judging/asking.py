"""Asking a judge what is not known yet: so many at a time, within a budget, until done or told to stop."""

import asyncio
import json
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from tqdm import tqdm

from errors import BadInput
from evaluation.judging.client import NoReply, NotTaken, Request, ask, is_settled
from evaluation.judging.prices import Budget, Price, expected_usage
from evaluation.judging.prompt import Judge
from evaluation.judging.verdicts import Reply, VerdictStore

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TIMES = 2  # that a prompt is asked in a session, if the first verdict is wrong
DEAD = 8  # requests without a reply, one after the other: nobody is there


class Asking:
    """One session with a judge. Each reply is in the store before anything depends on it."""

    def __init__(
        self, client: "AsyncOpenAI", judge: Judge, store: VerdictStore, budget: Budget, requests: list[Request]
    ):
        # `requests`: all of the judgement, those that are answered as well
        self.client = client
        self.judge = judge
        self.store = store
        self.budget = budget
        self.unanswered: list[str] = []  # why, for each request that nobody has answered
        self.not_taken: dict[str, str] = {}  # why, by key, for each that the server found fault with
        self.out_of_money = False
        self.interrupted = False
        self._fatal: BadInput | None = None
        self._answered = sum(request.key in store.replies for request in requests)
        self._in_a_row = 0  # of the unanswered
        self._wake = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """True when nothing more is to be sent."""
        return self.interrupted or self.out_of_money or self._fatal is not None or self._in_a_row >= DEAD

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

    def estimate(self, request: Request, *, batch: bool = False) -> float:
        """Return what a request may cost, in dollars; 0 where no price is known."""
        return estimated_usd(request, self.judge, self.budget.price, batch=batch)

    async def one_by_one(self, requests: list[Request], concurrency: int) -> None:
        """Ask, `concurrency` at a time. Raises BadInput when the server answers none, or the disk takes nothing."""
        waiting = iter(requests)
        with tqdm(total=len(requests), disable=None, unit="verdict") as bar:

            async def work() -> None:
                for request in waiting:
                    await self._ask(request)
                    if self.stopping:
                        return
                    bar.update()

            await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
        if self._fatal is not None:
            raise self._fatal

    def keep(self, reply: Reply, estimate: float) -> None:
        """Store a reply and count what it has cost, its estimate where the server did not say. Raises BadInput."""
        self.store.add(reply)
        self.budget.settle(estimate, reply.usage, batch=reply.batch)
        self._answered += 1
        self._in_a_row = 0

    def check_taken(self) -> None:
        """Raise BadInput where the server has found fault with more requests than were ever answered."""
        if len(self.not_taken) > self._answered:
            raise self._nothing_taken()

    async def _ask(self, request: Request) -> None:
        for _ in range(TIMES):
            estimate = self.estimate(request)
            if self.stopping:
                return
            if not self.budget.reserve(estimate):
                self.out_of_money = True
                return
            try:
                attempt = len(self.store.replies.get(request.key, []))
                self.keep(await ask(self.client, self.judge, request, attempt), estimate)
            except NotTaken as error:
                self.not_taken[request.key] = str(error)
                if not self._answered and len(self.not_taken) >= DEAD:
                    self._fatal = self._nothing_taken()
                return
            except NoReply as error:
                self.unanswered.append(str(error))
                self._in_a_row += 1
                return
            except BadInput as error:
                self._fatal = error
                return
            finally:
                self.budget.release(estimate)
            if is_settled(self.store, request):
                return

    def _nothing_taken(self) -> BadInput:
        return BadInput(f"{self.judge.base_url}: {next(iter(self.not_taken.values()))}")


def outstanding(requests: list[Request], store: VerdictStore) -> list[Request]:
    """Return the requests that nothing is known of, each once."""
    unique = {request.key: request for request in requests}
    return [request for request in unique.values() if not is_settled(store, request)]


def estimated_usd(request: Request, judge: Judge, price: Price | None, *, batch: bool) -> float:
    """Return what a request may cost, in dollars; 0 where no price is known."""
    if price is None:
        return 0.0
    sent = len(json.dumps(request.body, ensure_ascii=False).encode())
    return price.of(expected_usage(sent, request.answers, judge.model, judge.effort), batch=batch)
