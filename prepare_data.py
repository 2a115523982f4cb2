#!/usr/bin/env python3
"""Prepare token files (`prepare_data.py SOURCE... --output DIR`), or inspect, verify and publish a token directory."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from common.errors import BadInput
from common.script import Script


def main() -> int:
    with Script("prepare_data.py") as script:
        from tokens.command import read_command_line
        from training.command import key_rows

        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise numpy starts a thread per core in every worker
        command, options = read_command_line(sys.argv[1:], key_rows)
        script.interrupted = partial(how_to_continue, options)
        with full_disks(options):
            script.status = command.run(options)
    return script.status


@contextmanager
def full_disks(options: Any) -> Iterator[None]:
    """Turn an OSError raised in the block, usually by a full disk, into BadInput with advice on how to continue."""
    try:
        yield
    except OSError as error:
        from common.files import system_error

        advice = how_to_continue(options) or "; fix this, then rerun the same command"
        raise BadInput(f"{system_error(error)}{advice}") from error


def how_to_continue(options: Any) -> str:
    """Return the end of a message that says how to resume a stopped preparation, or "" if nothing was committed."""
    from tokens.prepare.command import PrepareCommand
    from tokens.prepare.commit_log import COMMITS

    is_resumable = isinstance(options, PrepareCommand) and os.path.exists(options.directory / COMMITS)  # noqa: PTH110  # never raises
    return "; finished work is kept, so rerun the same command to continue" if is_resumable else ""


if __name__ == "__main__":
    sys.exit(main())
