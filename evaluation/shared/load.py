"""Load a model with its tokenizer, turn prompts into the model's ids, and turn ids into text."""

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
    location: ModelLocation
    # The tokenizer that --tokenizer names. None: the option was not passed, or this tokenizer gives the same ids as the
    # model's own tokenizer.
    given_tokenizer: GivenTokenizer | None = attrs.field(default=None, kw_only=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises BadInput if none is known."""
        if self.known_tokenizer is None:
            raise BadInput(
                f"{self.location.path}: does not name the tokenizer of its tokens; put nanoGPT's meta.pkl next to the "
                "tokens, or pass --tokenizer to evaluate.py: gpt2, bytes, or a file of ranks or characters"
            )
        return self.known_tokenizer

    @cached_property
    def template(self) -> Template | None:
        """The model's conversation template, or None if it continues plain text.

        For a run, raises BadInput if the template is damaged, or if the prompt that it builds for an answer differs
        from the text that precedes answers in the training data. For a model from another program, the template in its
        files is used without this check, because we do not know how the model was trained.
        """
        recorded = self.location.tokenizer
        if recorded is None or recorded.template is None:
            return read_template(self.location.path)
        template = Template(recorded.template)
        with refusing(
            f"{self.location.run}/{RESOLVED}",
            "prepare the tokens with the corrected template, and train on them",
            (BadInput,),
        ):
            template.check()
        return template

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: those in the model's files, the end-of-text id and the end-of-turn ids.

        Raises BadInput.
        """
        ends = end_ids(self.location.path) | {self.tokenizer.end_of_text_id}
        return ends if self.template is None else ends.union(self.template.ends(self.tokenizer))

    @property
    def begin_id(self) -> int:
        """The id that precedes a text: the end-of-text id, or 0 if the network's vocabulary does not have that id."""
        end = self.tokenizer.end_of_text_id
        return end if end < self.network.config.vocab_size else 0

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt. For an empty prompt, the only id is `begin_id`."""
        return self.tokenizer.encode(prompt).tolist() or [self.begin_id]

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the prompt that asks the model for the next message of a conversation.

        The model's template determines the prompt. If the model has no template, the prompt consists of all messages
        as a single text to continue, with a newline after each answer.
        """
        if self.template is not None:
            return self.template.prompt(self.tokenizer, messages)
        return self.encode("".join(content + "\n" * (role == ASSISTANT) for role, content in messages))

    def spell(self, token: int) -> bytes:
        """Return the bytes of an id.

        A special token's bytes are its name; an id outside the vocabulary has no bytes.
        """
        return self.tokenizer.spell(token) if token < self.tokenizer.vocabulary_size else b""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.spell, ids)).decode(errors="replace")


def load(location: ModelLocation, tokenizer: str | None, device: torch.device) -> Trained:
    """Load a model and its tokenizer. Raises BadInput with the name of the damaged file.

    `tokenizer`: the name or file of a tokenizer that replaces the model's own, or None.
    """
    network = load_network(location)
    known_tokenizer = tokenizer_of(location, tokenizer, network.config)
    if tokenizer is None or known_tokenizer is None:
        replacement = None
    else:
        replacement = given_tokenizer(location, known_tokenizer, network.config)
    return Trained(network.to(device).eval(), known_tokenizer, location, given_tokenizer=replacement)


def load_network(location: ModelLocation) -> GPT:
    """Load a model onto the CPU, without its tokenizer. Raises BadInput with the name of the damaged file."""
    if not location.is_lockstep_checkpoint:
        return load_foreign(location.path, location.run)
    with refusing(location.path / STATE):
        config = read_state(location.path).config.network_config()
    with refusing(location.path / WEIGHTS, kinds=(OSError, ValueError)):  # for example, if it was just deleted
        return with_parameters(config, load_file(location.path / WEIGHTS))


def load_on_all(ranks: Ranks, location: ModelLocation, tokenizer: str | None) -> Trained:
    """Load a model on every rank. If one rank fails, all raise BadInput."""
    loaded: list[Trained] = []
    # `together` sends the return value of its function to all ranks. The models must not be sent, so this function
    # returns None, and each rank keeps its own model in `loaded`.
    together(ranks, lambda: loaded.append(load(location, tokenizer, ranks.device)))
    return loaded[0]
