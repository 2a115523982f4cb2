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
from tokens.tokenizer.loading import load_tokenizer


def start(run: Path, stdin: int, stdout: int, stderr: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "evaluate.py", "sample", "--device=cpu", str(run), "--tokens=1000000000", "--top-k=1"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    try:
        return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=stderr, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


@given(st.binary(), st.text())
def test_the_streamed_text_is_that_of_all_tokens(some: bytes, text: str) -> None:
    trained = Trained(None, load_tokenizer("bytes"), None)  # type: ignore[arg-type]
    ids = [*some, 256, *text.encode(), *some, 300]
    assert "".join(whole_characters(trained, ids)) == trained.decode(ids)
    assert [*whole_characters(trained, "aé€😀".encode())] == ["a", "é", "€", "😀", ""]


def test_samples_are_those_of_their_seeds(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = load(locate(str(finished), None), None, torch.device("cpu"))

    def printed(prompt: str, seed: int, samples: int = 1) -> str:
        print_samples(trained, SampleCommand(model="", tokens=70, samples=samples, temperature=3), prompt, seed)
        return capsys.readouterr().out

    each = [printed("\x1b[2J\tdef " * 9, seed) for seed in (5, 6, 7)]  # longer than the context
    assert printed("\x1b[2J\tdef " * 9, 5, samples=3) == f"{'-' * 15}\n".join(each)
    assert len({*each}) == 3 and all(text.startswith("\\x1b[2J\tdef " * 9) and "\x1b" not in text for text in each)
    trained.network.token_embedding.weight.data[0] = torch.nan
    with pytest.raises(BadInput, match="logits are not finite"):
        printed("", 5)


def test_prompts_of_files_end_before_their_last_line_end_or_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("Straße\r\n\n".encode())
    assert read_prompt(f"FILE:{tmp_path / 'text'}") == "Straße\r\n"
    (tmp_path / "text").write_bytes(b"ab\xff")
    for path, problem in ((tmp_path / "text", "in position 2"), (tmp_path, "directory"), ("/dev/zero", "more than")):
        with pytest.raises(BadInput, match=f"cannot be read as a prompt: .*{problem}"):
            read_prompt(f"FILE:{path}")


def test_a_reader_that_leaves_ends_the_sample(finished: Path) -> None:
    left = launch.start(ROOT / "evaluate.py", "sample", str(finished), "--device", "cpu", "--tokens", "1000000000")
    assert left.stdout.read(9)
    left.stdout.close()
    assert (left.wait(60), left.stderr.read()) == (1, "")


def test_piped_text_is_the_prompt_and_an_interrupt_ends_it(finished: Path) -> None:
    process = start(finished, *[subprocess.PIPE] * 3)
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
    process = start(finished, *[terminal] * 3)
    os.close(terminal)

    def until(wanted: str, more: int = 0) -> str:
        shown = ""
        while wanted not in shown or len(shown.partition(wanted)[2]) < more:
            shown += os.read(controller, 4096).decode(errors="replace")
        return shown

    assert "type how a text begins" in until("\n> ")
    for prompt in ("deg\x7ff", ""):  # edited by a backspace
        os.write(controller, f"{prompt}\r".encode())
        until("\r\n", more=40)
        process.send_signal(signal.SIGINT)
        until("\n> ")
    os.write(controller, b"\x04")
    assert process.wait(60) == 0
    os.close(controller)
