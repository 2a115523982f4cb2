"""Fast encoders give tiktoken's ids for any text; an encoder with other ids is not used."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import shared
from tests.tokens.gpt2 import reference, strange_texts, tiktokens
from tokens.format.manifest import RANKS_FILE
from tokens.prepare.encode_unit import _encoder
from tokens.tokenizer.fast_encoder import GROUPED_PATTERN, FastBytePairEncoder, encoders, write_recipe
from tokens.tokenizer.loading import record_of
from tokens.tokenizer.tokenizer import PROBE, Tokenizer, byte_pair_tokenizer, fingerprint

RECORD = record_of(tiktokens(), ranks=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    shutil.copy(shared("gpt2.tiktoken"), folder / RANKS_FILE)
    recipe_path = write_recipe(tiktokens(), folder / "recipe.json")
    assert recipe_path is not None
    return recipe_path


def test_all_encoders_give_tiktokens_ids(recipe: Path) -> None:
    pytest.importorskip("fastokens")
    names = ("wikitext2.txt", "tinyshakespeare.txt", "instruction-data.json")
    texts = [*PROBE, *strange_texts(5_000), *(shared(name).read_text()[:400_000] for name in names)]
    parts = [reference().encode_ordinary(text) for text in texts]
    expected_ids, lengths = np.concatenate([np.array(part, np.uint16) for part in parts]), [len(part) for part in parts]
    ways = list(encoders(RECORD, recipe.parent, recipe))
    assert [type(way) for way in ways] == [FastBytePairEncoder, Tokenizer, Tokenizer]
    for way in ways:
        ids, counts = way.encode_batch(texts)
        assert ids.dtype == expected_ids.dtype
        assert counts.tolist() == lengths
        assert ids.tolist() == expected_ids.tolist()


def test_without_fastokens_tiktoken_is_used(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert [type(way) for way in encoders(RECORD, recipe.parent, recipe)] == [Tokenizer, Tokenizer]


def test_an_encoder_with_other_ids_is_skipped(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastokens")
    values = json.loads(recipe.read_text())
    values["pre_tokenizer"]["add_prefix_space"] = True
    recipe_with_prefix = tmp_path / "other.json"
    recipe_with_prefix.write_text(json.dumps(values))
    expected_fingerprint = fingerprint(tiktokens())
    assert fingerprint(next(encoders(RECORD, recipe.parent, recipe_with_prefix))) != expected_fingerprint
    _encoder.cache_clear()
    encoder = _encoder(RECORD, recipe.parent, recipe_with_prefix)
    _encoder.cache_clear()
    assert isinstance(encoder, Tokenizer)
    assert fingerprint(encoder) == expected_fingerprint


def test_tokens_without_merges_are_encoded(tmp_path: Path) -> None:
    # "abc" is a token, but "ab" and "bc" are not, so merges cannot form "abc".
    tokens = [*(bytes([byte]) for byte in range(256)), b"abc"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = byte_pair_tokenizer("", ranks)
    for tokenizer_variant in (tokenizer, byte_pair_tokenizer("", ranks, GROUPED_PATTERN)):
        assert tokenizer_variant.encode("abc abcd").tolist() == [256, *b" abcd"]
    fastokens = pytest.importorskip("fastokens")
    encoding = fastokens.Tokenizer.from_file(str(write_recipe(tokenizer, tmp_path / "recipe.json")))
    ids, _ = encoding.encode_batch_flat(["abc abcd"], split_special_tokens=True)
    assert np.frombuffer(ids, "<u4").tolist() == [256, *b" abcd"]
