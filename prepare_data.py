#!/usr/bin/env python3
"""Prepare token files: `prepare_data.py SOURCE... --output DIR`; inspect, verify and publish token directories."""

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from common.errors import EXIT_DONE, BadInput
from common.output import keep_logs_only, show
from common.script import Script

if TYPE_CHECKING:
    from tokens.command import Lines
    from tokens.prepare.command import PrepareCommand


def main() -> int:
    with Script("prepare_data.py") as script:
        from tokens.command import parse_command_line
        from training.command import key_rows

        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread per core, in each worker
        command = parse_command_line(sys.argv[1:], key_rows)
        script.interrupted = partial(kept, command)
        script.status = run(command)
    return script.status


def run(command: "PrepareCommand | Lines") -> int:
    """Prepare tokens, or print the lines of another command; return the exit status. Raises BadInput."""
    from tokens.prepare.command import PrepareCommand

    try:
        if not isinstance(command, PrepareCommand):
            show(*command())
            return EXIT_DONE
        from tokens.prepare.display import refuse_losses, report
        from tokens.prepare.prepare import prepare

        keep_logs_only()
        began = time.monotonic()
        manifest = prepare(command)
        report(command, manifest, time.monotonic() - began)
        refuse_losses(manifest, sum(source.bytes for source in manifest.sources), "the token files are")
        return EXIT_DONE
    except OSError as error:  # a full disk, above all
        from common.files import system_error

        raise BadInput(f"{system_error(error)}{kept(command) or '; fix this, then rerun the same command'}") from error


def kept(command: "PrepareCommand | Lines") -> str:
    """Return the end of a message: how to resume a preparation that stops."""
    from tokens.prepare.command import PrepareCommand
    from tokens.prepare.commit_log import COMMITS

    begun = isinstance(command, PrepareCommand) and os.path.exists(command.directory / COMMITS)  # noqa: PTH110  # never raises
    return "; what was committed is kept: the same command goes on" if begun else ""


if __name__ == "__main__":
    sys.exit(main())
