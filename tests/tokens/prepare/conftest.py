"""A corpus in every format, and its token files from an uninterrupted preparation."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import ROOT, shared
from tests.tokens.preparing import COMMAND, PREPARE, files_of, jsonl, succeed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 4 MB of real text in every format."""
    folder = tmp_path_factory.mktemp("corpus")
    text = shared("wikitext2.txt").read_text() + shared("tinyshakespeare.txt").read_text()
    draw = random.Random(0)
    texts, at = [], 0
    while at < len(text):
        length = draw.choice([1, 30, 300, 3000, 20_000])
        texts.append(text[at : at + length])
        at += length
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=50)
    jsonl(folder / "b.jsonl", texts[: len(texts) // 2])
    (folder / "c.txt").write_text(text[:500_000])
    (folder / "d.txt").write_text("")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred short documents."""
    return jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", [f"document {number}" for number in range(200)])


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The sha256 of each token file, by name, after a preparation that was not interrupted."""
    directory = tmp_path_factory.mktemp("undisturbed")
    ranks = shared("gpt2.tiktoken")
    succeed(PREPARE, corpus, "--output", directory, "--tokenizer", ranks, "--executor", "inline", *COMMAND)
    return files_of(directory)


@pytest.fixture
def cluster() -> Iterator["subprocess.Popen[str]"]:
    """A Ray cluster of two nodes, started by tests/tokens/prepare/ray_cluster.py."""
    command = [sys.executable, "tests/tokens/prepare/ray_cluster.py"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()  # type: ignore[union-attr]
    process.wait(60)
