"""One judgement: every question to a judge in several orders, of which only what is not known yet is sent."""

import asyncio
import hashlib
import json
from collections import Counter
from contextlib import suppress
from typing import Any

import attrs

from common.errors import BadInput
from evaluation.instruct.overlap import FreeScores
from evaluation.judging.asking import DEAD, Asking, wrong_in_a_row
from evaluation.judging.batch import collect, in_batches
from evaluation.judging.candidates import Panel
from evaluation.judging.client import TRIES, make_request, problem_in, verdict_in
from evaluation.judging.comments import comments_name, comments_text, write_comments
from evaluation.judging.cost import JudgeCost, estimated_cost, total_cost
from evaluation.judging.kept import append_unless_superfluous
from evaluation.judging.prices import JudgeBudget, Price, money
from evaluation.judging.prompt import Judge, Prompt, orders, prompt_text
from evaluation.judging.questions import QuestionSet
from evaluation.judging.report import describe
from evaluation.judging.scores import Scores, score
from evaluation.judging.verdicts import Reply, VerdictStore
from evaluation.shared.intervals import Interval


@attrs.frozen(kw_only=True)
class Sending:
    """How requests are sent."""

    concurrency: int
    timeout_seconds: float  # of a request
    batch: bool
    poll_seconds: float  # between looks at a batch
    most_usd: float | None  # that the judgement may cost, with what earlier sessions paid
    retry_wrong: bool  # ask again where all verdicts so far were wrong
    credentials: tuple[str, str] | None = attrs.field(default=None, repr=False)  # user and password of the server


@attrs.frozen(kw_only=True)
class Ending:
    """How a session has ended."""

    interrupted: bool = False
    over_budget: float | None = None  # dollars that the next request may cost, where --max-usd ended the session
    unanswered: list[str] = attrs.field(factory=list)  # why, for each request without a reply
    not_taken: dict[str, str] = attrs.field(factory=dict)  # why, by key, for each that the server found fault with
    fatal: BadInput | None = None  # why nothing more was sent


