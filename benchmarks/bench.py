"""Shared parts of all benchmarks: command line, tables, run directories with random tokens, and processes.

The options of a benchmark are the parameters of its `main`. Importing this module makes the repository's packages
importable.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from cyclopts import App, Parameter
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from common.script import use_expandable_segments  # noqa: E402  # this import works only after the line above

use_expandable_segments()  # as the scripts do, before torch is imported

import attrs  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from common.errors import BadInput  # noqa: E402
from model.config import GPT2_SIZES, ModelConfig  # noqa: E402
from training.build import make_settings, make_state  # noqa: E402
from training.checkpoints.initial_weights import start_random  # noqa: E402
from training.config.batch_plan import make_plan  # noqa: E402
from training.config.train_config import Run  # noqa: E402
from training.exactness.fingerprint import resolve_numerics, set_determinism  # noqa: E402
from training.parallel.process_group import Ranks  # noqa: E402
from training.state import StepSettings, TrainState  # noqa: E402
from training.telemetry.metrics_log import METRICS, Metric, read_metrics  # noqa: E402

Size = Literal["small", "124M", "350M", "774M", "1.5B"]
SIZES = {
    "small": ModelConfig(
        vocab_size=256, context_length=256, emb_dim=384, n_heads=6, n_layers=6, qkv_bias=True, tie_weights=True
    ),
    **GPT2_SIZES,
}
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
WARM_UP = 3  # the first steps are not measured, because they compile the network and build DDP's buckets
GROUP_SECONDS = 600  # timeout of a collective
LOOK_SECONDS = 0.005  # pause before a benchmark looks again at the metrics, or at processes that should end
GRACE_SECONDS = 10.0  # time from SIGTERM to SIGKILL
GONE_SECONDS = 60.0  # time for a killed process to disappear: the driver frees its memory first
BASE: dict[str, Any] = {"clipping_max_norm": 1.0, "validation_interval": None, "log_interval": 1}


def run(main: Callable[..., None]) -> None:
    """Run a benchmark with the options of the command line. After a user error, print a line and exit with status 1."""
    exit_on_signals()
    try:
        parser(main)()
    except BadInput as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def exit_on_signals() -> None:
    """Turn the first signal, such as the hangup of a lost connection, into SystemExit, and ignore later signals.

    Context managers then end the processes that the benchmark has started.
    """

    def leave(number: int, _: object) -> None:
        for signal_number in SIGNALS:
            signal.signal(signal_number, signal.SIG_IGN)
        sys.exit(128 + number)

    for signal_number in SIGNALS:
        if signal.getsignal(signal_number) != signal.SIG_IGN:  # a signal that nohup ignores stays ignored
            signal.signal(signal_number, leave)


def parser(main: Callable[..., None]) -> App:
    """Return the command line of a benchmark. Its options are `main`'s parameters, and its help is the docstring."""
    app = App(
        help=main.__globals__["__doc__"],
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(consume_multiple=True, negative=()),
    )
    app.default(main)
    return app


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column is text. All other columns are aligned to the right, for numbers."""
    right = ["right"] * (len(columns) - 1)
    return str(tabulate(rows, columns, "simple", colalign=["left", *right], disable_numparse=True))


def prepare(folder: Path, model: ModelConfig, steps: int, **train: Any) -> Path:
    """Write a run directory, and token files with enough random tokens for `steps` steps. Return the run directory.

    `train` has the keys of train.json.
    """
    count = steps * train["global_batch_size"] * model.context_length
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, count + 1, dtype=np.uint16)
    return write_run_over(tokens, folder, model, min_train_tokens=count, **train)


def write_run_over(tokens: npt.NDArray[np.uint16], folder: Path, model: ModelConfig, **train: Any) -> Path:
    """Write a token file and a run directory that trains on it, and return the run directory."""
    (folder / "tokens").mkdir(parents=True)
    save_file({"tokens": tokens}, folder / "tokens" / "train.safetensors")
    return write_run(folder / "run", model, BASE | {"dataset": str(folder / "tokens")} | train)


def write_run(run: Path, model: ModelConfig, train: dict[str, Any]) -> Path:
    """Write a run directory, and return it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "model.json").write_text(json.dumps(attrs.asdict(model)))
    (run / "train.json").write_text(json.dumps(train))
    return run


def launcher(ranks: int) -> list[str]:
    """Return the first words of a command: Python and, if there are several ranks, torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def output_of(ranks: int, script: str, *words: str) -> str:
    """Return the standard output of a benchmark on several ranks. Raise BadInput if the benchmark fails."""
    program = [*launcher(ranks), script, *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInput(f"{Path(script).name}, {ranks} ranks: the measurement failed:\n{done.stderr[-4000:]}")
    return done.stdout


def train(run: Path, ranks: int, *settings: str, kill_after: int) -> list[dict[str, Any]]:
    """Train a run from the start until the step `kill_after` is in its metrics, kill it, and return its metrics.

    Because the run is killed, it needs neither time nor disk space for a last checkpoint. `settings` are KEY=VALUE
    pairs for train.json. Raise BadInput if training fails.
    """
    options = [f"--set={setting}" for setting in settings]
    command = [*launcher(ranks), "train.py", str(run), "--resume", "never", *options]
    file = run / METRICS
    # `--resume never` moves an earlier file to the archive, so a new inode means a new file.
    earlier = file.stat().st_ino if file.exists() else None
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        if file.exists() and file.stat().st_ino != earlier:
            step = max((record["step"] for record in read_metrics(run) if Metric.TRAIN_LOSS in record), default=0)
            if step >= kill_after:
                kill_tree(process)
                return read_metrics(run)
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise BadInput(f"train.py failed: {process.communicate()[1][-4000:]}")
    return read_metrics(run)


def seconds_by_step(records: list[dict[str, Any]], tokens_per_step: int) -> dict[int, float]:
    """Return the seconds of each step."""
    return {
        record["step"]: tokens_per_step / record[Metric.TOKENS_PER_SECOND]
        for record in records
        if Metric.TRAIN_LOSS in record
    }


def build(run: Run, ranks: Ranks) -> tuple[TrainState, StepSettings]:
    """Return the training state of a run in this process, and the settings of its steps."""
    plan = make_plan(run.train, run.model.context_length, ranks.world_size)
    numerics = resolve_numerics(run.train, ranks.device)
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    state = make_state(run.model, run.train, plan, numerics, ranks)
    start_random(state, run.train.random_seed)
    return state, make_settings(run.train, plan, numerics)


def process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and all its descendants. This requires Linux."""
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from process_tree(int(child))
    except OSError:  # the process has just ended
        return


def kill_tree(process: subprocess.Popen[str], grace_seconds: float = 0.0) -> None:
    """Kill a process and all its descendants, and wait until they have ended.

    With `grace_seconds`, send SIGTERM first and wait this long before SIGKILL.
    """
    pids = list(process_tree(process.pid))
    if grace_seconds:
        _send(pids, signal.SIGTERM)
        _wait(pids, grace_seconds)
    _send(pids, signal.SIGKILL)
    process.wait()
    _wait(pids, GONE_SECONDS)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(pids: Sequence[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
