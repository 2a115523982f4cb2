#!/usr/bin/env python3
"""Find the largest micro-batch of a run, on this machine or on another GPU: `python find_batch_size.py runs/8xa100`."""

import sys
from typing import TYPE_CHECKING

from common.script import Script

if TYPE_CHECKING:
    pass


def main() -> int:
    with Script("find_batch_size.py") as script:
        from common.arguments import ScriptTexts, read_command
        from training.command import FIND_COMMANDS, FIND_EPILOG, key_rows

        texts = ScriptTexts(epilog=FIND_EPILOG)
        command, options = read_command(
            "find_batch_size.py", FIND_COMMANDS, sys.argv[1:], texts=texts, key_rows=key_rows
        )
        script.interrupted = ": nothing was written"
        script.status = command.run(options)
    return script.status


if __name__ == "__main__":
    sys.exit(main())
