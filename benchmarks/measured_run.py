"""A rank of benchmarks/train_speed.py: a run's own loop, with its feed, log, clipping and AdamW, timed step by step.

python benchmarks/measured_run.py RUN RESULT [--memory] [--kernels]

The run directory has one step more than is measured; rank 0 writes RESULT, a JSON file.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from kernels import kernel_seconds

from common.errors import EXIT_DONE, EXIT_ERROR, BadInput
from training import build
from training.batch_finder.worker import is_memory_error, take_steps
from training.checkpoints.run_record import RunRecord
from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import Run, load_run
from training.data.open_tokens import open_tokens
from training.exactness.fingerprint import attention_backends, resolve_numerics
from training.exactness.levels import set_determinism
from training.hardware.environment import environment, git_commit, peak_flops, peak_memory_bytes
from training.parallel.process_group import Ranks, stop
from training.state import StepSettings, TrainState
from training.supervision.heartbeat import Heartbeat
from training.supervision.stop_request import StopRequest
from training.supervision.supervision import Supervision
from training.telemetry.time_ledger import TimeLedger

UNMEASURED_STEPS = 2  # in a process's first two steps DDP holds a second copy of the gradients
MATMUL_SIDE, MATMUL_SIDE_CPU = 8192, 1024
MATMUL_SECONDS = 2.0  # long enough for a GPU to come down to the clock that it holds


class Enough(Exception):
    """All steps have been timed."""


class Unsaved:
    """Saves nothing: the last step would be followed by a checkpoint, gigabytes that nobody wants."""

    in_flight = False

    def __init__(self, *_: Any) -> None:
        pass

    def ended(self) -> None:
        """Tell of no save."""


class Clock(StopRequest):
    """Asked before every step whether to stop: notes the time; at the run's last step, or when time is up, ends it."""

    def __init__(self, ranks: Ranks, steps: int, deadline: float):
        super().__init__(ranks, threading.Event(), lambda: False)
        self.steps = steps
        self.deadline = deadline  # by time.perf_counter()
        self.times: list[float] = []
        self._control = ranks.control

    def agreed(self) -> bool:
        """Note the time. Raises Enough."""
        self.times.append(time.perf_counter())
        print(f"timed {len(self.times) - 1}", flush=True)  # benchmarks/in_turn.py waits for it
        late = torch.tensor(float(self.times[-1] > self.deadline))
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self._control)
        if len(self.times) > self.steps or late.item():
            raise Enough
        return super().agreed()


def main() -> int:
    """Measure the run; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    arguments.deadline = time.perf_counter() + arguments.seconds
    build.Saver = Unsaved  # type: ignore[attr-defined,assignment]
    try:
        run = load_run(arguments.run, [])
        with Supervision(None).join(None, run.train.timeout_seconds) as heartbeat:
            ranks = heartbeat.ranks
            result = _measure(run, ranks, heartbeat, arguments)
        stop()
    except BadInput as error:
        print(f"train_speed.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except Exception as error:
        if not is_memory_error(error):
            raise
        print(
            f"train_speed.py: micro-batch {run.train.batch.microbatch_size} does not fit; pass a smaller --microbatch"
        )
        return EXIT_ERROR
    if ranks.coordinates:
        arguments.result.write_text(json.dumps(result))
    return EXIT_DONE


def _measure(run: Run, ranks: Ranks, heartbeat: Heartbeat, arguments: argparse.Namespace) -> dict[str, Any]:
    token_set = open_tokens(run, None, ranks, follow=False)
    plan = make_plan(run.train, run.model.context_length, ranks.world_size, token_set.lengths)
    numerics = resolve_numerics(run, plan, ranks)
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    matmul = _matmul_flops(ranks, numerics.precision)
    state = build.make_state(build.make_network(run), run, plan, numerics, ranks)
    settings = build.make_settings(run, plan, numerics)
    size = run.train.batch.microbatch_size
    trials = sorted({-(-size // 2), size}) if arguments.memory else []
    peaks = {trial: _peak_bytes(state, settings, ranks, trial) for trial in trials}
    clock = Clock(ranks, plan.steps - 1, arguments.deadline)
    builder = build.LoopBuilder(
        run=run,
        plan=plan,
        token_set=token_set,
        options=Options(),
        ledger=TimeLedger(time.perf_counter()),
        heartbeat=heartbeat,
        stop_asked=threading.Event(),
    )
    _run_loop(builder, state, settings, clock)
    profiled = kernel_seconds(lambda: take_steps(state, settings, ranks, 1)) if arguments.kernels else None
    return {
        "numerics": {**attrs.asdict(numerics), "attention": attention_backends() if _cuda(ranks) else "cpu"},
        "environment": environment(ranks.device, ranks.world_size),
        "gpu_bytes": torch.cuda.get_device_properties(ranks.device).total_memory if _cuda(ranks) else None,
        "commit": git_commit(),
        "tokens_per_step": plan.tokens_per_step,
        "seconds": [after - before for before, after in itertools.pairwise(clock.times)],
        "peak_flops": peak_flops(ranks.device),
        "matmul_flops": matmul,
        "peak_bytes": peaks,
        "kernels": profiled,
    }


def _cuda(ranks: Ranks) -> bool:
    return ranks.device.type == "cuda"


def _matmul_flops(ranks: Ranks, precision: str) -> float:
    """Return the FLOP/s of a square product of random matrices, bf16 on a GPU, the run's precision on a CPU."""
    cuda = _cuda(ranks)
    side = MATMUL_SIDE if cuda else MATMUL_SIDE_CPU
    dtype = torch.float32 if precision == "fp32" and not cuda else torch.bfloat16
    left, right = (torch.randn(side, side, device=ranks.device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while sum(seconds) < MATMUL_SECONDS:
        began = time.perf_counter()
        left @ right
        if cuda:
            torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - began)
    return float(2 * side**3 / statistics.median(seconds))


def _peak_bytes(state: TrainState, settings: StepSettings, ranks: Ranks, microbatch_size: int) -> int:
    """Return the peak of a whole step at this micro-batch. On a CPU, the process's: try the smaller one first."""
    layout, device = settings.layout, ranks.device
    accumulation = min(2, layout.accumulation) if settings.numerics.determinism == "off" else layout.accumulation
    torch._dynamo.reset()  # another shape is another graph
    if _cuda(ranks):
        torch.cuda.empty_cache()
    layout = attrs.evolve(layout, microbatch_size=microbatch_size, accumulation=accumulation)
    settings = attrs.evolve(settings, layout=layout)
    take_steps(state, settings, ranks, UNMEASURED_STEPS)
    if _cuda(ranks):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    take_steps(state, settings, ranks, 1)
    return peak_memory_bytes(device)


def _run_loop(builder: build.LoopBuilder, state: TrainState, settings: StepSettings, clock: Clock) -> None:
    layout = settings.layout
    record = RunRecord(model={}, train={}, numerics={}, global_batch_size=layout.global_batch_size)  # not saved
    loop = builder.build(state, settings, record)
    intervals = attrs.evolve(loop.intervals, validation=None)
    loop = attrs.evolve(loop, intervals=intervals, validation=None, stop_request=clock)
    try:
        loop.train()
    except Enough:
        loop.reporter.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as train.py does: gloo's threads may outlive the interpreter
