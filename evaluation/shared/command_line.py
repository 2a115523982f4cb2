"""Command-line options that commands of `evaluate.py` share. Importing this is quick: no torch."""

import argparse

from common.errors import BadInput

TIMEOUT_SECONDS = 3600  # of collectives: how long ranks wait for each other


def add_models(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add MODEL, or several as `models`, --checkpoint and --tokenizer."""
    what = "run, checkpoint or model directory, or OWNER/NAME on the hub"
    if several:
        parser.add_argument("models", metavar="MODEL", nargs="+", help=what)
    else:
        parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument(
        "--checkpoint",
        metavar="best|latest|NAME",
        help="checkpoint of a run; default: best where there is one, else latest",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="gpt2|bytes|FILE.tiktoken",
        help="default: the tokenizer of the model, or of the run's tokens",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU, else cpu")


def check_alone(command: str) -> None:
    """Raise BadInput under torchrun with several processes, as each would do all of the command's work."""
    from training.launch import environment_world_size

    processes = environment_world_size()
    if processes > 1:
        raise BadInput(f"{command}: got {processes} processes of torchrun, wanted one: python evaluate.py {command}")
