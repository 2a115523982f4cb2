"""nanoGPT and Lockstep compared on this CPU: the two trainers take turns, one step at a time.

While one trainer takes a step, the other trainer is halted. Other load on the machine therefore affects both equally.
"""

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

HALT_SECONDS = 0.0005  # time between two checks for the end of a step
STEP = re.compile(r'^(iter \d+|\{"step": \d+, "train_loss")')  # the line of a step in nanoGPT's log or metrics.jsonl
# This condition makes nanoGPT compute in fp32 on a CPU, whatever --dtype says. Our copy of nanoGPT omits it.
CPU_CONDITION = "nullcontext() if device_type == 'cpu' else "
OVER_THE_LIMIT = "over the limit"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@attrs.frozen(kw_only=True)
class NanogptComparison:
    """A comparison of Lockstep with nanoGPT: both train the same network with the same batch."""

    clone: Path  # a clone of nanoGPT
    model: ModelConfig
    layout: Layout
    steps: int
    threads: int
    minutes: float  # time limit for each table, including start and warm-up

    def print(self, size: str, *, compiled: bool) -> None:
        """Print the tokens/s of both trainers in fp32 and bf16: uncompiled and, if requested, also compiled."""
        tokens = self.layout.global_batch_size * self.model.context_length
        print(f"{size} on {cpu_name()}, {self.threads} threads, torch {torch.__version__}, commit {git_commit()}")
        print(f"{tokens:,} tokens per step in micro-batches of {self.layout.microbatch_size}; {self.steps} steps each")
        print(
            "medians of tokens/s, and of the ratio to nanoGPT's step in the same round; both use nanoGPT's GELU; the "
            "values in brackets are computed from CPU seconds"
        )
        for compile_it, precision in product((False, True) if compiled else (False,), DTYPES):
            trainers = self._step_in_turn(precision, compile_it)
            title = precision + (", compiled" if compile_it else "")
            nanogpt = trainers["nanoGPT"]
            rows = [[name, _cell(tokens / seconds), _cell(nanogpt / seconds, 2)] for name, seconds in trainers.items()]
            print(f"\n{table([title, 'tokens/s', 'ratio'], rows)}", flush=True)
            if len(nanogpt) < self.steps:
                print(f"{title}: {len(nanogpt)} of {self.steps} steps within {self.minutes:g} minutes", flush=True)

    def _step_in_turn(self, precision: str, compiled: bool) -> dict[str, np.ndarray]:
        """Return, for each trainer, the wall-clock and CPU seconds of each step, with the shape (steps, 2).

        If time runs out, there are fewer steps.
        """
        deadline = time.monotonic() + 60 * self.minutes
        with ExitStack() as stack:
            steppers = {}
            for name, prepare in (("nanoGPT", self._nanogpt), ("Lockstep", self._lockstep)):
                command, log = prepare(Path(stack.enter_context(TemporaryDirectory())), precision, compiled)
                steppers[name] = stack.enter_context(_stepper(command, log, self.threads, deadline))
            rounds = list(islice(zip(*steppers.values(), strict=False), WARM_UP + self.steps))
        measured = np.array(rounds[WARM_UP:]).reshape(-1, len(steppers), 2)
        return dict(zip(steppers, measured.transpose(1, 0, 2), strict=True))

    def _lockstep(self, folder: Path, precision: str, compiled: bool) -> tuple[list[str], Path]:
        """Return the command that trains Lockstep, and the file to which it writes a line for each step."""
        steps = 2 * (WARM_UP + self.steps)  # on a loaded machine, a trainer may take several steps before it is halted
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
        """Copy nanoGPT and random tokens into a folder. Return the command and the log, as `_lockstep` does.

        Raise BadInput if the clone is not the expected version of nanoGPT.
        """
        for name in ("train.py", "model.py", "configurator.py"):
            if not (self.clone / name).is_file():
                raise BadInput(f"--beside-nanogpt {self.clone}: has no {name}; clone github.com/karpathy/nanoGPT")
            text = (self.clone / name).read_text()
            if name == "train.py" and text.count(CPU_CONDITION) != 1:
                raise BadInput(
                    f"--beside-nanogpt {self.clone}: {name} is from another version of nanoGPT; check out 3adf61e"
                )
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
    """Start a trainer in the folder of `log`, and yield an iterator over its steps, which ends at the deadline.

    The trainer writes a line for each step to `log`. It is halted until the first step is requested.
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
    """Repeatedly let a trainer take a step, halt the trainer, and yield the wall-clock and CPU seconds of the step.

    The first step includes the start. If the trainer took several steps before it was halted, the seconds are the mean
    of these steps. At the deadline, the iterator ends in the middle of a step. Raise BadInput with the trainer's last
    output if the trainer ends first.
    """
    done = 0
    while True:
        process.send_signal(signal.SIGCONT)
        wall, cpu = time.perf_counter(), _cpu_seconds(process.pid)
        while _count(log) == done:
            if process.poll() is not None:
                errors = (log.parent / "errors").read_text()[-4000:]
                raise BadInput(f"{process.args!r}: the trainer ended before all steps were measured:\n{errors}")
            if time.monotonic() > deadline:
                return
            time.sleep(HALT_SECONDS)
        process.send_signal(signal.SIGSTOP)
        steps, done = _count(log) - done, _count(log)
        yield (time.perf_counter() - wall) / steps, (_cpu_seconds(process.pid) - cpu) / steps


def _count(log: Path) -> int:
    return len([line for line in log.read_text().splitlines() if STEP.match(line)]) if log.exists() else 0


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used so far, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cell(values: np.ndarray, digits: int = 0) -> str:
    if not len(values):
        return OVER_THE_LIMIT
    wall, cpu = np.median(values, axis=0)
    return f"{wall:,.{digits}f} ({cpu:,.{digits}f})"
