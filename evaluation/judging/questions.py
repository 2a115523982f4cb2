"""What a session asks, and of whom."""

import json
import math
from typing import Any

import attrs

from evaluation.judging.client import JudgeRequest, is_settled, limited
from evaluation.judging.prices import MANY_REPLIES, most_output, most_usage
from evaluation.judging.prompt import Judge
from evaluation.judging.verdicts import Usage, VerdictStore

MOST_DOUBLINGS = 4  # of the limit of a reply


@attrs.frozen(kw_only=True)
class QuestionSet:
    """All requests of a judgement, each once, answered or not."""

    judge: Judge
    by_key: dict[str, JudgeRequest]

    @property
    def label(self) -> str:
        """Tell judges apart whose replies use tokens differently."""
        return f"{self.judge.model} {self.judge.effort or 'default'} {self.judge.base_url}"

    def outstanding(self, store: VerdictStore, tries: dict[str, int]) -> list[JudgeRequest]:
        """Return the requests that nothing is known of. `tries`: by key, how many wrong verdicts settle it."""
        return [request for key, request in self.by_key.items() if not is_settled(store, request, tries[key])]

    def body(self, request: JudgeRequest, store: VerdictStore) -> tuple[dict[str, Any], int, Usage]:
        """Return what is sent for a request, how long it is in bytes, and the most that it can use."""
        limit = self.limit(request, store)
        body = limited(request, self.judge, limit)
        sent = len(json.dumps(body, ensure_ascii=False).encode())
        excess = store.excess.get(self.label, 1.0)
        return body, sent, most_usage(math.ceil(sent * excess), math.ceil(limit * excess))

    def limit(self, request: JudgeRequest, store: VerdictStore) -> int:
        """Return the limit of a reply: twice as high for each reply that was cut off by it.

        What was not answered is asked with the same limit: a server that knows Idempotency-Key compares bodies.
        """
        before = store.unanswered_of(request.key)
        if before is not None:
            return before.limit
        count, longest = store.longest.get(self.label, (0, 0))
        known = longest if count >= MANY_REPLIES else None
        cut = sum(reply.cut for reply in store.replies.get(request.key, []))
        return most_output(request.answers, self.judge.model, self.judge.effort, known) << min(cut, MOST_DOUBLINGS)
