"""Judgement: every question to a judge in several orders, of which only unsettled prompts are sent."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Literal, TypeAlias

import attrs

from common.errors import BadInput
from evaluation.judging.batch import ask_in_batches, collect
from evaluation.judging.client import Credentials
from evaluation.judging.cost import JudgeBudget
from evaluation.judging.panel import Panel
from evaluation.judging.prices import Price, money
from evaluation.judging.prompt import Judge, Prompt, make_prompts
from evaluation.judging.session import DEAD, Ending, Session, invalid_in_a_row, outstanding
from evaluation.judging.store import VerdictStore
from evaluation.judging.verdict import Grade

TRIES = 2  # of a prompt whose first reply is invalid
State: TypeAlias = Literal["judged", "refused", "not taken", "missing", "invalid"]


@attrs.frozen(kw_only=True)
class JudgeOptions:
    """Prompts of a judgement, and how they are sent."""

    orders: int  # prompts for each question
    seed: int  # of the orders
    batch: bool
    poll_seconds: float  # between polls of a batch
    concurrency: int
    timeout_seconds: float  # of a request
    max_usd: float | None  # of the judgement, in all sessions
    retry_wrong: bool  # ask again where all replies so far were invalid


@attrs.frozen(kw_only=True)
class Verdicts:
    """What is known of each prompt."""

    states: list[State]  # by prompt
    grades: list[list[Grade] | None]  # by prompt and position
    snapshots: list[str]  # models that answered, by the server's name

    def count(self, *states: State) -> int:
        """Return the number of prompts in these states."""
        return sum(state in states for state in self.states)

    @property
    def left_out(self) -> int:
        """Return the number of prompts without a verdict."""
        return len(self.states) - self.count("judged")

    @property
    def scores(self) -> list[tuple[float, ...] | None]:
        """Return the scores by prompt and position."""
        return [None if grades is None else tuple(grade.score for grade in grades) for grades in self.grades]


class Judgement:
    """The prompts of a panel for a judge, and the session that sends them."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, price: Price, options: JudgeOptions):
        self.panel, self.judge, self.store, self.options = panel, judge, store, options
        self.prompts = make_prompts(panel, judge, options.orders, options.seed)
        by_key = {prompt.key: prompt for prompt in self.prompts}
        self.budget = JudgeBudget(judge, by_key, store, price, options.max_usd)
        self._tries = {key: TRIES + options.retry_wrong * len(store.prompts[key].replies) for key in by_key}
        self.ending = Ending()

    def outstanding(self) -> list[Prompt]:
        """Return the prompts that are still to be asked."""
        return outstanding(self.budget, self._tries)

    def plan(self) -> str:
        """Return what is going to be sent, and at what cost.

        Raises BadInput if that is above --max-usd, or if the judge's last replies were all invalid.
        """
        left, options = self.outstanding(), self.options
        handed_over = {key for batch in self.store.open_batches(self.judge.base_url) for key in batch.keys}
        new = [prompt for prompt in left if prompt.key not in handed_over]
        if new and not options.retry_wrong:
            self._check_last_replies()
        estimate, paid = self.budget.estimate(new, batch=options.batch), self.budget.usd
        # The cost of an open batch is known only when it has been fetched: then the budget decides.
        if new and len(new) == len(left) and not self.budget.allows(estimate.usd):
            before = f", beside {money(paid)} that earlier sessions paid" if paid else ""
            raise BadInput(
                f"--max-usd: got {options.max_usd:g}, and {len(new):,} requests may cost about {money(estimate.usd)}"
                f"{before}; nothing was sent: allow more, or pass fewer --orders or answers"
            )
        waiting = f", {len(left) - len(new):,} in a batch" if len(new) < len(left) else ""
        answered = len(self.budget.prompts) - len(left)
        return f"{len(new):,} requests{waiting}, {answered:,} already answered, {estimate}"

    def ask(self, credentials: Credentials) -> None:
        """Send what is outstanding. Raises BadInput if no server can be asked; `ending` takes all later errors."""
        if self.outstanding():
            self.ending = asyncio.run(self._ask(credentials))

    async def _ask(self, credentials: Credentials) -> Ending:
        from evaluation.judging.client import open_client

        options = self.options
        client = open_client(self.judge.base_url, credentials, options.timeout_seconds, options.concurrency)
        session = Session(client, self.budget, self._tries)
        session.handle_signals()
        try:
            with suppress(asyncio.CancelledError):  # a second Ctrl-C
                async with client:
                    await collect(session, options.poll_seconds)
                    if options.batch:
                        await ask_in_batches(session, options.poll_seconds)
                    else:
                        await session.ask_directly(options.concurrency)
            session.check_taken()
        except BadInput as error:
            session.ending.fatal = session.ending.fatal or error
        return session.ending

    def verdicts(self) -> Verdicts:
        """Return what is known of each prompt."""
        histories = [self.store.prompts[prompt.key] for prompt in self.prompts]
        return Verdicts(
            states=[self._state(prompt) for prompt in self.prompts],
            grades=[one.verdict(prompt.answers) for one, prompt in zip(histories, self.prompts, strict=True)],
            snapshots=sorted({reply.model for one in histories for reply in one.replies if reply.model is not None}),
        )

    def why_missing(self) -> str:
        """Return the most common reason for a missing verdict."""
        reasons = Counter(self.ending.unanswered)
        for prompt in self.prompts:
            history = self.store.prompts[prompt.key]
            if history.replies and history.verdict(prompt.answers) is None:
                last = history.replies[-1]
                invalid = f"an invalid verdict: {last.problem(prompt.answers)}"
                reasons[f"refused: {last.refusal}" if last.refusal else invalid] += 1
        return reasons.most_common(1)[0][0] if reasons else "not asked"

    def _state(self, prompt: Prompt) -> State:
        history = self.store.prompts[prompt.key]
        if history.verdict(prompt.answers) is not None:
            return "judged"
        if history.refused():
            return "refused"
        if prompt.key in self.ending.not_taken:
            return "not taken"
        return "invalid" if len(history.replies) >= self._tries[prompt.key] else "missing"

    def _check_last_replies(self) -> None:
        """Raise BadInput if the last replies were all invalid."""
        prompts = self.budget.prompts
        last = [reply for reply in self.store.in_order if reply.key in prompts][-DEAD:]
        problems = [None if reply.refusal else reply.problem(prompts[reply.key].answers) for reply in last]
        if len(last) == DEAD and problems[-1] is not None and None not in problems:
            raise invalid_in_a_row(self.judge, last[-1], problems[-1])
