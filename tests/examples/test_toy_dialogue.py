"""The toy dialogue of the README."""

from pathlib import Path

import pytest

from common.errors import BadInput
from examples import toy_dialogue


def test_a_toy_world_never_replaces_a_users_file(tmp_path: Path) -> None:
    for _ in range(2):  # the same world again
        toy_dialogue.write(tmp_path, seed=0)
    (tmp_path / "conversations.jsonl").write_text("mine")
    with pytest.raises(BadInput, match=r"conversations.jsonl: is not the toy world of --seed 0, .* \(4 bytes\); move"):
        toy_dialogue.write(tmp_path, seed=0)
    assert (tmp_path / "conversations.jsonl").read_text() == "mine"
