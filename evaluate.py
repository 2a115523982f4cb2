#!/usr/bin/env python3
"""Ask a trained model questions: `python evaluate.py smoke runs/quickstart`."""

import argparse
import sys
from pathlib import Path

from errors import EXIT_DONE, EXIT_ERROR, BadInput

EPILOG = """examples:
  python evaluate.py smoke runs/quickstart --prompt "def " --tokens 100
  python evaluate.py smoke runs/8xa100 --checkpoint latest --temperature 0

Exit status: 0 done, 1 error or degenerate output, 2 usage.
"""


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Evaluate the model of a run directory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    smoke = commands.add_parser("smoke", help="continue a prompt")
    smoke.add_argument("run", type=Path, help="run directory")
    smoke.add_argument("--checkpoint", metavar="best|latest|NAME", help="default: best where there is one, else latest")
    smoke.add_argument("--prompt", default="Every effort moves you", help="text to continue (%(default)r)")
    smoke.add_argument("--tokens", type=int, default=20, help="tokens to add (%(default)s)")
    smoke.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (%(default)s)")
    smoke.add_argument("--top-k", type=int, default=25, help="candidates for each token (%(default)s)")
    smoke.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    smoke.add_argument(
        "--tokenizer", metavar="gpt2|bytes|FILE.tiktoken", help="that of the run's tokens, where the run has no record"
    )
    smoke.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    arguments = parser.parse_args()
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}, wanted at least {least}")
    return arguments


def main() -> int:
    """Run the command; return its exit status."""
    arguments = parse_arguments()
    try:
        run_smoke(arguments)
    except BadInput as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    return EXIT_DONE


def run_smoke(arguments: argparse.Namespace) -> None:
    """Print the continuation of a prompt."""
    import torch  # after --help: it takes seconds

    from evaluation.load import load_trained
    from evaluation.smoke import smoke
    from model.generate import Sampling

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    trained = load_trained(arguments.run, arguments.checkpoint, arguments.tokenizer, device)
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    text = smoke(trained, arguments.prompt, arguments.tokens, sampling)
    print(f"{trained.path}:\n{text}")


if __name__ == "__main__":
    sys.exit(main())
