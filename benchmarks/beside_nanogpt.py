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
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import numpy as np
import random_run
import torch
from command import ROOT, table

from common.errors import BadInput
from model.config import ModelConfig
from tokens.batches.sampling import Layout
from training.hardware.environment import cpu_name, git_commit
from training.telemetry.metrics_log import METRICS

WARM_UP = 3  # steps that are not counted
POLL_SECONDS = 0.0005
STEP = re.compile(r'^(iter \d+|\{"step": \d+, "train_loss")')  # the line of a step: nanoGPT's, and of metrics.jsonl
# On a CPU nanoGPT computes in fp32 whatever --dtype says: this is why. Without it the copy does what is asked.
CPU_CONDITION = "nullcontext() if device_type == 'cpu' else "
GELU, GPT2_GELU = "nn.GELU()", "nn.GELU(approximate='tanh')"  # nanoGPT's, with erf; GPT-2's, and ours
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@attrs.frozen(kw_only=True)
class NanogptComparison:
    """A shape at which both are trained."""

    clone: Path  # of nanoGPT
    model: ModelConfig
    layout: Layout
    steps: int
    threads: int

    def print(self, size: str, *, compiled: bool) -> None:
        """Print both trainers' tokens/s in fp32 and bf16, not compiled and, if asked, compiled."""
        tokens = self.layout.global_batch_size * self.model.context_length
        print(f"{size} on {cpu_name()}, {self.threads} threads, torch {torch.__version__}, commit {git_commit()}")
        print(f"{tokens:,} tokens a step in micro-batches of {self.layout.microbatch_size}; {self.steps} steps in turn")
        print("medians of tokens/s and of ratios to nanoGPT's step beside it; in brackets by CPU seconds")
        for compile_it, precision in product((False, True) if compiled else (False,), DTYPES):
            trainers = self._step_in_turn(precision, compile_it)
            theirs = trainers["nanoGPT"]
            rows = [[name, _cell(tokens / own), _cell(theirs / own, 2)] for name, own in trainers.items()]
            title = precision + (", compiled" if compile_it else "")
            print(f"\n{table([title, 'tokens/s', 'ratio'], rows)}", flush=True)

    def _step_in_turn(self, precision: str, compiled: bool) -> dict[str, np.ndarray]:
        """Return (steps, 2) wall-clock and CPU seconds of each trainer by its name."""
        with ExitStack() as stack:

            def folder() -> Path:
                return Path(stack.enter_context(TemporaryDirectory()))

            steppers = {}
            for name, gelu in (("nanoGPT", GELU), ("nanoGPT with GPT-2's GELU", GPT2_GELU)):
                command, log = self._nanogpt(folder(), precision, compiled, gelu)
                steppers[name] = stack.enter_context(_stepper(command, log, self.threads))
            for name, extra in (("Lockstep", {}), ("Lockstep, determinism off", {"determinism": "off"})):
                command, log = self._lockstep(folder(), {"precision": precision, "compile": compiled, **extra})
                steppers[name] = stack.enter_context(_stepper(command, log, self.threads))
            rounds = [[next(stepper) for stepper in steppers.values()] for _ in range(WARM_UP + self.steps)]
        return dict(zip(steppers, np.array(rounds[WARM_UP:]).transpose(1, 0, 2), strict=True))

    def _lockstep(self, folder: Path, how: dict[str, object]) -> tuple[list[str], Path]:
        """Return a command that trains, and the file that gets a line for each step."""
        sizes = {"microbatch_size": self.layout.microbatch_size, "global_batch_size": self.layout.global_batch_size}
        keys = sizes | {"cpu_threads": self.threads} | how
        run = random_run.prepare(folder, self.model, WARM_UP + self.steps + 2, **keys)
        return [sys.executable, str(ROOT / "train.py"), str(run), "--device=cpu"], run / METRICS

    def _nanogpt(self, folder: Path, precision: str, compiled: bool, gelu: str) -> tuple[list[str], Path]:
        """Put nanoGPT and random tokens into a folder; return as `_lockstep`. Raises BadInput if it is not nanoGPT."""
        changes = {"train.py": (CPU_CONDITION, ""), "model.py": (GELU, gelu), "configurator.py": ("", "")}
        for name, (old, new) in changes.items():
            if not (self.clone / name).is_file():
                raise BadInput(f"--beside-nanogpt {self.clone}: no {name} there; clone github.com/karpathy/nanoGPT")
            text = (self.clone / name).read_text()
            if old and text.count(old) != 1:
                raise BadInput(f"--beside-nanogpt {self.clone}: {name} is not the one that is known; check out 3adf61e")
            (folder / name).write_text(text.replace(old, new) if old else text)
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
def _stepper(command: list[str], log: Path, threads: int) -> Iterator[Iterator[tuple[float, float]]]:
    """Start a trainer in the folder of `log`, which gets a line for each step; yield its steps."""
    environment = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    folder = log.parent
    with (folder / "log").open("w") as output, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | environment, stdout=output, stderr=errors)
        try:
            yield _steps(process, log)
        finally:
            process.kill()
            process.wait()


def _steps(process: subprocess.Popen[bytes], log: Path) -> Iterator[tuple[float, float]]:
    """Let a trainer take a step; yield wall-clock and CPU seconds, with it halted. The first step includes the start.

    Raises BadInput with its last words where it ends.
    """
    done = 0
    while True:
        process.send_signal(signal.SIGCONT)
        wall, cpu = time.perf_counter(), _cpu_seconds(process.pid)
        while (count := _count(log)) == done:
            if process.poll() is not None:
                raise BadInput(f"{process.args!r}: ended too early:\n{(log.parent / 'errors').read_text()[-4000:]}")
            time.sleep(POLL_SECONDS)
        done = count
        process.send_signal(signal.SIGSTOP)
        yield time.perf_counter() - wall, _cpu_seconds(process.pid) - cpu


def _count(log: Path) -> int:
    return len([line for line in log.read_text().splitlines() if STEP.match(line)]) if log.exists() else 0


def _cpu_seconds(pid: int) -> float:
    """Return what all threads of a process have used so far, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cell(values: np.ndarray, digits: int = 0) -> str:
    wall, cpu = np.median(values, axis=0)
    return f"{wall:,.{digits}f} ({cpu:,.{digits}f})"
