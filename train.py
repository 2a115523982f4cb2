#!/usr/bin/env python3
"""Train one run directory: `torchrun --standalone --nproc_per_node=8 train.py runs/8xa100`."""

import math
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, BadInput, Diverged, printable
from common.file_lock import Locked
from common.files import is_folder, system_error
from common.installation import begin, exit_status, keep_logs_only
from training.launch import check_environment, check_launcher, environment_rank
from training.supervision.exit_record import ExitRecord

if TYPE_CHECKING:
    from training.command import Options, TrainCommand
    from training.config.train_config import Run
    from training.initial_weights import InitialWeights
    from training.supervision.supervision import Supervision

RANK_0_SECONDS = 30.0  # for rank 0 to print an error, after a slow start: torchrun ends all ranks once one has failed


def main() -> int:
    """Run the command; return its exit status."""
    try:
        begin("train.py")
        from common.arguments import parse
        from training.command import TRAIN_EPILOG, TrainCommand

        command: TrainCommand = parse("train.py", TrainCommand, sys.argv[1:], epilog=TRAIN_EPILOG)
    except SystemExit as end:
        if end.code:  # a usage error, or a missing package
            ExitRecord(None).write(EXIT_USAGE)
        raise
    from training.supervision.supervision import Supervision

    if command.trains:
        keep_logs_only()
    try:
        check_environment()
        locks = command.trains and environment_rank() == 0 and is_folder(command.run)
        if locks:
            check_launcher()  # before the lock, where tasks that would all train would wait for the first
        supervision = Supervision(command.run if locks else None)
    except BadInput as error:
        say(str(error))
        if not isinstance(error, Locked):
            ExitRecord(None).write(EXIT_ERROR)
        return EXIT_ERROR
    if supervision.earlier_status is not None:
        say(f"this job ended with status {supervision.earlier_status}, and torchrun restarted it: ending again")
        supervision.exit_record.write(supervision.earlier_status)
        return supervision.earlier_status
    from torch.distributed.elastic.multiprocessing.errors import record  # after --help: torch takes seconds

    try:
        status = record(train)(command, supervision) or EXIT_DONE  # record's type allows None
    except Exception:  # noqa: BLE001  # record has kept it for torchrun; leave() prints nothing
        traceback.print_exc()
        status = EXIT_ERROR
    supervision.exit_record.write(status)
    if status in {EXIT_STOPPED, EXIT_DIVERGED}:
        supervision.end_torchrun()
    return status


def train(command: "TrainCommand", supervision: "Supervision") -> int:
    """Check the run directory before the process group starts, then train; return the exit status."""
    from training.batch_finder.finder import report_largest
    from training.config.batch_plan import derive_layout
    from training.config.train_config import load_run
    from training.hardware.memory_errors import is_gpu_memory_error, is_memory_error
    from training.job import run_job
    from training.launch import environment_world_size

    try:
        run = load_run(command.run, command.overrides)
        if command.dry_run or command.plan:
            return dry_run(run, command)
        if command.preflight:
            return check_machine(run, command)
        if command.find_max_microbatch:
            report_largest(run, command.overrides, command.options.device, None, command.write)
            return EXIT_DONE
        if command.trains:
            check_launcher()
        derive_layout(run.train, run.model.context_length, environment_world_size())
        check_machine(run, command)
        return run_job(run, command.options, supervision, initial_weights(command.options.init_from))
    except (BadInput, Diverged) as error:
        alone = isinstance(error, BadInput) and error.alone
        # Rank 0 raises the same; when it has printed it and ended, torchrun sends this rank SIGTERM.
        if environment_rank() == 0 or alone or not supervision.stop_asked.wait(RANK_0_SECONDS):
            say(str(error))
        return EXIT_DIVERGED if isinstance(error, Diverged) else EXIT_ERROR
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        say(f"rank {environment_rank()}: {out_of_memory(run, gpu=is_gpu_memory_error(error))}")
    except OSError as error:
        if error.filename is None:
            raise
        say(system_error(error))  # a file or folder that cannot be read, for one
    return EXIT_ERROR


