#!/usr/bin/env python3
"""Report on runs: `python report.py runs/quickstart` writes one HTML file; `--to` sends the metrics to a tracker."""

import sys

from common.script import Script

EPILOG = """examples:
  python report.py runs/quickstart
  python report.py runs/quickstart --to tensorboard --watch

Exit status: 0 done, 1 error, 2 wrong command line, 130 interrupted.
"""


def main() -> int:
    with Script("report.py") as script:
        from common.arguments import ScriptTexts, read_command
        from reporting.command import COMMANDS
        from training.command import key_rows

        texts = ScriptTexts(epilog=EPILOG)
        command, options = read_command("report.py", COMMANDS, sys.argv[1:], texts=texts, key_rows=key_rows)
        script.interrupted = "; the last complete report is still in place"
        script.status = command.run(options)
    return script.status


if __name__ == "__main__":
    sys.exit(main())
