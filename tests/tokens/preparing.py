"""Helpers that prepare tokens in tests: small sources, and runs of prepare_data.py in this process or as a command."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests import launch
from tests.conftest import ROOT, shared
from tests.walks import children, kill
from tokens.format.manifest import Manifest
from tokens.prepare.command import PrepareCommand
from tokens.prepare.prepare import prepare

PREPARE = [sys.executable, "prepare_data.py"]
CRASH = [sys.executable, "tests/tokens/prepare/crash.py"]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def write(directory: Path, source: Path, *, workers: int = 0, bucket: str | None = None, **options: Any) -> Manifest:
    """Prepare a source with the bytes tokenizer, in this process or with workers. Return the manifest."""
    executor = {"executor": "process", "workers": workers} if workers else {"executor": "inline"}
    place = {"output": str(directory)} if bucket is None else {"output": bucket, "scratch": directory}
    fixed = {"sources": (str(source),), "tokenizer": "bytes", "split": "tail", "validation_fraction": 0.0}
    return prepare(PrepareCommand(**(fixed | executor | place | options)))


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokens_of(directory: Path, split: str) -> list[int]:
    tensors = load_file(directory / f"{split}.safetensors")  # safetensors' own reader
    assert list(tensors) == ["tokens"]
    assert tensors["tokens"].dtype == np.uint16
    return tensors["tokens"].tolist()


def texts_of(directory: Path, split: str) -> list[str]:
    path = directory / f"{split}.safetensors"
    ids = tokens_of(directory, split) if path.exists() else []
    return "".join("\0" if token == 256 else chr(token) for token in ids).split("\0")[:-1]


def files_of(directory: Path) -> dict[str, str]:
    """Return the sha256 of each token file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")}


def run(command: list[str], *options: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end. prepare_data.py and its variants are run by tests/launch.py.

    A preparation has no workers unless the options ask for some, because the imports of workers would take longer than
    everything else.
    """
    # `launch.run` forks a process that has imported the packages.
    if command in (PREPARE, CRASH) and "PYTHONPATH" not in environment:
        if "--output" in options and not {"--workers", "--executor", "tokenizer", "download"} & {*options}:
            options = (*options, "--executor", "inline")
        return launch.run(ROOT / command[1], *map(str, options), environment=environment)
    return launch.execute(*command, *options, seconds=120, **{"PYTHONPATH": PYTHONPATH} | environment)


def succeed(command: list[str], *options: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command and check that its exit status is 0."""
    done = run(command, *options, **environment)
    assert done.returncode == 0, done.stderr
    return done


PIPES: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
FRACTION = ("--validation-fraction", "0.02")
COMMAND = (*FRACTION, "--unit-bytes", "100000")


def kill_again_and_again(
    sources: list[str], out: Path, expected_files: dict[str, str], kills: int, ray_address: str
) -> None:
    """Start preparations that write to `out`, until `kills` of them have been killed. Then let the last one finish."""
    draw, hits = random.Random(kills), 0
    ways = [*(("--workers", number) for number in "112233"), ("--executor", "inline")]
    ways.append(("--executor", "ray", "--ray-address", ray_address))
    while True:
        options = draw.choice(ways)
        command = [*PREPARE, *sources, "--output", str(out), "--tokenizer", str(shared("gpt2.tiktoken")), *options]
        before = ledger_lines(out)
        process = subprocess.Popen([*command, *FRACTION, "--unit-bytes", "20000"], cwd=ROOT, **PIPES)
        if hits == kills:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            return
        wait_for_lines(process, out, before + draw.randint(0, 12))  # 0: kill it while it starts
        time.sleep(draw.uniform(0, 0.1))
        victims = draw.choice(["a worker", "the coordinator", "everything"])
        workers_now = children(process)
        chosen = [draw.choice(workers_now)] if victims == "a worker" and workers_now else [process.pid]
        for pid in [*chosen, *(workers_now if victims == "everything" else [])]:
            kill(pid)
        if victims == "a worker":  # the command continues; then the coordinator is killed as well
            time.sleep(draw.uniform(0, 1))
            kill(process.pid)
        process.communicate(timeout=60)  # also waits for its workers, which share its pipes and end by themselves
        if process.returncode == 0:  # the preparation finished before the kill
            assert files_of(out) == expected_files
            shutil.rmtree(out)
            continue
        hits += 1
        print(f"{hits:3}  {' '.join(options[:2]):18} kill -9 {victims:15} from {before} to {ledger_lines(out)} lines")


def ledger_lines(directory: Path) -> int:
    ledger = directory / "ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def wait_for_lines(process: "subprocess.Popen[str]", directory: Path, line_count: int) -> None:
    """Wait until a ledger has `line_count` lines, or until the process that writes the ledger ends."""
    deadline = time.monotonic() + 230  # after this time, the process must be hanging
    while ledger_lines(directory) < line_count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
