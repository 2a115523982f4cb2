"""Sampling: texts of any length after a prompt, streamed; on a terminal a loop of prompts and answers."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, count

import torch

from common.errors import BadInput, printable, refusing
from common.installation import GuardedStream
from common.json_files import FILE_BYTES, check_text
from evaluation.command_line import SampleCommand
from evaluation.shared.load import Trained, load_on_all, locate
from evaluation.shared.measuring import TIMEOUT_SECONDS
from model.generate import Sampling, lay_out_for_generation
from training.parallel.process_group import meet, stop

FILE = "FILE:"  # before the path of a prompt, as in nanoGPT's sample.py
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # terminals obey these


def run(command: SampleCommand) -> None:
    """Print samples after a prompt, or after each one that is typed."""
    typed = command.prompt is None and os.isatty(0) and os.isatty(1)
    prompt = "" if typed else read_prompt(command.prompt)
    ranks = meet(command.device, TIMEOUT_SECONDS)
    trained = load_on_all(ranks, locate(command.model, command.checkpoint), command.tokenizer)
    stop()
    torch.set_num_threads(1)  # else sums, and so the text, would depend on the number of cores
    lay_out_for_generation(trained.network)
    if not typed:
        return print_samples(trained, command, prompt, command.seed)
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines by it
    print(f"{printable(trained.place.title)}: type how a text begins.\nCtrl-C ends an answer, Ctrl-D the program.")
    for seed in count(command.seed, command.samples):
        try:
            print_samples(trained, command, input("> "), seed, typed=True)
        except EOFError:
            return print()
        except (KeyboardInterrupt, BadInput) as problem:
            print(problem)
    return None


def read_prompt(given: str | None) -> str:
    """Return the prompt of an option; None: of stdin, unless a terminal. One last line end is cut. Raises BadInput."""
    if given is not None and not given.startswith(FILE):
        check_text(given, "--prompt")
        return given
    with refusing(f"{given or 'stdin'}: cannot be read as a prompt", kinds=(OSError, ValueError)):
        with open(given.removeprefix(FILE) if given else 0, "rb", closefd=given is not None) as file:
            data = b"" if file.isatty() else file.read(FILE_BYTES + 1)
        if len(data) > FILE_BYTES:
            raise ValueError(f"got more than {FILE_BYTES:,} bytes")
        return data.decode().removesuffix("\n")


def print_samples(trained: Trained, command: SampleCommand, prompt: str, seed: int, *, typed: bool = False) -> None:
    """Print samples as they are generated, until the reader is gone; `typed`: without the prompt, to a text's end."""
    ids, end = trained.encode(prompt), [trained.tokenizer.end_of_text_id] if typed else []
    for number in range(seed, seed + command.samples):
        print("-" * 15 + "\n" if number > seed else "", end="")  # as between nanoGPT's
        sampling = Sampling(temperature=command.temperature, top_k=command.top_k, top_p=command.top_p, seed=number)
        new = trained.generate(ids, command.tokens, sampling, end)
        try:
            for text in chain(["" if typed else prompt], whole_characters(trained, new)):
                print(CONTROL.sub(lambda found: printable(found[0]), text), end="", flush=True)
                if isinstance(sys.stdout, GuardedStream) and sys.stdout.output.problem is not None:
                    return
        finally:
            print(flush=True)


def whole_characters(trained: Trained, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ids in parts as it comes. A part that ends with U+FFFD waits: a character may be incomplete."""
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = trained.decode(pending)
        if not text.endswith("\ufffd"):
            yield text
            pending = []
    yield trained.decode(pending)
