"""Helpers that many tests share: real text, small run directories, and real torchrun processes.

While these tests run, the shapes annotated in `model/` are checked, so that an accidental broadcast fails.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does, so that a single process computes in the same way as a rank
# `make test` sets these variables. They are removed, so that make in a test prints "make: " and uses only its own
# flags.
for name in ("MAKELEVEL", "MAKEFLAGS"):
    os.environ.pop(name, None)

from jaxtyping import install_import_hook

install_import_hook("model", "beartype.beartype")

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from tests import launch
from tests.bucket_server import BucketServer, serve_bucket
from tests.launch import ROOT
from tests.machines import Machines, two_machines
from tests.messages import pytest_runtest_makereport, whole_messages  # noqa: F401  # used by every test
from tokens.format.header import write_weighted
from tokens.format.token_file import open_split
from training.parallel import process_group
from training.parallel.process_group import Ranks

# A shell makes its background jobs, and therefore their children, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
hypothesis.settings.register_profile("house", deadline=None)  # the time of an example depends on the machine's load
hypothesis.settings.load_profile("house")

MakeRun = Callable[..., Path]  # the fixture `make_run`
KILLED = ROOT / "tests" / "killed_rename.py"  # runs another script and kills it at a rename
SHARED_DATA = ROOT.parent / "shared" / "data"

TINY_MODEL: dict[str, Any] = {
    "vocab_size": 257,
    "context_length": 32,
    "emb_dim": 32,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.0,
    "qkv_bias": True,
    "tie_weights": True,
}
TINY_TRAIN = {
    "min_train_tokens": 8 * 8 * 32,
    "microbatch_size": 2,
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "schedule_learning_rate": True,
    "warmup_period_percent": 25,
    "clipping_max_norm": 1.0,
    "checkpoint_interval": 4,
    "validation_interval": 4,
    "validation_sequences": 10,
    "log_interval": 1,
}

# Changes that make the quickstart small enough for tests of documented commands
SMALL_QUICKSTART: dict[str, dict[str, Any]] = {
    "train.json": {"min_train_tokens": 6 * 2048, "checkpoint_interval": 3, "validation_interval": 3},
    "model.json": {"emb_dim": 32, "n_heads": 2, "n_layers": 1},
}


def shared(name: str) -> Path:
    """Return the path of a file with real input; skip the test or module if it does not exist."""
    path = SHARED_DATA / name
    if not path.is_file():
        reason = f"needs {name}, real input that is stored next to the repository on its developers' machines"
        pytest.skip(reason, allow_module_level=True)
    return path


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append each finished test to the file named by REACHED_TESTS, so that .ci/run can list the unreached tests."""
    file = os.environ.get("REACHED_TESTS")
    if file and "PYTEST_XDIST_WORKER" not in os.environ and (report.failed or report.when == "teardown"):
        with Path(file).open("a") as reached:
            reached.write(f"{'FAILED ' if report.failed else ''}{report.nodeid}\n")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail the test that leaves a process group behind. Otherwise, a later test that starts a group would fail."""
    yield
    assert not torch.distributed.is_initialized()


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """Start a process group on the CPU that contains only this process."""
    yield process_group.start("cpu", 60)
    process_group.stop()


@pytest.fixture(scope="session")
def _served_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with serve_bucket(tmp_path_factory.mktemp("bucket") / "seaweedfs") as server:
        yield server


@pytest.fixture
def bucket_server(_served_bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    """Serve the bucket `runs`, and set the environment variables for it. Each test should use its own prefix."""
    _served_bucket.calm()
    for name, value in _served_bucket.environment().items():
        monkeypatch.setenv(name, value)
    return _served_bucket


@pytest.fixture(scope="session")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bytes of four modules of Python's library, prepared by the real command."""
    directory = tmp_path_factory.mktemp("tokens") / "bytes"
    sources = [str(Path(os.__file__).with_name(name)) for name in ("argparse.py", "os.py", "tarfile.py", "typing.py")]
    options = ("--tokenizer", "bytes", "--split", "tail", "--validation-fraction", "0.25", "--executor", "inline")
    launch.run(ROOT / "prepare_data.py", *sources, "--output", str(directory), *options).check_returncode()
    return directory


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> Path:
    """Rows of 32 bytes in which all, many, few or no tokens add to the loss, as in conversations."""
    directory, generator = tmp_path_factory.mktemp("tokens") / "answers", np.random.default_rng(0)
    directory.mkdir()
    for split, rows in (("train", 256), ("validation", 40)):
        tokens = open_split(token_files, split).read(0, 32 * rows + 1)
        shares = generator.choice([0.0, 0.1, 0.5, 1.0], rows)
        weights = np.append(generator.random((rows, 32)) < shares[:, None], False)
        write_weighted(directory / f"{split}.safetensors", tokens, weights, 32)
    return directory


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines that are emulated on this machine. If that is impossible, the test is skipped."""
    with two_machines(tmp_path) as pair:
        yield pair


@pytest.fixture
def make_run(tmp_path: Path, token_files: Path) -> MakeRun:
    """Return a function that writes a tiny run directory.

    Its keyword arguments override keys of train.json, and `model` overrides keys of model.json.
    """

    def make(name: str = "run", model: dict[str, Any] | None = None, **train: Any) -> Path:
        return write_run(tmp_path / name, token_files, model, **train)

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, token_files: Path) -> Path:
    """A finished run with two checkpoints. A test may read it or change a copy."""
    run = write_run(tmp_path_factory.mktemp("finished") / "run", token_files)
    complete(run)
    return run


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, which a test may damage."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def write_run(directory: Path, token_files: Path, model: dict[str, Any] | None = None, **train: Any) -> Path:
    """Write a tiny run directory and return it."""
    directory.mkdir()
    (directory / "model.json").write_text(json.dumps(TINY_MODEL | (model or {})))
    (directory / "train.json").write_text(json.dumps({"dataset": str(token_files)} | TINY_TRAIN | train))
    return directory


def train(run: Path, *options: str, **keywords: Any) -> Any:
    """Run train.py, or a script that runs it, to its end. `keywords` are passed to `start_training`."""
    return launch.finish(start_training(run, *options, **keywords))


def complete(run: Path, *options: str, **keywords: Any) -> Any:
    """Run train.py as `train` does, and check that its status is 0."""
    done = train(run, *options, **keywords)
    assert done.returncode == 0, done.stderr
    return done


def one_line(done: Any) -> str:
    """Return the line with which a command has refused to run. All ranks together print only one such line."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if re.match(r"\w+\.py: ", line)]
    assert len(lines) == 1, done.stderr
    assert f'{lines[0].partition(":")[0]}", line' not in done.stderr  # no traceback, except torchrun's own
    return lines[0]


