"""Cost of a judgement: the most that a request can be billed, estimates, and the budget that --max-usd sets."""

import json
import math
import uuid
from collections.abc import Iterable
from typing import Any

import attrs

from evaluation.judging.prices import Price, money
from evaluation.judging.prompt import Judge, Prompt, request_body
from evaluation.judging.store import Asked, StoreLine, Usage, VerdictStore

BYTES_PER_TOKEN = 4  # English, roughly: judges' tokenizers would have to be downloaded
TOKENS_PER_GRADE = 40  # label, comment, score
MOST_TOKENS_PER_GRADE, MOST_TOKENS_AROUND = 160, 200  # of a judge that exceeds the rubric's fifteen words
# Reasoning tokens by effort: expected (a guess), and allowed. A reply that is cut off is paid for in vain and asked for
# again with twice the limit; but a request without an answer counts at all that it was allowed.
REASONING = {"none": (0, 0), "minimal": (50, 500), "low": (150, 2000), "medium": (500, 6000)}
MOST_REASONING = (2000, 25_000)  # of every other effort; OpenAI advises as much to begin with
REASONING_MODELS = ("gpt-5", "gpt-6", "o1", "o3", "o4")  # by default, except:
SILENT_BY_DEFAULT = ("gpt-5.1", "gpt-5.2", "gpt-5.4")
NEVER_REASONING = ("gpt-4", "gpt-3.5")  # others are not known
ENOUGH_REPLIES = 5  # of a judge, to estimate by their usage
MANY_REPLIES, ROOM = 20, 4  # to limit replies by the longest of them, and to how many times that
MOST_DOUBLINGS = 4  # of the limit of a reply


@attrs.frozen
class JudgeCost:
    """Cost so far, never below the server's bill."""

    counted: float = 0.0  # dollars of replies, by the server's counts
    open: list[float] = attrs.field(factory=list)  # the most that each request without an answer or a count can cost

    @property
    def uncounted(self) -> float:
        return sum(self.open)

    @property
    def usd(self) -> float:
        return self.counted + self.uncounted

    def __str__(self) -> str:
        if not self.open:
            return money(self.usd)
        return (
            f"at most {money(self.usd)}: {money(self.counted)} by the server's counts, and up to "
            f"{money(self.uncounted)} for {len(self.open):,} requests without an answer or count, which may have been "
            "billed"
        )


