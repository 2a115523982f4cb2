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
  python evaluate.py loss runs/8xa100 openai-community/gpt2
  torchrun --standalone --nproc_per_node=8 evaluate.py loss runs/8xa100
  python evaluate.py export runs/8xa100 gpt2-fineweb --push OWNER/gpt2-fineweb --license mit

Exit status: 0 done, 1 error or degenerate output, 2 usage.
"""


TIMEOUT_SECONDS = 3600  # that ranks wait for each other
UNKNOWN = "; what it was trained on is not known here"


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
    _add_model(smoke, several=True)
    smoke.add_argument("--prompt", default="Every effort moves you", help="text to continue (%(default)r)")
    smoke.add_argument("--tokens", type=int, default=20, dest="length", help="tokens to add (%(default)s)")
    smoke.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (%(default)s)")
    smoke.add_argument("--top-k", type=int, default=25, help="candidates for each token (%(default)s)")
    smoke.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    smoke.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    loss = commands.add_parser("loss", help="nats a token and bits a byte of held-out text, with standard errors")
    _add_model(loss, several=True)
    loss.add_argument("--tokens", type=Path, metavar="DIR", help="token directory; default: that of the first run")
    loss.add_argument("--split", default="validation", choices=("train", "validation", "test"), help="(%(default)s)")
    # Not --start: torchrun, which reads all options, would take it for one of its own.
    loss.add_argument(
        "--from", type=int, dest="start", help="default: 50,000,000; in a shorter stream, behind what was validated"
    )
    loss.add_argument("--count", type=int, help="tokens to predict; default: 19,660,800, or what there is")
    loss.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    export = commands.add_parser("export", help="write a directory that Hugging Face's libraries load as GPT-2")
    _add_model(export)
    export.add_argument("directory", type=Path, metavar="DIR", help="new folder")
    export.add_argument("--push", metavar="OWNER/NAME", help="upload it to the hub as well")
    export.add_argument("--private", action="store_true", help="make the repository a private one")
    export.add_argument("--license", metavar="NAME", help="the hub's identifier of a license, as mit, for the card")
    arguments = parser.parse_args()
    for name, least in (("length", 1), ("temperature", 0), ("top_k", 1), ("seed", 0), ("start", 0), ("count", 1)):
        value = getattr(arguments, name, None)
        if value is not None and value < least:
            option = {"length": "tokens", "start": "from"}.get(name, name.replace("_", "-"))
            parser.error(f"--{option}: got {value}, wanted at least {least}")
    if getattr(arguments, "private", False) and arguments.push is None:
        parser.error("--private: says how to --push")
    return arguments


def _add_model(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    what = "run, checkpoint or model directory, or OWNER/NAME on the hub"
    if several:
        parser.add_argument("models", metavar="MODEL", nargs="+", help=what)
    else:
        parser.add_argument("model", metavar="MODEL", help=what)
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
        {"smoke": run_smoke, "loss": run_loss, "export": run_export}[arguments.command](arguments)
    except BadInput as error:
        from training.ranks import environment_rank

        if environment_rank() == 0 or error.alone:  # all ranks raise it together
            print(f"evaluate.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    return EXIT_DONE


def run_smoke(arguments: argparse.Namespace) -> None:
    """Print how each model continues a prompt."""
    import torch  # after --help: it takes seconds

    from evaluation.load import load, locate
    from evaluation.smoke import smoke
    from model.generate import Sampling

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    for model in arguments.models:
        trained = load(locate(model, arguments.checkpoint), arguments.tokenizer, device)
        text = smoke(trained, arguments.prompt, arguments.length, sampling)
        print(f"{trained.place.path}:\n{text}")


def run_loss(arguments: argparse.Namespace) -> None:
    """Print and keep each model's loss on a range of tokens; under torchrun the ranks share the work."""
    import attrs

    from evaluation.load import Place, load_on_all, locate
    from evaluation.loss import Range, check_unseen, choose_range, describe, measure, token_directory
    from evaluation.results import append_result
    from training.ranks import from_coordinator, start, stop

    ranks = start(arguments.device, TIMEOUT_SECONDS)

    def prepare() -> tuple[list[Place], Range]:
        places = [locate(model, arguments.checkpoint) for model in arguments.models]
        directory = arguments.tokens or token_directory(places)
        span = choose_range(directory, arguments.split, arguments.start, arguments.count, places)
        for place in places:
            check_unseen(place, span)
        return places, span

    places, span = from_coordinator(ranks, prepare)
    if ranks.coordinates:
        print(span)
    for place in places:
        result = measure(load_on_all(ranks, place, arguments.tokenizer), span, ranks)
        if ranks.coordinates:
            print(f"{place.path}: {describe(result)}{'' if place.is_own else UNKNOWN}")
            where = {"tokens": str(span.directory), "split": span.split, "start": span.start, "count": span.count}
            append_result(place, "loss", {"range": where, **attrs.asdict(result)})
    stop()


def run_export(arguments: argparse.Namespace) -> None:
    """Write a model for Hugging Face's libraries; say where it is."""
    import torch

    from evaluation.export import Publication, export, push
    from evaluation.load import load, locate

    publication = Publication(repository=arguments.push, private=arguments.private, license_name=arguments.license)
    publication.check()
    trained = load(locate(arguments.model, arguments.checkpoint), arguments.tokenizer, torch.device("cpu"))
    export(trained, arguments.directory, publication)
    print(f"{arguments.directory}: AutoModelForCausalLM.from_pretrained loads it")
    if publication.repository is not None:
        print(push(arguments.directory, publication))


if __name__ == "__main__":
    sys.exit(main())
