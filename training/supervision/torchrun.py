"""torchrun that ends with the last line and the status of its ranks, without a log and a traceback of its own.

`python -m training.supervision.torchrun --standalone --nproc_per_node=2 train.py RUN`, as make runs it.
"""

import logging
import os
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from common.json_files import read_json
from training.supervision.run_lock import NODE_VARIABLE


def main() -> int:
    """Run torchrun; return the status of the rank that failed first, EXIT_ERROR where it was killed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    arguments = parse_args(None)
    logging.disable(logging.ERROR)
    status, killed = EXIT_DONE, ""
    with TemporaryDirectory() as folder:
        os.environ[NODE_VARIABLE] = folder
        try:
            run(arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status, killed = failure.exitcode, f"rank {rank}: {failure.message}" if failure.exitcode < 0 else ""
        except SignalException as error:
            record = Path(folder, "0.json")  # torchrun does not tell how its ranks have ended
            status, killed = (read_json(record)["status"], "") if record.exists() else (EXIT_ERROR, error.sigval.name)
    if killed or status == EXIT_STOPPED:
        again = os.environ.get("LOCKSTEP_NEXT") or shlex.join(sys.orig_argv)
        print(f"{killed or f'stopped, status {status}'}; to continue: {again}", file=sys.stderr)
    return EXIT_ERROR if killed else status


if __name__ == "__main__":
    sys.exit(main())
