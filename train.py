#!/usr/bin/env python3
"""Train one run directory: `torchrun --standalone --nproc_per_node=8 train.py runs/8xa100`."""

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

# Of a status that no error has caused; EXIT_ERROR is then of --preflight or --replay, for a problem or a difference
REASON_OF_STATUS: dict[int, Reason] = {EXIT_DONE: "finished", EXIT_STOPPED: "stopped", EXIT_ERROR: "check-failed"}
# What an option of train.py does instead of training: the module, imported then, and its function of (run, command,
# initial weights), which returns an exit status, None for success
INSTEAD_OF_TRAINING = {
    "dry_run": ("training.planning.dry_run", "dry_run"),
    "plan": ("training.planning.dry_run", "dry_run"),
    "find_max_microbatch": ("training.planning.batch_command", "find_for_training"),
    "preflight": ("training.run_checks", "preflight"),
    "look": ("reporting.samples.batch_text", "look"),
}


def main() -> int:
    supervision = Supervision()
    with Script("train.py", partial(report, supervision)) as script:
        command = read_command()
        if (earlier := prepare(command, supervision)) is not None:
            return end_again(earlier, supervision)
        from training.checkpoints.initial_weights import InitialWeights
        from training.config.train_config import load_run  # torch takes seconds
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
        initial = None  # else the model that --init-from names; it is read when the run begins
        if (source := command.options.init_from) is not None:
            initial = InitialWeights(source.removeprefix(HUB), partial(load_model, source))
        with memory_advice(run):
            status = answer(run, command, initial)
            if status is None:
                status = run_job(check_run(run, command, initial), command.options, supervision)
        script.status = record_end(status, supervision)
    return script.status


def read_command() -> "TrainCommand":
    """Return the command line. Exits after --keys, as after --help."""
    from common.arguments import ScriptTexts, parse
    from training.command import TRAIN_EPILOG, TrainCommand, key_rows

    if sys.argv[1:] == ["--keys"]:
        from training.config.key_table import key_table

        show(*key_table().split("\n"))
        sys.exit(EXIT_DONE)
    texts = ScriptTexts(epilog=TRAIN_EPILOG)
    return parse("train.py", TrainCommand, sys.argv[1:], texts=texts, key_rows=key_rows)


def prepare(command: "TrainCommand", supervision: Supervision) -> JobExit | None:
    """Check the environment, and lock a run directory that is there; return the end of this job if it has ended."""
    if command.trains:
        keep_logs_only()
    check_environment()
    if command.trains and environment_rank() == 0 and is_folder(command.run):
        check_launcher()  # before the lock, where tasks that would all train would wait for the first
        supervision.lock(command.run)
    return supervision.earlier_exit


def end_again(earlier: JobExit, supervision: Supervision) -> int:
    """End as an earlier group of ranks of this job has, which torchrun should not have restarted."""
    from training.supervision.rank_failure import print_failure

    reason = earlier.reason or ("stopped" if earlier.status == EXIT_STOPPED else "non-finite")
    line = f"this job ended with status {earlier.status}, and torchrun restarted it: ending again"
    print_failure(Failure(earlier.status, reason, line))
    supervision.exit_record.write(earlier.status, reason, earlier.problem or "")
    return earlier.status


def record_end(status: int, supervision: Supervision) -> int:
    """Record the end of a job that no error has ended; return the exit status of this rank."""
    if status == EXIT_STOPPED:
        tell_torchrun("stopped early with status 75; the same command continues", status, "stopped")
    supervision.exit_record.write(status, REASON_OF_STATUS[status])
    if status == EXIT_STOPPED:
        supervision.end_torchrun()
    # torchrun's table is of rank 0 alone
    return EXIT_DONE if environment_rank() > 0 and environment_nodes() == 1 else status


def report(supervision: Supervision, error: Exception) -> int:
    from training.supervision import rank_failure

    return rank_failure.report(error, supervision)


def answer(run: "Run", command: "TrainCommand", initial: "InitialWeights | None") -> int | None:
    """Carry out a command that trains nothing; return its status, or None for one that trains. Raises BadInput."""
    for option, (module, function) in INSTEAD_OF_TRAINING.items():
        if getattr(command, option) not in (None, False):
            status = getattr(import_module(module), function)(run, command, initial)
            return EXIT_DONE if status is None else int(status)
    return None


def load_model(source: str) -> "OtherModel":
    """Return the model that --init-from or --like names. Raises BadInput."""
    from evaluation.shared.load import load_network
    from evaluation.shared.model_location import locate
    from training.checkpoints.initial_weights import OtherModel

    place = locate(source, None)
    return OtherModel(load_network(place), place.tokenizer)


if __name__ == "__main__":
    leave(main())
