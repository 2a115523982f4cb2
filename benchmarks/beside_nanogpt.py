"""nanoGPT and Lockstep on this CPU: a step each in turn, the others halted, so that other load affects all alike."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import bench
import numpy as np
import torch
from bench import ROOT, WARM_UP, table

from common.errors import BadInput
from model.config import ModelConfig
from tokens.batches.sampling import Layout
from training.hardware.environment import cpu_name, git_commit
from training.telemetry.metrics_log import METRICS

HALT_SECONDS = 0.0005  # between looks for the end of a step
STEP = re.compile(r'^(iter \d+|\{"step": \d+, "train_loss")')  # the line of a step: nanoGPT's, and of metrics.jsonl
# On a CPU nanoGPT computes in fp32 whatever --dtype says: this is why. Without it the copy does what is asked.
CPU_CONDITION = "nullcontext() if device_type == 'cpu' else "
OVER_THE_LIMIT = "over the limit"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@attrs.frozen(kw_only=True)
class NanogptComparison:
    """A shape at which both are trained."""

    clone: Path  # of nanoGPT
    model: ModelConfig
    layout: Layout
    steps: int
    threads: int
    minutes: float  # for each table, start and warm-up included

    def print(self, size: str, *, compiled: bool) -> None:
        """Print both trainers' tokens/s in fp32 and bf16, not compiled and, if asked, compiled."""
        tokens = self.layout.global_batch_size * self.model.context_length
        print(f"{size} on {cpu_name()}, {self.threads} threads, torch {torch.__version__}, commit {git_commit()}")
        print(f"{tokens:,} tokens a step in micro-batches of {self.layout.microbatch_size}; {self.steps} steps in turn")
        print(
            "medians of tokens/s, and of ratios to nanoGPT's step beside it, with its GELU; in brackets by CPU seconds"
        )
        for compile_it, precision in product((False, True) if compiled else (False,), DTYPES):
            trainers = self._step_in_turn(precision, compile_it)
            title = precision + (", compiled" if compile_it else "")
            theirs = trainers["nanoGPT"]
            rows = [[name, _cell(tokens / own), _cell(theirs / own, 2)] for name, own in trainers.items()]
            print(f"\n{table([title, 'tokens/s', 'ratio'], rows)}", flush=True)
            if len(theirs) < self.steps:
                print(f"{title}: {len(theirs)} of {self.steps} steps within {self.minutes:g} minutes", flush=True)

    def _step_in_turn(self, precision: str, compiled: bool) -> dict[str, np.ndarray]:
        """Return (steps, 2) wall-clock and CPU seconds of each trainer by its name: fewer steps where time is up."""
        deadline = time.monotonic() + 60 * self.minutes
        with ExitStack() as stack:
            steppers = {}
            for name, prepare in (("nanoGPT", self._nanogpt), ("Lockstep", self._lockstep)):
                command, log = prepare(Path(stack.enter_context(TemporaryDirectory())), precision, compiled)
                steppers[name] = stack.enter_context(_stepper(command, log, self.threads, deadline))
            rounds = list(islice(zip(*steppers.values(), strict=False), WARM_UP + self.steps))
        counted = np.array(rounds[WARM_UP:]).reshape(-1, len(steppers), 2)
        return dict(zip(steppers, counted.transpose(1, 0, 2), strict=True))

    def _lockstep(self, folder: Path, precision: str, compiled: bool) -> tuple[list[str], Path]:
        """Return a command that trains, and the file that gets a line for each step."""
        steps = 2 * (WARM_UP + self.steps)  # on a loaded machine a halt may come after more than one
        run = bench.prepare(
            folder,
            attrs.evolve(self.model, activation="gelu"),
            steps,
            microbatch_size=self.layout.microbatch_size,
            global_batch_size=self.layout.global_batch_size,
            cpu_threads=self.threads,
            precision=precision,
            compile=compiled,
        )
        return [sys.executable, str(ROOT / "train.py"), str(run), "--device=cpu"], run / METRICS

    def _nanogpt(self, folder: Path, precision: str, compiled: bool) -> tuple[list[str], Path]:
        """Put nanoGPT and random tokens into a folder; return as `_lockstep`. Raises BadInput if it is not nanoGPT."""
        for name in ("train.py", "model.py", "configurator.py"):
            if not (self.clone / name).is_file():
                raise BadInput(f"--beside-nanogpt {self.clone}: no {name} there; clone github.com/karpathy/nanoGPT")
            text = (self.clone / name).read_text()
            if name == "train.py" and text.count(CPU_CONDITION) != 1:
                raise BadInput(f"--beside-nanogpt {self.clone}: {name} is not the one that is known; check out 3adf61e")
            (folder / name).write_text(text.replace(CPU_CONDITION, ""))
        data, model = folder / "data" / "random", self.model
        data.mkdir(parents=True)
        for split in ("train", "val"):
            np.random.default_rng(0).integers(0, model.vocab_size, 1 << 20, np.uint16).tofile(data / f"{split}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": model.padded_vocab_size}))
        options = {
            "dataset": "random",
            "device": "cpu",
            "dtype": DTYPES[precision],
            "compile": compiled,
            "batch_size": self.layout.microbatch_size,
            "gradient_accumulation_steps": self.layout.accumulation,
            "block_size": model.context_length,
            "n_layer": model.n_layers,
            "n_head": model.n_heads,
            "n_embd": model.emb_dim,
            "bias": model.qkv_bias,
            "eval_iters": 1,
            "eval_interval": 10**9,
        }
        return [sys.executable, "train.py", *(f"--{key}={value}" for key, value in options.items())], folder / "log"


@contextmanager
def _stepper(command: list[str], log: Path, threads: int, deadline: float) -> Iterator[Iterator[tuple[float, float]]]:
    """Prepare a trainer in the folder of `log`, which gets a line for each step; yield its steps until the deadline.

    It is halted until the first one is asked for.
    """
    environment = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    folder = log.parent
    with (folder / "log").open("w") as output, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | environment, stdout=output, stderr=errors)
        process.send_signal(signal.SIGSTOP)
        try:
            yield _steps(process, log, deadline)
        finally:
            process.kill()
            process.wait()


def _steps(process: subprocess.Popen[bytes], log: Path, deadline: float) -> Iterator[tuple[float, float]]:
    """Let a trainer take a step; yield wall-clock and CPU seconds, with it halted. The first step includes the start.

    Where the trainer took several before it was halted, seconds are their mean.
    Stops in the middle of the step at the deadline. Raises BadInput with the trainer's last words where it ends.
    """
    done = 0
    while True:
        process.send_signal(signal.SIGCONT)
        wall, cpu = time.perf_counter(), _cpu_seconds(process.pid)
        while _count(log) == done:
            if process.poll() is not None:
                raise BadInput(f"{process.args!r}: ended too early:\n{(log.parent / 'errors').read_text()[-4000:]}")
            if time.monotonic() > deadline:
                return
            time.sleep(HALT_SECONDS)
        process.send_signal(signal.SIGSTOP)
        steps, done = _count(log) - done, _count(log)
        yield (time.perf_counter() - wall) / steps, (_cpu_seconds(process.pid) - cpu) / steps


def _count(log: Path) -> int:
    return len([line for line in log.read_text().splitlines() if STEP.match(line)]) if log.exists() else 0


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cell(values: np.ndarray, digits: int = 0) -> str:
    if not len(values):
        return OVER_THE_LIMIT
    wall, cpu = np.median(values, axis=0)
    return f"{wall:,.{digits}f} ({cpu:,.{digits}f})"
