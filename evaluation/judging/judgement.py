"""Judgement: every question to a judge in several orders; what has become of each, and what ends the asking."""

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from common.errors import BadInput
from evaluation.judging.cost import JudgeBudget
from evaluation.judging.panel import Panel
from evaluation.judging.prices import Price, money
from evaluation.judging.prompt import Judge, Prompt, make_prompts
from evaluation.judging.replies import Failure, NoReply, one_line
from evaluation.judging.store import Asked, PromptHistory, Reply, StoreLine, VerdictStore
from evaluation.judging.verdict import Grade

if TYPE_CHECKING:
    from evaluation.judging.command import JudgeCommand

TRIES = 2  # of a prompt whose first reply is invalid
DEAD = 8  # requests in a row without a reply, or with an invalid one: the fault is common to all
State: TypeAlias = Literal["judged", "refused", "not taken", "missing", "invalid"]


class Judgement:
    """The prompts of a panel for a judge, and the outcomes of requests in this session and earlier ones."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, price: Price, options: "JudgeCommand"):
        self.panel, self.judge, self.store, self.options = panel, judge, store, options
        self.prompts = make_prompts(panel, judge, options.orders, options.seed)
        self.by_key = {prompt.key: prompt for prompt in self.prompts}
        self.budget = JudgeBudget(judge, self.by_key, store, price, options.max_usd)
        self._tries = {key: TRIES + options.retry_wrong * len(store.prompts[key].replies) for key in self.by_key}
        self.interrupted = asyncio.Event()
        self.over_budget: float | None = None  # dollars of the next request at its most, if --max-usd ended the session
        self.fatal: Exception | None = None  # the first error that ended the session
        self.unanswered: list[str] = []  # why, for each request without a reply
        self.unanswered_in_a_row = self._invalid_in_a_row = 0
        self.not_taken: dict[str, str] = {}  # why, by key, for each prompt that the server rejects

    @property
    def stopping(self) -> bool:
        """True if nothing more is to be sent."""
        ended = self.interrupted.is_set() or self.over_budget is not None or self.fatal is not None
        return ended or self.unanswered_in_a_row >= DEAD

    def history(self, prompt: Prompt) -> PromptHistory:
        return self.store.prompts[prompt.key]

    def is_settled(self, prompt: Prompt) -> bool:
        """Tell whether nothing is left to ask: there is a verdict, a refusal, or too many invalid replies."""
        history = self.history(prompt)
        given_up = len(history.replies) >= self._tries[prompt.key]
        return given_up or history.refused or history.verdict(prompt.answers) is not None

    def outstanding(self) -> list[Prompt]:
        return [prompt for prompt in self.by_key.values() if not self.is_settled(prompt)]

    def plan(self) -> str:
        """Return what is going to be sent, and at what cost.

        Raises BadInput if that is above --max-usd, or if the judge's last replies were all invalid.
        """
        left, options = self.outstanding(), self.options
        handed_over = {key for batch in self.store.open_batches(self.judge.base_url) for key in batch.keys}
        new = [prompt for prompt in left if prompt.key not in handed_over]
        if new and not options.retry_wrong:
            self._check_last_replies()
        usd, estimate = self.budget.estimate(new, batch=options.batch)
        paid = self.budget.usd
        # The cost of an open batch is known only when it has been fetched: then the budget decides.
        if new and len(new) == len(left) and not self.budget.allows(usd):
            before = f", beside {money(paid)} that earlier sessions paid" if paid else ""
            raise BadInput(
                f"--max-usd: got {options.max_usd:g}, and {len(new):,} requests may cost about {money(usd)}"
                f"{before}; nothing was sent: allow more, or pass fewer --orders or answers"
            )
        waiting = f", {len(left) - len(new):,} in a batch" if len(new) < len(left) else ""
        return f"{len(new):,} requests{waiting}, {len(self.by_key) - len(left):,} already answered, {estimate}"

    def admit(self, prompt: Prompt, *, alone: bool) -> tuple[Asked, dict[str, Any]] | None:
        """Return the record, which is stored, and the body of a request; None while the budget has no room for it.

        `alone`: no other request can make room, which ends the session.
        """
        asked, body = self.budget.plan(prompt)  # by the latest usage
        usd = self.budget.most_usd(asked)
        if self.budget.allows(usd):
            self.budget.note(StoreLine(asked=asked))
            return asked, body
        self.over_budget = usd if alone else None
        return None

    def take(self, asked: Asked, outcome: Reply | NoReply) -> bool:
        """Store the outcome of a request and count its cost; return whether it is a verdict or a refusal.

        Raises BadInput if the disk does not take it.
        """
        if not isinstance(outcome, Reply):
            self._take_failure(asked, outcome)
            return False
        usage = self.store.usage[self.judge.label]
        before = usage.excess
        if not self.budget.note(StoreLine(reply=outcome)):
            return False
        if before == 1.0 < usage.excess:
            print(
                f"NOTE: a reply of {self.judge.model} used more tokens than its limit: this server ignores limits; "
                "from now on requests count at the larger size",
                file=sys.stderr,
            )
        self.unanswered_in_a_row = 0
        problem = self._problem(outcome)
        self._invalid_in_a_row = 0 if problem is None else self._invalid_in_a_row + 1
        if problem is not None and self._invalid_in_a_row >= DEAD:
            self.fail(self._all_invalid(outcome, problem))
        return problem is None

    def fail(self, error: Exception) -> None:
        """End the session with an error, unless there is an earlier one."""
        self.fatal = self.fatal or error

    def check_taken(self) -> None:
        """End the session if the server has rejected more prompts than were ever answered."""
        answered = sum(bool(self.history(prompt).replies) for prompt in self.by_key.values())
        if len(self.not_taken) > answered:
            self.fail(BadInput(f"{self.judge.base_url}: {next(iter(self.not_taken.values()))}"))

    async def pause(self, seconds: float) -> None:
        """Wait, until interrupted."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.interrupted.wait(), seconds)

    def states(self) -> list[State]:
        """Return the state of each prompt."""
        return [self._state(prompt) for prompt in self.prompts]

    def grades(self) -> list[list[Grade] | None]:
        """Return grades by prompt and position."""
        return [self.history(prompt).verdict(prompt.answers) for prompt in self.prompts]

    def snapshots(self) -> list[str]:
        """Return the models that answered, by the server's name."""
        replies = [reply for prompt in self.prompts for reply in self.history(prompt).replies]
        return sorted({reply.model for reply in replies if reply.model is not None})

    def why_missing(self) -> str:
        """Return the most common reason for a missing verdict."""
        reasons = Counter(self.unanswered)
        for prompt in self.prompts:
            history = self.history(prompt)
            if history.replies and history.verdict(prompt.answers) is None:
                last = history.replies[-1]
                invalid = f"an invalid verdict: {last.problem(prompt.answers)}"
                reasons[f"refused: {last.refusal}" if last.refusal else invalid] += 1
        return reasons.most_common(1)[0][0] if reasons else "not asked"

    def _state(self, prompt: Prompt) -> State:
        history = self.history(prompt)
        if history.verdict(prompt.answers) is not None:
            return "judged"
        if history.refused:
            return "refused"
        if prompt.key in self.not_taken:
            return "not taken"
        return "invalid" if self.is_settled(prompt) else "missing"

    def _problem(self, reply: Reply) -> str | None:
        """Return what is wrong with a reply; None for a verdict, a refusal, and prompts of other judgements."""
        prompt = self.by_key.get(reply.key)
        return None if prompt is None or reply.refusal else reply.problem(prompt.answers)

    def _take_failure(self, asked: Asked, failed: NoReply) -> None:
        if failed.failure is not Failure.LOST:
            self.budget.note(StoreLine(unbilled=[asked.id], why=failed.why))
        if failed.failure is Failure.UNUSABLE:
            self.fail(BadInput(f"{self.judge.base_url}: {failed.why}"))
        if failed.failure is Failure.NOT_TAKEN:
            self.not_taken[asked.key] = failed.why
            if len(self.not_taken) >= DEAD and not any(self.store.prompts[key].replies for key in self.by_key):
                self.check_taken()

    def _check_last_replies(self) -> None:
        """Raise BadInput if the last replies were all invalid."""
        last = [reply for reply in self.store.in_order if reply.key in self.by_key][-DEAD:]
        problems = [self._problem(reply) for reply in last]
        if len(last) == DEAD and problems[-1] is not None and None not in problems:
            raise self._all_invalid(last[-1], problems[-1])

    def _all_invalid(self, last: Reply, problem: str) -> BadInput:
        quoted = "" if last.error is not None else f"; it says '{one_line(last.text)[:200]}'"
        return BadInput(
            f"{self.judge.model}: {DEAD} replies in a row are not valid verdicts, the last one: {problem}{quoted}; "
            "they are stored, and not paid for again: pass another --model, or --retry-wrong, perhaps with another "
            "--api"
        )
