"""Judge session: prompts, outcomes, stop conditions, and the budget in dollars that each request is taken from."""

import json
import uuid
from typing import Any, Literal, TypeAlias

import attrs

from common.errors import BadInput
from common.text import dollars_at_most, printable
from evaluation.command_line import JudgeCommand
from evaluation.judging.prompt import Grade, Judge, Panel, Prompt, make_prompts, read_grades, request_body
from evaluation.judging.store import (
    Asked,
    JudgeCost,
    Price,
    Reply,
    StoreLine,
    Usage,
    VerdictStore,
    expected_usage,
    most_output,
)

TRIES = 2  # of a prompt whose first reply is invalid
DEAD = 8  # requests in a row without a reply, or with an invalid one: the fault is common to all
MOST_DOUBLINGS = 4  # of the limit of a reply
MOST_CHARACTERS = 300  # of a server's message
NOT_ASKED = "not asked"
State: TypeAlias = Literal["judged", "refused", "not taken", "missing", "invalid"]


@attrs.frozen
class PromptVerdict:
    state: State
    why: str = ""  # there are no grades
    grades: list[Grade] | None = None  # by position


class Judgement:
    """The prompts of a panel for a judge, and the outcomes of requests in this session and earlier ones."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, price: Price, options: JudgeCommand):
        self.panel, self.judge, self.store, self.price, self.options = panel, judge, store, price, options
        self.prompts = make_prompts(panel, judge, options.orders, options.seed)
        self.by_key = {prompt.key: prompt for prompt in self.prompts}
        self._tries = {key: TRIES + options.retry_wrong * len(store.by_prompt[key]) for key in self.by_key}
        self._first_reply = len(store.replies) if options.retry_wrong else 0  # that counts as invalid in a row
        self.interrupted = False
        self.over_budget: float | None = None  # dollars of the next request at its most, if --max-usd has no room
        self.fatal: Exception | None = None  # the first error that ended the session
        self.failed: dict[str, PromptVerdict] = {}  # by key: the last request in this session got no reply
        self.unanswered_in_a_row = 0

    @property
    def stopping(self) -> bool:
        ended = self.interrupted or self.over_budget is not None or self.fatal is not None
        return ended or self.unanswered_in_a_row >= DEAD

    @property
    def cost(self) -> JudgeCost:
        """Cost of all sessions of this judgement; requests without an outcome or a count count at their most."""
        usages = [reply.usage for key in self.by_key for reply in self.store.by_prompt[key] if reply.usage is not None]
        open = [asked.most for asked in self.store.open.values() if asked.key in self.by_key]
        return JudgeCost(sum(map(self.price.of, usages)), list(map(self.price.of, open)))

    def outstanding(self) -> list[Prompt]:
        return [prompt for prompt in self.by_key.values() if not self.is_settled(prompt)]

    def is_settled(self, prompt: Prompt) -> bool:
        """Tell whether nothing is left to ask: there is a verdict, a refusal, or too many invalid replies."""
        return self.verdict(prompt).state in ("judged", "refused", "invalid")

    def plan(self) -> str:
        """Return the requests and their cost. Raises BadInput above --max-usd, or after invalid replies only."""
        left, most_usd, paid = self.outstanding(), self.options.max_usd, self.cost.usd
        if left and not self.options.retry_wrong:
            self._check_last_replies()
        requests = [(prompt.answers, self.request(prompt)[0].most) for prompt in left]
        usd = sum(self.price.of(expected_usage(most.input, answers, self.judge)) for answers, most in requests)
        if left and most_usd is not None and paid + usd > most_usd:
            before = f", beside {dollars_at_most(paid)} that earlier sessions paid" if paid else ""
            raise BadInput(
                f"--max-usd: got {most_usd:g}, and {len(left):,} requests may cost about {dollars_at_most(usd)}"
                f"{before}; nothing was sent: allow more, or pass fewer --orders or answers"
            )
        most = dollars_at_most(sum(self.price.of(most) for _, most in requests))
        estimate = (
            f"about {dollars_at_most(usd)} at prices of {self.price.date}, {most} if every reply is as long as allowed"
        )
        return (
            f"{len(left):,} requests, {len(self.by_key) - len(left):,} already answered, "
            f"{estimate if self.price.date else 'price unknown'}"
        )

    def request(self, prompt: Prompt) -> tuple[Asked, dict[str, Any]]:
        """Return the record and the body of a request. A reply that was cut off gets twice the limit next time."""
        cut = sum(reply.cut for reply in self.store.by_prompt[prompt.key])
        limit = most_output(prompt.answers, self.judge) << min(cut, MOST_DOUBLINGS)
        body = request_body(self.judge, prompt, limit)
        sent = len(json.dumps(body, ensure_ascii=False).encode())  # no tokenizer makes more than a token of each byte
        most = Usage(input=sent, cache_write=sent, output=limit)
        return Asked(id=uuid.uuid4().hex, key=prompt.key, limit=limit, most=most), body

    def reserve(self, asked: Asked) -> bool:
        """Store a request before it is sent; False if nothing more is, or the budget has no room. Raises BadInput."""
        if self.stopping:
            return False
        usd, most_usd = self.price.of(asked.most), self.options.max_usd
        if most_usd is not None and self.cost.usd + usd > most_usd:
            self.over_budget = usd
            return False
        self.store.append(StoreLine(asked=asked))
        return True

    def release(self, asked: Asked, why: str) -> None:
        self.store.append(StoreLine(unbilled=[asked.id], why=why))

    def take(self, reply: Reply) -> bool:
        """Store a reply; return whether it is a verdict or a refusal."""
        self.store.append(StoreLine(reply=reply))
        self.failed.pop(reply.key, None)
        self.unanswered_in_a_row = 0
        try:
            self._check_last_replies()
        except BadInput as error:
            self.fail(error)
        return reply.problem(self.by_key[reply.key].answers) is None

    def fail(self, error: Exception) -> None:
        self.fatal = self.fatal or error

    def verdicts(self) -> list[PromptVerdict]:
        return [self.verdict(prompt) for prompt in self.prompts]

    def snapshots(self) -> list[str]:
        """Return the models that answered, by the server's name."""
        replies = [reply for prompt in self.prompts for reply in self.store.by_prompt[prompt.key]]
        return sorted({reply.model for reply in replies if reply.model is not None})

    def verdict(self, prompt: Prompt) -> PromptVerdict:
        replies, why = self.store.by_prompt[prompt.key], NOT_ASKED
        for reply in replies:
            if reply.refusal is not None:
                return PromptVerdict("refused", f"refused: {reply.refusal}")
            if (problem := reply.problem(prompt.answers)) is None:
                return PromptVerdict("judged", grades=read_grades(reply.text, prompt.answers))
            why = f"an invalid verdict: {problem}"
        given_up = len(replies) >= self._tries[prompt.key]
        return self.failed.get(prompt.key) or PromptVerdict("invalid" if given_up else "missing", why)

    def _check_last_replies(self) -> None:
        last = [one for one in self.store.replies[self._first_reply :] if one.key in self.by_key][-DEAD:]
        problems = [reply.problem(self.by_key[reply.key].answers) for reply in last]
        if len(last) < DEAD or None in problems:
            return
        quoted = "" if last[-1].error is not None else f"; it says '{one_line(last[-1].text)[:200]}'"
        raise BadInput(
            f"{self.judge.model}: {DEAD} replies in a row are not valid verdicts, the last one: "
            f"{problems[-1]}{quoted}; they are stored, and not paid for again: pass another --model, or "
            "--retry-wrong"
        )


def one_line(text: str) -> str:
    """Return foreign text cut to a line that is safe to print."""
    return printable(" ".join(text[: 4 * MOST_CHARACTERS].split()))[:MOST_CHARACTERS]
