"""Parts of an answer have only complete characters, end before the first stop string, and include their tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evaluation.generation.generated_text import TextDecoder
from evaluation.serve.answer import AnswerPart, Score, ServedAnswer
from evaluation.serve.api_request import AnswerRequest, ServedModel
from evaluation.serve.engine import Engine
from evaluation.shared.load import Trained
from evaluation.shared.model_location import ModelLocation
from model.config import ModelConfig
from model.generate import DrawnToken, Finish, Sampling
from model.gpt import GPT, initialize
from tests.conftest import TINY_MODEL
from tokens.tokenizer.loading import load_tokenizer

OFF: Any = dict.fromkeys(("include_usage", "is_chat", "repeatable"), False)
REQUEST = AnswerRequest(prompt=[1], count=1000, sampling=Sampling(), stop=(), alternatives=0, stream=True, **OFF)
PLACE = ModelLocation(Path("m"), None, Path("m"))
TOKENIZER = load_tokenizer("bytes")


def new_answer(**changed: Any) -> ServedAnswer:
    trained = Trained(None, TOKENIZER, PLACE)  # type: ignore[arg-type]
    served = ServedModel(trained=trained, name="", longest_answer=9, most_answers=4)
    return ServedAnswer(attrs.evolve(REQUEST, **changed), served, lambda _: None)


def parts(text: Iterable[int], **changed: Any) -> list[AnswerPart]:
    answer, answer_parts = new_answer(**changed), []
    for token in [*text, TOKENIZER.end_of_text_id]:
        answer_parts.append(take(answer, token))
        if answer_parts[-1].finish:
            break
    return answer_parts


def take(answer: ServedAnswer, token: int) -> AnswerPart:
    """Add a token to an answer, and return the part that the token completes.

    As in `Drawing`, the answer ends at the end-of-text id, or when it has as many tokens as the request allows.
    """
    is_last = answer.count + 1 == answer.request.count
    ended: Finish | None = "stop" if token == TOKENIZER.end_of_text_id else "length" if is_last else None
    return answer.take(DrawnToken(token, torch.zeros(2000), ended))


@given(st.binary(max_size=30), st.lists(st.sampled_from(["a", "ab", "bab", "é", "aa b"]), max_size=4))
@example(b"b", ["a", "bab"])  # "a" is completed before "bab", although "bab" begins first
def test_answer_ends_before_the_first_stop_string(noise: bytes, stops: list[str]) -> None:
    text = noise + b"abab\xc3\xa9aa bab" + noise
    full_text = text.decode(errors="replace")
    # The stop string that is completed first ends the answer. If one character completes several stop strings, the
    # longest of them ends the answer.
    places = [(position + len(stop), position) for stop in stops if (position := full_text.find(stop)) >= 0]
    answer_parts = parts(text, stop=tuple(stops))
    assert "".join(part.text for part in answer_parts) == full_text[: min(places, default=(0, len(full_text)))[1]]
    assert answer_parts[-1].finish == "stop" and all(part.finish is None for part in answer_parts[:-1])
    tokens = [token.token for part in answer_parts for token in part.tokens]
    assert tokens == [*text[: len(tokens)]]
    if not places:
        assert len(tokens) == len(text)


@given(st.lists(st.binary(max_size=4), max_size=12), st.integers(0, 12))
@example([b"\xed", b"\xa0"], 0)  # Python's decoder holds back the first two bytes of a surrogate
def test_offset_is_the_position_of_the_first_byte(spelled: list[bytes], prompt: int) -> None:
    ids = [*range(1000, 1000 + len(spelled))]
    answer = new_answer(echo=ids[:prompt], prompt=ids[:prompt] or [1], count=1 + len(ids[prompt:]))
    answer._decoder = TextDecoder(lambda token: dict(zip(ids, spelled, strict=True))[token])
    answer._prompt_scores += [Score(0.0, [])] * len(ids)
    answer_parts = [answer._echo_part(ids[:prompt])]
    for token in [*ids[prompt:], TOKENIZER.end_of_text_id]:
        answer_parts.append(take(answer, token))
    text, tokens = (
        "".join(part.text for part in answer_parts),
        [token for part in answer_parts for token in part.tokens],
    )
    data = b"".join(spelled)
    assert text == data.decode(errors="replace") and [token.token for token in tokens] == [
        *ids,
        TOKENIZER.end_of_text_id,
    ]
    # A byte belongs to the last character of the text that ends with this byte.
    for number, token in enumerate(tokens[:-1]):
        before = b"".join(spelled[:number])
        if spelled[number]:
            assert token.offset == len((before + spelled[number][:1]).decode(errors="replace")) - 1
    assert tokens[-1].offset == len(text)


def test_possible_stop_strings_are_held_back() -> None:
    assert [part.text for part in parts(b"a12b", stop=("12x",))][:4] == ["a", "", "", "12b"]
    # An id outside the tokenizer's vocabulary has no text.
    assert [part.text for part in parts([300, *b"a"])] == [
        "",
        "a",
        "",
    ]
    assert [(part.text, part.finish) for part in parts(b"abc", count=2)] == [("a", None), ("b", "length")]


def test_engine_survives_failing_answers() -> None:
    network = GPT(ModelConfig(**TINY_MODEL)).eval()
    initialize(network, 0)
    trained = Trained(network, TOKENIZER, PLACE)
    served, engine = ServedModel(trained=trained, name="m", longest_answer=9, most_answers=4), Engine(trained, 2, 2)

    def ended(seconds: float, damaged: float | None = None) -> str:
        posted: list[AnswerPart | Exception] = []
        answer = ServedAnswer(attrs.evolve(REQUEST, count=20, repeatable=True), served, posted.append)
        answer.deadline += seconds
        row = network.token_embedding.weight.data[1]
        original = row.clone()
        if damaged is not None:
            row.fill_(damaged)
        engine.submit([answer])
        while not (posted and (isinstance(posted[-1], Exception) or posted[-1].finish)):
            pass
        row.copy_(original)
        return str(posted[-1]) if isinstance(posted[-1], Exception) else str(posted[-1].finish)

    assert ended(-1e6) == "the answer took too long; ask for fewer tokens, or for fewer answers at once"
    assert "m: the model's logits are not finite" in ended(0, torch.nan)
    assert ended(0) in ("length", "stop")
    engine.stop()
    with pytest.raises(Exception, match="shutting down"):
        ended(0)
