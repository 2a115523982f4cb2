"""Checks of correctness on this machine, by comparing runs of a small network.

The benchmark compares losses on the GPU with losses on the CPU, and losses of DDP and FSDP with those of one process.
With `determinism` "elastic", it compares the hashes of all layouts with each other. It also compares the hashes of a
run that was killed and resumed with those of an uninterrupted run.

python benchmarks/correctness.py losses elastic resume [--ranks 1 2 4 8] [--device cpu]

The benchmark trains the network with train.py on the bytes of Python's library and prints a line for each comparison.
The exit status is 1 if a comparison fails. With --device cpu, all runs use the CPU and gloo.
"""

import math
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
import bench
import numpy as np
import numpy.typing as npt
import torch
from bench import LOOK_SECONDS, ROOT, kill_tree, launcher, write_run_over

from common.errors import BadInput
from model.config import ModelConfig
from training.telemetry.metrics_log import METRICS, Metric, RunEvent, event_of, read_metrics

Part = Literal["losses", "elastic", "resume"]
# Largest accepted differences in a step's loss, in nats. On a CPU, bf16 differs from fp32 by 0.0003. In bf16, DDP on
# two ranks differs from a single process by 0.0002.
FP32_LIMIT, BF16_LIMIT, ORDER_LIMIT = 1e-4, 3e-3, 2e-3
MODEL = ModelConfig(
    vocab_size=256, context_length=128, emb_dim=256, n_heads=4, n_layers=4, qkv_bias=True, tie_weights=True
)
TINY = attrs.evolve(MODEL, context_length=64, emb_dim=128, n_heads=2, n_layers=2)  # head width 64, as in MODEL
GLOBAL_BATCH = 8  # micro-batches of one sequence, so there can be up to 8 ranks
COLUMNS = ["comparison", "found", "limit", "outcome"]


@attrs.frozen
class MachineComparison:
    """One line of the table. `holds` is None on the emulated driver, where the values are meaningless."""

    subject: str
    measured: str
    limit: str
    holds: bool | None

    @property
    def cells(self) -> list[str]:
        outcome = {True: "holds", False: "FAILS", None: "emulated"}[self.holds]
        return [self.subject, self.measured, self.limit, outcome]


@attrs.frozen(kw_only=True)
class SmallResult:
    """A trained run."""

    losses: dict[int, float]  # by step
    hashes: dict[int, str]  # by step
    self_test: bool | None  # whether all self-tests succeeded; None if there were none


