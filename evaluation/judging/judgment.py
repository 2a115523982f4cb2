"""A judge session: its prompts, their outcomes, the conditions that end it, and the budget in dollars."""

import json
import uuid
from typing import Any, Literal, TypeAlias

import attrs

from common.errors import BadInput
from common.text import dollars_at_most, printable
from evaluation.command_line import JudgeCommand
from evaluation.judging.prompt import Grade, Judge, Panel, Prompt, make_prompts, read_grades, request_body
from evaluation.judging.store import (
    JudgeCost,
    JudgeRequest,
    Price,
    Reply,
    StoreLine,
    Usage,
    VerdictStore,
    expected_usage,
    most_output,
)

TRIES = 2  # number of times that a prompt is sent if its replies are invalid
# The session ends after this many requests in a row without a valid reply, because all others would probably fail, too.
MOST_FAILURES = 8
MOST_DOUBLINGS = 4  # number of times that the token limit of a reply may be doubled
MOST_CHARACTERS = 300  # longer messages from a server are cut to this length
NOT_ASKED = "not asked"
State: TypeAlias = Literal["judged", "refused", "not taken", "missing", "invalid"]


@attrs.frozen
class PromptVerdict:
    """The outcome of a prompt."""

    state: State
    why: str = ""  # why there are no grades
    grades: list[Grade] | None = None  # by position in the prompt


