"""The output folder: locked, and nothing is written through links or waits for pipes."""

import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.conftest import shared
from tests.tokens.preparing import jsonl, tokens_of, write
from tokens.prepare import prepare as prepare_module
from tokens.prepare.output_folder import locked


@pytest.mark.parametrize("name", [".partial-train.safetensors", ".lock", ".units", "tokenizer.tiktoken"])
def test_nothing_is_written_through_links_in_the_output_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 100)
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    if name == ".units":
        victim.mkdir()
    else:
        victim.write_text("precious")
    begin = prepare_module.make_plan

    def plant(*arguments: Any) -> Any:
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(victim)
        return begin(*arguments)

    monkeypatch.setattr(prepare_module, "make_plan", plant)  # after leftovers of an earlier command were deleted
    if name == ".lock":
        (tmp_path / "out" / name).symlink_to(victim)
    write(tmp_path / "out", source, tokenizer=str(shared("gpt2.tiktoken")))
    assert not list(victim.iterdir()) if name == ".units" else victim.read_text() == "precious"
    assert tokens_of(tmp_path / "out", "train") == [5239, 50256] * 100


def test_two_commands_do_not_prepare_the_same_tokens_at_once(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(BadInput, match="another process prepares these tokens"):
        write(tmp_path / "out", source)
    write(tmp_path / "out", source)


@pytest.mark.parametrize(
    ("name", "says"),
    [(".lock", "cannot be written: is a pipe, wanted a regular file"), (".scratch", "cannot be read: is a pipe")],
)
def test_a_pipe_in_an_output_folder_is_not_waited_for(tmp_path: Path, name: str, says: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["text"] * 20)
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(BadInput, match=rf"{name}: {says}"):
        write(tmp_path / "out", source)
