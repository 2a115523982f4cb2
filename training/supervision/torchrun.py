"""torchrun as make runs it, `python -m training.supervision.torchrun train.py RUN`, on all GPUs or two CPU processes.

It ends with the last line and the status of its ranks, without a log and a traceback of its own.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from common.json_files import read_json
from common.output import progress, show
from training.supervision.run_lock import NODE_VARIABLE

MOST_RANKS = 8  # the quickstart has as many micro-batches in a step, which ranks share evenly


def main() -> int:
    """Run torchrun; return the status of rank 0, EXIT_ERROR where any was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torchrun handles it: torch's import aborts at an exception
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    ranks = 1 << (min(torch.cuda.device_count() or 2, MOST_RANKS).bit_length() - 1)
    logging.disable(logging.ERROR)
    with TemporaryDirectory() as folder:
        os.environ[NODE_VARIABLE] = folder
        try:
            run(parse_args(["--standalone", f"--nproc_per_node={ranks}", *sys.argv[1:]]))
            return EXIT_DONE
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status, killed = failure.exitcode, f"rank {rank}: {failure.message}"
        except SignalException as error:  # torchrun does not ask how its ranks end then
            record, killed = Path(folder, "0.json"), error.sigval.name
            status = read_json(record)["status"] if record.exists() else -1
    if status == EXIT_STOPPED or status < 0:
        end = f"stopped, status {status}" if status > 0 else killed
        show(progress(f"{end}; to continue: {os.environ.get('LOCKSTEP_NEXT', 'the same command')}"))
    return status if status >= 0 else EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
