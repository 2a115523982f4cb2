#!/usr/bin/env python3
"""Evaluate, compare and export models: `python evaluate.py smoke runs/quickstart`."""

import sys

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput
from common.installation import exit_status, interrupts_kept, prepare_process

DESCRIPTION = """Evaluate, compare and export models. MODEL: a run directory, one of its
checkpoints, a model directory of Hugging Face's, or OWNER/NAME on the hub."""
EPILOG = """examples:
  python evaluate.py sample runs/quickstart --prompt "def " --tokens 500
  python evaluate.py smoke runs/8xa100 --checkpoint latest --temperature 0
  python evaluate.py smoke openai-community/gpt2
  python evaluate.py loss runs/8xa100 openai-community/gpt2
  torchrun --standalone --nproc_per_node=8 evaluate.py loss runs/8xa100
  python evaluate.py hellaswag runs/8xa100 --data hellaswag_val.jsonl
  python evaluate.py harness lambada_openai,arc_easy runs/8xa100
  python evaluate.py instruct runs/8xa100 openai-community/gpt2 --data instruction-data.json --seeds 3
  python evaluate.py judge runs/8xa100 openai-community/gpt2 --model gpt-5.4-mini --max-usd 2
  python evaluate.py compare runs/8xa100 openai-community/gpt2 --markdown
  python evaluate.py export runs/8xa100 gpt2-fineweb --push OWNER/gpt2-fineweb --license mit

Exit status: 0 done, 1 error or degenerate output, 2 usage, 75 stopped at --max-usd, 130 interrupted.
"""


def main() -> int:
    """Run the command; return its exit status."""
    prepare_process("evaluate.py")
    from common.arguments import parse
    from evaluation.command_line import COMMANDS

    classes = {name: command.options for name, command in COMMANDS.items()}
    options = parse("evaluate.py", classes, sys.argv[1:], help_text=DESCRIPTION, epilog=EPILOG)
    from training.launch import check_environment, environment_rank

    try:
        check_environment()
        with interrupts_kept():
            return COMMANDS[sys.argv[1]].run(options) or EXIT_DONE
    except BadInput as error:
        if error.alone or environment_rank() == 0:  # all ranks raise it together
            print(f"evaluate.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("evaluate.py: interrupted; stored results are kept", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(exit_status(main))
