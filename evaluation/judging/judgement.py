"""Judgement: every question to a judge in several orders; its cost, what is still to be asked, and its verdicts."""

from collections import Counter
from typing import Literal, TypeAlias

import attrs

from common.errors import BadInput
from evaluation.judging.cost import JudgeBudget
from evaluation.judging.panel import Panel
from evaluation.judging.prices import Price, money
from evaluation.judging.prompt import Judge, Prompt, make_prompts
from evaluation.judging.replies import one_line
from evaluation.judging.store import Reply, VerdictStore
from evaluation.judging.verdict import Grade

TRIES = 2  # of a prompt whose first reply is invalid
DEAD = 8  # requests in a row without a reply, or with an invalid one: the fault is common to all
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


@attrs.define(kw_only=True)
class Ending:
    """End of a session: what ended it, and what was not answered."""

    interrupted: bool = False
    over_budget: float | None = None  # dollars of the next request at its most, if --max-usd ended the session
    unanswered: list[str] = attrs.field(factory=list)  # why, for each request without a reply
    not_taken: dict[str, str] = attrs.field(factory=dict)  # why, by key, for each prompt that the server rejects
    fatal: Exception | None = None  # the first one

    def fail(self, error: Exception) -> None:
        """End the session with an error, unless there is an earlier one."""
        self.fatal = self.fatal or error


@attrs.frozen(kw_only=True)
class Verdicts:
    """State of each prompt of a judgement."""

    states: list[State]  # by prompt
    grades: list[list[Grade] | None]  # by prompt and position
    snapshots: list[str]  # models that answered, by the server's name

    def count(self, state: State) -> int:
        return self.states.count(state)

    @property
    def left_out(self) -> int:
        return len(self.states) - self.count("judged")

    @property
    def scores(self) -> list[tuple[float, ...] | None]:
        """Scores by prompt and position."""
        return [None if grades is None else tuple(grade.score for grade in grades) for grades in self.grades]


class Judgement:
    """The prompts of a panel for a judge, and what has become of them."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, price: Price, options: JudgeOptions):
        self.panel, self.judge, self.store, self.options = panel, judge, store, options
        self.prompts = make_prompts(panel, judge, options.orders, options.seed)
        self.by_key = {prompt.key: prompt for prompt in self.prompts}
        self.budget = JudgeBudget(judge, self.by_key, store, price, options.max_usd)
        self._tries = {key: TRIES + options.retry_wrong * len(store.prompts[key].replies) for key in self.by_key}
        self.ending = Ending()

    def is_settled(self, prompt: Prompt) -> bool:
        """Tell whether nothing is left to ask: there is a verdict, a refusal, or too many invalid replies."""
        history = self.store.prompts[prompt.key]
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

    def verdicts(self) -> Verdicts:
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

    def invalid_in_a_row(self, last: Reply, problem: str) -> BadInput:
        """Return the error for a judge whose replies are invalid, quoting the last one."""
        quoted = "" if last.error is not None else f"; it says '{one_line(last.text)[:200]}'"
        return BadInput(
            f"{self.judge.model}: {DEAD} replies in a row are not valid verdicts, the last one: {problem}{quoted}; "
            "they are stored, and not paid for again: pass another --model, or --retry-wrong, perhaps with another "
            "--api"
        )

    def _state(self, prompt: Prompt) -> State:
        history = self.store.prompts[prompt.key]
        if history.verdict(prompt.answers) is not None:
            return "judged"
        if history.refused:
            return "refused"
        if prompt.key in self.ending.not_taken:
            return "not taken"
        return "invalid" if self.is_settled(prompt) else "missing"

    def _check_last_replies(self) -> None:
        """Raise BadInput if the last replies were all invalid."""
        last = [reply for reply in self.store.in_order if reply.key in self.by_key][-DEAD:]
        problems = [None if reply.refusal else reply.problem(self.by_key[reply.key].answers) for reply in last]
        if len(last) == DEAD and problems[-1] is not None and None not in problems:
            raise self.invalid_in_a_row(last[-1], problems[-1])
