"""The report of a preparation: tokens by split, problems with examples, and losses that are too large."""

from contextlib import nullcontext
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from tokens.format.manifest import FileEntry, Manifest, SourceRecord, TokenizerRecord
from tokens.prepare.command import PrepareCommand
from tokens.prepare.display import refuse_losses, report


def entry(tokens: int) -> FileEntry:
    return FileEntry(size_bytes=0, sha256="", max_id=0, tokens=tokens, dtype="uint16")


MANIFEST = Manifest(
    files={
        "train-00000-of-00002.safetensors": entry(600),
        "train-00001-of-00002.safetensors": entry(300),
        "validation.safetensors": entry(100),
    },
    documents=100,
    tokens=1000,
    tokenizer=TokenizerRecord(name="bytes", vocabulary_size=257, end_of_text_id=256, ranks_file=None),
    sources=[SourceRecord(name="a", files=1, bytes=10_000)],
)


def test_the_shards_of_a_split_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    report(PrepareCommand(("a",), output="out\x1b"), MANIFEST, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "out\\x1b: 100 documents, 1,000 tokens in 2.0 s",
        "  train in 2 files: 900 tokens (90.00%)",
        "  validation.safetensors: 100 tokens (10.00%)",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lost_documents": 1, "problems": {"not JSON": 1}}, ""),
        ({"lost_documents": 2}, "more than 1% of the input could not be read"),
        ({"lost_bytes": 100}, ""),
        ({"lost_bytes": 101}, "more than 1% of the input could not be read"),
        (
            {"problems": {"damaged file": 1, "wrong encoding": 1}},
            "1 document or more in damaged files and 1 document not in UTF-8",
        ),
        ({"problems": {"wrong encoding": 1}}, "1 document not in UTF-8 could not be read"),
    ],
)
def test_losing_over_one_percent_or_a_file_is_refused(changes: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(BadInput, match=f"{message}.*; the token files are complete without it")
        if message
        else nullcontext()
    ):
        refuse_losses(attrs.evolve(MANIFEST, **changes), 10_000, "the token files are")
