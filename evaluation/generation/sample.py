"""Sample texts of any length after a prompt, print them as they are generated, and trace them to the training data."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from common.errors import BadInput
from common.output import show
from common.text import counted
from evaluation.command_line import SampleCommand
from evaluation.generation.generated_text import GeneratedText, load_for_generation, print_parts, sampling_of
from evaluation.generation.prompts import read_prompt
from evaluation.shared.load import Trained
from tokens.format.token_file import TokenStream
from tokens.search.excerpt import excerpt
from tokens.search.overlap import GRAM, open_comparable
from tokens.search.verbatim import verbatim_runs

SHOWN_RUNS = 10  # largest number of runs of tokens that a trace prints


def run(command: SampleCommand) -> None:
    prompt = read_prompt(command.prompt)
    trained = load_for_generation(command)
    print_samples(trained, command, prompt, training_data(trained, command.against) if command.trace else [])


def training_data(trained: Trained, directories: Sequence[Path]) -> list[TokenStream]:
    """Open the train splits of token directories. The default is the model's training data. Raises BadInput."""
    directories = directories or trained.location.job.token_directories
    if not directories:
        raise BadInput(f"{trained.location.path}: does not name a token directory; pass --against DIR")
    return [open_comparable(directory, "train", trained.tokenizer) for directory in directories]


def print_samples(trained: Trained, command: SampleCommand, prompt: str, streams: Sequence[TokenStream] = ()) -> None:
    """Print samples as they are generated. Raises BadInput.

    Stop early if the program that reads the output has ended. If there are `streams`, each sample is followed by a
    trace, which shows where parts of the sample occur in the streams.
    """
    ids = trained.encode(prompt)
    for number in range(command.samples):
        if number:
            show("-" * 15)  # the separator of nanoGPT's sample.py
        text = GeneratedText(trained, ids, command.tokens, sampling_of(command, number))
        if not print_parts(chain([prompt], text)):
            return
        if streams:
            show(*trace(trained, streams, np.array(text.tokens)))


def trace(trained: Trained, streams: Sequence[TokenStream], text: np.ndarray) -> list[str]:
    """Return lines about the longest runs of tokens in a generated text that also occur in streams, longest first.

    `text`: the ids of the generated text, 1-D. Runs that overlap a longer run are not printed.
    """
    runs = verbatim_runs(streams, text)
    in_training_data, printed = np.zeros(len(text), bool), np.zeros(len(text), bool)
    lines: list[str] = []
    for run in sorted(runs, key=lambda run: -run.length):
        span = slice(run.start, run.start + run.length)
        in_training_data[span] = True
        if not printed[span].any() and len(lines) < SHOWN_RUNS:
            printed[span] = True
            copies = f"{run.copies:,} places, first " if run.copies > 1 else ""
            source = excerpt(streams, run.place, run.length, trained.tokenizer)
            lines.append(f"  {run.length:,} tokens from {run.start:,} on: {copies}{source}")
    share = f"{in_training_data.sum():,} of {len(text):,} new tokens occur in the training data"
    heading = "; the longest, without overlaps:" * bool(lines)
    return [f"trace: {share}, in {counted(len(runs), 'run')} of {GRAM} or more tokens" + heading, *lines]
