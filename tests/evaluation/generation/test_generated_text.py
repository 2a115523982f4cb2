"""Generated text arrives in complete characters."""

from hypothesis import given
from hypothesis import strategies as st

from evaluation.generation.generated_text import TextDecoder
from evaluation.shared.load import Trained
from tokens.tokenizer.loading import load_tokenizer


@given(st.binary(), st.text())
def test_streamed_text_equals_decoded_text(some: bytes, text: str) -> None:
    trained = Trained(None, load_tokenizer("bytes"), None)  # type: ignore[arg-type]
    ids = [*some, 256, *text.encode(), *some, 300]
    assert "".join(streamed(trained, ids)) == trained.decode(ids)
    assert trained.spell(300) == b""  # an id outside the tokenizer's vocabulary has no text
    assert streamed(trained, [*"aé€😀".encode(), 0xE2]) == ["a", "", "é", "", "", "€", "", "", "", "😀", "", "\ufffd"]


def streamed(trained: Trained, ids: list[int]) -> list[str]:
    decoder = TextDecoder(trained.spell)
    return [*(decoder.add(token).text for token in ids), decoder.end()]
