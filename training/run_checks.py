"""Checks that run before the process group starts: settings, machine and tokens, with all problems in one error."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import attrs

from common.errors import BadInput, check_all, joined
from common.files import is_folder
from common.launch import (
    check_launcher,
    environment_local_world_size,
    environment_nodes,
    environment_world_size,
    restarts,
)
from model.counts import flops_per_token
from training.checkpoints.directory import check_resume_name
from training.checkpoints.initial_weights import InitialWeights
from training.checkpoints.retention import disk_need
from training.command import TrainCommand
from training.config.batch_plan import derive_layout, make_plan
from training.config.train_config import Run, TrainConfig, override, read_files
from training.data.locate_tokens import lengths_of, streams_at_hand
from training.data.open_tokens import PlannedTokens
from training.data.verify_tokens import check_tokens, tokens_at_hand
from training.exactness.fingerprint import compiled_on_gpu
from training.hardware.preflight import PreflightRequirements, enforce, report


@attrs.frozen(kw_only=True)
class CheckedRun:
    """A run that this machine can train, as far as one process can tell."""

    run: Run
    initial: InitialWeights | None  # the model of --init-from
    tokens: PlannedTokens | None  # None on several nodes, or if some tokens are not downloaded or prepared yet


def check_run(run: Run, command: TrainCommand, initial: InitialWeights | None) -> CheckedRun:
    """Check the run, the machine and the tokens before anything is downloaded.

    Raises BadInput, which is the same on every rank.
    """
    if command.trains:
        check_launcher()
    alone = environment_nodes() == 1 and run.train.checkpoints.checkpoints is None and restarts() == 0
    needs = machine_requirements(run, command)
    *_, tokens = check_all(
        lambda: check_resume_name(run.directory, command.options.resume, is_here=alone),
        lambda: derive_layout(run.train, run.model.context_length, environment_world_size()),
        lambda: enforce(needs),
        lambda: check_tokens(run, command.options.token_files, environment_world_size()),
    )
    return CheckedRun(run=run, initial=initial, tokens=tokens)


def machine_requirements(run: Run, command: TrainCommand) -> PreflightRequirements:
    """Return what a run requires of this machine. With --preflight, this does not depend on the number of ranks."""
    return PreflightRequirements(
        device=command.options.device,
        compiles=compiled_on_gpu(run.train),
        disk=disk_need(run, resumes=command.options.resume != "never") if command.trains or command.preflight else None,
        ranks=None if command.preflight else environment_local_world_size(),
        bucket=run.train.checkpoints.checkpoints,
        count_flops=partial(_count_flops, run, command) if command.trains or command.preflight else lambda: None,
        world_size=environment_world_size(),
    )


def _count_flops(run: Run, command: TrainCommand) -> float | None:
    """Return the floating-point operations of the run, up to --max-steps.

    Return None if the number of steps depends on tokens that are not on this machine, or if the run is invalid, which
    other checks report.
    """
    try:
        lengths = lengths_of(streams_at_hand(run.train, command.options.token_files))
        plan = make_plan(run.train, run.model.context_length, run.train.execution.tensor_parallel, lengths)
    except (BadInput, OSError):
        return None
    steps = plan.steps if command.options.max_steps is None else min(plan.steps, command.options.max_steps)
    return float(steps * plan.tokens_per_step * flops_per_token(run.model))


def preflight(run: Run, command: TrainCommand, _: InitialWeights | None) -> int:
    """Check this machine, and print the outcome; return the exit status."""
    return report(machine_requirements(run, command))


@contextmanager
def all_problems(command: TrainCommand) -> Iterator[None]:
    """Context in which a run is read. It adds problems of the machine and the dataset to a BadInput."""

    def check_dataset() -> None:
        if is_folder(directory := Path(command.like or command.run)):
            overridden = override(command.overrides, values := read_files(directory))
            file = command.run / "train.json"
            keys = {"dataset": values["train"].get("dataset"), "microbatch_size": 1, "validation_interval": None}
            with suppress(ValueError):  # an invalid dataset is already among the problems
                tokens_at_hand(TrainConfig.from_keys(keys, file, overridden), command.options.token_files)

    try:
        yield
    except BadInput as error:
        if not command.trains:
            raise
        needs = PreflightRequirements(device=command.options.device, ranks=environment_local_world_size())
        try:
            check_all(lambda: enforce(needs, quiet=True), check_dataset, earlier_error=error)
        except BadInput as combined:
            raise joined([combined], alone=error.alone) from error