@attrs.frozen(kw_only=True)
class SmallRun:
    """Runs of one small network, with the same tokens and initial weights."""

    folder: Path
    device: str  # the device of every run, unless a run specifies another device
    steps: int
    tiny: bool  # use TINY, without compilation

    @property
    def model(self) -> ModelConfig:
        return TINY if self.tiny else MODEL

    @property
    def description(self) -> str:
        """A description of the network and the steps, for the table."""
        model = self.model
        return (
            f"{self.device}: {model.n_layers} layers x {model.emb_dim}, {self.steps} steps of {GLOBAL_BATCH} x "
            f"{model.context_length} bytes of Python's library"
        )

    def train(self, name: str, ranks: int, *, device: str | None = None, **keys: Any) -> SmallResult:
        """Train a run to its end and return its results. `keys` are for train.json. Raise BadInput if the run fails."""
        run = self._write(name, **keys)
        return self._finish(run, self._start(run, ranks, device or self.device))

    def kill(self, name: str, ranks: int, after: int, **keys: Any) -> int | None:
        """Kill all processes of a run after its first checkpoint, and return the last step in its metrics.

        `after` is the number of steps between checkpoints. Return None if the run ended first.
        """
        run = self._write(name, checkpoint_interval=after, **keys)
        process = self._start(run, ranks, self.device)
        while process.poll() is None:
            records = read_metrics(run) if (run / METRICS).exists() else []
            if any(event_of(record) == RunEvent.CHECKPOINT for record in records):
                kill_tree(process)
                process.communicate()
                return max(record["step"] for record in records)
            time.sleep(LOOK_SECONDS)
        self._finish(run, process)
        return None

    def resume(self, name: str, ranks: int) -> SmallResult:
        """Resume a killed run on the given number of ranks, and train it to its end."""
        run = self.folder / name / "run"
        return self._finish(run, self._start(run, ranks, self.device))

    def _write(self, name: str, **keys: Any) -> Path:
        count = self.steps * GLOBAL_BATCH * self.model.context_length
        train = {
            "min_train_tokens": count,
            "microbatch_size": 1,
            "global_batch_size": GLOBAL_BATCH,
            "learning_rate": 1e-4,  # with a higher rate, or without warm-up, rounding errors grow from step to step
            "schedule_learning_rate": True,
            "warmup_period_percent": 50,
            "checkpoint_interval": self.steps,
            "compile": False if self.tiny else None,
        }
        return write_run_over(_library_bytes(count + 1), self.folder / name, self.model, **(train | keys))

    def _start(self, run: Path, ranks: int, device: str) -> subprocess.Popen[str]:
        program = [*launcher(ranks), "train.py", str(run), "--device", device, "--hash-every", "1"]
        return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _finish(self, run: Path, process: subprocess.Popen[str]) -> SmallResult:
        _, errors = process.communicate()
        if process.returncode:
            raise BadInput(f"{run.parent.name}: train.py failed: {errors[-4000:]}")
        records = read_metrics(run)
        self_tests = [record["held"] for record in records if event_of(record) == RunEvent.SELF_TEST]
        return SmallResult(
            losses={record["step"]: record[Metric.TRAIN_LOSS] for record in records if Metric.TRAIN_LOSS in record},
            hashes={record["step"]: record[Metric.STATE_SHA256] for record in records if Metric.STATE_SHA256 in record},
            self_test=all(self_tests) if self_tests else None,
        )


