"""torchrun that ends with its ranks' last line and status, without a log and a traceback of its own.

    python -m training.supervision.torchrun --standalone --nproc_per_node=2 train.py runs/quickstart

After a stop the last line is the command that continues: NEXT_VARIABLE, else this one. Later requests to stop, as by a
second Ctrl-C, change nothing: the ranks save.
"""

import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, printable
from common.installation import guard_outputs
from training.supervision.run_lock import NODE_VARIABLE, read_record
from training.supervision.supervision import NUMBERS

NEXT_VARIABLE = "LOCKSTEP_NEXT"


def main() -> int:
    """Run torchrun; return the status of the rank that failed first, EXIT_ERROR for one that was killed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    def stop(number: int, _: object) -> NoReturn:
        for each in NUMBERS:
            signal.signal(each, signal.SIG_IGN)
        raise SignalException("", signal.Signals(number))

    guard_outputs()
    arguments = parse_args(None)
    arguments.signals_to_handle = "SIGQUIT"
    logging.disable(logging.ERROR)
    with TemporaryDirectory() as folder:
        os.environ[NODE_VARIABLE] = folder
        for number in NUMBERS:
            signal.signal(number, stop)
        try:
            run(arguments)
            status, end = EXIT_DONE, ""
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status, end = failure.exitcode, ""
            if status < 0:
                status, end = EXIT_ERROR, f"rank {rank}: {failure.message}"
        except SignalException as error:
            record = read_record(Path(folder, "0.json"))
            status = EXIT_ERROR if record is None else record.status
            end = f"{error.sigval.name} ended its ranks before they could save" if record is None else ""
    if status == EXIT_STOPPED or end:
        command = os.environ.get(NEXT_VARIABLE) or shlex.join(sys.orig_argv)
        print(f"torchrun: {end or f'stopped, status {status}'}; to continue: {printable(command)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
