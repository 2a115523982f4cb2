#!/usr/bin/env python3
"""Train the model of a run directory.

Example: `torchrun --standalone --nproc_per_node=8 train.py runs/8xa100`
"""

import faulthandler
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, Reason
from common.files import HUB, is_folder
from common.launch import (
    Failure,
    check_environment,
    check_launcher,
    environment_nodes,
    environment_rank,
    tell_torchrun,
)
from common.output import keep_logs_only, show
from common.script import Script, leave
from training.supervision.run_lock import JobExit
from training.supervision.supervision import Supervision

if TYPE_CHECKING:
    from training.checkpoints.initial_weights import InitialWeights, OtherModel
    from training.command import TrainCommand
    from training.config.train_config import Run

# The reason to record for each exit status of a job that ended without an exception. For such a job, EXIT_ERROR means
# that --preflight found a problem or that --replay found a difference.
REASON_OF_STATUS: dict[int, Reason] = {EXIT_DONE: "finished", EXIT_STOPPED: "stopped", EXIT_ERROR: "check-failed"}
# Options of train.py that replace training. Each option has a function and the function's module, which is imported
# only if the option is given. The function takes (run, command, initial weights) and returns an exit status, or None
# for success.
INSTEAD_OF_TRAINING = {
    "dry_run": ("training.planning.dry_run", "dry_run"),
    "plan": ("training.planning.dry_run", "dry_run"),
    "find_max_microbatch": ("training.planning.batch_command", "find_for_training"),
    "preflight": ("training.run_checks", "preflight"),
    "look": ("reporting.samples.batch_text", "look"),
}


def main() -> int:
    """Run the command line and return the exit status of this rank."""
    supervision = Supervision()
    with Script("train.py", partial(report_error, supervision)) as script:
        command = read_command()
        if (earlier_exit := prepare(command, supervision)) is not None:
            return repeat_exit(earlier_exit, supervision)
        from training.checkpoints.initial_weights import InitialWeights
        from training.config.train_config import load_run  # imported here because torch takes seconds to import
        from training.hardware.usable_gpus import memory_advice
        from training.job import run_job
        from training.run_checks import all_problems, check_run

        faulthandler.enable()
        with all_problems(command):
            if command.like is None:
                run = load_run(command.run, command.overrides)
            else:
                from training.planning.new_run import new_run

                run = new_run(command, lambda source: load_model(source).network.config)
        if command.like is not None and command.trains and environment_rank() == 0:
            supervision.lock(command.run)
        initial = None  # the model of --init-from, if it is given; its weights are read when the run begins
        if (source := command.options.init_from) is not None:
            initial = InitialWeights(source.removeprefix(HUB), partial(load_model, source))
        with memory_advice(run):
            status = run_without_training(run, command, initial)
            if status is None:
                status = run_job(check_run(run, command, initial), command.options, supervision)
        script.status = record_end(status, supervision)
    return script.status


def read_command() -> "TrainCommand":
    """Parse the command line and return it. --keys and --help print their text and exit."""
    from common.arguments import ScriptTexts, parse
    from training.command import TRAIN_EPILOG, TrainCommand, key_rows

    if sys.argv[1:] == ["--keys"]:
        from training.config.key_table import key_table

        show(*key_table().split("\n"))
        sys.exit(EXIT_DONE)
    texts = ScriptTexts(epilog=TRAIN_EPILOG)
    return parse("train.py", TrainCommand, sys.argv[1:], texts=texts, key_rows=key_rows)


def prepare(command: "TrainCommand", supervision: Supervision) -> JobExit | None:
    """Check the environment, and lock the run directory if it exists.

    If torchrun has restarted this job although it had stopped or diverged, returns how the job had ended; else None.
    """
    if command.trains:
        keep_logs_only()
    check_environment()
    if command.trains and environment_rank() == 0 and is_folder(command.run):
        # Check this before taking the lock: if a launcher has started several independent tasks by mistake, they
        # would otherwise wait for the first one's lock.
        check_launcher()
        supervision.lock(command.run)
    return supervision.earlier_exit


def repeat_exit(earlier_exit: JobExit, supervision: Supervision) -> int:
    """End this job with the same status and reason as before, because torchrun should not have restarted it."""
    from training.supervision.rank_failure import print_failure

    reason = earlier_exit.reason or ("stopped" if earlier_exit.status == EXIT_STOPPED else "non-finite")
    line = f"this job ended with status {earlier_exit.status}, but torchrun restarted it; it ends again"
    print_failure(Failure(earlier_exit.status, reason, line))
    supervision.exit_record.write(earlier_exit.status, reason, earlier_exit.problem or "")
    return earlier_exit.status


def record_end(status: int, supervision: Supervision) -> int:
    """Record the end of a job that ended without an exception; return the exit status of this rank."""
    if status == EXIT_STOPPED:
        tell_torchrun("stopped early with status 75; run the same command again to continue", status, "stopped")
    supervision.exit_record.write(status, REASON_OF_STATUS[status])
    if status == EXIT_STOPPED:
        supervision.end_torchrun()
    # On one node, the other ranks end with status 0, so that torchrun's table of failures lists rank 0 only.
    return EXIT_DONE if environment_rank() > 0 and environment_nodes() == 1 else status


def report_error(supervision: Supervision, error: Exception) -> int:
    """Report an exception that ends this rank; return the exit status."""
    from training.supervision import rank_failure

    return rank_failure.report(error, supervision)


def run_without_training(run: "Run", command: "TrainCommand", initial: "InitialWeights | None") -> int | None:
    """Run the option that replaces training, such as --plan, and return its exit status.

    Returns None if the command line has no such option. In that case, the run has to be trained. Raises BadInput.
    """
    for option, (module, function) in INSTEAD_OF_TRAINING.items():
        if getattr(command, option) not in (None, False):
            status = getattr(import_module(module), function)(run, command, initial)
            return EXIT_DONE if status is None else int(status)
    return None


def load_model(source: str) -> "OtherModel":
    """Load the model that --init-from or --like names. Raises BadInput."""
    from evaluation.shared.load import load_network
    from evaluation.shared.model_location import locate
    from training.checkpoints.initial_weights import OtherModel

    location = locate(source, None)
    return OtherModel(load_network(location), location.tokenizer)


if __name__ == "__main__":
    leave(main())
