#!/usr/bin/env python3
"""Experiments on runs: `sweep` compares changes of a run over seeds, `ladder` forecasts a large run from small ones."""

import sys

from common.installation import exit_status, prepare_process, run_command

DESCRIPTION = "Train variants of a run under one budget, and say what the results prove."
EPILOG = """examples:
  python experiment.py sweep sweeps/quickstart.json --dry-run
  python experiment.py sweep sweeps/quickstart.json --price-per-hour 14.32 --max-usd 20
  python experiment.py ladder ladders/laptop.json

Exit status: 0 done, 1 error, 2 usage, 75 stopped at its budget or by SIGTERM,
130 interrupted.
"""


def main() -> int:
    """Run the command; return its exit status."""
    prepare_process("experiment.py")
    from common.arguments import parse
    from experiments.command import LadderCommand, SweepCommand

    commands = {"sweep": SweepCommand, "ladder": LadderCommand}
    command = parse("experiment.py", commands, sys.argv[1:], help_text=DESCRIPTION, epilog=EPILOG)
    return run_command("experiment.py", command.run, "; the same command continues")


if __name__ == "__main__":
    sys.exit(exit_status(main))
