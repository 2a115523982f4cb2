"""torchrun as the Makefile runs it: `python -m training.supervision.torchrun train.py RUN`.

It starts one rank per GPU, or two CPU processes. Unlike torchrun itself, it ends with the status of its ranks, and
its last line says how they ended, without a log or traceback.
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

MOST_RANKS = 8  # a step of the quickstart has 8 micro-batches, which can be divided evenly among at most 8 ranks


def main() -> int:
    """Run torchrun; return the status of rank 0, or EXIT_ERROR if any rank was killed."""
    # Until torchrun handles Ctrl-C, Ctrl-C ends the process at once, without a traceback from torch's import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
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
            status, cause = failure.exitcode, f"rank {rank}: {failure.message}"
        except SignalException as error:  # in this case, torchrun does not report how its ranks ended
            record, cause = Path(folder, "0.json"), error.sigval.name
            status = read_json(record)["status"] if record.exists() else -1
    if status == EXIT_STOPPED or status < 0:
        outcome = f"stopped, status {status}" if status > 0 else cause
        show(progress(f"{outcome}; to continue, run {os.environ.get('LOCKSTEP_NEXT', 'the same command again')}"))
    return status if status >= 0 else EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
