"""Engine: one thread that owns the network and draws a token of each active answer, in one forward pass."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import refusing
from evaluation.serve.answer import DrawnAnswer
from evaluation.serve.api_request import ApiError
from evaluation.shared.load import Trained
from model.generate import Prefix, advance

CHUNK = 128  # tokens of a prompt that are computed before the others' next token
GRACE_SECONDS = 3.0  # for active answers, once the server stops


class Engine:
    """Slots for active answers, each taken by the prompt most like its last text, and the queue behind them."""

    def __init__(self, trained: Trained, slots: int, waiting: int):
        self.trained, self.slots, self.waiting = trained, slots, waiting
        self._changed = threading.Condition()
        self._queue: deque[DrawnAnswer] = deque()
        self._open: list[DrawnAnswer] = []  # slow readers of complete ones included
        self._active: list[DrawnAnswer] = []
        self._idle: list[Prefix] = []
        self._end: float | None = None  # time of the end, once it stops
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, answers: list[DrawnAnswer]) -> None:
        """Queue all answers of a request, or none. Raises ApiError where the queue is full, or the server stops."""
        with self._changed:
            if self._end is not None:
                raise stopping()
            self._open = [one for one in self._open if not one.closed]
            if len(self._open) + len(answers) > self.slots + self.waiting:
                problem = f"{len(self._open)} answers are being drawn or wait; try again later"
                raise ApiError(429, problem, code="rate_limit_exceeded")
            self._open += answers
            self._queue += answers
            self._changed.notify()

    def stop(self) -> None:
        """Refuse new and waiting answers; end active ones within GRACE_SECONDS, and the thread after them."""
        with self._changed:
            self._end = self._end or time.monotonic() + GRACE_SECONDS
            self._changed.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        while self._admit():
            now = time.monotonic()
            for answer in [*self._active]:
                if self._end is not None and now > self._end:
                    self._release(answer, stopping())
                elif answer.closed or now > answer.deadline:
                    problem = "the answer took too long; ask for fewer tokens, or for fewer answers at once"
                    self._release(answer, ApiError(503, problem, code="timeout"))
            prompts = [one for one in self._active if one.drawing is not None and len(one.drawing.new) > 1]
            alone = [one for one in self._active if one.request.repeatable or one.scores_prompt or one in prompts]
            together = [one for one in self._active if one not in alone]
            for group in [*filter(None, [together]), *([one] for one in alone)]:
                self._advance(group)

    def _admit(self) -> bool:
        """Wait for work, and give free slots to those that wait longest; return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._active or self._end)
            while self._queue and (len(self._active) < self.slots or self._end or self._queue[0].closed):
                answer = self._queue.popleft()
                if self._end:
                    answer.post(stopping())
                elif not answer.closed:
                    with self._ending([answer]):
                        self._begin(answer)
            return not (self._end and not self._active)

    def _begin(self, answer: DrawnAnswer) -> None:
        prompt = answer.request.prompt
        self._idle.sort(key=lambda prefix: prefix.shared(prompt))
        full = len(self._idle) + len(self._active) >= self.slots
        fresh = not full and (not self._idle or not self._idle[-1].shared(prompt))
        self._active.append(answer)
        answer.begin(Prefix(self.trained.network) if fresh else self._idle.pop(0 if answer.request.repeatable else -1))

    def _advance(self, group: list[DrawnAnswer]) -> None:
        """Compute the next token of each answer of a group, or a chunk of the prompt of a single one."""
        with self._ending(group):
            drawings = [answer.drawing for answer in group if answer.drawing is not None]
            scores_prompt = group[0].scores_prompt  # such an answer is a group of its own
            logits = advance(drawings, most=CHUNK, all_positions=scores_prompt)
            if scores_prompt:
                group[0].score_prompt(logits)
            if drawings[0].new:  # the rest of a long prompt, whose answer is a group of its own
                return
            for answer, row in zip(group, logits[-len(group) :], strict=True):
                with self._ending([answer]):
                    for part in answer.parts_after(row[None]):
                        if part.text or part.tokens or part.finish:
                            answer.post(part)
                        if part.finish:
                            self._release(answer, None)

    @contextmanager
    def _ending(self, answers: list[DrawnAnswer]) -> Iterator[None]:
        """End answers by an exception of the block; the others go on."""
        try:
            with refusing(self.trained.place.path):  # logits that are not finite
                yield
        except Exception as error:  # noqa: BLE001  # too little memory, for one
            for answer in answers:
                self._release(answer, error)

    def _release(self, answer: DrawnAnswer, problem: Exception | None) -> None:
        """Free an answer's slot; its prefix stays for a prompt that begins alike."""
        if problem is not None:
            answer.post(problem)
        if answer in self._active:
            self._active.remove(answer)
            if answer.drawing is not None:
                self._idle.append(answer.drawing.prefix)


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
