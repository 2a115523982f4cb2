#!/usr/bin/env python3
"""Evaluate, compare and export models: `python evaluate.py smoke runs/quickstart`."""

import sys
from typing import Any

from common.errors import BadInput
from common.script import Script

DESCRIPTION = """Evaluate, compare and export models. MODEL is a run directory, one of its
checkpoints, a Hugging Face model directory, or OWNER/NAME on the hub."""
EPILOG = """examples:
  python evaluate.py sample runs/quickstart --prompt "def " --tokens 500
  python evaluate.py chat runs/mine --system "Be brief."
  python evaluate.py serve runs/chat
  python evaluate.py smoke runs/8xa100 --checkpoint latest --temperature 0
  python evaluate.py smoke openai-community/gpt2
  python evaluate.py loss runs/8xa100 openai-community/gpt2
  torchrun --standalone --nproc_per_node=8 evaluate.py loss runs/8xa100
  python evaluate.py core runs/8xa100
  python evaluate.py instruct runs/8xa100 --data instruction-data.json --seeds 3
  python evaluate.py judge runs/8xa100 --model gpt-5.4-mini --max-usd 2
  python evaluate.py compare runs/8xa100 openai-community/gpt2 --markdown
  python evaluate.py export runs/8xa100 exported --push OWNER/NAME --license mit

Exit status: 0 done, 1 error or degenerate output, 2 wrong command line,
75 stopped at --max-usd, 130 interrupted.
"""


def main() -> int:
    with Script("evaluate.py", has_ranks=True) as script:
        from common.arguments import ScriptTexts, read_command
        from evaluation.command_line import COMMANDS
        from training.command import key_rows

        texts = ScriptTexts(description=DESCRIPTION, epilog=EPILOG)
        command, options = read_command("evaluate.py", COMMANDS, sys.argv[1:], texts=texts, key_rows=key_rows)
        script.interrupted = "; stored results are kept"
        check_processes(sys.argv[1], options)
        script.status = command.run(options)
    return script.status


def check_processes(name: str, options: Any) -> None:
    """Raise BadInput if several processes were started for a command whose work cannot be shared."""
    from common.launch import check_environment, environment_world_size
    from evaluation.command_line import MeasureOptions

    check_environment()
    processes = environment_world_size()
    if processes > 1 and not isinstance(options, MeasureOptions):
        raise BadInput(f"{name}: got {processes} processes of torchrun, wanted one; run python evaluate.py {name}")


if __name__ == "__main__":
    sys.exit(main())
