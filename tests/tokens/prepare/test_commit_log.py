"""Damaged or foreign commit logs and plans are refused in one line."""

import os
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.tokens.preparing import jsonl, write
from tokens.prepare import verify as audit
from tokens.prepare.commit_log import COMMITS, CommitLog


@pytest.mark.parametrize("name", ["plan.json", "ledger.jsonl"])
@pytest.mark.parametrize(
    "content", [b'{"a": ' * 100_000, b"[1]", b"\xff", b'{"cut": 3}', b'{"parts": {"train": {"tokens": "5"}}}', b"{}"]
)
def test_a_damaged_plan_or_ledger_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", ["text"] * 20), tmp_path / "out"
    write(out, source)
    path = out / name
    path.write_bytes((path.read_bytes() if name == "ledger.jsonl" else b"") + content + b"\n")
    with pytest.raises(BadInput, match=rf"{name}: damaged: "):
        audit.status(str(out))


def test_a_pipe_in_the_place_of_the_ledger_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / COMMITS)
    with pytest.raises(BadInput, match=r"ledger\.jsonl: cannot be read: is a pipe, wanted a regular file"):
        CommitLog(tmp_path, "a plan")
