"""Sampling: texts of any length after a prompt, streamed; traced to the training data that holds parts of them."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from common.errors import BadInput
from common.output import show
from evaluation.command_line import SampleCommand
from evaluation.generation.generated_text import GeneratedText, load_for_generation, print_parts, sampling_of
from evaluation.generation.prompts import read_prompt
from evaluation.shared.load import Trained
from tokens.format.token_file import TokenStream
from tokens.search.excerpt import excerpt
from tokens.search.overlap import GRAM, open_comparable
from tokens.search.verbatim import verbatim_runs

SHOWN_RUNS = 10  # runs


def run(command: SampleCommand) -> None:
    prompt = read_prompt(command.prompt)
    trained = load_for_generation(command)
    print_samples(trained, command, prompt, training_data(trained, command.against) if command.trace else [])


def training_data(trained: Trained, directories: Sequence[Path]) -> list[TokenStream]:
    """Open the train splits of token directories, of none those of the model's run. Raises BadInput."""
    searched = directories or trained.place.job.token_directories
    if not searched:
        raise BadInput(f"{trained.place.path}: names no token directory; pass --against DIR")
    return [open_comparable(directory, "train", trained.tokenizer) for directory in searched]


def print_samples(trained: Trained, command: SampleCommand, prompt: str, searched: Sequence[TokenStream] = ()) -> None:
    """Print samples as they are generated, until the reader is gone, each traced in streams. Raises BadInput."""
    ids = trained.encode(prompt)
    for number in range(command.samples):
        if number:
            show("-" * 15)  # as between nanoGPT's
        text = GeneratedText(trained, ids, command.tokens, sampling_of(command, number))
        if not print_parts(chain([prompt], text)):
            return
        if searched:
            show(*trace(trained, searched, np.array(text.tokens)))


def trace(trained: Trained, streams: Sequence[TokenStream], text: np.ndarray) -> list[str]:
    """Return lines on the longest runs of a generated text (ids, 1-D) that stand in streams, longest first."""
    runs = verbatim_runs(streams, text)
    held, told = np.zeros(len(text), bool), np.zeros(len(text), bool)
    lines: list[str] = []
    for run in sorted(runs, key=lambda run: -run.length):
        span = slice(run.start, run.start + run.length)
        held[span] = True
        if not told[span].any() and len(lines) < SHOWN_RUNS:
            told[span] = True
            copies = f"{run.copies:,} places, first " if run.copies > 1 else ""
            found = excerpt(streams, run.place, run.length, trained.tokenizer)
            lines.append(f"  {run.length:,} tokens from {run.start:,} on: {copies}{found}")
    share = f"{held.sum():,} of {len(text):,} new tokens stand in the training data"
    return [f"trace: {share}, in {len(runs):,} runs of {GRAM} or more" + "; the longest apart:" * bool(lines), *lines]
