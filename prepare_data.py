#!/usr/bin/env python3
"""Prepare token files: `prepare_data.py SOURCE... --output DIR`; inspect, verify and publish token directories."""

import os
import sys
import time
from typing import TYPE_CHECKING

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput, printable
from common.installation import exit_status, interrupts_kept, keep_logs_only, prepare_process

if TYPE_CHECKING:
    from tokens.prepare.command import PrepareCommand


def main() -> int:
    """Run the command; return its exit status."""
    prepare_process("prepare_data.py")
    from tokens.command import parse_command_line
    from tokens.prepare.command import PrepareCommand

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread per core, in each worker
    try:
        command = parse_command_line(sys.argv[1:])
        if isinstance(command, PrepareCommand):
            return prepare(command)
        print("\n".join(map(printable, command.lines())))
        return EXIT_DONE
    except (BadInput, OSError) as error:
        print(f"prepare_data.py: {printable(str(error))}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        print(f"prepare_data.py: interrupted{interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare(command: "PrepareCommand") -> int:
    """Read, encode and write every document, in the order of the sources."""
    from tokens.prepare.commit_log import COMMITS
    from tokens.prepare.display import Display, report, too_many_bad
    from tokens.prepare.prepare import prepare

    def kept() -> str:
        begun = (command.directory / COMMITS).exists()
        return "; what was committed is kept: the same command goes on" if begun else ""

    keep_logs_only()
    began = time.monotonic()
    display = Display()
    try:
        with interrupts_kept():
            manifest = prepare(command, display)
    except OSError as error:  # a full disk, above all
        raise BadInput(f"{error}{kept()}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept()) from None
    finally:
        display.close()
    report(command, manifest, time.monotonic() - began)
    return EXIT_ERROR if too_many_bad(manifest) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
