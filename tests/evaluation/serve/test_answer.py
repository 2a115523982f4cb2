"""Parts of an answer: whole characters, up to the first stop string, each token with the part that it completes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation.serve.answer import AnswerPart, DrawnAnswer
from evaluation.serve.api_request import AnswerRequest, ServedModel
from evaluation.serve.engine import Engine
from evaluation.shared.load import ModelLocation, Trained
from model.config import ModelConfig
from model.generate import Drawn, Sampling
from model.gpt import GPT, initialize
from tests.conftest import TINY_MODEL
from tokens.tokenizer.loading import load_tokenizer

OFF: Any = dict.fromkeys(("include_usage", "is_chat", "repeatable"), False)
REQUEST = AnswerRequest(prompt=[1], count=1000, sampling=Sampling(), stop=(), alternatives=0, stream=True, **OFF)
PLACE = ModelLocation(Path("m"), None, Path("m"))
TOKENIZER = load_tokenizer("bytes")


def parts(text: Iterable[int], **changed: Any) -> list[AnswerPart]:
    served = ServedModel(trained=Trained(None, TOKENIZER, PLACE), name="", longest_answer=9)  # type: ignore[arg-type]
    answer = DrawnAnswer(attrs.evolve(REQUEST, **changed), served, lambda _: None)
    found = []
    for token in [*text, TOKENIZER.end_of_text_id]:
        found.append(answer.take(Drawn(token, torch.zeros(301))))
        if found[-1].finish:
            break
    return found


@given(st.binary(max_size=30), st.lists(st.sampled_from(["a", "ab", "bab", "é", "aa b"]), max_size=4))
def test_parts_end_at_the_first_stop_string_and_cut_no_character(noise: bytes, stops: list[str]) -> None:
    text = noise + b"abab\xc3\xa9aa bab" + noise
    whole = text.decode(errors="replace")
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    found = parts(text, stop=tuple(stops))
    assert "".join(part.text for part in found) == whole[: min(places, default=len(whole))]
    assert found[-1].finish == "stop" and all(part.finish is None for part in found[:-1])
    said = [one.token for part in found for one in part.tokens]
    assert said == [*text[: len(said)]]
    if not places:
        assert len(said) == len(text)


def test_an_answer_ends_at_its_length_and_holds_back_what_may_be_a_stop_string() -> None:
    assert [part.text for part in parts(b"a12b", stop=("12x",))][:4] == ["a", "", "", "12b"]
    assert [part.text for part in parts([300, *b"a"])] == ["", "a", ""]  # an id beyond the tokenizer has no text
    assert [(part.text, part.finish) for part in parts(b"abc", count=2)] == [("a", None), ("b", "length")]


def test_damaged_weights_and_deadlines_end_an_answer_and_not_the_engine() -> None:
    network = GPT(ModelConfig(**TINY_MODEL)).eval()
    initialize(network, 0)
    trained = Trained(network, TOKENIZER, PLACE)
    served, engine = ServedModel(trained=trained, name="m", longest_answer=9), Engine(trained, 2, 2)

    def ended(seconds: float, damaged: float | None = None) -> str:
        posted: list[AnswerPart | Exception] = []
        answer = DrawnAnswer(attrs.evolve(REQUEST, count=20, repeatable=True), served, posted.append)
        answer.deadline += seconds
        row = network.token_embedding.weight.data[1]
        kept = row.clone()
        if damaged is not None:
            row.fill_(damaged)
        engine.submit(answer)
        while not (posted and (isinstance(posted[-1], Exception) or posted[-1].finish)):
            pass
        row.copy_(kept)
        return str(posted[-1]) if isinstance(posted[-1], Exception) else str(posted[-1].finish)

    assert ended(-1e6) == "the answer took too long; ask for fewer tokens"
    assert "m: the model's logits are not finite" in ended(0, torch.nan)
    assert ended(0) in ("length", "stop")
    engine.stop()
    with pytest.raises(Exception, match="shutting down"):
        ended(0)
