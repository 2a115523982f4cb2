"""A trained tokenizer depends only on sources and options, works in other programs, and is never written partially."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import EXIT_INTERRUPTED, BadInput
from tests import launch
from tests.conftest import ROOT, slow
from tests.tokens.gpt2 import strange_texts
from tests.tokens.preparing import PIPES, PREPARE, jsonl, run
from tests.walks import children, kill
from tokens.prepare.command import SPECIAL, TokenizerCommand
from tokens.prepare.trained_tokenizer import train_tokenizer
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.tokenizer import PROBE

TEXTS = [f"Zeile {n}: for x in range({n * 37}):\n        return 'größer'  # {n}\n\n" for n in range(300)]


def train(output: Path, *sources: Path | str, **options: Any) -> list[str]:
    return train_tokenizer(TokenizerCommand(tuple(map(str, sources)), output=output, **{"vocab_size": 400} | options))


@pytest.mark.slow
def test_threads_and_hash_seeds_do_not_change_bytes(tmp_path: Path) -> None:
    contents = set()
    for threads, seed in (("1", "0"), ("2", "1"), ("8", "random")):
        path = tmp_path / f"{threads}.json"
        options = ["stdlib", "--sample-bytes", "500000", "--vocab-size", "1000", "--output", path]
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        done = launch.execute(sys.executable, "prepare_data.py", "tokenizer", *options, **environment)
        assert done.returncode == 0 and "trained on 500,000 bytes: 4.1%, spread evenly, of" in done.stdout, done.stderr
        contents.add(path.read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("pattern", ["cl100k", "gpt2", "o200k"])
def test_transformers_gives_the_same_ids(tmp_path: Path, pattern: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "own.json"
    train(path, jsonl(tmp_path / "a.jsonl", TEXTS), pattern=pattern)
    tokenizer, library_tokenizer = (
        load_tokenizer(str(path)),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(path)),
    )
    assert tokenizer.vocabulary_size == len(library_tokenizer) == 400
    assert tokenizer.special_tokens == library_tokenizer.get_added_vocab() and tokenizer.end_of_text_id == 400 - SPECIAL
    for text in [*PROBE, *TEXTS[:20], *strange_texts(300)]:
        ids = tokenizer.encode(text).tolist()
        assert ids == library_tokenizer.encode(text, split_special_tokens=True), text
        assert tokenizer.decode(ids) == text
    digits = {"cl100k": 3, "o200k": 3}.get(pattern)
    assert all(digits is None or len(token) <= digits for token in tokenizer.coder.ranks if token.isdigit())


def test_an_error_states_the_largest_possible_vocabulary(tmp_path: Path) -> None:
    source, path = jsonl(tmp_path / "a.jsonl", ["low lower lowest"] * 3), tmp_path / "new" / "own.json"
    with pytest.raises(BadInput, match=r"--vocab-size 400: 48 bytes of text give only (\d+) ids") as refused:
        train(path, source)
    most = int(str(refused.value).partition("give only ")[2].split()[0])
    assert not path.exists()
    assert f"{most} ids, {SPECIAL} of them special" in train(path, source, vocab_size=most)[0]


def test_an_existing_tokenizer_file_is_never_replaced(tmp_path: Path) -> None:
    source, path = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "own.json"
    with source.open("a") as file:
        file.write('{"text": null}\n' * 9)
    done = run(PREPARE, "tokenizer", source, "--vocab-size", "300", "--output", path)
    assert done.returncode == 1 and path.exists()
    assert done.stderr.startswith("bad documents: 9 null text; 9 documents and 0 bytes of input are left out:\n")
    assert done.stderr.endswith(f"more than 1% of the input could not be read; {path} is complete without it\n")
    before = path.read_bytes()
    done = run(PREPARE, "tokenizer", source, "--vocab-size", "301", "--output", path)
    assert (
        done.stderr
        == f"prepare_data.py: {path}: exists; pass another --output, or delete it to train the tokenizer again\n"
    )
    assert path.read_bytes() == before
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BadInput, match=r"empty\.txt: no text could be read; nothing was written"):
        train(tmp_path / "other.json", tmp_path / "empty.txt")


@pytest.mark.parametrize("way", ["full disk", *slow("Ctrl-C", "kill the trainer")])
def test_interrupted_training_leaves_no_file(tmp_path: Path, way: str) -> None:
    size = "300" if way == "full disk" else "5000"
    words = ["tokenizer", "stdlib", "--vocab-size", size, "--output", str(tmp_path / "own.json")]
    if way == "full disk":
        words += ["--sample-bytes", "99999"]
        done = launch.finish(launch.start(ROOT / "prepare_data.py", *words, file_bytes=999))
    else:
        process = subprocess.Popen([*PREPARE, *words], cwd=ROOT, start_new_session=True, **PIPES)
        launch.wait_until(lambda: any(map(_is_trainer, children(process))), process)
        if way == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            kill(next(filter(_is_trainer, children(process))))
        done = launch.finish(process)
    assert done.returncode == (EXIT_INTERRUPTED if way == "Ctrl-C" else 1)
    messages = {"Ctrl-C": "interrupted", "kill the trainer": "lower --sample-bytes", "full disk": "cannot be written"}
    assert len(done.stderr.splitlines()) == 1 and messages[way] in done.stderr, done.stderr
    assert [*tmp_path.iterdir()] == []


def _is_trainer(pid: int) -> bool:
    """Return whether a process has loaded the trainer's library."""
    try:
        return "tokenizers" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