def main(
    *parts: Part,
    ranks: tuple[int, ...] = (),
    device: Literal["cuda", "cpu"] = "cuda",
    steps: int = 20,
    tiny: bool = False,
    emulated: bool = False,
) -> None:
    """Print the tables.

    Args:
        ranks: world sizes; default: 1, 2, 4 and 8 if there are enough GPUs; on a CPU, 1 and 2.
        tiny: train a smaller network without compilation, for a CPU without fast bf16.
        emulated: print no verdicts, because the driver is emulated; implies --tiny.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 2
    sizes = ranks or tuple(size for size in (1, 2, 4, 8) if size <= gpus)
    failed = False
    with TemporaryDirectory() as folder:
        small = SmallRun(folder=Path(folder), device=device, steps=steps, tiny=tiny or emulated)
        for part in parts or ("losses", "elastic", "resume"):
            compare = {"losses": compare_losses, "elastic": compare_hashes, "resume": compare_resumed}[part]
            rows = []
            for comparison in compare(small, sizes):
                shown = attrs.evolve(comparison, holds=None) if emulated else comparison
                print(*shown.cells, sep=" | ", flush=True)
                rows.append(shown)
            failed |= any(row.holds is False for row in rows)
            print(f"\n{part}, {small.description}\n{bench.table(COLUMNS, [row.cells for row in rows])}\n", flush=True)
    sys.exit(1 if failed else 0)


def compare_losses(small: SmallRun, sizes: Sequence[int]) -> Iterator[MachineComparison]:
    """Compare the loss of each step with the loss in a reference run.

    The reference for one process on the device, in fp32 or bf16, is one process on the CPU in fp32. The reference for
    DDP and FSDP is one process in bf16.
    """
    reference = small.train("cpu-fp32", 1, precision="fp32", device="cpu")
    fp32 = small.train("fp32", 1, precision="fp32", determinism="off")
    bf16 = small.train("bf16", 1, precision="bf16", determinism="off")
    yield compare_step_losses(f"{small.device} fp32 and CPU fp32", fp32, reference, FP32_LIMIT)
    yield compare_step_losses(f"{small.device} bf16 and CPU fp32", bf16, reference, BF16_LIMIT)
    learned = reference.losses[min(reference.losses)] - reference.losses[max(reference.losses)]
    yield MachineComparison("the network learns", f"{learned:.3f} nats", "> 0.5", learned > 0.5)
    for size in [size for size in sizes if size > 1][-1:]:
        for parallel in ("ddp", "fsdp"):
            many = small.train(f"{parallel}-off", size, precision="bf16", determinism="off", parallel=parallel)
            yield compare_step_losses(f"bf16: {parallel} on {size} ranks and one process", many, bf16, ORDER_LIMIT)


def compare_hashes(small: SmallRun, sizes: Sequence[int]) -> Iterator[MachineComparison]:
    """Compare the hashes of weights and moments after each step of "elastic" runs, and report the self-tests."""
    for precision in ("bf16", "fp32"):
        layouts = [(size, parallel) for parallel in ("ddp", "fsdp") for size in sizes]
        first: SmallResult | None = None
        for size, parallel in layouts if precision == "bf16" else [layouts[0], layouts[-1]]:
            name = f"{precision}-{parallel}-{size}"
            trained = small.train(name, size, precision=precision, determinism="elastic", parallel=parallel)
            first = first or trained
            yield compare_step_hashes(f"{precision} {parallel} on {size} ranks and the first layout", trained, first)
            if trained.self_test is not None:
                outcome = "repeats" if trained.self_test else "differs"
                yield MachineComparison(
                    f"{precision} {parallel} on {size} ranks: self-test", outcome, "repeats", trained.self_test
                )


def compare_resumed(small: SmallRun, sizes: Sequence[int]) -> Iterator[MachineComparison]:
    """Compare an uninterrupted run with a run that was killed on all ranks and resumed with a different layout."""
    interval, options = max(1, small.steps // 4), {"precision": "bf16", "determinism": "elastic"}
    straight = small.train("straight", 1, checkpoint_interval=interval, **options)
    for size, parallel in ((sizes[-1], "ddp"), (sizes[0], "fsdp")):
        began = time.monotonic()
        killed = small.kill(f"killed-{parallel}", size, interval, parallel=parallel, **options)
        resumed = small.resume(f"killed-{parallel}", sizes[0] if size != sizes[0] else sizes[-1])
        subject = f"killed on {size} ranks, {parallel}, at step {killed}: resumed and uninterrupted run"
        if killed is None:
            yield MachineComparison(subject, "the run ended before it was killed", "killed", False)
            continue
        yield compare_step_hashes(f"{subject}, {time.monotonic() - began:.0f} s", resumed, straight)


def compare_step_losses(subject: str, result: SmallResult, reference: SmallResult, limit: float) -> MachineComparison:
    """Compare the losses with those of the reference, step by step. A missing loss or NaN is a failure."""
    differences = [abs(result.losses.get(step, math.nan) - loss) for step, loss in reference.losses.items()]
    holds = bool(differences) and all(difference <= limit for difference in differences)  # False for NaN
    largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)
    return MachineComparison(f"losses: {subject}", f"{largest:.1e}", f"{limit:g}", holds)


def compare_step_hashes(subject: str, result: SmallResult, reference: SmallResult) -> MachineComparison:
    """Compare the hashes with those of the reference, step by step."""
    different = [step for step, digest in reference.hashes.items() if result.hashes.get(step) != digest]
    measured = f"step {different[0]} differs" if different else f"{len(reference.hashes)} steps equal"
    return MachineComparison(f"hashes: {subject}", measured, "equal", bool(reference.hashes) and not different)


def _library_bytes(count: int) -> npt.NDArray[np.uint16]:
    """Return the first bytes of Python's library sources, as token ids."""
    content = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(content) >= count:
            break
        content += path.read_bytes()
    return np.frombuffer(content[:count], dtype=np.uint8).astype(np.uint16)


if __name__ == "__main__":
    bench.run(main)
