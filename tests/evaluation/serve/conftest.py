"""A chat model that was trained for a few steps, and real servers on loopback that serve it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests import launch
from tests.conftest import complete, write_run
from tests.launch import ROOT

CONTEXT = 512
Serve = Callable[..., Any]


@attrs.frozen
class Served:
    """A server that answers at `url`."""

    process: launch.Process
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@pytest.fixture(scope="session")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on conversations for two steps. Tests only read it."""
    folder = tmp_path_factory.mktemp("chat")
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three " * 20}]
    (folder / "conversations.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 40)
    options = ("--template", "turns", "--context-length", str(CONTEXT), "--tokenizer", "bytes")
    source, tokens = str(folder / "conversations.jsonl"), str(folder / "tokens")
    tail = ("--split", "tail", "--validation-fraction", "0.2")
    launch.run(ROOT / "prepare_data.py", source, "--output", tokens, *options, *tail).check_returncode()
    keys = {"objective": "answers", "min_train_tokens": 2 * CONTEXT, "microbatch_size": 1, "validation_interval": None}
    run = write_run(folder / "run", Path(tokens), {"vocab_size": 261, "context_length": CONTEXT}, **keys)
    complete(run)
    return run


@pytest.fixture(scope="session")
def serve() -> Serve:
    """Return a context manager that serves a run. The first line of the server's output has the address."""

    @contextmanager
    def serving(run: Path, *options: str, **environment: str) -> Iterator[Served]:
        command = ("serve", str(run), "--device=cpu", "--port=0", *options)
        process = launch.start(ROOT / "evaluate.py", *command, environment=environment)
        try:
            line = process.stdout.readline()
            assert " is the chat page" in line, process.communicate()
            yield Served(process, line.partition(": ")[2].partition(" ")[0])
        finally:
            process.send_signal(15)
            process.wait(launch.TIMEOUT_SECONDS)

    os.environ.pop("LOCKSTEP_API_KEY", None)
    return serving


@pytest.fixture(scope="session")
def served(chat_run: Path, serve: Serve) -> Iterator[Served]:
    """A server that many tests share."""
    with serve(chat_run) as server:
        yield server
