"""Sampling: texts of any length after a prompt, streamed."""

from itertools import chain

from evaluation.command_line import SampleCommand
from evaluation.shared.generation import load_for_generation, read_prompt, sampling_of, show, whole_characters
from evaluation.shared.load import Trained


def run(command: SampleCommand) -> None:
    prompt = read_prompt(command.prompt)
    print_samples(load_for_generation(command), command, prompt)


def print_samples(trained: Trained, command: SampleCommand, prompt: str) -> None:
    """Print samples as they are generated, until the reader is gone. Raises BadInput."""
    ids = trained.encode(prompt)
    for number in range(command.samples):
        print("-" * 15 + "\n" if number else "", end="")  # as between nanoGPT's
        new = trained.generate(ids, command.tokens, sampling_of(command, number))
        if not show(chain([prompt], whole_characters(trained, new))):
            return
