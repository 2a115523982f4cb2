#!/usr/bin/env python3
"""What is a model worth, and how do others use it: `python evaluate.py smoke runs/quickstart`."""

import argparse
import sys
from pathlib import Path

from errors import EXIT_DONE, EXIT_ERROR, BadInput

EPILOG = """examples:
  python evaluate.py smoke runs/quickstart --prompt "def " --tokens 100
  python evaluate.py smoke runs/8xa100 --checkpoint latest --temperature 0
  python evaluate.py smoke openai-community/gpt2
  python evaluate.py export runs/8xa100 gpt2-fineweb --push OWNER/gpt2-fineweb --license mit

Exit status: 0 done, 1 error or degenerate output, 2 usage.
"""


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Evaluate models, and hand them on.\nMODEL: a run directory, one of its checkpoints, a model "
        "directory of Hugging Face's,\nor OWNER/NAME on the hub.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    smoke = commands.add_parser("smoke", help="continue a prompt")
    _add_model(smoke)
    smoke.add_argument("--prompt", default="Every effort moves you", help="text to continue (%(default)r)")
    smoke.add_argument("--tokens", type=int, default=20, help="tokens to add (%(default)s)")
    smoke.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (%(default)s)")
    smoke.add_argument("--top-k", type=int, default=25, help="candidates for each token (%(default)s)")
    smoke.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    smoke.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    export = commands.add_parser("export", help="write a directory that Hugging Face's libraries load as GPT-2")
    _add_model(export)
    export.add_argument("directory", type=Path, metavar="DIR", help="new folder")
    export.add_argument("--push", metavar="OWNER/NAME", help="upload it to the hub as well")
    export.add_argument("--private", action="store_true", help="make the repository a private one")
    export.add_argument("--license", metavar="NAME", help="the hub's identifier of a license, as mit, for the card")
    arguments = parser.parse_args()
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if getattr(arguments, name, least) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}, wanted at least {least}")
    return arguments


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="run, checkpoint or model directory, or OWNER/NAME on the hub")
    parser.add_argument(
        "--checkpoint", metavar="best|latest|NAME", help="of a run; default: best where there is one, else latest"
    )
    parser.add_argument(
        "--tokenizer", metavar="gpt2|bytes|FILE.tiktoken", help="default: that of the model, or of the run's tokens"
    )


def main() -> int:
    """Run the command; return its exit status."""
    arguments = parse_arguments()
    try:
        {"smoke": run_smoke, "export": run_export}[arguments.command](arguments)
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
    trained = load_trained(arguments.model, arguments.checkpoint, arguments.tokenizer, device)
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    text = smoke(trained, arguments.prompt, arguments.tokens, sampling)
    print(f"{trained.path}:\n{text}")


def run_export(arguments: argparse.Namespace) -> None:
    """Write a model for Hugging Face's libraries; say where it is."""
    import torch

    from evaluation.export import Publication, export, push
    from evaluation.load import load_trained

    publication = Publication(repository=arguments.push, private=arguments.private, license_name=arguments.license)
    publication.check()
    trained = load_trained(arguments.model, arguments.checkpoint, arguments.tokenizer, torch.device("cpu"))
    export(trained, arguments.directory, publication)
    print(f"{arguments.directory}: AutoModelForCausalLM.from_pretrained loads it")
    if publication.repository is not None:
        print(push(arguments.directory, publication))


if __name__ == "__main__":
    sys.exit(main())
