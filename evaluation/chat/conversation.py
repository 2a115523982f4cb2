"""A conversation with a model: its turns, the prompt of the next answer, and the answer as it comes."""

from collections.abc import Generator, Iterator

from common.errors import BadInput
from evaluation.shared.generation import whole_characters
from evaluation.shared.load import Trained
from model.generate import Prefix, Sampling
from tokens.tokenizer.template import ASSISTANT, SYSTEM, USER, Message


class Conversation:
    """Messages of a user and a model; keys and values of those that the model has seen are kept.

    A model without a conversation template continues them as one plain text, each message of the user on a new line.
    """

    def __init__(self, trained: Trained, longest: int, system: str | None = None):
        """`longest`: tokens of an answer; `system`: first message, which stays. Raises BadInput where it cannot be."""
        self.trained, self.longest = trained, longest
        self.context = trained.network.config.context_length
        self.system = [] if system is None else [Message(SYSTEM, system)]
        self.turns: list[Message] = []  # of the user and the model, alternately
        self.unseen = 0  # of them, the first ones, which do not fit the context any more
        self.left = longest  # tokens that the last answer could still have had
        self._prefix = Prefix(trained.network)
        if self.system and trained.template is None:
            raise BadInput(f"{trained.place.path}: has no conversation template, and so no place for a system message")
        self._prompt(Message(USER, " "))

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the answer to a message, in parts of whole characters. Raises BadInput.

        The turn is kept when the answer ends, is closed or interrupted; but not without an answer.
        """
        question, said = Message(USER, text), ""
        ids = self._prompt(question)
        try:
            for part in whole_characters(self.trained, self._draw(ids, sampling)):
                said += part
                yield part
        finally:
            if said:
                self.turns += question, Message(ASSISTANT, said)

    def reset(self) -> None:
        """Forget all turns, but not the system message."""
        self.turns, self.unseen = [], 0

    def _draw(self, ids: list[int], sampling: Sampling) -> Iterator[int]:
        self.left = min(self.longest, self.context - len(ids))
        for drawn in self.trained.draw(self._prefix, ids, self.left, sampling, self.trained.stop_ids):
            self.left -= 1
            yield drawn.token

    def _prompt(self, question: Message) -> list[int]:
        """Return the ids of the latest turns that leave a quarter of the context to the answer, or its longest length.

        Raises BadInput where the question alone is too long.
        """
        limit = self.context - max(1, min(self.longest, self.context // 4))
        ids: list[int] = []
        for first in range(self.unseen, len(self.turns) + 1, 2):
            ids = self._encode([*self.turns[first:], question])
            if len(ids) <= limit:
                self.unseen = first
                return ids
        counted = "message and system message" if self.system else "message"
        raise BadInput(f"{counted}: got {len(ids):,} tokens, wanted at most {limit:,} of {self.context:,}")

    def _encode(self, turns: list[Message]) -> list[int]:
        if self.trained.template is not None:
            return self.trained.template.prompt(self.trained.tokenizer, [*self.system, *turns])
        return self.trained.encode("".join(said + "\n" * (role == ASSISTANT) for role, said in turns))
