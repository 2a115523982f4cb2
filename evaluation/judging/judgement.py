"""One judgement: every question to a judge in several orders, of which only what is not known yet is sent."""

import asyncio
import hashlib
import json
from collections import Counter
from contextlib import suppress

import attrs

from errors import BadInput
from evaluation.intervals import Interval
from evaluation.judging.asking import Asking, estimated_usd, outstanding
from evaluation.judging.batch import collect, in_batches
from evaluation.judging.candidates import Panel
from evaluation.judging.client import make_request, open_client, problem_in, verdict_in
from evaluation.judging.prices import Budget, Price
from evaluation.judging.prompt import Judge, Prompt, orders, prompt_text
from evaluation.judging.report import describe
from evaluation.judging.scores import Scores, score
from evaluation.judging.verdicts import Reply, VerdictStore
from evaluation.overlap import FreeScores
from evaluation.results import append_result


@attrs.frozen(kw_only=True)
class Sending:
    """How requests are sent."""

    concurrency: int
    timeout_seconds: float  # of a request
    batch: bool
    poll_seconds: float  # between looks at a batch
    most_usd: float | None  # that the judgement may cost, with what earlier sessions paid


@attrs.frozen(kw_only=True)
class Ending:
    """How a session has ended."""

    interrupted: bool = False
    out_of_money: bool = False
    unanswered: list[str] = attrs.field(factory=list)  # why, for each request without a reply
    not_taken: dict[str, str] = attrs.field(factory=dict)  # why, by key, for each that the server found fault with


