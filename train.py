#!/usr/bin/env python3
"""Train one run directory: `torchrun --standalone --nproc_per_node=8 train.py runs/8xa100`."""

import faulthandler
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from common.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_STOPPED,
    EXIT_USAGE,
    BadInput,
    Diverged,
    Reason,
    UsageError,
)
from common.files import Locked, is_folder
from common.output import keep_logs_only, show
from common.script import checked_status, prepare_process
from common.text import printable
from training.launch import (
    Failure,
    check_environment,
    check_launcher,
    environment_nodes,
    environment_rank,
    is_first_on_machine,
    tell_torchrun,
)
from training.supervision.run_lock import ExitRecord
from training.supervision.supervision import Supervision, hold_torchruns_signal

if TYPE_CHECKING:
    from training.command import TrainCommand
    from training.config.train_config import Run
    from training.initial_weights import InitialWeights, OtherModel

# Of a status that no error has caused; EXIT_ERROR is then of --preflight or --replay, for a problem or a difference
REASON_OF_STATUS: dict[int, Reason] = {EXIT_DONE: "finished", EXIT_STOPPED: "stopped", EXIT_ERROR: "check-failed"}
RANK_0_SECONDS = 30.0  # for rank 0 to print an error, after a slow start: torchrun ends all ranks once one has failed


def main() -> int:
    hold_torchruns_signal()
    command = parse_command()
    supervision = supervise(command)
    from training.config.train_config import load_run  # torch takes seconds
    from training.initial_weights import InitialWeights
    from training.job import run_job
    from training.run_checks import all_problems, check_run

    run, follows = None, environment_rank() > 0  # it ends as rank 0 does, which says why
    faulthandler.enable()
    try:
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
            initial = InitialWeights(source.removeprefix("hf:"), partial(load_model, source))
        status = answer(run, command, initial)
        if status is None:
            status = run_job(check_run(run, command, initial), command.options, supervision)
        if status == EXIT_STOPPED:
            tell_torchrun("stopped early with status 75; the same command continues", status, "stopped")
        follows, failure = follows and status != EXIT_DONE, Failure(status, REASON_OF_STATUS[status])
    except Exception as error:  # noqa: BLE001  # leave() prints nothing
        failure, follows = report(error, run, supervision, follows=follows)
    supervision.exit_record.write(*failure)
    if failure.status in {EXIT_STOPPED, EXIT_DIVERGED}:
        supervision.end_torchrun()
    return EXIT_DONE if follows and environment_nodes() == 1 else failure.status  # torchrun's table is of rank 0 alone


def report(error: Exception, run: "Run | None", supervision: Supervision, *, follows: bool) -> tuple[Failure, bool]:
    """Print an error that ends this rank, unless rank 0 prints the same; return it, and whether rank 0 does.

    `follows`: this rank is not rank 0.
    """
    from training.command import describe_error

    status = EXIT_DIVERGED if isinstance(error, Diverged) else EXIT_ERROR
    reason, line = describe_error(error, run)
    if line is None:
        failure = Failure(status, reason, traceback.format_exception_only(error)[-1].strip())
        behind = supervision.failure_behind(error)
        tell_torchrun(traceback.format_exc(), status, reason if behind is None else "failed-rank")
        traceback.print_exc()
        return behind or failure, False
    on_all = isinstance(error, BadInput | Diverged) and not (isinstance(error, BadInput) and error.alone)
    # Rank 0 raises the same; when it has printed it and ended, torchrun sends this rank SIGTERM.
    follows = follows and on_all and supervision.stop_asked.wait(RANK_0_SECONDS)
    if not follows:
        say(line, status, reason)
    return Failure(status, reason, line), follows


def answer(run: "Run", command: "TrainCommand", initial: "InitialWeights | None") -> int | None:
    """Carry out a command that trains nothing; return its status, or None for one that trains. Raises BadInput."""
    if command.dry_run or command.plan:
        from training.planning.estimate_table import dry_run

        dry_run(run, command, initial)
        return EXIT_DONE
    if command.find_max_microbatch:
        from training.batch_finder.finder import report_largest

        report_largest(run, command.overrides, command.options.device, None, command.write)
        return EXIT_DONE
    if command.preflight:
        from training.hardware.preflight import report
        from training.run_checks import machine_requirements

        return report(machine_requirements(run, command))
    if command.look is not None:
        from reporting.samples.batch_text import look

        return look(run, command, initial)
    return None


def load_model(source: str) -> "OtherModel":
    """Return the model that --init-from or --like names. Raises BadInput."""
    from evaluation.shared.load import load_network, locate
    from training.initial_weights import OtherModel

    place = locate(source, None)
    return OtherModel(load_network(place), place.tokenizer)


def parse_command() -> "TrainCommand":
    """Return the command line. Exits after --help, on a usage error and without a package that is needed."""
    try:
        prepare_process("train.py")
        from common.arguments import ScriptTexts, parse
        from training.command import TRAIN_EPILOG, TrainCommand, key_rows

        if sys.argv[1:] == ["--keys"]:
            from training.config.key_table import key_table

            show(*key_table().split("\n"))
            sys.exit(EXIT_DONE)
        texts = ScriptTexts(epilog=TRAIN_EPILOG)
        return parse("train.py", TrainCommand, sys.argv[1:], texts=texts, key_rows=key_rows)
    except UsageError as error:
        ExitRecord(None).write(EXIT_USAGE, "usage-error", str(error))
        if is_first_on_machine():  # the other ranks of this machine would say the same
            say(str(error), EXIT_USAGE, "usage-error")
            leave(checked_status(EXIT_USAGE))
    except SystemExit as end:  # after --help or --keys, or because a package is missing
        if not end.code:
            leave(checked_status(EXIT_DONE))
        ExitRecord(None).write(EXIT_USAGE, "usage-error", str(end.code))
        if is_first_on_machine():
            raise
    return leave(EXIT_DONE)


def supervise(command: "TrainCommand") -> Supervision:
    """Receive signals and lock the run directory. Exits where the environment or another job leaves nothing to do."""
    if command.trains:
        keep_logs_only()
    try:
        check_environment()
        locks = command.trains and environment_rank() == 0 and is_folder(command.run)
        if locks:
            check_launcher()  # before the lock, where tasks that would all train would wait for the first
        supervision = Supervision(command.run if locks else None)
    except BadInput as error:
        say(str(error), EXIT_ERROR, error.reason)
        if not isinstance(error, Locked):
            ExitRecord(None).write(EXIT_ERROR, error.reason, str(error))
        leave(checked_status(EXIT_ERROR))
    if (earlier := supervision.earlier_exit) is not None:
        reason = earlier.reason or ("stopped" if earlier.status == EXIT_STOPPED else "non-finite")
        line = f"this job ended with status {earlier.status}, and torchrun restarted it: ending again"
        say(line, earlier.status, reason)
        supervision.exit_record.write(earlier.status, reason, earlier.problem or "")
        leave(checked_status(earlier.status))
    return supervision


def say(problem: str, status: int, reason: Reason) -> None:
    """Print an error, each problem as one line; torchrun's table of failures has it, too."""
    lines = [printable(line) for line in problem.split("\n")]
    print(*(f"train.py: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    tell_torchrun("\n".join(lines), status, reason)


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's own shutdown.

    gloo's threads release their last tensors a moment after a collective returns. During the shutdown they would wait
    for an interpreter that is gone, and the process aborts: with torch 2.13, one in five short FSDP runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(checked_status(main()))
