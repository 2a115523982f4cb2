"""The commands and names that were promised to the first users. Each command runs here, so that none can disappear."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.conftest import ROOT, MakeRun, metrics
from tests.evaluation.instruct.instructions import RECORDS
from tests.evaluation.judging.sessions import PRICES
from tests.judge_server import serve

TOP_LEVEL = (
    *("train.py", "find_batch_size.py", "prepare_data.py", "evaluate.py", "setup_lambda.sh", "requirements.txt"),
    *("runs", "model", "tests"),
)
PACKAGES = ("torch", "tiktoken", "datasets", "huggingface_hub", "safetensors", "numpy", "tqdm", "matplotlib", "openai")
OFFICIAL_APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # sha256 of LICENSE-2.0.txt


def run(line: str, **places: Path | str) -> Any:
    """Run one line of the contract, with a small run as the run directory. `RANKS=n` starts torchrun."""
    ranks, words = re.fullmatch(r"(?:RANKS=(\d) )?(.*)", line).groups()
    script, *arguments = words.format(**places).split()
    done = launch.run(ROOT / script, *arguments, ranks=int(ranks or 1))
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done


def test_a_run_is_trained_by_torchrun(make_run: MakeRun) -> None:
    directory = make_run(min_train_tokens=2 * 8 * 32)
    run("RANKS=2 train.py {run} --device cpu", run=directory)
    assert list(metrics(directory, "train_loss")) == [1, 2]
    assert (directory / "checkpoints/latest/model.safetensors").is_file()


@pytest.mark.parametrize("option", ["--find-max-microbatch", "--find-max-microbatch-size"])
def test_train_finds_the_largest_micro_batch(make_run: MakeRun, option: str) -> None:
    directory = make_run(global_batch_size=2, microbatch_size=1, validation_sequences=2, dataset="not needed")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for ranks, largest in (("", 2), ("RANKS=2 ", 1)):
        done = run(f"{ranks}train.py {{run}} {option} --device cpu", run=directory)
        assert "a CPU's memory is not measured" in done.stderr  # so no memory limit is claimed
        assert done.stdout.splitlines()[-1].startswith(
            f"largest micro-batch that fits and keeps the global batch: {largest} (2 = {largest} x"
        )
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_train_writes_the_micro_batch_only_if_asked(make_run: MakeRun) -> None:
    directory = make_run(global_batch_size=2, microbatch_size=1, validation_sequences=2)
    run("train.py {run} --find-max-microbatch --write --device cpu", run=directory)
    assert json.loads((directory / "train.json").read_text())["microbatch_size"] == 2
    assert {path.name for path in directory.iterdir()} == {"model.json", "train.json"}


def test_a_smoke_test_generates_text(copied: Path) -> None:
    done = run("evaluate.py smoke {run} --device cpu", run=copied)
    assert "[greedy]" in done.stdout and "[temperature 1]" in done.stdout


def test_an_instruction_fine_tune_is_judged(copied: Path, tmp_path: Path) -> None:
    data, prices = tmp_path / "records.json", tmp_path / "prices.json"
    data.write_text(json.dumps(RECORDS[:20]))
    prices.write_text(json.dumps(PRICES))
    run("evaluate.py instruct {run} --data {data} --epochs 1 --longest-answer 4 --device cpu", run=copied, data=data)
    with serve(lambda request: dict.fromkeys(request["answers"], 50)) as judge:  # replaces OpenAI's model
        done = run(
            "evaluate.py judge {run} --model scripted --base-url {url} --prices {prices} --verdicts {verdicts}",
            run=copied, url=judge.url, prices=prices, verdicts=tmp_path / "verdicts.jsonl",
        )  # fmt: skip
    assert judge.billed > 0 and "50" in done.stdout
    results = [json.loads(line) for line in (copied / "evaluations.jsonl").read_text().splitlines()]
    assert {"instruct", "judge"} <= {result["evaluation"] for result in results}


def test_the_top_level_and_the_packages_are_there() -> None:
    assert [name for name in TOP_LEVEL if not (ROOT / name).exists()] == []
    required = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert [name for name in PACKAGES if name not in required] == []


def test_readme_names_both_commands_before_everything_else() -> None:
    before_own_text = (ROOT / "README.md").read_text().partition("## Your own text")[0]
    assert re.findall(r"^make .*", before_own_text, re.MULTILINE) == [
        "make train    # install everything and train a small model on this machine: ten minutes",
        "make test     # run the tests that a contributor waits for: five minutes",
    ]


def test_the_licence_is_the_same_everywhere() -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(licence).hexdigest() == OFFICIAL_APACHE_2
    expected = {
        "README.md": ("[Apache License 2.0](LICENSE)", "The Lockstep authors"),
        "CONTRIBUTING.md": ("[Apache License 2.0](LICENSE)", "The Lockstep authors"),
        "CITATION.cff": ("license: Apache-2.0", "The Lockstep authors"),
        "pyproject.toml": ('license = "Apache-2.0"', "The Lockstep authors"),
    }
    for name, phrases in expected.items():
        text = (ROOT / name).read_text()
        assert [phrase for phrase in phrases if phrase not in text] == [], name
