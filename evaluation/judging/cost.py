"""What a judgement has cost and may cost, in dollars: never less than the server's bill."""

import attrs

from evaluation.judging.client import JudgeRequest
from evaluation.judging.prices import Price, expected_usage, measured, money
from evaluation.judging.questions import QuestionSet
from evaluation.judging.verdicts import VerdictStore


@attrs.frozen(kw_only=True)
class JudgeCost:
    """What a judgement has cost."""

    counted: float  # of replies, by the server's counts
    uncounted: float  # the most that the rest can have cost
    requests: int  # of the rest: without an answer, or without a count in it

    @property
    def usd(self) -> float:
        """Return what the server's bill cannot be above."""
        return self.counted + self.uncounted

    def __str__(self) -> str:
        """Return what people read."""
        if not self.requests:
            return money(self.usd)
        return (
            f"at most {money(self.usd)}: {money(self.counted)} by the server's counts, and up to "
            f"{money(self.uncounted)} for {self.requests:,} requests without an answer or count, which may have been "
            "billed"
        )


@attrs.frozen(kw_only=True)
class Estimate:
    """What requests may cost."""

    price: Price | None
    usd: float  # as expected
    most: float  # if every reply is as long as allowed
    replies: int  # that it is measured on; 0: a guess

    def __str__(self) -> str:
        """Return what people read."""
        if self.price is None:
            return "at a price that is not known"
        source = f", as {self.replies:,} replies of this judge" if self.replies else ""
        return (
            f"about {money(self.usd)} at prices of {self.price.date}{source}, "
            f"{money(self.most)} if every reply is as long as allowed"
        )


def estimated_cost(
    questions: QuestionSet, requests: list[JudgeRequest], store: VerdictStore, price: Price | None, *, batch: bool
) -> Estimate:
    """Return what requests may cost, by what replies of the same judge have used where there are any."""
    known, judge = measured(store, questions.label), questions.judge
    usd = most = 0.0
    for request in requests if price is not None else []:
        assert price is not None
        _, sent, bound = questions.body(request, store)
        guess = expected_usage(sent, request.answers, judge.model, judge.effort)
        usd += price.of(guess if known is None else known.usage(sent, request.answers), batch=batch)
        most += price.of(bound, batch=batch)
    return Estimate(price=price, usd=usd, most=most, replies=0 if known is None else known.replies)


def total_cost(questions: QuestionSet, store: VerdictStore, price: Price | None) -> JudgeCost:
    """Return what all requests of a judgement have cost, in all sessions."""
    if price is None:
        return JudgeCost(counted=0.0, uncounted=0.0, requests=0)
    counted, uncounted = 0.0, []
    for key, request in questions.by_key.items():
        for reply in store.replies.get(key, []):
            asked = store.asked.get(reply.asked or "")
            if reply.usage is not None:
                counted += price.of(reply.usage, batch=reply.batch)
            elif asked is not None:
                uncounted.append(price.of(asked.most, batch=reply.batch))
            elif reply.refusal is None:  # of an earlier version, which noted refusals by a status without usage
                uncounted.append(price.of(questions.body(request, store)[2], batch=reply.batch))
    for asked in store.unanswered.values():
        if asked.key in questions.by_key:
            uncounted.append(price.of(asked.most, batch=asked.batch))
    return JudgeCost(counted=counted, uncounted=sum(uncounted), requests=len(uncounted))
