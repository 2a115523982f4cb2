"""Trained and measured runs to compare."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import complete, write_run
from tests.evaluation.comparison.stored import output_of
from tests.tokens.preparing import PREPARE, succeed


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of 3 and 8 steps, and a run of 8 steps with another seed, measured on at least 200 documents."""
    folder = tmp_path_factory.mktemp("compared")
    modules = [Path(os.__file__).with_name(name) for name in ("argparse.py", "tarfile.py", "typing.py")]
    pieces = "\n".join(path.read_text() for path in modules).split("\n\n")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    options = ("--tokenizer", "bytes", "--validation-fraction", "0.5", "--output", folder / "tokens")
    succeed(PREPARE, folder / "text.jsonl", *options)
    directories = {
        name: write_run(folder / name, folder / "tokens", random_seed=seed)
        for name, seed in (("short", 1), ("long", 1), ("other", 2))
    }
    for name, directory in directories.items():
        complete(directory, "--price-per-hour", "3600", *(["--max-steps", "3"] if name == "short" else []))
    output_of("loss", *directories.values(), "--from", "1000", "--count", "40000", "--device", "cpu")
    return directories