class Judgment:
    """The prompts of a panel, and the outcomes of the requests to a judge in this session and earlier ones."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, price: Price, options: JudgeCommand):
        self.panel, self.judge, self.store, self.price, self.options = panel, judge, store, price, options
        self.prompts = make_prompts(panel, judge, options.orders, options.seed)
        self.by_key = {prompt.key: prompt for prompt in self.prompts}
        self._tries = {key: TRIES + options.retry_wrong * len(store.by_prompt[key]) for key in self.by_key}
        # Index of the first reply that counts in the check for invalid replies in a row. With --retry-wrong, the
        # replies of earlier sessions do not count.
        self._first_reply = len(store.replies) if options.retry_wrong else 0
        self.interrupted = False
        # Largest possible cost, in dollars, of a request that would exceed --max-usd; None: there was no such request
        self.over_budget: float | None = None
        self.fatal: Exception | None = None  # the error that ended the session; if there were several, the first one
        self.failed: dict[str, PromptVerdict] = {}  # failures of prompts whose last request got no reply, by key
        self.unanswered_in_a_row = 0

    @property
    def stopping(self) -> bool:
        """True if no more requests may be sent in this session."""
        is_ended = self.interrupted or self.over_budget is not None or self.fatal is not None
        return is_ended or self.unanswered_in_a_row >= MOST_FAILURES

    @property
    def cost(self) -> JudgeCost:
        """The cost of all sessions of this judgment.

        A request without an outcome or without a recorded token count adds its maximum cost.
        """
        usages = [reply.usage for key in self.by_key for reply in self.store.by_prompt[key] if reply.usage is not None]
        open_usages = [request.most for request in self.store.open.values() if request.key in self.by_key]
        return JudgeCost(sum(map(self.price.of, usages)), list(map(self.price.of, open_usages)))

    def outstanding(self) -> list[Prompt]:
        """Return the prompts that have to be sent."""
        return [prompt for prompt in self.by_key.values() if not self.is_settled(prompt)]

    def is_settled(self, prompt: Prompt) -> bool:
        """Return whether a prompt needs no more requests: it has a verdict, a refusal, or too many invalid replies."""
        return self.verdict(prompt).state in ("judged", "refused", "invalid")

    def plan(self) -> str:
        """Return a line with the number of requests and their cost.

        Raises BadInput if the expected cost exceeds --max-usd, or if the last MOST_FAILURES replies were all invalid.
        """
        prompts, max_usd, paid = self.outstanding(), self.options.max_usd, self.cost.usd
        if prompts and not self.options.retry_wrong:
            self._check_last_replies()
        requests = [(prompt.answers, self.request(prompt)[0].most) for prompt in prompts]
        usd = sum(self.price.of(expected_usage(most.input, answers, self.judge)) for answers, most in requests)
        if prompts and max_usd is not None and paid + usd > max_usd:
            earlier = f", in addition to {dollars_at_most(paid)} for earlier sessions" if paid else ""
            raise BadInput(
                f"--max-usd: got {max_usd:g}, but {len(prompts):,} requests may cost about {dollars_at_most(usd)}"
                f"{earlier}; nothing was sent: raise --max-usd, or pass fewer --orders or answers"
            )
        most = dollars_at_most(sum(self.price.of(most) for _, most in requests))
        estimate = (
            f"about {dollars_at_most(usd)} at prices of {self.price.date}, {most} if every reply has its maximum length"
        )
        return (
            f"{len(prompts):,} requests, {len(self.by_key) - len(prompts):,} already answered, "
            f"{estimate if self.price.date else 'price unknown'}"
        )

    def request(self, prompt: Prompt) -> tuple[JudgeRequest, dict[str, Any]]:
        """Return the record and the body of a request.

        The token limit is doubled after each reply that was cut off.
        """
        cut = sum(reply.cut for reply in self.store.by_prompt[prompt.key])
        limit = most_output(prompt.answers, self.judge) << min(cut, MOST_DOUBLINGS)
        body = request_body(self.judge, prompt, limit)
        sent_bytes = len(json.dumps(body, ensure_ascii=False).encode())  # no tokenizer makes more tokens than bytes
        most = Usage(input=sent_bytes, cache_write=sent_bytes, output=limit)
        return JudgeRequest(id=uuid.uuid4().hex, key=prompt.key, limit=limit, most=most), body

    def reserve(self, request: JudgeRequest) -> bool:
        """Store a request before it is sent. Return False if the session is stopping or the budget is too small.

        Raises BadInput if the store cannot be written.
        """
        if self.stopping:
            return False
        usd, max_usd = self.price.of(request.most), self.options.max_usd
        if max_usd is not None and self.cost.usd + usd > max_usd:
            self.over_budget = usd
            return False
        self.store.append(StoreLine(asked=request))
        return True

    def release(self, request: JudgeRequest, why: str) -> None:
        """Record that a request was not billed."""
        self.store.append(StoreLine(unbilled=[request.id], why=why))

    def take(self, reply: Reply) -> bool:
        """Store a reply, and return whether it is a valid verdict or a refusal."""
        self.store.append(StoreLine(reply=reply))
        self.failed.pop(reply.key, None)
        self.unanswered_in_a_row = 0
        try:
            self._check_last_replies()
        except BadInput as error:
            self.fail(error)
        return reply.problem(self.by_key[reply.key].answers) is None

    def fail(self, error: Exception) -> None:
        """End the session with an error."""
        self.fatal = self.fatal or error

    def verdicts(self) -> list[PromptVerdict]:
        return [self.verdict(prompt) for prompt in self.prompts]

    def snapshots(self) -> list[str]:
        """Return the server's names for the models that answered."""
        replies = [reply for prompt in self.prompts for reply in self.store.by_prompt[prompt.key]]
        return sorted({reply.model for reply in replies if reply.model is not None})

    def verdict(self, prompt: Prompt) -> PromptVerdict:
        """Return the outcome of a prompt so far."""
        replies, why = self.store.by_prompt[prompt.key], NOT_ASKED
        for reply in replies:
            if reply.refusal is not None:
                return PromptVerdict("refused", f"refused: {reply.refusal}")
            if (problem := reply.problem(prompt.answers)) is None:
                return PromptVerdict("judged", grades=read_grades(reply.text, prompt.answers))
            why = f"an invalid verdict: {problem}"
        is_given_up = len(replies) >= self._tries[prompt.key]
        return self.failed.get(prompt.key) or PromptVerdict("invalid" if is_given_up else "missing", why)

    def _check_last_replies(self) -> None:
        """Raise BadInput if the last MOST_FAILURES replies are all invalid."""
        last = [reply for reply in self.store.replies[self._first_reply :] if reply.key in self.by_key][-MOST_FAILURES:]
        problems = [reply.problem(self.by_key[reply.key].answers) for reply in last]
        if len(last) < MOST_FAILURES or None in problems:
            return
        quotation = "" if last[-1].error is not None else f", in the reply '{one_line(last[-1].text)[:200]}'"
        raise BadInput(
            f"{self.judge.model}: {MOST_FAILURES} replies in a row were not valid verdicts, the last one because of "
            f"{problems[-1]}{quotation}; they are stored and will not be paid for again; pass another --model, or "
            "--retry-wrong"
        )


def one_line(text: str) -> str:
    """Return text from a server as one short line that is safe to print."""
    return printable(" ".join(text[: 4 * MOST_CHARACTERS].split()))[:MOST_CHARACTERS]
