"""Bad inputs for the four scripts always give clear errors. Many of the inputs are generated. Run: `make test-long`.

Each command runs in a copy of a workspace in which one input is damaged. The outcomes are:

    clear      an error line for each problem and a non-zero status, or the same result as with good input
    traceback  a Python traceback, death by a signal, or an error that has no printable line or repeats a line
    hang       a command that does not end within HANG_SECONDS
    silent     status 0 although the input is bad, or a result that differs from the result with good input
    lost       a checkpoint, token file or answer that existed before no longer exists
"""

import hashlib
import json
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import attrs
import pytest

from tests import launch
from tests.conftest import ROOT, write_run
from tests.long.fuzz.cases import cases
from tests.long.fuzz.damage import Case
from tests.model.architectures import QWEN3

SEED = os.environ.get("FUZZ_SEED", "0")
ONLY = os.environ.get("FUZZ_ONLY", "")  # run only the cases whose "AREA: NAME" contains this text
WORKERS = 2
HANG_SECONDS = 90
MEMORY_BYTES = 6 << 30  # the most memory that a command may use
CLASSES = ("clear", "traceback", "hang", "silent", "lost")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
PROTECTED = ("checkpoints", "archive", "tokens", "answers")  # files in these folders must never be lost
STEPS = 8  # steps of the whole run, which was stopped at step 4 and has checkpoints at steps 2 and 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_bad_input_is_always_one_clear_error(tmp_path: Path) -> None:
    chosen_cases = [case for case in cases() if ONLY in f"{case.area}: {case.name}"]
    assert ONLY or len(chosen_cases) >= 500
    workspaces: queue.Queue[Workspace] = queue.Queue()
    for number in range(WORKERS):
        workspaces.put(Workspace(tmp_path / f"workspace-{number}"))

    def attempt(case: Case) -> Outcome:
        workspace = workspaces.get()
        try:
            return workspace.attempt(case, f"{SEED}: {case.area}: {case.name}")
        finally:
            workspaces.put(workspace)

    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(attempt, chosen_cases))
    attempts = list(zip(chosen_cases, outcomes, strict=True))
    counts = Counter((case.area, outcome.verdict) for case, outcome in attempts)
    print(f"\nseed {SEED}: {len(attempts)} bad inputs; FUZZ_SEED=N generates others, FUZZ_ONLY=NAME repeats some")
    print(f"{'':<14}", *(f"{name:>10}" for name in CLASSES))
    for area in dict.fromkeys(case.area for case in chosen_cases):
        print(f"{area:<14}", *(f"{counts[area, name]:>10}" for name in CLASSES))
    print(f"{'in all':<14}", *(f"{sum(outcome.verdict == name for outcome in outcomes):>10}" for name in CLASSES))
    wrong = [
        f"{outcome.verdict}: {case.area}: {case.name}: status {outcome.status}: {outcome.output[-600:]!r}"
        for case, outcome in attempts
        if outcome.verdict != "clear"
    ]
    assert not wrong, "\n".join(wrong)


@attrs.frozen
class Outcome:
    """The outcome of a command with a bad input."""

    verdict: str  # one of CLASSES
    status: int | None
    output: str