@attrs.define
class JudgeBudget:
    """Requests and running cost of a judgement, in all sessions, within --max-usd. All that is stored passes it."""

    judge: Judge
    prompts: dict[str, Prompt]  # by key
    store: VerdictStore
    price: Price
    limit_usd: float | None  # --max-usd
    usd: float = attrs.field(default=0.0, init=False)  # upper bound of the bill: requests without an outcome at most
    _costs: dict[str, JudgeCost] = attrs.field(factory=dict, init=False)  # by key

    def __attrs_post_init__(self) -> None:
        self._count(self.prompts)  # of earlier sessions

    @property
    def cost(self) -> JudgeCost:
        costs = self._costs.values()
        return JudgeCost(sum(cost.counted for cost in costs), [usd for cost in costs for usd in cost.open])

    def note(self, line: StoreLine) -> bool:
        """Store a line and count its cost; False if nothing in it is new. Raises BadInput as `VerdictStore.append`."""
        changed = self.store.append(line)
        self._count(changed)
        return bool(changed)

    def allows(self, usd: float) -> bool:
        return self.limit_usd is None or self.usd + usd <= self.limit_usd

    def most_usd(self, asked: Asked) -> float:
        return self.price.of(asked.most, batch=asked.batch)

    def plan(self, prompt: Prompt, *, batch: bool = False) -> tuple[Asked, dict[str, Any]]:
        """Return the record and the body of a request about to be sent."""
        limit = self._limit(prompt)
        body = request_body(self.judge, prompt, limit)
        sent = len(json.dumps(body, ensure_ascii=False).encode())
        excess = self.store.usage[self.judge.label].excess
        most_input = math.ceil(sent * excess)  # a tokenizer of bytes makes at most one token of each
        asked = Asked(
            id=uuid.uuid4().hex,
            key=prompt.key,
            judge=self.judge.label,
            answers=prompt.answers,
            sent_bytes=sent,
            limit=limit,
            most=Usage(input=most_input, cache_write=most_input, output=math.ceil(limit * excess)),
            batch=batch,
        )
        return asked, body

    def estimate(self, prompts: list[Prompt], *, batch: bool) -> tuple[float, str]:
        """Return the expected cost of prompts in dollars, by earlier replies if there are enough; and as text."""
        used = self.store.usage[self.judge.label]
        measured = used.replies >= ENOUGH_REPLIES
        requests = [self.plan(prompt, batch=batch)[0] for prompt in prompts]
        expected = [used.scaled_to(one) if measured else expected_usage(one, self.judge) for one in requests]
        usd = sum(self.price.of(one, batch=batch) for one in expected)
        if not self.price.date:
            return usd, "price unknown"
        source = f", as {used.replies:,} replies of this judge" if measured else ""
        most = money(sum(map(self.most_usd, requests)))
        return (
            usd,
            f"about {money(usd)} at prices of {self.price.date}{source}, {most} if every reply is as long as allowed",
        )

    def _count(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self.prompts:
                before = self._costs.get(key, JudgeCost())
                self._costs[key] = cost = self._cost_of_prompt(key)
                self.usd += cost.usd - before.usd

    def _limit(self, prompt: Prompt) -> int:
        history, used = self.store.prompts[prompt.key], self.store.usage[self.judge.label]
        last_asked = next(reversed(history.asked.values()), None)
        if last_asked is not None and last_asked.id in self.store.open:
            return last_asked.limit  # a server that knows Idempotency-Key compares bodies
        longest = used.longest if used.replies >= MANY_REPLIES else None
        cut = sum(reply.cut for reply in history.replies)
        return most_output(prompt.answers, self.judge, longest) << min(cut, MOST_DOUBLINGS)  # twice for each cut reply

    def _cost_of_prompt(self, key: str) -> JudgeCost:
        history = self.store.prompts[key]
        counted, open = 0.0, [self.most_usd(asked) for id, asked in history.asked.items() if id in self.store.open]
        for reply in history.replies:
            asked = history.asked.get(reply.asked or "")
            if reply.usage is not None:
                counted += self.price.of(reply.usage, batch=reply.batch)
            elif asked is not None or reply.refusal is None:  # earlier versions stored unbilled refusals like this
                most = (asked or self.plan(self.prompts[key])[0]).most
                open.append(self.price.of(most, batch=reply.batch))
        return JudgeCost(counted, open)


def most_output(answers: int, judge: Judge, longest: int | None = None) -> int:
    """Return the token limit of a reply, reasoning included.

    `longest`: output of the longest of many replies of this judge; the limit is halved while it is far above that.
    """
    by_default = "low" if judge.model.startswith(SILENT_BY_DEFAULT) else "medium"
    allowed = REASONING.get(judge.effort or by_default, MOST_REASONING)[1]
    least = MOST_TOKENS_AROUND + answers * MOST_TOKENS_PER_GRADE
    limit = least + (0 if judge.model.startswith(NEVER_REASONING) else allowed)
    while longest is not None and limit // 2 >= max(least, ROOM * longest):
        limit //= 2
    return limit


def expected_usage(asked: Asked, judge: Judge) -> Usage:
    """Return a guess of the usage of a request, without discounts for repeated prefixes."""
    silent = judge.effort is None and judge.model.startswith(SILENT_BY_DEFAULT)
    reasons = judge.model.startswith(REASONING_MODELS) and not silent
    reasoning = REASONING.get(judge.effort or "medium", MOST_REASONING)[0] if reasons else 0
    return Usage(input=-(-asked.sent_bytes // BYTES_PER_TOKEN), output=asked.answers * TOKENS_PER_GRADE + reasoning)