class Judgement:
    """What is asked of a judge about a panel, and what it has said."""

    def __init__(self, panel: Panel, judge: Judge, store: VerdictStore, repeats: int, seed: int):
        self.panel = panel
        self.judge = judge
        self._store = store
        self._repeats, self._seed = repeats, seed
        self.prompts = make_prompts(panel, repeats, seed)
        self.requests = [make_request(judge, prompt) for prompt in self.prompts]
        self._questions = QuestionSet(judge=judge, by_key={request.key: request for request in self.requests})
        self._read({}, self._tries(retry_wrong=False))

    def plan(self, price: Price | None, sending: Sending) -> str:
        """Return what is going to be sent, and for how much.

        Raises BadInput where that is more than allowed, or where the judge's last replies were no verdicts.
        """
        questions = self._questions
        left = questions.outstanding(self._store, self._tries(sending.retry_wrong))
        handed_over = {key for batch in self._store.open_batches(self.judge.base_url) for key in batch.keys}
        new = [request for request in left if request.key not in handed_over]
        if new and not sending.retry_wrong:
            self._check_last_replies()
        estimate = estimated_cost(questions, new, self._store, price, batch=sending.batch)
        paid = self.cost(price).usd
        # Of a batch that is out it is not known yet what of its most is left: the budget decides when it is in.
        unknown = len(new) < len(left)
        if sending.most_usd is not None and new and not unknown and paid + estimate.usd > sending.most_usd:
            before = f", beside {money(paid)} that earlier sessions paid" if paid else ""
            raise BadInput(
                f"--max-usd: got {sending.most_usd:g}, and {len(new):,} requests may cost about {money(estimate.usd)}"
                f"{before}; nothing was sent: allow more, or pass fewer --orders or answers"
            )
        waiting = f", {len(left) - len(new):,} in a batch" if unknown else ""
        answered = len(questions.by_key) - len(left)
        return f"{len(new):,} requests{waiting}, {answered:,} already answered, {estimate}"

    def ask(self, sending: Sending, price: Price | None) -> Ending:
        """Ask what is not known. Raises BadInput where no server can be asked."""
        tries = self._tries(sending.retry_wrong)  # by the replies so far
        if not self._questions.outstanding(self._store, tries):
            return Ending()
        ending = asyncio.run(self._ask(sending, price, tries))
        self._read(ending.not_taken, tries)
        return ending

    async def _ask(self, sending: Sending, price: Price | None, tries: dict[str, int]) -> Ending:
        from evaluation.judging.transport import open_client

        client = open_client(self.judge.base_url, sending.credentials, sending.timeout_seconds, sending.concurrency)
        budget = JudgeBudget(price, sending.most_usd, self.cost(price).usd)
        asking = Asking(client, self._questions, tries, self._store, budget)
        asking.heed_signals()
        try:
            with suppress(asyncio.CancelledError):  # Ctrl-C a second time
                async with client:
                    await collect(asking, sending.poll_seconds)
                    if sending.batch:
                        await in_batches(asking, sending.poll_seconds)
                    else:
                        await asking.one_by_one(sending.concurrency)
            asking.check_taken()
        except BadInput as error:
            asking.fatal = asking.fatal or error
        return Ending(
            interrupted=asking.interrupted,
            over_budget=asking.over_budget,
            unanswered=asking.unanswered,
            not_taken=asking.not_taken,
            fatal=asking.fatal,
        )

    def scores(self) -> Scores | None:
        """Return what the verdicts come to; None where there is none."""
        return score(self.panel, self.prompts, self._verdicts) if any(self._verdicts) else None

    def report(self, scores: Scores | None, price: Price | None) -> str:
        """Return what people read."""
        found = len(self.prompts) - self.left_out
        lines = [
            f"judge: {self.judge.model}, verdicts: {found:,} of {len(self.prompts):,}, refused: {self._refused:,}; "
            "what has none is left out for all models alike",
            self.cost_line(price),
        ]
        if (models := self._models()) not in ([], [self.judge.model]):
            lines.insert(1, f"answered by: {', '.join(models)}")
        if self._wrong:
            lines.append(
                f"wrong verdicts only: {self._wrong:,} prompts, which are not paid for again; --retry-wrong asks them"
            )
        if self._not_taken:
            index, why = next(iter(self._not_taken.items()))
            question = self.panel.questions[self.prompts[index].question].instruction
            lines.append(f"not taken by the server: {len(self._not_taken):,}, as of {question[:100]!r}: {why}")
        return "\n".join(lines) + ("" if scores is None else "\n\n" + describe(self.panel, scores))

    def cost_line(self, price: Price | None) -> str:
        """Return what all sessions of this judgement have cost, for people."""
        return "cost: not known" if price is None else f"cost, with what earlier sessions paid: {self.cost(price)}"

    def why(self, ending: Ending) -> str:
        """Return the most common reason for a missing verdict."""
        reasons = Counter(ending.unanswered)
        for request, verdict in zip(self.requests, self._verdicts, strict=True):
            if verdict is None:
                for reply in self._store.replies.get(request.key, [])[-1:]:
                    refused, problem = reply.refusal, problem_in(reply, request.answers)
                    reasons[f"refused: {refused}" if refused else f"a wrong verdict: {problem}"] += 1
        return reasons.most_common(1)[0][0] if reasons else "not asked"

    def keep_results(self, scores: Scores, free: list[list[FreeScores]], price: Price | None) -> list[str]:
        """Append the result to those of every model that has a home; return lines for people.

        A result that says the same as the newest one, or less, is left out. Raises BadInput where it cannot be written.
        """
        values = self._values(scores, price)
        lines = []
        for candidate, standing, seeds in zip(self.panel.candidates, scores.standings, free, strict=True):
            if candidate.home is None:
                continue
            own = {
                "candidate": standing.title,
                "score": attrs.asdict(standing.score),
                "free": [attrs.asdict(seed) for seed in seeds],
            }
            reason = append_unless_superfluous(candidate.home, candidate.model, {**own, **values})
            if reason is not None:
                lines.append(f"{candidate.title}: no result was added: {reason}")
        return lines

    def keep_comments(self) -> list[str]:
        """Write what the judge has said beside the answers of every model that has a home; return lines for people.

        Raises BadInput where it cannot be written.
        """
        homes = dict.fromkeys(candidate.home for candidate in self.panel.candidates if candidate.home is not None)
        titles = [candidate.title for candidate in self.panel.candidates]
        asked = [self.judge.effort, self.judge.base_url, _sha256(self.panel), titles]
        name = comments_name(self.judge.model, [*asked, self._repeats, self._seed, self.panel.slots])
        text = comments_text(self.panel, self.judge.model, self.prompts, self._texts())
        return [f"the judge's comments: {write_comments(home, name, text)}" for home in homes]

    def cost(self, price: Price | None) -> JudgeCost:
        """Return what all requests of this judgement have cost, in this session and before."""
        return total_cost(self._questions, self._store, price)

    def _values(self, scores: Scores, price: Price | None) -> dict[str, Any]:
        """Return what the results of all candidates have in common."""
        titles = [standing.title for standing in scores.standings]
        cost = self.cost(price)
        return {
            "judge": self.judge.model,
            "judge_snapshots": self._models(),
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
            "left_out": self.left_out,
            "refused": self._refused,
            "usd": None if price is None else cost.usd,
            "usd_uncounted": None if price is None else cost.uncounted,
        }

    def _read(self, not_taken: dict[str, str], tries: dict[str, int]) -> None:
        """Read the replies, which takes a while. `not_taken`: why, by key of the request; `tries`: as `_tries`."""
        replies = [self._store.replies.get(request.key, []) for request in self.requests]
        self._verdicts = [
            verdict_in(said, request.answers) for said, request in zip(replies, self.requests, strict=True)
        ]
        without = [index for index, verdict in enumerate(self._verdicts) if verdict is None]  # by prompt
        refused = {index for index in without if any(reply.refusal is not None for reply in replies[index])}
        wrong = {index for index in without if len(replies[index]) >= TRIES} - refused
        self._not_taken = {
            index: not_taken[self.requests[index].key] for index in without if self.requests[index].key in not_taken
        }
        self._refused, self._wrong, self.left_out = len(refused), len(wrong), len(without)
        outstanding = {request.key for request in self._questions.outstanding(self._store, tries)}
        left = {index for index in without if self.requests[index].key in outstanding}
        self.missing = len(left - set(self._not_taken))  # prompts that may get a verdict

    def _tries(self, retry_wrong: bool) -> dict[str, int]:
        """Return with how many wrong verdicts, by key, a prompt is asked no more: with `retry_wrong`, TRIES more."""
        before = self._store.replies if retry_wrong else {}
        return {key: TRIES + len(before.get(key, [])) for key in self._questions.by_key}

    def _check_last_replies(self) -> None:
        """Raise BadInput where nothing but wrong verdicts came in the end."""
        by_key = self._questions.by_key
        last = [reply for reply in self._store.in_order if reply.key in by_key][-DEAD:]
        problems = [None if reply.refusal else problem_in(reply, by_key[reply.key].answers) for reply in last]
        if len(problems) == DEAD and problems[-1] is not None and None not in problems:
            raise wrong_in_a_row(self.judge, last[-1], problems[-1])

    def _models(self) -> list[str]:
        """Return what the server calls the models that answered."""
        return sorted({reply.model for reply in self._replies() if reply.model is not None})

    def _replies(self) -> list[Reply]:
        """Return all replies to these prompts, right and wrong."""
        return [reply for key in self._questions.by_key for reply in self._store.replies.get(key, [])]

    def _texts(self) -> list[str | None]:
        """Return the text of each prompt's verdict."""
        return [
            next((r.text for r in self._store.replies.get(q.key, []) if problem_in(r, q.answers) is None), None)
            for q in self.requests
        ]


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
