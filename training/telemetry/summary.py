"""Summary and introduction of a job, as lines for people."""

import math
from pathlib import Path

import torch

from training.config.batch_plan import Plan, describe
from training.config.train_config import Run
from training.parallel.process_group import Ranks
from training.precision import Numerics
from training.state import Position
from training.telemetry.progress_bar import duration
from training.telemetry.reporter import Reporter


def introduce(run: Run, plan: Plan, numerics: Numerics, ranks: Ranks) -> list[str]:
    """Return device, layout and arithmetic of a job."""
    compiled = {False: "not compiled", True: "compiled", "model": "compiled as one graph"}[numerics.compiled]
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    parallel = run.train.execution.parallel
    wrapper = parallel if ranks.world_size > 1 else "one process"
    settings = f"{wrapper}, {numerics.precision}, {compiled}, determinism {numerics.determinism}"
    lines = [f"{run.directory}: {ranks.world_size} x {name}, {settings}", *describe(run.model, run.train, plan)]
    visible = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    if visible > ranks.node.size:
        lines.append(
            f"WARNING: {visible - ranks.node.size} of this machine's {visible} GPUs are idle; "
            f"start with torchrun --nproc_per_node={visible}"
        )
    return lines


def nothing_to_do(directory: Path, steps: int, position: Position) -> str:
    """Return a line for a job without a step to take."""
    if position.step < steps:
        return f"{directory}: at step {position.step:,} of {steps:,}; --max-steps asks for no more"
    return f"{directory}: the run is complete: {steps:,} steps{_best(position)}; start anew with --resume never"


def summarize(directory: Path, reporter: Reporter, position: Position, stopped_by: str | None, chart: str) -> list[str]:
    """Return the outcome of a job. `stopped_by`: of one that stopped early, "signal" or the option of a limit."""
    plan, ledger = reporter.plan, reporter.ledger
    tokens = ledger.steps * plan.tokens_per_step
    done = "done" if position.step == plan.steps else "paused by --max-steps"
    if position.step < plan.steps and stopped_by is not None:
        done = "stopped early; the same command continues"
        if stopped_by != "signal":
            done = f"stopped early by {stopped_by}; the same command with a larger {stopped_by} continues"
    loss = reporter.last_loss
    losses = ("" if math.isnan(loss) else f", train loss {loss:.4f}") + _best(position)
    return [
        f"{directory}: {done}: step {position.step:,} of {plan.steps:,}{losses}",
        *(
            "data: "
            + ("" if read["epochs"] is None else f"{read['epochs']:.2f} epochs, ")
            + f"{read['tokens']:,} tokens of {read['dataset']}"
            for read in plan.read_until(position.step)
        ),
        f"{tokens:,} tokens in {duration(ledger.process_seconds())}, "
        f"{tokens / ledger.training_seconds():,.0f} tokens/s while training",
        f"weights {directory / 'checkpoints' / 'latest'}, {chart}",
    ]


def _best(position: Position) -> str:
    if position.best_validation_loss is None:
        return ""
    return f", best validation loss {position.best_validation_loss:.4f} at step {position.best_step:,}"