def only_line(done: Any) -> str:
    """Return the line with which a command of one process has refused to run. It must be the only line of stderr."""
    assert done.stderr.count("\n") == 1, done.stderr
    return one_line(done)


def start_training(
    run: Path,
    *options: str,
    ranks: int = 1,
    script: Path = ROOT / "train.py",
    as_user: bool = False,
    torchrun: bool = False,
    **keywords: Any,
) -> Any:
    """Start train.py, or a script that runs it, on the CPU. If there is more than one rank, use torchrun.

    With `as_user`, the script is started with a command line, as a user would start it, and `keywords` may have an
    `environment`. In this case, `torchrun` means that torchrun is used even for one rank. Otherwise, tests/launch.py
    starts the script in processes that have already imported torch, and `keywords` are passed to `launch.start`.
    """
    if not as_user:
        return launch.start(script, str(run), *on_the_cpu(options), ranks=ranks, **keywords)
    return subprocess.Popen(
        train_command(run, *options, ranks=ranks, script=script, torchrun=torchrun),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(keywords.get("environment") or {})},
        start_new_session=True,  # a separate process group, like the foreground job of a terminal
    )


def train_command(
    run: Path, *options: str, ranks: int, script: Path = ROOT / "train.py", torchrun: bool = False
) -> list[str]:
    """Return the command line of a run on the CPU, with torchrun for more than one rank or if `torchrun` is true."""
    launcher = [sys.executable]
    if ranks > 1 or torchrun:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(script), str(run), *on_the_cpu(options)]


def on_the_cpu(options: Sequence[str]) -> list[str]:
    """Add --device cpu to options of train.py, unless they name a device or plan for other machines."""
    return [*options] if {"--device", "--plan"} & {*options} else ["--device", "cpu", *options]


def in_terminal(command: list[str]) -> tuple[int, list[str]]:
    """Run a command with a terminal as its stderr; return its status and the lines that the terminal showed."""
    line = f"stty rows 40 cols 160; exec {shlex.join(command)} > /dev/null"
    done = subprocess.run(["script", "-qefc", line, "/dev/null"], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    return done.returncode, done.stdout.decode().replace("\n", "\r").split("\r")


def seal_again(checkpoint: Path) -> None:
    """Compute the hashes and the manifest of a checkpoint again, after a test has changed its files."""
    from common.files import sha256
    from training.checkpoints.directory import OPTIMIZER, WEIGHTS
    from training.checkpoints.saved_state import FIELDS_SHA256, combined_sha256, fields_sha256

    state = json.loads((checkpoint / "state.json").read_text())
    digests = {name: sha256(checkpoint / name) for name in (WEIGHTS, OPTIMIZER)}
    state["state_sha256"] = combined_sha256(state["step"], digests)
    state[FIELDS_SHA256] = fields_sha256(state)
    (checkpoint / "state.json").write_text(json.dumps(state, indent=2))
    forge_manifest(checkpoint)


def change_weights(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a checkpoint's weights with a function, and seal the checkpoint again."""
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors")
    seal_again(checkpoint)


def forge_manifest(checkpoint: Path) -> None:
    """Write a new manifest for a checkpoint whose files were changed, but leave the other hashes as they are."""
    from common.files import sha256
    from training.checkpoints.directory import MANIFEST
    from training.checkpoints.saved_state import FileDigest, manifest_text

    files = {
        path.name: FileDigest(path.stat().st_size, sha256(path))
        for path in checkpoint.iterdir()
        if path.name != MANIFEST
    }
    (checkpoint / MANIFEST).write_text(manifest_text(files))


def slow(*cases: Any) -> list[Any]:
    """Return parameter sets that the fast suite skips. A set of several parameters is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def metrics(run: Path, key: str) -> dict[int, float]:
    """Return the values of one measurement in a run's metrics, by step."""
    from training.telemetry.metrics_log import read_metrics

    return {record["step"]: record[key] for record in read_metrics(run) if key in record}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the tracked files, with a small quickstart, and with a `.venv` that has this Python's packages."""
    if not Path(sys.prefix, "installed-test").exists():
        pytest.skip("runs only in the .venv that `make test` creates, because it would install packages elsewhere")
    for name in launch.execute("git", "ls-files").stdout.split():
        target = tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    clone = tmp_path / "clone"
    (clone / ".venv").symlink_to(sys.prefix)
    for name, changes in SMALL_QUICKSTART.items():
        path = clone / "runs" / "quickstart" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return clone
