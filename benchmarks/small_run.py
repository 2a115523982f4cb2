"""A small network trained by train.py on the bytes of Python's library, to compare losses and state hashes."""

import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from command import ROOT
from process_tree import kill_tree
from random_run import POLL_SECONDS, launcher, write_run_over

from common.errors import BadInput
from model.config import ModelConfig
from training.telemetry.metrics_log import METRICS, read_metrics

MODEL = ModelConfig(
    vocab_size=256, context_length=128, emb_dim=256, n_heads=4, n_layers=4, qkv_bias=True, tie_weights=True
)
TINY = attrs.evolve(MODEL, context_length=64, emb_dim=128, n_heads=2, n_layers=2)  # head width 64, as in the other
GLOBAL_BATCH = 8  # of micro-batches of one sequence: up to 8 ranks


@attrs.frozen(kw_only=True)
class SmallResult:
    """A trained run: losses and hashes by step; whether the self-test held, None without one."""

    losses: dict[int, float]
    hashes: dict[int, str]
    self_test: bool | None


@attrs.frozen(kw_only=True)
class SmallRun:
    """Runs of one small network, with the same tokens and initial weights."""

    folder: Path
    device: str  # of all but those that name another one
    steps: int
    tiny: bool  # and not compiled

    @property
    def model(self) -> ModelConfig:
        return TINY if self.tiny else MODEL

    @property
    def description(self) -> str:
        """The network and the step, for the table."""
        model = self.model
        return (
            f"{self.device}: {model.n_layers} layers x {model.emb_dim}, {self.steps} steps of {GLOBAL_BATCH} x "
            f"{model.context_length} bytes of Python's library"
        )

    def train(self, name: str, ranks: int, *, device: str | None = None, **keys: Any) -> SmallResult:
        """Train to the end, and return what was recorded. `keys`: of train.json. Raises BadInput where it fails."""
        run = self._write(name, **keys)
        return self._finish(run, self._start(run, ranks, device or self.device))

    def kill(self, name: str, ranks: int, after: int, **keys: Any) -> int | None:
        """Kill all processes of a run by SIGKILL once a checkpoint beyond step `after` is there; return the step.

        None where the run ended before.
        """
        run = self._write(name, checkpoint_interval=after, **keys)
        process = self._start(run, ranks, self.device)
        while process.poll() is None:
            records = read_metrics(run) if (run / METRICS).exists() else []
            if any(record.get("event") == "checkpoint" for record in records):
                kill_tree(process)
                process.communicate()
                return max(record["step"] for record in records)
            time.sleep(POLL_SECONDS)
        self._finish(run, process)
        return None

    def resume(self, name: str, ranks: int) -> SmallResult:
        """Resume a killed run on so many ranks, to its end."""
        run = self.folder / name / "run"
        return self._finish(run, self._start(run, ranks, self.device))

    def _write(self, name: str, **keys: Any) -> Path:
        count = self.steps * GLOBAL_BATCH * self.model.context_length
        train = {
            "min_train_tokens": count,
            "microbatch_size": 1,
            "global_batch_size": GLOBAL_BATCH,
            "learning_rate": 1e-4,  # a higher one, or no warm-up, makes rounding grow from step to step
            "schedule_learning_rate": True,
            "warmup_period_percent": 50,
            "checkpoint_interval": self.steps,
            "compile": False if self.tiny else None,
        }
        return write_run_over(library_bytes(count + 1), self.folder / name, self.model, **(train | keys))

    def _start(self, run: Path, ranks: int, device: str) -> subprocess.Popen[str]:
        program = [*launcher(ranks), "train.py", str(run), "--device", device, "--hash-every", "1"]
        return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _finish(self, run: Path, process: subprocess.Popen[str]) -> SmallResult:
        _, errors = process.communicate()
        if process.returncode:
            raise BadInput(f"{run.parent.name}: train.py failed: {errors[-4000:]}")
        records = read_metrics(run)
        tests = [record["held"] for record in records if record.get("event") == "self-test"]
        return SmallResult(
            losses={record["step"]: record["train_loss"] for record in records if "train_loss" in record},
            hashes={record["step"]: record["state_sha256"] for record in records if "state_sha256" in record},
            self_test=all(tests) if tests else None,
        )


def library_bytes(count: int) -> npt.NDArray[np.uint16]:
    """Return the first bytes of Python's library sources, as token ids."""
    content = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(content) >= count:
            break
        content += path.read_bytes()
    return np.frombuffer(content[:count], dtype=np.uint8).astype(np.uint16)