def initial_weights(source: str | None) -> "InitialWeights | None":
    """Return the model that --init-from names; it is read when the run begins."""
    if source is None:
        return None
    from evaluation.shared.load import load_network, locate
    from training.initial_weights import InitialWeights

    return InitialWeights(source, lambda: load_network(locate(source, None)))


def check_initial_weights(run: "Run", options: "Options") -> None:
    """Raise BadInput where training could not begin with, or go on from, the weights of --init-from."""
    from training.checkpoints.directory import checkpoints_of
    from training.checkpoints.saved_state import read_state
    from training.checkpoints.verification import find
    from training.initial_weights import check_network, check_origin

    if (initial := initial_weights(options.init_from)) is None:
        return
    found = None if options.resume == "never" else find(checkpoints_of(run.directory), options.resume)
    if found is not None:
        check_origin(initial, read_state(found).config.initial_weights, found)
    else:
        check_network(initial, initial.load().config, run.model, run.directory / "model.json")


def check_machine(run: "Run", command: "TrainCommand") -> int:
    """Check this machine before anything is downloaded, the same on every rank; with --preflight print all checks.

    Returns the exit status. Raises BadInput for a problem.
    """
    from training.checkpoints.node_disks import disk_need
    from training.hardware.preflight import Needs, enforce, report
    from training.launch import environment_local_world_size

    needs = Needs(
        device=command.options.device,
        compiles=run.train.execution.compiles_on_gpu,
        disk=disk_need(run, resumes=command.options.resume != "never") if command.trains or command.preflight else None,
        ranks=None if command.preflight else environment_local_world_size(),
        bucket=run.train.checkpoints.checkpoints,
    )
    if command.preflight:
        return report(needs)
    enforce(needs, quiet=environment_rank() != 0)
    return EXIT_DONE


def out_of_memory(run: "Run", *, gpu: bool) -> str:
    """Return the out-of-memory error as one line, with what to do."""
    size = run.train.batch.microbatch_size
    smaller = next((n for n in range(size - 1, 0, -1) if size % n == 0), None)
    advice = f"try --set microbatch_size={smaller}, or find_batch_size.py"
    if smaller is None:
        advice = "use a larger GPU, or parallel fsdp" if gpu else "use a larger machine, or a smaller model"
    return f"{'the GPU' if gpu else 'this machine'}'s memory does not hold microbatch_size {size}; {advice}"


def say(problem: str) -> None:
    """Print an error as one line."""
    print(f"train.py: {printable(problem)}", file=sys.stderr, flush=True)


def dry_run(run: "Run", command: "TrainCommand") -> int:
    """Print what a run would do, with --plan on machines for rent; needs no GPU, nor tokens with min_train_tokens."""
    from training.config.batch_plan import describe, make_plan
    from training.data.locate_tokens import lengths_at_hand
    from training.planning.estimate import make_estimate
    from training.planning.estimate_table import describe_estimate
    from training.planning.forecast_file import describe_forecast_file
    from training.planning.price_list import MACHINES, read_machines
    from training.planning.several_nodes import Network

    check_initial_weights(run, command.options)
    lengths = lengths_at_hand(run.train, command.options.token_files)
    if command.dry_run:
        plan = make_plan(run.train, run.model.context_length, command.world_size or 1, lengths)
        lines = describe(run.model, run.train, plan)
    else:
        prices = read_machines(command.machines or MACHINES, command.machine)
        network = Network(nodes=command.nodes, link=command.node_link or math.inf)
        lines = [*describe_estimate(make_estimate(run, prices, lengths, network)), *describe_forecast_file(run)]
    print("\n".join(map(printable, [*run.notices, *lines])))
    return EXIT_DONE


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's own shutdown.

    gloo's threads release their last tensors a moment after a collective returns. During the shutdown they would wait
    for an interpreter that is gone, and the process aborts: with torch 2.13, one in five short FSDP runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(exit_status(main))