class Workspace:
    """A folder that is created again for each case. Its path never changes, because its files contain this path."""

    def __init__(self, directory: Path):
        self._here, self._template = directory, directory.with_name(f"{directory.name}-template")
        _fill(self._here)
        self._here.rename(self._template)
        self._renew()
        _run("train.py", str(self._here / "run"), "--device", "cpu")
        self._good_state = self._final_state()
        assert self._good_state is not None
        self._good_outputs: dict[tuple[str, ...], str] = {}

    def attempt(self, case: Case, seed: str) -> Outcome:
        """Damage a fresh copy of the files, run the command, and return the outcome."""
        if case.survives and not _trains(case) and case.command not in self._good_outputs:
            self._renew()
            self._good_outputs[case.command] = self._start(case.command).communicate(HANG_SECONDS)[0]
        self._renew()
        case.damage(self._here, random.Random(seed))
        before = self._contents()
        process = self._start(case.command)
        with suppress(ProcessLookupError):  # reading an endless file must not exhaust the machine's memory
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            output, errors = process.communicate(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (process.pid, *process.children()):
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return Outcome("hang", None, "")
        status = process.returncode
        assert status is not None
        verdict = "clear"
        if before - self._contents():
            verdict = "lost"
        elif not _is_clear(case.command[0], status, output, errors):
            verdict = "traceback"
        elif status == 0 and not (case.survives and self._same_result(case, output)):
            verdict = "silent"
        return Outcome(verdict, status, output + errors)

    def _start(self, command: tuple[str, ...]) -> launch.Process:
        script, *arguments = (part.replace("{}", str(self._here)) for part in command)
        environment = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "sk-fuzz", "HF_HOME": str(self._here / "hub")}
        return launch.start(ROOT / script, *arguments, environment=environment)

    def _renew(self) -> None:
        shutil.rmtree(self._here, ignore_errors=True)
        shutil.copytree(self._template, self._here, symlinks=True)

    def _contents(self) -> set[str]:
        """Return the hashes of all protected files. After the command, every hash must still belong to a file."""
        files = [path for name in PROTECTED for folder in self._here.rglob(name) for path in folder.rglob("*")]
        return {hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file() and _is_small(path)}

    def _same_result(self, case: Case, output: str) -> bool:
        if _trains(case):
            return self._final_state() == self._good_state
        return _results(output) == _results(self._good_outputs[case.command])

    def _final_state(self) -> str | None:
        state = self._here / "run" / "checkpoints" / f"step-{STEPS:08d}" / "state.json"
        return json.loads(state.read_text())["state_sha256"] if state.is_file() else None


def _trains(case: Case) -> bool:
    return case.command[0] == "train.py" and "--replay" not in case.command


def _results(output: str) -> list[str]:
    return [line for line in output.splitlines() if not line.startswith("NOTE: ")]


def _is_small(path: Path) -> bool:
    return path.stat().st_size < 1 << 30


def _is_clear(script: str, status: int, output: str, errors: str) -> bool:
    """Return whether a command ended as promised: no traceback, no control characters, and lines with the reasons."""
    if status < 0 or "Traceback" in output + errors or CONTROL.search(output + errors):
        return False
    if status == 0:
        return True
    reasons = [line for line in errors.splitlines() if line.startswith(f"{script}: ") or ": error: " in line]
    return 0 < len(reasons) == len({*reasons})


def _run(script: str, *arguments: str) -> None:
    done = launch.run(ROOT / script, *arguments)
    assert done.returncode == 0, (script, arguments, done.stdout, done.stderr)


def _fill(here: Path) -> None:
    """Write texts, tokens, an unfinished run, two exported models, answers for a judge, records, and price lists."""
    texts, tokens, run = here / "texts", here / "tokens", here / "run"
    texts.mkdir(parents=True)
    words = random.Random(0)
    lines = [" ".join(words.choices(["step", "token", "loss", "rank", "data", "a"], k=12)) for _ in range(4000)]
    (texts / "a.txt").write_text("\n".join(lines))
    (texts / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[:500]))
    _run(
        *("prepare_data.py", str(texts / "b.jsonl"), "--output", str(tokens), "--tokenizer", "bytes"),
        *("--validation-fraction", "0.1", "--executor", "inline"),
    )
    write_run(run, tokens, checkpoint_interval=2, keep_checkpoints=20)
    _run("train.py", str(run), "--device", "cpu", "--max-steps", "4")
    _run("evaluate.py", "export", str(run), str(here / "export"))
    rotary = write_run(
        here / "rotary", tokens, model=QWEN3 | {"vocab_size": 257, "tie_weights": False, "n_kv_heads": 1}
    )
    _run("train.py", str(rotary), "--device", "cpu", "--max-steps", "1")
    _run("evaluate.py", "export", str(rotary), str(here / "rotary-export"))
    records = [{"instruction": f"say {n}", "input": "", "output": f"{n}"} for n in range(20)]
    (here / "records.json").write_text(json.dumps(records))
    (here / "answers").mkdir()
    for model in ("one", "two"):
        answers = [{**record, "answer": f"{model}!", "reference_loss": 1.0} for record in records[:3]]
        content = {"model": model, "home": None, "seed": 0, "settings": {}, "answers": answers}
        (here / "answers" / f"{model}.json").write_text(json.dumps(content))
    for origin in (ROOT / "training" / "planning" / "machines.json", ROOT / "evaluation" / "judging" / "prices.json"):
        shutil.copy(origin, here)
