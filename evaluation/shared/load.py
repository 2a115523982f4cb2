"""Loading of a model with its tokenizer: the network, and how it is asked and read."""

from collections.abc import Sequence
from functools import cached_property

import attrs
import torch
from safetensors.torch import load_file

from common.errors import BadInput, refusing
from evaluation.shared.chat_template import end_ids, read_template
from evaluation.shared.foreign import load_foreign, with_parameters
from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.model_tokenizer import given_tokenizer, tokenizer_of
from model.gpt import GPT
from tokens.tokenizer.template import ASSISTANT, Message, Template
from tokens.tokenizer.tokenizer import Tokenizer
from training.checkpoints.directory import STATE, WEIGHTS
from training.checkpoints.run_record import RESOLVED
from training.checkpoints.saved_state import read_state
from training.parallel.process_group import Ranks, together


@attrs.frozen
class Trained:
    """A model ready for inference, in fp32 on its device."""

    network: GPT
    known_tokenizer: Tokenizer | None
    place: ModelLocation
    # By --tokenizer, unless it gives the ids of the model's own
    given_tokenizer: GivenTokenizer | None = attrs.field(default=None, kw_only=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises BadInput where none is known."""
        if self.known_tokenizer is None:
            raise BadInput(
                f"{self.place.path}: does not name the tokenizer of its tokens; put nanoGPT's meta.pkl beside them, or "
                "pass it with --tokenizer to evaluate.py: gpt2, bytes, or a file of ranks or characters"
            )
        return self.known_tokenizer

    @cached_property
    def template(self) -> Template | None:
        """The template of conversations; None: it continues plain text.

        Raises BadInput, also for a run whose template would ask for answers with another prompt than it trained them
        after. For a model of others the prompt is what its files say, since we do not know how it was trained.
        """
        recorded = self.place.tokenizer
        if recorded is None or recorded.template is None:
            return read_template(self.place.path)
        template = Template(recorded.template)
        with refusing(
            f"{self.place.run}/{RESOLVED}",
            "train it on tokens that are prepared with the corrected template",
            (BadInput,),
        ):
            template.check()
        return template

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: those that its files name, of a turn, of a text. Raises BadInput."""
        ends = end_ids(self.place.path) | {self.tokenizer.end_of_text_id}
        return ends if self.template is None else ends.union(self.template.ends(self.tokenizer))

    @property
    def begin_id(self) -> int:
        """The id before a text: the end of the one before, or 0 where the network has no such id."""
        end = self.tokenizer.end_of_text_id
        return end if end < self.network.config.vocab_size else 0

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt; an empty one is `begin_id`."""
        return self.tokenizer.encode(prompt).tolist() or [self.begin_id]

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids by which the model is asked for the next message of a conversation.

        They are those of its template. Without one, they are the messages as one text to continue, in which a line end
        follows each answer.
        """
        if self.template is not None:
            return self.template.prompt(self.tokenizer, messages)
        return self.encode("".join(content + "\n" * (role == ASSISTANT) for role, content in messages))

    def spell(self, token: int) -> bytes:
        """Return the bytes of an id, special tokens spelled; none for an id beyond the tokenizer's vocabulary."""
        return self.tokenizer.spell(token) if token < self.tokenizer.vocabulary_size else b""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.spell, ids)).decode(errors="replace")


def load(place: ModelLocation, tokenizer: str | None, device: torch.device) -> Trained:
    """Load a model. `tokenizer` overrides its own. Raises BadInput naming what is damaged."""
    network = load_network(place)
    known = tokenizer_of(place, tokenizer, network.config)
    given = None if tokenizer is None or known is None else given_tokenizer(place, known, network.config)
    return Trained(network.to(device).eval(), known, place, given_tokenizer=given)


def load_network(place: ModelLocation) -> GPT:
    """Load a model without its tokenizer, onto the CPU. Raises BadInput naming what is damaged."""
    if not place.is_own:
        return load_foreign(place.path, place.run)
    with refusing(place.path / STATE):
        config = read_state(place.path).config.network_config()
    with refusing(place.path / WEIGHTS, kinds=(OSError, ValueError)):  # deleted a moment ago, for one
        return with_parameters(config, load_file(place.path / WEIGHTS))


def load_on_all(ranks: Ranks, place: ModelLocation, tokenizer: str | None) -> Trained:
    loaded: list[Trained] = []
    together(ranks, lambda: loaded.append(load(place, tokenizer, ranks.device)))  # the value itself is not sent
    return loaded[0]
