"""`evaluate.py sample` streams a text of any length after a prompt from anywhere, and answers at a terminal."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BadInput
from evaluation.command_line import SampleCommand
from evaluation.sample.sample import print_samples, read_prompt, whole_characters
from evaluation.shared.load import Trained, load, locate
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.comparison.stored import refused
from tokens.tokenizer.tokenizer import ByteTokenizer


@pytest.fixture
def trained(finished: Path) -> Trained:
    return load(locate(str(finished), None), None, torch.device("cpu"))


@given(st.binary(), st.text())
def test_the_streamed_text_is_that_of_all_tokens(some: bytes, text: str) -> None:
    trained = Trained(None, ByteTokenizer(), None)  # type: ignore[arg-type]
    ids = [*some, 256, *text.encode(), *some, 300]
    assert "".join(whole_characters(trained, ids)) == trained.decode(ids)
    assert len([*whole_characters(trained, "é€😀".encode() * 3)]) == 28
    assert [part for part in whole_characters(trained, "aé€😀".encode()) if part] == ["a", "é", "€", "😀"]


def test_samples_are_those_of_their_seeds(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt longer than the context, a text longer than it, control characters escaped."""

    def printed(prompt: str, seed: int, samples: int = 1) -> str:
        print_samples(trained, SampleCommand(model="", tokens=70, samples=samples, temperature=3), prompt, seed)
        return capsys.readouterr().out

    prompt = "\x1b[2J\tdef " * 9
    each = [printed(prompt, seed) for seed in (5, 6, 7)]
    assert printed(prompt, 5, 3) == f"{'-' * 15}\n".join(each)
    assert len({*each}) == 3 and all(text.startswith("\\x1b[2J\tdef " * 9) for text in each)
    assert "\x1b" not in "".join(each) and len(printed("", 5)) > 50
    trained.network.final_norm.weight.data[0] = torch.nan
    with pytest.raises(BadInput, match="logits are not finite"):
        printed("def", 5)
    assert capsys.readouterr().out == "def\n"


def test_prompts_come_from_files_and_what_is_none_is_one_line(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("Straße\r\n\n", newline="")
    assert read_prompt(f"FILE:{tmp_path / 'p'}") == "Straße\r\n"
    (tmp_path / "p").write_bytes(b"ab\xff")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 31)
    for name, problem in (("p", "not UTF-8 at byte 2"), ("none", "No such file"), ("large", "at most"), ("", "folder")):
        with pytest.raises(BadInput, match=f"cannot be read as a prompt: .*{problem}"):
            read_prompt(f"FILE:{tmp_path / name}")
    assert "got 2 processes" in refused("sample", finished, ranks=2)


def test_a_reader_that_leaves_ends_the_sample(finished: Path) -> None:
    left = launch.start(ROOT / "evaluate.py", "sample", str(finished), "--device", "cpu", "--tokens", "1000000000")
    assert left.stdout.read(9)
    left.stdout.close()
    assert left.wait(60) == 1
    assert left.stderr.read() == ""


def start(run: Path, stdin: int, stdout: int, stderr: int) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "evaluate.py",
        "sample",
        "--device",
        "cpu",
        str(run),
        "--tokens",
        "1000000000",
        "--temperature",
        "0",
    ]
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell has it ignored in background
    return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=stderr, text=True, **heard)


def test_piped_text_is_the_prompt_and_an_interrupt_ends_it(finished: Path) -> None:
    process = start(finished, subprocess.PIPE, subprocess.PIPE, subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    with process.stdin:
        process.stdin.write("import os\n")
    assert process.stdout.read(20).startswith("import os")
    process.send_signal(signal.SIGINT)
    assert process.stdout.read().endswith("\n")
    assert process.stderr.read() == "evaluate.py: interrupted; stored results are kept\n"
    assert process.wait() == 130


def test_a_terminal_asks_answers_is_interrupted_and_left(finished: Path) -> None:
    controller, terminal = pty.openpty()
    process = start(finished, terminal, terminal, terminal)
    os.close(terminal)

    def until(wanted: str, more: int = 0) -> str:
        shown = ""
        while wanted not in shown or len(shown.partition(wanted)[2]) < more:
            shown += os.read(controller, 4096).decode(errors="replace")
        return shown

    assert "type the beginning of a text" in until("> ")
    for prompt in ("deg\x7ff", ""):  # edited by a backspace
        os.write(controller, f"{prompt}\r".encode())
        until("\r\n", more=40)
        process.send_signal(signal.SIGINT)
        until("\n> ")
    process.send_signal(signal.SIGINT)  # at a prompt
    until("\n> ")
    os.write(controller, b"\x04")
    assert process.wait(60) == 0
    os.close(controller)
