"""evaluate.py export"""

import argparse
from pathlib import Path

from common.errors import BadInput
from evaluation.shared.command_line import add_models, check_alone

HELP = "export a model to a directory that Hugging Face's libraries load as GPT-2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_models(parser, several=False)
    parser.add_argument("directory", type=Path, metavar="DIR", help="output directory; must not exist yet, or be empty")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload to the hub as well")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--license", metavar="NAME", help="license identifier for the model card, such as mit")


def run(arguments: argparse.Namespace) -> None:
    """Export a model, and upload it if asked."""
    import torch

    from evaluation.export.export import Publication, export, push
    from evaluation.shared.load import load, locate

    check_alone("export")
    if arguments.private and arguments.push is None:
        raise BadInput("--private: applies to --push, which is missing")
    publication = Publication(repository=arguments.push, private=arguments.private, license_name=arguments.license)
    publication.check()
    trained = load(locate(arguments.model, arguments.checkpoint), arguments.tokenizer, torch.device("cpu"))
    export(trained, arguments.directory, publication)
    print(f"{arguments.directory}: AutoModelForCausalLM.from_pretrained loads it")
    if publication.repository is not None:
        print(push(arguments.directory, publication))
