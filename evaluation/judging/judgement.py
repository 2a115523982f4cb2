"""Judgement: every question to a judge in several orders; what has become of each, and what ends the asking."""

import asyncio
import sys
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import attrs

from common.errors import BadInput
from evaluation.judging.command import JudgeCommand
from evaluation.judging.cost import JudgeBudget
from evaluation.judging.panel import Panel
from evaluation.judging.prices import Price, money
from evaluation.judging.prompt import Grade, Judge, Prompt, make_prompts
from evaluation.judging.replies import Failure, NoReply, one_line
from evaluation.judging.store import Asked, PromptHistory, Reply, StoreLine, VerdictStore

TRIES = 2  # of a prompt whose first reply is invalid
DEAD = 8  # requests in a row without a reply, or with an invalid one: the fault is common to all
NOT_ASKED = "not asked"
State: TypeAlias = Literal["judged", "refused", "not taken", "missing", "invalid"]


@attrs.frozen
class PromptVerdict:
    """Outcome of a prompt."""

    state: State
    why: str = ""  # there are no grades
    grades: list[Grade] | None = None  # by position


class Judgement:
    """The prompts of a panel for a judge, and the outcomes of requests in this session and earlier ones."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, price: Price, options: JudgeCommand):
        self.panel, self.judge, self.store, self.options = panel, judge, store, options
        self.prompts = make_prompts(panel, judge, options.orders, options.seed)
        self.by_key = {prompt.key: prompt for prompt in self.prompts}
        self.budget = JudgeBudget(judge, self.by_key, store, price, options.max_usd)
        self._tries = {key: TRIES + options.retry_wrong * len(store.prompts[key].replies) for key in self.by_key}
        self.interrupted = asyncio.Event()
        self.over_budget: float | None = None  # dollars of the next request at its most, if --max-usd ended the session
        self.fatal: Exception | None = None  # the first error that ended the session
        self.failed: dict[str, NoReply] = {}  # by key, of prompts whose last request in this session got no reply
        self.unanswered_in_a_row = self._invalid_in_a_row = 0

    @property
    def stopping(self) -> bool:
        """True if nothing more is to be sent."""
        ended = self.interrupted.is_set() or self.over_budget is not None or self.fatal is not None
        return ended or self.unanswered_in_a_row >= DEAD

    def history(self, prompt: Prompt) -> PromptHistory:
        return self.store.prompts[prompt.key]

    def outstanding(self) -> list[Prompt]:
        return [prompt for prompt in self.by_key.values() if not self.is_settled(prompt)]

    def is_settled(self, prompt: Prompt) -> bool:
        """Tell whether nothing is left to ask: there is a verdict, a refusal, or too many invalid replies."""
        history = self.history(prompt)
        given_up = len(history.replies) >= self._tries[prompt.key]
        return given_up or history.refusal is not None or history.verdict(prompt.answers) is not None

    def plan(self) -> str:
        """Return what is to be sent, and its cost. Raises BadInput above --max-usd, or after invalid replies only."""
        left, options, paid = self.outstanding(), self.options, self.budget.usd
        handed_over = {key for batch in self.store.open_batches(self.judge.base_url) for key in batch.keys}
        new = [prompt for prompt in left if prompt.key not in handed_over]
        if new and not options.retry_wrong:
            self._check_last_replies()
        usd, estimate = self.budget.estimate(new, batch=options.batch)
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
        asked, body = self.budget.plan(prompt)
        usd = self.budget.most_usd(asked)
        if self.budget.allows(usd):
            self.budget.note(StoreLine(asked=asked))
            return asked, body
        self.over_budget = usd if alone else None
        return None

    def take(self, asked: Asked, outcome: Reply | NoReply) -> bool:
        """Store and count the outcome of a request; return whether it is a verdict or a refusal. Raises BadInput."""
        if isinstance(outcome, NoReply):
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
        self.failed.pop(asked.key, None)
        self.unanswered_in_a_row = 0
        valid = self._problem(outcome) is None
        self._invalid_in_a_row = 0 if valid else self._invalid_in_a_row + 1
        if self._invalid_in_a_row >= DEAD:
            self.fail(self._all_invalid(outcome))
        return valid

    def fail(self, error: Exception) -> None:
        """End the session with an error, unless there is an earlier one."""
        self.fatal = self.fatal or error

    def check_taken(self, least: int = 1) -> None:
        """End the session if the server has rejected so many prompts, and more than were ever answered."""
        rejected = [failed.why for failed in self.failed.values() if failed.failure is Failure.NOT_TAKEN]
        answered = sum(bool(self.history(prompt).replies) for prompt in self.by_key.values())
        if len(rejected) >= least and len(rejected) > answered:
            self.fail(BadInput(f"{self.judge.base_url}: {rejected[0]}"))

    async def pause(self, seconds: float) -> None:
        """Wait, until interrupted."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.interrupted.wait(), seconds)

    def verdicts(self) -> list[PromptVerdict]:
        return [self._verdict(prompt) for prompt in self.prompts]

    def snapshots(self) -> list[str]:
        """Return the models that answered, by the server's name."""
        replies = [reply for prompt in self.prompts for reply in self.history(prompt).replies]
        return sorted({reply.model for reply in replies if reply.model is not None})

    def _verdict(self, prompt: Prompt) -> PromptVerdict:
        history, failed = self.history(prompt), self.failed.get(prompt.key)
        grades = history.verdict(prompt.answers)
        if grades is not None:
            return PromptVerdict("judged", grades=grades)
        if history.refusal is not None:
            return PromptVerdict("refused", f"refused: {history.refusal}")
        state: State = "invalid" if self.is_settled(prompt) else "missing"
        if failed is not None:
            return PromptVerdict("not taken" if failed.failure is Failure.NOT_TAKEN else state, failed.why)
        problem = f"an invalid verdict: {history.replies[-1].problem(prompt.answers)}" if history.replies else NOT_ASKED
        return PromptVerdict(state, problem)

    def _take_failure(self, asked: Asked, failed: NoReply) -> None:
        self.failed[asked.key] = failed
        if failed.failure is not Failure.LOST:
            self.budget.note(StoreLine(unbilled=[asked.id], why=failed.why))
        if failed.failure is Failure.UNUSABLE:
            self.fail(BadInput(f"{self.judge.base_url}: {failed.why}"))
        if not any(self.history(prompt).replies for prompt in self.prompts):
            self.check_taken(DEAD)

    def _problem(self, reply: Reply) -> str | None:
        """Return what is wrong with a reply; None for a verdict, a refusal, and prompts of other judgements."""
        prompt = self.by_key.get(reply.key)
        return None if prompt is None or reply.refusal else reply.problem(prompt.answers)

    def _check_last_replies(self) -> None:
        last = [reply for reply in self.store.in_order if reply.key in self.by_key][-DEAD:]
        if len(last) == DEAD and all(self._problem(reply) is not None for reply in last):
            raise self._all_invalid(last[-1])

    def _all_invalid(self, last: Reply) -> BadInput:
        quoted = "" if last.error is not None else f"; it says '{one_line(last.text)[:200]}'"
        return BadInput(
            f"{self.judge.model}: {DEAD} replies in a row are not valid verdicts, the last one: {self._problem(last)}"
            f"{quoted}; they are stored, and not paid for again: pass another --model, or --retry-wrong, perhaps with "
            "another --api"
        )
