"""The engine: one thread that owns the network and generates one token of every active answer in each forward pass."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import refusing
from evaluation.serve.answer import ServedAnswer
from evaluation.serve.api_request import ApiError
from evaluation.shared.load import Trained
from model.generate import Prefix, advance

CHUNK = 128  # number of prompt tokens that are computed at a time, before the other answers get their next token
GRACE_SECONDS = 3.0  # time that active answers get to finish when the server stops


class Engine:
    """The slots of active answers, and a queue of answers that wait for a slot.

    A free slot keeps the cache of its last text. A prompt gets the free slot whose text shares the longest beginning
    with it.
    """

    def __init__(self, trained: Trained, slots: int, waiting: int):
        """Start the thread. `slots`: largest number of active answers. `waiting`: largest number in the queue."""
        self.trained, self.slots, self.waiting = trained, slots, waiting
        self._changed = threading.Condition()
        self._queue: deque[ServedAnswer] = deque()
        self._open: list[ServedAnswer] = []  # answers that are not closed, including complete ones still being sent
        self._active: list[ServedAnswer] = []
        self._idle: list[Prefix] = []
        self._end: float | None = None  # when active answers will be ended; None: the server is not stopping
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, answers: list[ServedAnswer]) -> None:
        """Queue all answers of a request.

        If the queue does not have room for all of them, or the server is stopping, raise ApiError and queue none.
        """
        with self._changed:
            if self._end is not None:
                raise shutdown_error()
            self._open = [answer for answer in self._open if not answer.closed]
            if len(self._open) + len(answers) > self.slots + self.waiting:
                problem = f"the server is busy with {len(self._open)} answers; try again later"
                raise ApiError(429, problem, code="rate_limit_exceeded")
            self._open += answers
            self._queue += answers
            self._changed.notify()

    def stop(self) -> None:
        """Refuse new and waiting answers. The thread ends when the active answers have ended, within GRACE_SECONDS."""
        with self._changed:
            self._end = self._end or time.monotonic() + GRACE_SECONDS
            self._changed.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        """Generate answers until the engine is stopped."""
        while self._admit():
            now = time.monotonic()
            for answer in [*self._active]:
                if self._end is not None and now > self._end:
                    self._release(answer, shutdown_error())
                elif answer.closed or now > answer.deadline:
                    problem = "the answer took too long; ask for fewer tokens, or for fewer answers at once"
                    self._release(answer, ApiError(503, problem, code="timeout"))
            prompts = [answer for answer in self._active if answer.drawing is not None and len(answer.drawing.new) > 1]
            alone = [
                answer
                for answer in self._active
                if answer.request.repeatable or answer.scores_prompt or answer in prompts
            ]
            together = [answer for answer in self._active if answer not in alone]
            for group in [*filter(None, [together]), *([answer] for answer in alone)]:
                self._advance(group)

    def _admit(self) -> bool:
        """Wait for work, and give free slots to the answers that have waited longest.

        Return False if the engine is stopping and no answer is active.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._active or self._end)
            while self._queue and (len(self._active) < self.slots or self._end or self._queue[0].closed):
                answer = self._queue.popleft()
                if self._end:
                    answer.post(shutdown_error())
                elif not answer.closed:
                    with self._ending([answer]):
                        self._begin(answer)
            return not (self._end and not self._active)

    def _begin(self, answer: ServedAnswer) -> None:
        """Give an answer the free slot whose text shares the longest beginning with the answer's prompt.

        If no text shares a beginning with the prompt, create another slot, unless there are already `slots` of them.
        """
        prompt = answer.request.prompt
        self._idle.sort(key=lambda prefix: prefix.shared(prompt))
        is_full = len(self._idle) + len(self._active) >= self.slots
        is_new = not is_full and (not self._idle or not self._idle[-1].shared(prompt))
        self._active.append(answer)
        # A repeatable answer does not use the cache, so it takes the least useful slot.
        answer.begin(Prefix(self.trained.network) if is_new else self._idle.pop(0 if answer.request.repeatable else -1))

    def _advance(self, group: list[ServedAnswer]) -> None:
        """Compute the next token of each answer in a group, or the next chunk of one answer's prompt."""
        with self._ending(group):
            drawings = [answer.drawing for answer in group if answer.drawing is not None]
            scores_prompt = group[0].scores_prompt  # such an answer is the only one in its group
            logits = advance(drawings, most=CHUNK, all_positions=scores_prompt)
            if scores_prompt:
                group[0].score_prompt(logits)
            if drawings[0].new:  # the rest of a long prompt is not computed yet; its answer is alone in the group
                return
            for answer, row in zip(group, logits[-len(group) :], strict=True):
                with self._ending([answer]):
                    for part in answer.parts_after(row[None]):
                        if part.text or part.tokens or part.finish:
                            answer.post(part)
                        if part.finish:
                            self._release(answer, None)

    @contextmanager
    def _ending(self, answers: list[ServedAnswer]) -> Iterator[None]:
        """End these answers if the block raises an exception. The other answers continue."""
        try:
            with refusing(self.trained.location.path):  # for example, logits that are not finite
                yield
        except Exception as error:  # noqa: BLE001  # any error, such as too little memory, must end only these answers
            for answer in answers:
                self._release(answer, error)

    def _release(self, answer: ServedAnswer, problem: Exception | None) -> None:
        """Free an answer's slot. The cache of its text is kept for later prompts with the same beginning."""
        if problem is not None:
            answer.post(problem)
        if answer in self._active:
            self._active.remove(answer)
            if answer.drawing is not None:
                self._idle.append(answer.drawing.prefix)


def shutdown_error() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
