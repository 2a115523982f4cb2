"""Problem counts need little memory, however many there are."""

import gzip
from pathlib import Path

from tests.tokens.documents.reading import read
from tokens.documents import problems


def test_millions_of_bad_lines_are_counted_in_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b"x\n" * 50_000 + b'{"' + b'a": 1, "' * 50_000 + b'b": 1}\n')
    pieces, reader = read(tmp_path / "a.jsonl.gz")
    assert pieces == []
    summary = reader.problems.summary()
    assert [len(lines) for lines in summary["examples"].values()] == [problems.EXAMPLES, 1]
    longest = max(len(line) for lines in summary["examples"].values() for line in lines)
    assert longest <= problems.DETAIL_CHARACTERS + len(f"{tmp_path}/a.jsonl.gz: line 50001: no text field: ")
    assert summary["problems"] == {"not JSON": 50_000, "no text field": 1}
    assert reader.problems.lost_documents == 50_001
