"""A conversation with kept keys and values says what fresh ones say; it fits the context, and keeps its turns."""

from pathlib import Path

import attrs
import pytest
import torch

from common.errors import BadInput
from evaluation.chat.conversation import Conversation
from evaluation.shared.load import ModelLocation, Trained
from model.config import ModelConfig
from model.generate import Sampling
from tests.model.architectures import MODERN
from tests.model.test_gpt import SMALL
from tests.model.test_naming import network
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import ASSISTANT, SYSTEM, TEMPLATES, TURN_TOKENS, USER, Message

GREEDY = Sampling(temperature=0)


def trained(config: ModelConfig = SMALL, context: int = 512, template: str | None = "turns") -> Trained:
    """Return a model of random weights that speaks ASCII."""
    model = network(attrs.evolve(config, vocab_size=261, context_length=context, tie_weights=False))
    assert model.head is not None
    with torch.no_grad():
        model.head.weight[128:] = 0
        model.head.weight[:128] *= 5
    tokenizer = load_tokenizer("bytes").with_special_tokens(TURN_TOKENS)
    place = ModelLocation(Path("model"), None, Path("model"))
    return Trained(model, tokenizer, place, None if template is None else TEMPLATES[template])


@pytest.mark.parametrize(
    ("config", "template"), [(SMALL, "turns"), (MODERN["NanoChat"], "turns"), (SMALL, "alpaca"), (SMALL, None)]
)
def test_each_answer_is_that_of_the_whole_prompt(config: ModelConfig, template: str | None) -> None:
    model = trained(config, 700, template)
    talk = Conversation(model, 20, None if template is None else "Be brief.")
    for question in ("Hello", "What is <|end|>?", "é €"):
        said = "".join(talk.answer(question, GREEDY))
        messages = [*talk.system, *talk.turns[:-1]]
        if model.template is None:
            ids = model.encode("".join(text + ("\n" if role == ASSISTANT else "") for role, text in messages))
        else:
            ids = model.template.prompt(model.tokenizer, messages)
        assert said == model.decode([*model.generate(ids, 20, GREEDY, model.stop_ids)])
        assert talk.turns[-2:] == [Message(USER, question), Message(ASSISTANT, said)]


def test_an_answer_ends_at_a_stop_id_and_one_that_is_closed_or_interrupted_is_kept() -> None:
    model = trained()
    talk = Conversation(model, 30)
    whole = "".join(talk.answer("Hi", GREEDY))
    assert len(whole) == 30 and talk.left == 0
    ending = attrs.evolve(model, end_ids=frozenset({ord(whole[-1])}))
    talk = Conversation(ending, 30)
    assert "".join(talk.answer("Hi", GREEDY)) == whole[: whole.index(whole[-1])] and talk.left > 0
    talk = Conversation(model, 30)
    parts = talk.answer("Hi", GREEDY)
    heard = next(parts) + next(parts)
    with pytest.raises(KeyboardInterrupt):
        parts.throw(KeyboardInterrupt())
    assert talk.turns == [Message(USER, "Hi"), Message(ASSISTANT, heard)] and heard == whole[:2]
    talk.reset()
    assert "".join(talk.answer("Hi", GREEDY)) == whole


def test_a_turn_without_an_answer_is_not_kept() -> None:
    talk = Conversation(attrs.evolve(trained(), end_ids=frozenset(range(261))), 30)
    assert ("".join(talk.answer("Hi", GREEDY)), talk.turns, talk.left) == ("", [], 30)


def test_the_oldest_turns_leave_the_context_the_system_message_stays() -> None:
    model = trained(context=64)
    talk = Conversation(model, 500, "Sys")
    for turn in range(6):
        assert 0 < len("".join(talk.answer(f"question {turn}", GREEDY))) <= 64
        assert model.network.config.context_length - len(talk._prompt(Message(USER, "x"))) >= 16
    assert talk.unseen > 0 and len(talk.turns) == 12 and talk.system == [Message(SYSTEM, "Sys")]
    assert talk._prompt(Message(USER, "x"))[:5] == [257, *b"Sys", 260]
    with pytest.raises(BadInput, match="system message: got 88 tokens, wanted at most 48 of"):
        next(talk.answer("x" * 80, GREEDY))
    assert len(talk.turns) == 12


def test_a_system_message_needs_a_template_and_room() -> None:
    with pytest.raises(BadInput, match="no conversation template"):
        Conversation(trained(template=None), 9, "Be brief.")
    with pytest.raises(BadInput, match="system message: got 96 tokens"):
        Conversation(trained(context=64), 9, "Be brief. " * 9)
    refusing = attrs.evolve(trained(), template=attrs.evolve(TEMPLATES["turns"], text="{{ raise_exception('no!') }}"))
    with pytest.raises(BadInput, match="template: no!"):
        Conversation(refusing, 9)
