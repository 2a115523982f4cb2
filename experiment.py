#!/usr/bin/env python3
"""Experiments on runs: `sweep` compares settings, `trial` compares two commits, `ladder` forecasts a large run."""

import sys

from common.script import Script

DESCRIPTION = "Train variants of a run under one budget, and say what the results prove."
EPILOG = """examples:
  python experiment.py sweep sweeps/quickstart.json --dry-run
  python experiment.py sweep sweeps/quickstart.json \\
      --price-per-hour 14.32 --max-usd 20
  python experiment.py trial HEAD . runs/quickstart --max-hours 1
  python experiment.py ladder ladders/laptop.json

Exit status: 0 done, 1 error, 2 wrong command line, 75 stopped by the budget or
by SIGTERM, 130 interrupted. For trial: 0 better, 10 same bits, 11 no difference
found, 12 worse, 13 cannot tell.
"""


def main() -> int:
    with Script("experiment.py") as script:
        from common.arguments import ScriptTexts, read_command
        from experiments.command import COMMANDS
        from training.command import key_rows

        texts = ScriptTexts(description=DESCRIPTION, epilog=EPILOG)
        command, options = read_command("experiment.py", COMMANDS, sys.argv[1:], texts=texts, key_rows=key_rows)
        script.interrupted = "; to continue, run the same command again"
        script.status = command.run(options)
    return script.status


if __name__ == "__main__":
    sys.exit(main())
