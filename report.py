#!/usr/bin/env python3
"""Report on runs: `python report.py runs/quickstart` writes one HTML file, `--to` replays them to a tracker."""

import sys

from common.script import exit_status, prepare_process, run_command

EPILOG = """examples:
  python report.py runs/quickstart
  python report.py runs/quickstart --to tensorboard --watch

Exit status: 0 done, 1 error, 2 usage, 130 interrupted.
"""


def main() -> int:
    """Run the command; return its exit status."""
    prepare_process("report.py")
    from common.arguments import ScriptTexts, parse
    from reporting.command import ReportCommand
    from training.command import key_rows

    texts = ScriptTexts(epilog=EPILOG)
    command = parse("report.py", ReportCommand, sys.argv[1:], texts=texts, key_rows=key_rows)
    return run_command("report.py", command.run, "; the last whole report is in place")


if __name__ == "__main__":
    sys.exit(exit_status("report.py", main))
