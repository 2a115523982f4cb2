"""`evaluate.py sample` streams a text of any length, after a prompt from an option, a file or stdin."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from common.errors import BadInput
from evaluation.command_line import SampleCommand
from evaluation.generation.generated_text import GeneratedText, sampling_of
from evaluation.generation.sample import print_samples, trace, training_data
from evaluation.shared.load import load
from evaluation.shared.model_location import locate
from tests import launch
from tests.conftest import ROOT


def start(words: list[str | Path], stdin: int, stdout: int, stderr: int) -> "subprocess.Popen[str]":
    line = [sys.executable, "evaluate.py", *map(str, words), "--device=cpu", "--tokens=1000000000", "--top-k=1"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore SIGINT
    try:
        return subprocess.Popen(line, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=stderr, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_samples_depend_only_on_their_seeds(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = load(locate(str(finished), None), None, torch.device("cpu"))

    def printed(prompt: str, seed: int, samples: int = 1) -> str:
        command = SampleCommand(model="", tokens=70, samples=samples, temperature=3, seed=seed)
        print_samples(trained, command, prompt)
        return capsys.readouterr().out

    texts = [printed("\x1b[2J\tdef " * 9, seed) for seed in (5, 6, 7)]  # longer than the context
    assert printed("\x1b[2J\tdef " * 9, 5, samples=3) == f"{'-' * 15}\n".join(texts)
    assert len({*texts}) == 3 and all(text.startswith("\\x1b[2J\tdef " * 9) and "\x1b" not in text for text in texts)
    trained.network.token_embedding.weight.data[0] = torch.nan
    with pytest.raises(BadInput, match="logits are not finite"):
        printed("", 5)


def test_trace_names_the_training_data_of_copied_parts(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = load(locate(str(finished), None), None, torch.device("cpu"))
    command = SampleCommand(model="", tokens=70, temperature=3, seed=5, trace=True)
    text = GeneratedText(trained, trained.encode("def "), 70, sampling_of(command, 0))
    assert "".join(text)
    new = text.tokens
    tokens = np.array([1, 2, *new[:30], 3, *b"<\x1b>", *new[20:60], 4, *new[:30]], np.uint16)
    save_file({"tokens": tokens}, tmp_path / "train.safetensors")
    print_samples(trained, command, "def ", training_data(trained, [tmp_path]))
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0] == (
        "trace: 60 of 70 new tokens occur in the training data, in 2 runs of 13 or more tokens; the longest, without "
        "overlaps:"
    )
    assert lines[1].startswith(f"  40 tokens from 20 on: {tmp_path}/train.safetensors, token 36: ")
    assert "<\\x1b>[" in lines[1]
    own_lines = trace(trained, training_data(trained, []), np.array(new))
    assert re.match(r"trace: \d+ of 70 new tokens occur in the training data", own_lines[0])
    words = ["sample", str(finished), "--device=cpu", "--prompt=x", "--tokens=2"]
    assert "trace: 0 of 2 new tokens" in launch.run(ROOT / "evaluate.py", *words, "--trace").stdout
    line = launch.run(ROOT / "evaluate.py", *words, "--against", str(tmp_path)).stderr
    assert line == "evaluate.py: sample: --against needs --trace; see --help\n"


def test_sampling_ends_when_the_reader_leaves(finished: Path) -> None:
    process = launch.start(ROOT / "evaluate.py", "sample", str(finished), "--device", "cpu", "--tokens", "1000000000")
    assert process.stdout.read(9)
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (1, "")


@pytest.mark.slow
def test_piped_prompt_is_continued_until_an_interrupt(finished: Path) -> None:
    process = start(["sample", finished], *[subprocess.PIPE] * 3)
    assert process.stdin and process.stdout and process.stderr
    with process.stdin:
        process.stdin.write("import os\n")
    assert process.stdout.read(20).startswith("import os")
    process.send_signal(signal.SIGINT)
    assert process.stdout.read().endswith("\n")
    assert process.stderr.read() == "evaluate.py: interrupted; stored results are kept\n"
    assert process.wait() == 130
