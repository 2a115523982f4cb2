"""evaluate.py smoke"""

import argparse

from evaluation.commands.common import add_device, add_models, at_least, temperature

HELP = "continue a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_models(parser, several=True)
    parser.add_argument("--prompt", default="Every effort moves you", help="text to continue (%(default)r)")
    parser.add_argument("--tokens", type=at_least(1), default=20, help="tokens to add (%(default)s)")
    parser.add_argument("--temperature", type=temperature, default=1.0, help="0 takes the most likely token")
    parser.add_argument("--top-k", type=at_least(1), default=25, help="candidates for each token (%(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the sampling (%(default)s)")
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print how each model continues a prompt."""
    import torch  # after --help: it takes seconds

    from evaluation.load import load, locate
    from evaluation.smoke import smoke
    from model.generate import Sampling

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    for model in arguments.models:
        trained = load(locate(model, arguments.checkpoint), arguments.tokenizer, device)
        text = smoke(trained, arguments.prompt, arguments.tokens, sampling)
        print(f"{trained.place.path}:\n{text}")
