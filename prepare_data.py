#!/usr/bin/env python3
"""Prepare token files: `prepare_data.py SOURCE... --output DIR`; inspect, verify and publish token directories."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput, printable
from common.installation import begin, exit_status
from common.remote_files import REMOTE

if TYPE_CHECKING:
    from tokens.command import PrepareCommand
    from tokens.prepare.executors import Executor


def main() -> int:
    """Run the command; return its exit status."""
    begin("prepare_data.py")
    from tokens.command import PrepareCommand, parse_command_line

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread per core, in each worker
    try:
        command = parse_command_line(sys.argv[1:])
        if isinstance(command, PrepareCommand):
            return prepare(command)
        print("\n".join(map(printable, command.lines())))
        return EXIT_DONE
    except BadInput as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"prepare_data.py: {printable(str(error))}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        print(f"prepare_data.py: interrupted{interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare(command: "PrepareCommand") -> int:
    """Read, encode and write every document, in the order of the sources."""
    from tokens.format.splits import SplitRule
    from tokens.prepare.display import Display, report, too_many_bad
    from tokens.prepare.prepare import Host, PrepareRequest, prepare

    bucket = command.output if REMOTE in command.output else None
    scratch = command.scratch or Path("token_files", command.output.rstrip("/").rpartition("/")[2])
    request = PrepareRequest(
        sources=list(command.sources),
        directory=Path(command.output) if bucket is None else scratch,
        bucket=bucket,
        tokenizer=command.tokenizer,
        text_field=command.text_field,
        rule=SplitRule(
            kind=command.split,
            seed=command.split_seed,
            validation=command.validation_fraction,
            test=command.test_fraction,
        ),
        unit_bytes=command.unit_bytes,
        shard_tokens=command.shard_tokens,
        fail_on_bad_document=command.on_bad_document == "fail",
    )
    began = time.monotonic()
    display = Display()
    try:
        manifest = prepare(request, Host(make_executor=lambda: make_executor(command), say=say, show=display.show))
    except OSError as error:  # a full disk, above all
        raise BadInput(f"{error}{kept_in(request.directory)}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept_in(request.directory)) from None
    finally:
        display.close()
    asked = command.validation_fraction + command.test_fraction
    report(command.output, manifest, asked, time.monotonic() - began)
    return EXIT_ERROR if too_many_bad(manifest) else EXIT_DONE


def kept_in(directory: Path) -> str:
    """Return the end of the last line of an interrupted command: whether it can be resumed."""
    from tokens.prepare.commit_log import LEDGER

    begun = (directory / LEDGER).exists()
    return "; what was committed is kept: the same command goes on" if begun else ""


def make_executor(command: "PrepareCommand") -> "Executor":
    """Return the executor of the units of work."""
    from tokens.prepare.executors import Inline, Processes, RayCluster

    if command.executor == "ray":
        return RayCluster(command.ray_address)
    return Inline() if command.executor == "inline" else Processes(command.workers)


def say(line: str) -> None:
    """Print a line on stderr."""
    print(printable(line), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(exit_status(main))