class Judgement:
    """What is asked of a judge about a panel, and what it has said."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, repeats: int, seed: int):
        self.panel = panel
        self.judge = judge
        self._store = store
        self._repeats = repeats
        self.prompts = make_prompts(panel, repeats, seed)
        self.requests = [make_request(judge, prompt) for prompt in self.prompts]
        self._read({})

    def plan(self, price: Price | None, sending: Sending) -> str:
        """Return what is going to be sent, and for how much. Raises BadInput where that is more than allowed."""
        left = outstanding(self.requests, self._store)
        handed_over = {key for batch in self._store.open_batches(self.judge.base_url) for key in batch.keys}
        new = [request for request in left if request.key not in handed_over]
        usd = sum(estimated_usd(request, self.judge, price, batch=sending.batch) for request in new)
        due = [request for request in left if request.key in handed_over]
        paid = self._paid(price) + sum(estimated_usd(request, self.judge, price, batch=True) for request in due)
        if sending.most_usd is not None and new and paid + usd > sending.most_usd:
            before = f", beside ${paid:.4f} that earlier sessions paid" if paid else ""
            raise BadInput(
                f"--max-usd: got {sending.most_usd:g}, and {len(new):,} requests may cost about ${usd:.4f}{before}; "
                "nothing was sent: allow more, or pass fewer --orders or answers"
            )
        waiting = f", {len(left) - len(new):,} in a batch" if len(new) < len(left) else ""
        cost = "at a price that is not known" if price is None else f"about ${usd:.4f} at prices of {price.date}"
        answered = len({request.key for request in self.requests}) - len(left)
        return f"{len(new):,} requests{waiting}, {answered:,} already answered, {cost}"

    def ask(self, sending: Sending, price: Price | None) -> Ending:
        """Ask what is not known. Raises BadInput when the server would answer no request, or the disk is full."""
        if not self.missing:
            return Ending()
        ending = asyncio.run(self._ask(sending, price))
        self._read(ending.not_taken)
        return ending

    async def _ask(self, sending: Sending, price: Price | None) -> Ending:
        client = open_client(self.judge.base_url, sending.timeout_seconds)
        budget = Budget(price, sending.most_usd, self._paid(price))
        asking = Asking(client, self.judge, self._store, budget, self.requests)
        asking.heed_signals()
        with suppress(asyncio.CancelledError):  # Ctrl-C a second time
            async with client:
                await collect(asking, self.requests, sending.poll_seconds)
                if sending.batch:
                    await in_batches(asking, self.requests, sending.poll_seconds)
                else:
                    await asking.one_by_one(outstanding(self.requests, self._store), sending.concurrency)
        asking.check_taken()
        return Ending(
            interrupted=asking.interrupted,
            out_of_money=asking.out_of_money,
            unanswered=asking.unanswered,
            not_taken=asking.not_taken,
        )

    def scores(self) -> Scores | None:
        """Return what the verdicts come to; None where there is none."""
        return score(self.panel, self.prompts, self._verdicts) if any(self._verdicts) else None

    def report(self, scores: Scores | None, price: Price | None) -> str:
        """Return what people read."""
        found = len(self.prompts) - self._verdicts.count(None)
        usd, uncounted = self._usd(price), sum(r.usage is None and r.refusal is None for r in self._replies())
        lines = [
            f"judge: {self.judge.model}, verdicts: {found:,} of {len(self.prompts):,}, refused: {self._refused:,}; "
            "what has none is left out for all models alike",
            ("cost: not known" if usd is None else f"cost, with what earlier sessions paid: ${usd:.4f}")
            + (f", and {uncounted:,} replies whose tokens the server did not count" if uncounted else ""),
        ]
        if self._not_taken:
            index, why = next(iter(self._not_taken.items()))
            question = self.panel.questions[self.prompts[index].question].instruction
            lines.append(f"not taken by the server: {len(self._not_taken):,}, as of {question[:100]!r}: {why}")
        return "\n".join(lines) + ("" if scores is None else "\n\n" + describe(self.panel, scores))

    def why(self, ending: Ending) -> str:
        """Return the most common reason for a missing verdict."""
        reasons = Counter(ending.unanswered)
        for request in outstanding(self.requests, self._store):
            for reply in self._store.replies.get(request.key, [])[-1:]:
                reasons[f"a wrong verdict: {problem_in(reply, request.answers)}"] += 1
        return " ".join(reasons.most_common(1)[0][0].split())[:300] if reasons else "not asked"

    def keep_results(self, scores: Scores, free: list[list[FreeScores]], price: Price | None) -> None:
        """Append the result to those of every model that has a home. Raises BadInput where that cannot be done."""
        titles = [standing.title for standing in scores.standings]
        values = {
            "judge": self.judge.model,
            "effort": self.judge.effort,
            "base_url": self.judge.base_url,
            "questions": {"count": len(self.panel.questions), "sha256": _sha256(self.panel)},
            "orders": self._repeats,
            "seeds": self.panel.slots,
            "anchor": scores.anchor,
            "doubtful": len(scores.doubtful),
            "position_bias": [value for value, _ in scores.bias],
            "disagreement": scores.disagreement,
            "candidates": [
                {"model": standing.title, "score": standing.score.value, **_ends(standing.score)}
                for standing in scores.standings
            ],
            "differences": [
                {"a": titles[a], "b": titles[b], **attrs.asdict(difference)}
                for (a, b), difference in scores.differences.items()
            ],
            "left_out": self._verdicts.count(None),
            "refused": self._refused,
            "usd": self._usd(price),
        }
        for candidate, standing, seeds in zip(self.panel.candidates, scores.standings, free, strict=True):
            if candidate.home is not None:
                own = {
                    "candidate": standing.title,
                    "score": attrs.asdict(standing.score),
                    "free": [attrs.asdict(seed) for seed in seeds],
                }
                append_result(candidate.home, candidate.model, "judge", {**own, **values})

    def _read(self, not_taken: dict[str, str]) -> None:
        """Read the replies, which takes a while. `not_taken`: why, by key of the request."""
        replies = [self._store.replies.get(request.key, []) for request in self.requests]
        self._verdicts = [
            verdict_in(said, request.answers) for said, request in zip(replies, self.requests, strict=True)
        ]
        without = [index for index, verdict in enumerate(self._verdicts) if verdict is None]  # by prompt
        refused = {index for index in without if any(reply.refusal is not None for reply in replies[index])}
        self._refused = len(refused)
        self._not_taken = {
            index: not_taken[self.requests[index].key] for index in without if self.requests[index].key in not_taken
        }
        self.missing = len(without) - len(refused) - len(self._not_taken)  # prompts that may still get a verdict

    def _usd(self, price: Price | None) -> float | None:
        """Return what all replies to these prompts have cost, right and wrong, in this session and before."""
        if price is None:
            return None
        return sum(price.of(reply.usage, batch=reply.batch) for reply in self._replies() if reply.usage is not None)

    def _paid(self, price: Price | None) -> float:
        """Return what a budget counts as paid: replies whose tokens nobody has counted cost what they may have."""
        paid = self._usd(price) or 0.0
        for request in {request.key: request for request in self.requests}.values():
            uncounted = [reply for reply in self._store.replies.get(request.key, []) if reply.usage is None]
            paid += sum(estimated_usd(request, self.judge, price, batch=reply.batch) for reply in uncounted)
        return paid

    def _replies(self) -> list[Reply]:
        """Return all replies to these prompts, right and wrong."""
        keys = {request.key for request in self.requests}
        return [reply for key in keys for reply in self._store.replies.get(key, [])]


def make_prompts(panel: Panel, repeats: int, seed: int) -> list[Prompt]:
    """Return `repeats` prompts for each seed of the models and each question."""
    items = [(slot, question) for slot in range(panel.slots) for question in range(len(panel.questions))]
    arranged = orders(len(panel.candidates) + 1, len(items), repeats, seed)
    prompts = []
    for index, order in enumerate(arranged):
        slot, question = items[index // repeats]
        text = prompt_text(panel.questions[question], [panel.text(question, slot, answer) for answer in order])
        prompts.append(Prompt(question=question, slot=slot, order=order, text=text))
    return prompts


def _ends(interval: Interval) -> dict[str, float | None]:
    return {"low": interval.low, "high": interval.high}


def _sha256(panel: Panel) -> str:
    """Return what tells whether two judgements had the same questions."""
    questions = [attrs.astuple(record) for record in panel.questions]
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()
