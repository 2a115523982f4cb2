"""Token set: lengths, hashes and the tokenizer of the directories that a run reads."""

from pathlib import Path

import attrs
import numpy as np
import pytest
from safetensors.numpy import save_file

from tokens.format.manifest import Content, Manifest, TokenizerRecord
from tokens.format.token_file import open_split
from training.data.open_tokens import TokenDirectory, TokenSet

BYTES = TokenizerRecord(name="bytes", vocabulary_size=257, end_of_text_id=256, ranks_file=None)


@pytest.fixture
def opened(tmp_path: Path) -> TokenDirectory:
    """An opened directory of 1,000 tokens to train on, without a manifest."""
    save_file({"tokens": np.arange(1000, dtype=np.uint16)}, tmp_path / "train.safetensors")
    stream = open_split(tmp_path, "train")
    return TokenDirectory(dataset="a", path=tmp_path, manifest=None, train=stream, validation=None)


def test_a_run_validates_on_the_directories_with_a_validation_stream(opened: TokenDirectory) -> None:
    validated = attrs.evolve(opened, dataset="b", validation=opened.train)
    assert TokenSet((opened,)).validated == []
    assert TokenSet((opened, validated)).validated == [validated]
    assert (len(opened.streams), len(validated.streams)) == (1, 2)


def test_lengths_and_hashes_are_by_dataset_and_file(opened: TokenDirectory) -> None:
    content = Content(size_bytes=8, sha256="0" * 64, max_id=1)
    token_set = TokenSet((attrs.evolve(opened, contents={"train.safetensors": content}),))
    assert token_set.lengths == {"a": 1000}
    assert token_set.digests == {opened.path / "train.safetensors": "0" * 64}


def test_the_tokenizer_is_that_of_a_directory_with_a_manifest(opened: TokenDirectory) -> None:
    described = attrs.evolve(opened, manifest=Manifest(files={}, documents=1, tokens=1000, tokenizer=BYTES, sources=[]))
    assert TokenSet((opened,)).tokenizer is None
    assert TokenSet((opened, described)).tokenizer == (opened.path, BYTES)
