#!/usr/bin/env python3
"""Train one run directory: `torchrun --standalone --nproc_per_node=8 train.py runs/8xa100`."""

import faulthandler
import os
import sys
import traceback
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, NoReturn

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, BadInput, Diverged, printable
from common.files import Locked, is_folder
from common.installation import checked_status, keep_logs_only, prepare_process
from training.launch import (
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

RANK_0_SECONDS = 30.0  # for rank 0 to print an error, after a slow start: torchrun ends all ranks once one has failed


def main() -> int:
    hold_torchruns_signal()
    command = parse_command()
    supervision = supervise(command)
    from training.command import describe_error  # torch takes seconds
    from training.config.train_config import load_run
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
            tell_torchrun("stopped early with status 75; the same command continues", status)
        follows = follows and status != EXIT_DONE
    except Exception as error:  # noqa: BLE001  # leave() prints nothing
        status, line = EXIT_DIVERGED if isinstance(error, Diverged) else EXIT_ERROR, describe_error(error, run)
        on_all = isinstance(error, BadInput | Diverged) and not (isinstance(error, BadInput) and error.alone)
        # Rank 0 raises the same; when it has printed it and ended, torchrun sends this rank SIGTERM.
        follows = follows and on_all and supervision.stop_asked.wait(RANK_0_SECONDS)
        if line is None:
            tell_torchrun(traceback.format_exc(), status)
            traceback.print_exc()
        elif not follows:
            say(line, status)
    supervision.exit_record.write(status)
    if status in {EXIT_STOPPED, EXIT_DIVERGED}:
        supervision.end_torchrun()
    return EXIT_DONE if follows and environment_nodes() == 1 else status  # torchrun's table is of rank 0 alone


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
    said = StringIO()
    try:
        prepare_process("train.py")
        from common.arguments import ScriptTexts, parse
        from training.command import TRAIN_EPILOG, TrainCommand, key_rows

        if sys.argv[1:] == ["--keys"]:
            from training.config.key_table import key_table

            print(key_table())
            sys.exit(EXIT_DONE)
        texts = ScriptTexts(epilog=TRAIN_EPILOG)
        with redirect_stderr(said):
            return parse("train.py", TrainCommand, sys.argv[1:], texts=texts, key_rows=key_rows)
    except SystemExit as end:
        if not end.code:
            leave(checked_status(EXIT_DONE))
        ExitRecord(None).write(EXIT_USAGE)
        if not is_first_on_machine():
            leave(EXIT_DONE)  # the first rank of this machine says the same
        if line := said.getvalue().strip():
            say(line.removeprefix("train.py: "), EXIT_USAGE)
        raise


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
        say(str(error), EXIT_ERROR)
        if not isinstance(error, Locked):
            ExitRecord(None).write(EXIT_ERROR)
        leave(checked_status(EXIT_ERROR))
    if supervision.earlier_status is not None:
        line = f"this job ended with status {supervision.earlier_status}, and torchrun restarted it: ending again"
        say(line, supervision.earlier_status)
        supervision.exit_record.write(supervision.earlier_status)
        leave(checked_status(supervision.earlier_status))
    return supervision


def say(problem: str, status: int) -> None:
    """Print an error, each problem as one line; torchrun's table of failures has it, too."""
    lines = [printable(line) for line in problem.split("\n")]
    print(*(f"train.py: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    tell_torchrun("\n".join(lines), status)


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
